"""Everything private of torch that polymp touches, a file for each subsystem of torch.

Each docstring says why a name is needed and since when it exists; the tests of this folder fail
when one changes. Supported: torch 2.11 to 2.15.
"""
