"""The step of an optimizer that divides by the scale and skips by itself, as torch's fused ones."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.compat import dynamo
from polymp.backends.torch.scaler.findings import Entry, Findings


class Steps:
    """The steps of optimizers that this process has seen.

    Attributes:
        take_scaler: by function, whether it has an argument `grad_scaler`.
    """

    def __init__(self) -> None:
        self.take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


steps: Steps = Steps()


def step(
    scaler: Any,
    findings: Findings,
    optimizer: Any,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, with scale and finding set on the optimizer."""
    if takes_scaler(optimizer):
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
            "directly.",
            FutureWarning,
            stacklevel=3,
        )
        return optimizer.step(*args, **kwargs, grad_scaler=scaler)
    outer = getattr(optimizer, "grad_scale", None)
    scale = outer
    if entry["stage"] is OptState.READY:
        scale = scaler._get_scale_async() * (1 if outer is None else outer)
        scaler._check_inf_per_device(optimizer, scale)
        entry["grad_scale"] = scale
    if findings.nothing_to_step(entry):
        return None
    return _step_under(optimizer, scale, findings.found(entry), args, kwargs)


def takes_scaler(optimizer: Any) -> bool:
    """Return whether the optimizer's step has an argument `grad_scaler`, for the scaler itself.

    The answer is kept: reading a signature takes longer than the rest of the step's overhead.
    """
    if torch.compiler.is_compiling():  # dynamo traces signatures, and no such dictionary
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    step = getattr(optimizer.step, "__func__", optimizer.step)
    known = steps.take_scaler.get(step)
    if known is None:
        known = "grad_scaler" in inspect.signature(optimizer.step).parameters
        steps.take_scaler[step] = known
    return known


@dynamo.untraced(
    "dynamo does not trace fused optimizers; in compiled code make them without fused=True"
)
def _step_under(
    optimizer: Any,
    scale: torch.Tensor | None,
    found: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `optimizer.step(*args, **kwargs)` with `grad_scale` and `found_inf` set.

    Dynamo does not trace it: it breaks the graph in a fused step anyway, and would lose attributes
    that are set before the break and deleted after it.
    """
    optimizer.grad_scale = scale
    optimizer.found_inf = found
    try:
        return optimizer.step(*args, **kwargs) if may_step(optimizer, found) else None
    finally:  # left behind, they would scale the next try twice
        del optimizer.grad_scale
        del optimizer.found_inf


def may_step(optimizer: torch.optim.Optimizer, found: torch.Tensor) -> bool:
    """Prepare the optimizer for a step that `found` may skip.

    The fused step of SGD makes its momentum without a value and lets the first step write it. If
    that is skipped, the next step reads whatever the memory held (torch 2.13). So the momentum is
    made of zeros here, from which the first step gets the same result unless `dampening` is set.
    With `dampening` the host waits for `found` if a parameter has its first gradient.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    wait = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for p in group["params"]:
            made = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            if p.grad is None or made:
                continue
            if group["dampening"]:
                wait = True
            else:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
    return not (wait and bool(found))
