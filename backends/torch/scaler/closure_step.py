"""An optimizer's step with a closure, every evaluation of which is checked.

An evaluation with Inf or NaN in it ends the step at once: parameters and the optimizer's state are
put back to what they were before the step, so that a search never goes on from a spoiled point.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from polymp.backends.torch import compat


class _NotFinite(BaseException):
    """Leaves an optimizer's step, past whatever in it goes on after an error."""


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, first or by name; None if there is none."""
    given = kwargs.get("closure", args[0] if args else None)
    return given if callable(given) else None


@compat.untraced("a step that is taken back when an evaluation fails cannot be traced")
def step(
    optimizer: torch.optim.Optimizer,
    spoiled: Callable[[], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """`optimizer.step(*args, **kwargs)`, taken back if an evaluation of the closure is spoiled.

    Args:
        optimizer: calls the closure as often as it likes.
        spoiled: called after each evaluation; makes its gradients true ones and says whether it
            found Inf or NaN.
        args: of the step, with the closure.
        kwargs: of the step, with the closure.

    Returns:
        What the step returned, None if it was taken back; and True if it was.
    """
    closure = closure_of(args, kwargs)
    assert closure is not None

    def evaluate() -> Any:
        loss = closure()
        if spoiled():
            raise _NotFinite
        return loss

    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": evaluate}
    else:
        args = (evaluate, *args[1:])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    states = {key: copy.deepcopy(state) for key, state in optimizer.state.items()}
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    try:
        return optimizer.step(*args, **kwargs), False
    except _NotFinite:
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, was in zip(optimizer.param_groups, settings, strict=True):
            group.update(was)
        return None, True
