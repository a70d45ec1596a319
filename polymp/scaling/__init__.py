"""Loss scaling as arithmetic: the update rule of the scale, and reports of gradients.

Knows numbers, and nothing of tensors or optimizers. Imports errors, dtypes and rules.
"""
