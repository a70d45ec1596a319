"""Activation checkpointing: the policies of the forward pass hold in the recomputation, too.

torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag, the
dtype and the cache flag, so a policy would be lost. It is noted here beside what torch notes, for
every checkpoint, whoever makes it: libraries bind torch's function when they are imported.
"""

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.utils.checkpoint

from polymp.backends.torch.autocast import regions
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
    code, entered = regions.code_in_force(), regions.entered()

    @functools.wraps(function)
    def carried(*args: Any, **kwargs: Any) -> Any:
        with regions.resumed(code, entered):
            return function(*args, **kwargs)

    return carried
