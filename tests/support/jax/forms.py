"""The forms in which a contraction is lowered on CPUs, whatever processor the tests run on."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from polymp.backends.jax.autocast import contraction

# With instructions for bfloat16 products, and without.
OF_CPUS = ("row_by_row", "widened_or_few")


@contextmanager
def lowered_as(form: str) -> Iterator[None]:
    """Lower contractions on CPUs in a form of contraction.py while in here."""
    contraction.lower_as(getattr(contraction, form), "cpu")
    jax.clear_caches()
    try:
        yield
    finally:
        contraction.lower_as(contraction.FORMS["cpu"], "cpu")
        jax.clear_caches()
