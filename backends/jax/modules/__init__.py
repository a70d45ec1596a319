"""Modules: those of nnx as arguments, their paths as name scopes, parameters that keep their dtype.

Imported by `autocast`.
"""
