"""An optimizer's step with a closure; every evaluation of the closure is checked.

An evaluation with Inf or NaN in its gradients ends the step at once: parameters and the optimizer's
state are put back to what they were before the step, so that a search does not go on from there.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.compat import dynamo, optimizers
from polymp.backends.torch.scaler.findings import Entry, Findings


class _NotFinite(BaseException):
    """Ends an optimizer's step. No Exception, so that no optimizer catches it and goes on."""


def closure_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Callable[[], object] | None:
    """Return the closure among the arguments of a step, first or by name; None without one."""
    given = kwargs.get("closure", args[0] if args else None)
    return given if callable(given) else None


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer cannot step without a closure, as LBFGS."""
    return _needs_closure(type(optimizer))  # type: ignore[arg-type]


@cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step(
    unscale: Callable[[torch.optim.Optimizer], None],
    findings: Findings,
    optimizer: torch.optim.Optimizer,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `optimizer.step(*args, **kwargs)`; take it back if an evaluation had Inf or NaN."""

    def spoiled() -> bool:
        if not findings.has_scaled():
            raise RuntimeError(
                "the closure given to step() did not scale its loss: call "
                "scaler.scale(loss).backward() in it, and return the loss itself."
            )
        if entry["stage"] is not OptState.UNSCALED:
            unscale(optimizer)
        entry["stage"] = OptState.READY  # for the next evaluation
        bad = any(f.item() for f in entry["found_inf_per_device"].values())
        if not bad:
            findings.note_scaled(False)
        return bad

    # Gradients that this iteration has made already are for an optimizer that uses them before it
    # calls the closure (SAM).
    if findings.has_scaled() and spoiled():
        result, entry["skipped"] = None, True
    else:
        result, entry["skipped"] = _step_or_take_back(optimizer, spoiled, args, kwargs)
    return result


@dynamo.untraced("a step that is taken back when an evaluation fails cannot be traced")
def _step_or_take_back(
    optimizer: torch.optim.Optimizer,
    spoiled: Callable[[], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """Call `optimizer.step(*args, **kwargs)`; take it back if an evaluation is spoiled."""
    closure = closure_of(args, kwargs)
    assert closure is not None

    def evaluate() -> object:
        loss = closure()
        if spoiled():
            raise _NotFinite
        return loss

    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": evaluate}
    else:
        args = (evaluate, *args[1:])
    optimizers.complete_state(optimizer)
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
