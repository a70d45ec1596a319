"""Weights stored in the dtypes that a program reads them in.

Imports `autocast`.
"""
