"""torch.optim and torch.nn: steps, state and hooks of optimizers; calls of modules."""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from polymp.backends.torch.compat import dynamo


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return every parameter of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the names by which an optimizer knows its parameters, or else their places."""
    found: dict[torch.Tensor, str] = {}
    for at, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or ()
        for number, p in enumerate(group["params"]):
            found[p] = given[number] if number < len(given) else f"group {at}, parameter {number}"
    return found


# Steps of torch's optimizers in graphs of torch.compile.


def fits_a_graph(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether dynamo is tracing, and can trace this optimizer's step, which is torch's."""
    # The wrapper of a learning-rate scheduler (`_wrapped_by_lr_sched`) only sets an attribute, and
    # dynamo drops writes to attributes of optimizers. The dynamo of torch 2.15 can trace `getattr`
    # on such a step, but not `hasattr`.
    return (
        torch.compiler.is_dynamo_compiling()
        and _lists_of(type(optimizer)) is not None
        and not optimizer.defaults.get("differentiable", False)
        and (
            "step" not in vars(optimizer) or getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        )
    )


@dynamo.at_trace_time
def _lists_of(kind: type[torch.optim.Optimizer]) -> int | None:
    """Return how many lists `_init_group` fills; None where it or the step is not torch's."""
    step: Any = kind.step
    make = inspect.unwrap(getattr(kind, "_init_group", step))
    inside = inspect.unwrap(step)
    torchs = all(f.__module__.startswith("torch.optim.") for f in (make, inside))
    if not torchs or make is inside or step.__wrapped__.__wrapped__ is not inside:
        return None
    return len(inspect.signature(make).parameters) - 2


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """While dynamo traces, make the state that an optimizer of torch's makes in its first step."""
    # Dynamo runs `_init_group` while it traces it, so that the state exists after this call. Each
    # class has arguments of its own: a group, and lists to fill.
    lists = _lists_of(type(optimizer))
    assert lists is not None
    for group in optimizer.param_groups:
        filled: list[list[Any]] = []
        for _ in range(lists):
            filled.append([])
        optimizer._init_group(group, *filled)  # type: ignore[attr-defined]


def traced_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, which fits a graph, without a graph break."""
    # torch's optimizers break the graph around their step, so that inductor sees that no gradient
    # is wanted (see a note in torch/optim/optimizer.py). Here the function inside their two
    # wrappers is called instead.
    step: Any = type(optimizer).step
    for hook in (
        *_global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ):
        if (given := hook(optimizer, args, kwargs)) is not None:
            args, kwargs = given
    with torch.no_grad():
        result = step.__wrapped__.__wrapped__(optimizer, *args, **kwargs)
    for hook in (
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ):
        hook(optimizer, args, kwargs)
    return result


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the step of a class as a function that runs no step hooks."""
    # The first optimizer of a class puts `Optimizer.profile_hook_step` around the class's step,
    # which has a mark `hooked`.
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Have polymp's low weights put what stands beside them into the state, before it is copied."""
    getattr(optimizer, "complete_state", lambda: None)()


# A module's call is its `_call_impl`.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls run in this thread, the innermost first, from the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back
