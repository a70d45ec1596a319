"""Products in 8 bits: the recipes, how an operand is quantised, and where 8 bits are not possible.

Pure functions of arrays, given a record of the framework's verbs; nothing here knows a framework.
Imports errors and dtypes.
"""
