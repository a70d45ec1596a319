"""`checkpoint`: torch's activation checkpointing, with the policy carried into the recomputation.

torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag, the
dtype and the cache flag. That is all there is to a region without a policy of its own; a policy
would be lost.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.utils.checkpoint

from polymp.backends.torch import casts, regions


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `torch.utils.checkpoint.checkpoint`, both kinds; recomputes under the forward's policies.

    Args:
        function: what to run now and once more in backward.
        args: its arguments.
        kwargs: `use_reentrant` and torch's other options.
    """
    return torch.utils.checkpoint.checkpoint(_carry(function), *args, **kwargs)


def _carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run under the policies in force here wherever it is called from."""
    tickets = [regions.ticket(region) for region in regions.with_policy()]
    scope = regions.scope_in_force()
    recomputing = False

    @functools.wraps(function)
    def carried(*args: Any, **kwargs: Any) -> Any:
        nonlocal recomputing
        with ExitStack() as entered:
            if recomputing:
                # In a region of torch's own, which ends behind polymp's back.
                entered.callback(casts.drop_unknown)
            recomputing = True
            if scope is not None:
                entered.callback(regions.leave_scope, regions.code_in_force())
                regions.enter_scope(scope)
            for ticket in tickets:
                regions.enter(ticket)
                entered.callback(regions.leave, ticket)
            return function(*args, **kwargs)

    return carried
