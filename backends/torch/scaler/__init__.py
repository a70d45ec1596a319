"""Loss scaling for torch optimizers.

Imports `compat` and the core.
"""
