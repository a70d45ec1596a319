"""Loss scaling for torch optimizers.

Imports `autocast`.
"""
