"""How much of a sweep or of a random history a run of the tests does.

    make test        a part that covers every kind, in minutes
    make test-long   with POLYMP_SIZE=long: the rest of the sweeps, and histories at full length

A sweep is marked `one_in(n)`: `make test` runs one in n of its parameters, `make test-long` the
others. A test of random programs or histories is marked `sized` and takes its count from `size`;
both runs have it, the second one with the larger count.
"""

import os

LONG = os.environ.get("POLYMP_SIZE") == "long"


def size(few: int, many: int) -> int:
    """A count: `few` in `make test`, `many` in `make test-long`."""
    return many if LONG else few
