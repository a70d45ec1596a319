"""Weights stored in low dtypes: for serving, and for training in 16 bits.

Imports `autocast`, `modules` and the core.
"""
