"""The matrix products of a JAX program, and a bench that times them.

Imports `autocast` and the core's `speed`.
"""
