"""Reports of `explain` and audits as data, and how they are drawn; rounding bounds; suggestions.

Knows calls, magnitudes and text, and nothing of how a framework is watched. Imports rules and
scaling.
"""
