"""The step of an optimizer that takes the scale and the finding, and skips by itself."""

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
    """What is known of the steps of optimizers.

    Attributes:
        take_scaler: by function, whether it has an argument `grad_scaler`.
    """

    def __init__(self) -> None:
        self.take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


steps = Steps()


def step(
    scaler: Any,
    findings: Findings,
    optimizer: Any,
    entry: Entry,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`optimizer.step(*args, **kwargs)` under what it needs to divide and to skip.

    Args:
        scaler: a `GradScaler`; what it does under torch.amp's names, a subclass may do otherwise.
        findings: the scaler's.
        optimizer: one with `_step_supports_amp_scaling`.
        entry: the optimizer's.
        args: of the step.
        kwargs: of the step.
    """
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
    """True if the optimizer's step asks for the scaler itself, by an argument `grad_scaler`.

    Asked at every step, and a signature takes longer to read than what it is needed for.
    """
    if torch.compiler.is_compiling():  # which knows signatures, and no such dictionary
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
    """`optimizer.step(*args, **kwargs)` under a `grad_scale` and a `found_inf`.

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
    """Make the optimizer ready for a step that `found` may skip; False if it is not to be called.

    The fused step of SGD makes its momentum without a value and counts on the first step to write
    it. If that is skipped, the next one reads whatever the memory held (torch 2.13). Zeros lead to
    what the first step would have written, unless `dampening` is set: the host waits for `found`
    then, at steps in which a parameter has its first gradient.

    Args:
        optimizer: a fused one.
        found: float32 [].
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
