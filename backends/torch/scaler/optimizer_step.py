"""The step of an optimizer under a loss scaler: fused, in a graph, or with a closure.

fused        the optimizer divides by the scale and skips by itself, as torch's fused ones do
in a graph   of torch.compile it steps, and what a bad step wrote is put back on the device
a closure    the loss is evaluated, scaled and unscaled within the step, as for LBFGS
no scaler    `expect_scaler` flags it, on gradients that went through float16
"""

import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils.hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from polymp.backends.torch.compat import dispatcher, distributed, dynamo, optimizers
from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.snapshot import Snapshot
from polymp.errors import ScalerWarning, UnscaledError

# By the function of an optimizer's step, whether it has an argument `grad_scaler`: to read a
# signature takes longer than the rest of the step's overhead.
_take_scaler: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def takes_scaler(optimizer: Any) -> bool:
    """Return whether the optimizer's step has an argument `grad_scaler`, for the scaler itself."""
    if torch.compiler.is_compiling():  # dynamo traces signatures, and no such dictionary
        return "grad_scaler" in inspect.signature(optimizer.step).parameters
    step = getattr(optimizer.step, "__func__", optimizer.step)
    known = _take_scaler.get(step)
    if known is None:
        known = "grad_scaler" in inspect.signature(optimizer.step).parameters
        _take_scaler[step] = known
    return known


@dynamo.untraced(
    "dynamo does not trace fused optimizers; in compiled code make them without fused=True"
)
def step_fused(
    optimizer: Any,
    scale: torch.Tensor | None,
    found: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `optimizer.step(*args, **kwargs)` with `grad_scale` and `found_inf` set."""
    # Dynamo would break the graph in it, and lose attributes that are set before the break.
    optimizer.grad_scale = scale
    optimizer.found_inf = found
    try:
        return optimizer.step(*args, **kwargs) if prepare_to_skip(optimizer, found) else None
    finally:  # left behind, they would scale the next try twice
        del optimizer.grad_scale
        del optimizer.found_inf


def prepare_to_skip(optimizer: torch.optim.Optimizer, found: torch.Tensor) -> bool:
    """Prepare for a step that `found` may skip; return False if it must not be taken."""
    # The fused step of SGD makes its momentum without a value and lets the first step write it. If
    # that is skipped, the next step reads whatever the memory held (torch 2.13). So it is made of
    # zeros here, from which the first step gets the same result unless `dampening` is set: then the
    # host waits for `found`.
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    wait = False
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            made = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            if p.grad is None or made:
                continue
            if group["dampening"]:
                wait = True
            else:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
    return not (wait and bool(found))


def step_in_graph(
    optimizer: torch.optim.Optimizer, found: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Take a step that fits a graph, where nothing can wait; put back what it wrote if `found`."""
    # The optimizer makes its state before the step, and a first step that is skipped leaves it so.
    optimizers.make_state(optimizer)
    if not prepare_to_skip(optimizer, found):
        return None
    params = [p for p in optimizers.parameters(optimizer) if p.grad is not None]
    with torch.no_grad():
        before = [[t.clone() for t in _written(optimizer, p)] for p in params]
    result = optimizers.traced_step(optimizer, *args, **kwargs)
    skips = unscale.OnDevices(found != 0, copy=False)
    with torch.no_grad():
        for p, old in zip(params, before, strict=True):
            # A momentum with dampening is new, where `found` is 0.
            for now, was in zip(_written(optimizer, p), old, strict=False):
                torch.where(skips.get(now.device), was, now, out=now)
    return result


def _written(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[torch.Tensor]:
    """Return what a step writes for a parameter: its values, and the tensors of its state."""
    values = [p, *optimizer.state.get(p, {}).values()]
    return [distributed.local(v) for v in values if isinstance(v, torch.Tensor)]


# An optimizer's step with a closure; every evaluation of the closure is checked.
#
# An evaluation with Inf or NaN in its gradients ends the step at once: parameters and the
# optimizer's state are put back to what they were before the step, so that a search does not go
# on from there.


class _NotFinite(BaseException):
    """Ends an optimizer's step. No Exception, so that no optimizer catches it and goes on."""


def closure_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Callable[[], object] | None:
    """Return the closure among the arguments of a step, first or by name; None without one."""
    given = kwargs.get("closure", args[0] if args else None)
    return given if callable(given) else None


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer cannot step without a closure, as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dynamo.untraced("a step that is taken back when an evaluation fails cannot be traced")
def step_or_take_back(
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
    before = Snapshot(optimizers.parameters(optimizer), optimizers=[optimizer])
    try:
        return optimizer.step(*args, **kwargs), False
    except _NotFinite:
        before.put_back()
        return None, True


# A step without a scaler. While a check is on, every backward pass first notes the parameters whose
# gradients will go through float16; a hook that torch calls before every optimizer's step looks.

_checks: WeakSet[Callable[..., None]] = WeakSet()
_low = WeakTensorKeyDictionary()

# Modules whose functions step optimizers for a scaler.
_SCALERS = ("polymp.backends.torch.scaler.grad_scaler", torch.amp.grad_scaler.__name__)


def expect_scaler(action: Literal["warn", "raise"] = "warn") -> hooks.RemovableHandle:
    """Flag optimizer steps on gradients that went through float16 and that no scaler handles.

        with expect_scaler("raise"):
            train()

    A step is flagged if a gradient of the optimizer's went through float16 in `backward()`, no
    scaler of polymp's or torch.amp's takes the step, and none of polymp's has unscaled the
    gradients. A disabled scaler counts as one. So a step by hand after `unscale_` of torch.amp's
    scaler is flagged. Whether the loss was scaled is not checked.
    Not seen are float16 inside of a compiled graph or an `autograd.Function`, a compiled step,
    gradients of FSDP, `torch.autograd.grad`, and `backward(inputs=...)`.

    Args:
        action: "warn" warns, once for each optimizer; "raise" raises before the step.

    Returns:
        A handle. `remove()` ends the check, and so does leaving the handle as a context manager.

    Raises:
        ValueError: `action` is neither "warn" nor "raise".
        UnscaledError: later, before a step that is flagged, if `action` is "raise".

    Warns:
        ScalerWarning: later, at a step that is flagged, if `action` is "warn".
    """
    if action not in ("warn", "raise"):
        raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
    _low.clear()
    _watch_backward()
    settled: WeakSet[torch.optim.Optimizer] = WeakSet()

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        every = optimizers.parameters(optimizer)
        on = sorted({p.device.type for p in every if p.grad is not None and _low.get(p)})
        if not on:
            return
        frames = traceback.walk_stack(inspect.currentframe())
        by_scaler = any(frame.f_globals.get("__name__") in _SCALERS for frame, _ in frames)
        if optimizer not in settled and not by_scaler:
            said = (
                f"{type(optimizer).__name__} steps on gradients that went through float16 "
                f"({' and '.join(map(repr, on))}) without a scaler that takes the step: gradients "
                "below float16's smallest number are lost there, and those of a scaled loss are "
                f"still multiplied by the scale. Make scaler = GradScaler({on[0]!r}), and in each "
                "iteration call scaler.scale(loss).backward(), scaler.step(optimizer) in place of "
                "optimizer.step(), and scaler.update(). Or use bfloat16, which needs no scaler."
            )
            if action == "raise":
                raise UnscaledError(said)
            warnings.warn(said, ScalerWarning, stacklevel=3)
            settled.add(optimizer)
        settle(optimizer)

    _checks.add(look)
    handle = register_optimizer_step_pre_hook(look)
    if action == "raise":  # before checks that only warn, which would forget the gradients
        hooks_in_order: Any = handle.hooks_dict_ref()
        hooks_in_order.move_to_end(handle.id, last=False)
    return handle


@functools.cache
def _watch_backward() -> None:
    """Have every backward pass, while a check is on, note what it sends through float16; once."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _checks and kwargs.get("inputs") is None:
            roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            nodes = (getattr(t, "grad_fn", None) for t in roots)
            reached = dispatcher.leaves(nodes, torch.float16)
            _low.update({p: low for p, low in reached.items() if low or p.grad is None})
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = noting


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Forget what went through float16 to the parameters of an optimizer."""
    for p in optimizers.parameters(optimizer) if _low else ():
        _low.pop(p, None)
