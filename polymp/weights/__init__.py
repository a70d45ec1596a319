"""Weights kept in 16 bits: what stands beside a weight, and how a new value is stored.

Pure functions of arrays, given a record of the framework's verbs; nothing here knows a framework.
Imports errors and dtypes.
"""
