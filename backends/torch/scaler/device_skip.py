"""An optimizer's step that is skipped by a value on the device, for which the host does not wait.

The step is taken, and then undone on the device if Inf or NaN was found: parameters that have a
gradient, and the tensors of their state, get their old values back. This costs a copy of both
while the step runs, and three passes over them, each in a few launches for all. The rest is put
back by the host, which waits for the finding: state that the step has made, Python numbers that it
has changed, and tensors on the CPU if the finding is elsewhere.

torch's optimizers, after the step that made their state:

    never wait             SGD, Muon; capturable: Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, ASGD,
                           RMSprop, Rprop
    wait unless on the CPU the same without capturable, Adagrad, Adafactor: their count of steps is
                           a tensor on the CPU; ASGD's is not, but then ASGD itself reads it
    always wait            SparseAdam: its count of steps is a number
    need no undoing        SGD, Adagrad, Adam and AdamW with fused: they skip by themselves

For an optimizer that keeps other objects than tensors and numbers in its state, the host waits for
the finding before the step.
"""

from collections import defaultdict
from typing import Any

import torch

from polymp.backends.torch.compat import dtensor, optimizers
from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.scaler.options import SkipOn

State = dict[str, Any]
# Values that a step can only replace, not change in place.
_PLAIN = (torch.Tensor, bool, int, float, str, type(None))
# Integer dtypes by their size in bytes. There is none of 16, as complex128 has: see `_Copies`.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def step(optimizer: torch.optim.Optimizer, found: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `optimizer.step(*args, **kwargs)`, and undo it if `found` is not 0.

    In code that torch.compile traces nothing can wait: there torch's optimizers make their state
    before the step, and a first step that is skipped leaves it as made. SGD's momentum is then
    zeros instead of None, which gives the same next step unless `dampening` is set.
    """
    compiling = torch.compiler.is_compiling()
    optimizers.complete_state(optimizer)
    if compiling:
        optimizers.make_state(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    skip = found != 0
    before = [dict(optimizer.state.get(p, {})) for p in params]
    if not all(isinstance(v, _PLAIN) for state in before for v in state.values()):
        return None if bool(skip) else optimizers.optimizer_step(optimizer, *args, **kwargs)
    settings = [_settings(group) for group in optimizer.param_groups]
    with torch.no_grad():
        kept = [dtensor.local(p) for p in params]
        for state in before:
            kept += [dtensor.local(v) for v in state.values() if isinstance(v, torch.Tensor)]
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


def wanted(skip_on: SkipOn, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the device decides on a step.

    By "auto" it does so in compiled code, and for optimizers whose steps can be captured in a CUDA
    graph: `capturable`.
    """
    if skip_on == "auto":
        return torch.compiler.is_compiling() or all(
            group.get("capturable", False) for group in optimizer.param_groups
        )
    return skip_on == "device"


class _Copies:
    """Copies of tensors, which are put back if a finding is not 0.

    Tensors on the finding's device are read as integers, many at a time: products with 0 and 1 and
    sums of integers are exact. A copy is multiplied by 1 if it will be put back and by 0 if not,
    what the step has written the other way round, and the two are added. Other tensors are put back
    one by one, for which the host waits after the step; in compiled code all are, because the
    compiler makes one kernel of many by itself.
    """

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
        for tensor, copy in self.alone:
            torch.where(skips.get(tensor.device), copy, tensor, out=tensor)
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
                buffer = dtensor.local(now)
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
