"""Weights that are cast once: for a block, for serving, or in an exported program.

Imports `autocast` and `modules`.
"""
