"""Regions in torch: entering them, and the kernels that run each op in the dtype of its rule.

Imports the core and `compat`.
"""
