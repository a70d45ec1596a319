"""Activation checkpointing: the policies of the forward pass hold in the recomputation, too.

torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag, the
dtype and the cache flag, so a policy would be lost. It is noted here beside what torch notes, for
every checkpoint, whoever makes it: libraries bind torch's function when they are imported.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.utils.checkpoint

from polymp.backends.torch.autocast import compiled_region, policy_code, region_casts
from polymp.backends.torch.autocast.compiled_region import open_regions
from polymp.backends.torch.autocast.policy_code import NONE, Code
from polymp.backends.torch.compat import autograd


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.utils.checkpoint.checkpoint`, which keeps policies by itself.

    Args:
        function: what to run now and once more in backward.
        args: its arguments.
        kwargs: `use_reentrant` and torch's other options.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


@cache
def keep_policies() -> None:
    """From now on, have torch's checkpoints recompute under the policies of their forward pass."""
    autograd.carry_into_recomputation(_carry)


def _carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run under the policies in force here wherever it is called from."""
    code, entered = policy_code.in_force(), compiled_region.entered()

    @functools.wraps(function)
    def carried(*args: Any, **kwargs: Any) -> Any:
        with _resumed(code, entered):
            return function(*args, **kwargs)

    return carried


@contextmanager
def _resumed(code: Code, entered: bool) -> Iterator[None]:
    """Put policies in force once more, for code that runs again; torch restores the rest.

    Args:
        code: what `policy_code.in_force` said where it ran first.
        entered: what `compiled_region.entered` said there.
    """
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
            region_casts.drop_unknown()  # made in a region of torch's, which ends behind our back


def _nothing() -> None:
    """An entry that nothing has to be undone for."""
