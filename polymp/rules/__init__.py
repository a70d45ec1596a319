"""Policies as data: which rule each op has, where it holds, and what was decided by it.

Knows dtypes and names of ops, and nothing of tensors. Imports errors and dtypes alone.
"""
