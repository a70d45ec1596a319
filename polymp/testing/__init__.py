"""Assertions for tests: torch against JAX, one function against another, ranges.

    assert_parity(torch_fn, jax_fn, inputs)      the same dtypes, and values equal up to rounding
    assert_close(fn, reference, x)               two functions of one framework, likewise
    assert_fits(model, x, dtype="float16")       nothing overflows or vanishes

No framework is imported before it is needed.
"""

from polymp.testing.fits import assert_fits
from polymp.testing.parity import Parity, ParityError, assert_close, assert_parity

__all__ = ["Parity", "ParityError", "assert_close", "assert_fits", "assert_parity"]


def __dir__() -> list[str]:
    return __all__
