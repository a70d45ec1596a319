"""Regions in JAX: a traced program is planned, rewritten by its policy, and run.

Imports the core, `compat` and `modules`.
"""
