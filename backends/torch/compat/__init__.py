"""Everything private of torch that polymp touches, a file for each subsystem of torch.

Each name says why it is needed and since when it has been there; the tests of this folder fail when
one changes. Supported: torch 2.11 to 2.15.
"""
