"""The matrix products of a torch model, and a bench that times them.

Imports `autocast` and the core's `speed`.
"""
