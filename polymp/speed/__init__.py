"""Times of matrix products, measured or predicted, and the dtype to use by them.

Knows shapes and seconds; a backend's `speed` room runs the products. Imports diagnostics alone.
"""
