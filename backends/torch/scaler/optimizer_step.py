"""The step of an optimizer under a loss scaler: fused, undone on the device, or with a closure.

fused        the optimizer divides by the scale and skips by itself, as torch's fused ones do
undone       it steps, and what a bad step changed is put back: the host does not wait
a closure    the loss is evaluated, scaled and unscaled within the step, as for LBFGS
no scaler    `expect_scaler` flags it, after a float16 region
"""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils.hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.compat import distributed, dynamo, optimizers
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


# An optimizer's step that is skipped by a value on the device, for which the host does not wait.
#
# The step is taken, and then undone on the device if Inf or NaN was found: parameters that have
# a gradient, and the tensors of their state, get their old values back, for a copy of both and
# three passes over them. The rest is put back by the host, which waits for the finding: state that
# the step has made, numbers that it has changed, tensors on the CPU if the finding is elsewhere. It
# waits before the step if there are other objects than tensors and numbers in the state.
# docs/scaling-torch.md says which of torch's optimizers make it wait.

State = dict[str, Any]

# Values that a step can only replace, not change in place.
_PLAIN = (torch.Tensor, bool, int, float, str, type(None))

# Integer dtypes by their size in bytes. There is none of 16, as complex128 has: see `_Copies`.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def step_or_undo(
    optimizer: torch.optim.Optimizer, found: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, and undo it if `found` is not 0."""
    # In code that torch.compile traces nothing can wait: there torch's optimizers make their state
    # before the step, and a first step that is skipped leaves it as made. SGD's momentum is then
    # zeros instead of None, which gives the same next step unless `dampening` is set.
    compiling = torch.compiler.is_compiling()
    optimizers.complete_state(optimizer)
    if compiling:
        optimizers.make_state(optimizer)
    params = [p for p in optimizers.parameters(optimizer) if p.grad is not None]
    skip = found != 0
    before = [dict(optimizer.state.get(p, {})) for p in params]
    if not all(isinstance(v, _PLAIN) for state in before for v in state.values()):
        return None if bool(skip) else optimizers.optimizer_step(optimizer, *args, **kwargs)
    settings = [_settings(group) for group in optimizer.param_groups]
    with torch.no_grad():
        kept = [distributed.local(p) for p in params]
        for state in before:
            kept += [distributed.local(v) for v in state.values() if isinstance(v, torch.Tensor)]
        copies = _Copies(kept, skip)

    def undo() -> None:
        skips = unscale.OnDevices(skip, copy=False)
        with torch.no_grad():
            copies.put_back(skips)
        if compiling and isinstance(optimizer, torch.optim.SGD):
            _momentum_from_zeros(optimizer, dict(zip(params, before, strict=True)), skips)
        same = settings == [_settings(group) for group in optimizer.param_groups]
        for p, state in zip(params, before, strict=True):
            same = same and _same(state, optimizer.state.get(p, {}))
        if not same and bool(skip):
            for p, state in zip(params, before, strict=True):
                if state:
                    optimizer.state[p] = state
                else:
                    optimizer.state.pop(p, None)
            for group, was in zip(optimizer.param_groups, settings, strict=True):
                group.update(was)

    if compiling:  # a graph that breaks in a try is given up
        result = optimizers.optimizer_step(optimizer, *args, **kwargs)
    else:
        try:
            result = optimizers.optimizer_step(optimizer, *args, **kwargs)
        except BaseException:  # of the step or a hook, with parameters written already
            undo()
            raise
    undo()
    return result


def decides_on_device(skip_on: str, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the device decides on a step."""
    if skip_on == "auto":
        return torch.compiler.is_compiling() or all(
            group.get("capturable", False) for group in optimizer.param_groups
        )
    return skip_on == "device"


class _Copies:
    """Copies of tensors, which are put back if a finding is not 0."""

    # Tensors on the finding's device are read as integers, many at a time: products with 0 and 1
    # and sums of integers are exact. A copy is multiplied by 1 if it will be put back and by 0 if
    # not, what the step has written the other way round, and the two are added. Other tensors are
    # put back one by one, for which the host waits after the step; in compiled code all are,
    # because the compiler makes one kernel of many by itself.

    def __init__(self, tensors: list[torch.Tensor], skip: torch.Tensor) -> None:
        self.skip = skip
        self.together: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self.alone: list[tuple[torch.Tensor, torch.Tensor]] = []
        device, compiling = skip.device, torch.compiler.is_compiling()
        for tensor in tensors:
            if compiling or tensor.device != device or tensor.element_size() not in _WHOLE:
                self.alone.append((tensor, tensor.clone()))
            else:
                whole = _WHOLE[tensor.element_size()]
                self.together[whole].append(tensor.view(whole))
        self.kept = {
            dtype: torch._foreach_mul(alike, skip.to(dtype))
            for dtype, alike in self.together.items()
        }

    def put_back(self, skips: unscale.OnDevices) -> None:
        """Give the tensors their old values back if the finding is not 0."""
        for tensor, old in self.alone:
            torch.where(skips.get(tensor.device), old, tensor, out=tensor)
        keep = self.skip.logical_not()
        for dtype, alike in self.together.items():
            torch._foreach_mul_(alike, keep.to(dtype))
            torch._foreach_add_(alike, self.kept.pop(dtype))


def _momentum_from_zeros(
    optimizer: torch.optim.SGD, before: dict[torch.Tensor, State], skips: unscale.OnDevices
) -> None:
    """Make momentum that a skipped first step has made zeros, and note it as the old state."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            now = optimizer.state.get(p, {}).get("momentum_buffer")
            if now is None or before[p].get("momentum_buffer") is not None or group["dampening"]:
                continue
            with torch.no_grad():
                buffer = distributed.local(now)
                skip = skips.get(buffer.device)
                torch.where(skip, torch.zeros_like(buffer), buffer, out=buffer)
            before[p]["momentum_buffer"] = now


def _settings(group: State) -> State:
    """Return the numbers of a group that a step could change."""
    return {k: v for k, v in group.items() if isinstance(v, (bool, int, float))}


def _same(before: State, after: State) -> bool:
    """Return whether nothing but the values of tensors has changed."""
    if before.keys() != after.keys():
        return False
    for key, was in before.items():
        now = after[key]
        if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor):
            if now is not was:
                return False
        elif now != was:
            return False
    return True


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


# A step without a scaler. Regions note that they were entered; a hook that torch calls before every
# optimizer's step reads these notes.

# Modules whose functions step optimizers for a scaler.
_SCALERS = ("polymp.backends.torch.scaler.grad_scaler", torch.amp.grad_scaler.__name__)


def expect_scaler(action: Literal["warn", "raise"] = "warn") -> hooks.RemovableHandle:
    """Flag optimizer steps on gradients of a float16 region that no scaler has scaled.

        with expect_scaler("raise"):
            train()

    A step is flagged if a float16 region of polymp's was entered, with gradients on, since the last
    step, the optimizer has gradients on that device, no scaler of polymp's or torch.amp's takes the
    step, and none of polymp's has unscaled the gradients. A disabled scaler counts as one. So a
    step by hand after `unscale_` of torch.amp's scaler is flagged.
    Nothing is flagged in compiled code, or in another thread than that of the regions. Where a
    model in float16 without a scaler and one in float32 are trained in turns, the step of the
    second may be flagged: the check does not follow gradients through the graph.

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
    regions.local.thread.unscaled.clear()
    settled: WeakSet[torch.optim.Optimizer] = WeakSet()

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        entered = regions.local.thread.unscaled
        if not entered:
            return
        on = sorted(entered & {g.device.type for g in unscale.gradients(optimizer)})
        if not on:
            return
        if optimizer not in settled and not _stepped_by_a_scaler():
            said = (
                f"{type(optimizer).__name__} steps on gradients that came out of a float16 region "
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
        entered.clear()

    handle = register_optimizer_step_pre_hook(look)
    if action == "raise":  # before checks that only warn, which would take note of the regions
        hooks_in_order: Any = handle.hooks_dict_ref()
        hooks_in_order.move_to_end(handle.id, last=False)
    return handle


def _stepped_by_a_scaler() -> bool:
    """Return whether a function of a scaler is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _SCALERS:
            return True
        frame = frame.f_back
    return False
