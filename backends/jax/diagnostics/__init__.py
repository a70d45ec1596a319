"""Reading a JAX program: `explain`, `audit`, `locate`, FLOPs, and runs moved by rounding.

Imports all other rooms of the backend.
"""
