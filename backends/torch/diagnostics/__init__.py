"""Watching a torch program run: `explain`, `audit`, `locate`, and runs moved by rounding.

Imports all other rooms of the backend.
"""
