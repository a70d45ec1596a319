"""Activation checkpointing: recomputation runs under the policies of the forward pass.

torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag, the
dtype and the cache flag, so a policy would be lost. `keep_policies` changes torch's own classes, so
that libraries which imported torch's function before keep their policies, too.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec, TypeVar

from polymp.backends.torch.autocast import compiled_region, policy_code, region_casts
from polymp.backends.torch.autocast.compiled_region import open_regions
from polymp.backends.torch.autocast.policy_code import NONE, Code
from polymp.backends.torch.compat import autograd

P = ParamSpec("P")
R = TypeVar("R")


@cache
def keep_policies() -> None:
    """Have torch's checkpoints recompute under the policies of their forward pass; once."""
    autograd.carry_into_recomputation(_carry)


def _carry(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that each call of it runs under the policies in force here and now."""
    code, entered = policy_code.in_force(), compiled_region.entered()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        with _resumed(code, entered):
            return function(*args, **kwargs)

    return carried


@contextmanager
def _resumed(code: Code, entered: bool) -> Iterator[None]:
    """Put policies in force once more, for code that runs again; torch restores the rest."""
    outer = policy_code.in_force()
    policy_code.write(code)
    if entered:
        open_regions.leaving.append(_nothing)
    try:
        yield
    finally:
        if entered and _nothing in open_regions.leaving:
            open_regions.leaving.remove(_nothing)
        policy_code.write(outer)
        if code != NONE or outer != NONE:
            region_casts.drop_unknown()  # made in a region of torch's: its end is not seen


def _nothing() -> None:
    """Do nothing: leaving an entry that needs no undoing."""
