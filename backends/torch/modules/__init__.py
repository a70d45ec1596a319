"""Modules whose class polymp extends: rules by module path, and parameters that keep their dtype.

Imports `autocast`.
"""
