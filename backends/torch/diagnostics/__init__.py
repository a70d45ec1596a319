"""Reports on a torch program that runs: `explain`, `audit`, `locate`; and runs with more rounding.

Imports all other rooms of the backend.
"""
