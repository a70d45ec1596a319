"""The low parameters of an optimizer, what stands beside them, and their float32 values.

    optimizer.state[p]["beside"]      float32, int16 or bfloat16, laid out as p; not in `stochastic`
    optimizer.state[p]["low_steps"]   int32 []; in `stochastic`: the steps of p so far
    group["low_weights"]              the mode

They are in the optimizer's own state, so that what saves, shards, copies or takes back the state of
an optimizer has them. Before the first step they are in `LowWeights.waiting`: programs take an
optimizer with an empty state for one that has not begun (torch.distributed.checkpoint).
"""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast.dtype_names import DTYPES, NAMES
from polymp.backends.torch.compat import distributed, dtensor, storage
from polymp.backends.torch.weights import low_arrays
from polymp.backends.torch.weights.originals import Original
from polymp.weights.modes import Mode

BESIDE, STEPS, GROUP = "beside", "low_steps", "low_weights"
OURS = (BESIDE, STEPS)

OptimizerState = MutableMapping[torch.Tensor, dict[str, Any]]


class LowWeights(NamedTuple):
    """How an optimizer keeps its parameters low.

    Attributes:
        mode: the mode.
        dtype: name of the low dtype.
        seed: of the random bits.
        places: the low parameters, and the place of each among all parameters of the optimizer.
        kept: the other ones, and why each stays as it is.
        versions: of each low parameter and of what stands beside it, after the last step.
        stepped: the parameters, low and kept, that have taken a step.
        waiting: what will be in the state of parameters that have taken none.
    """

    mode: Mode
    dtype: str
    seed: int
    places: dict[torch.Tensor, int]
    kept: dict[torch.Tensor, str]
    versions: dict[torch.Tensor, tuple[int, int]]
    stepped: dict[torch.Tensor, bool]
    waiting: dict[torch.Tensor, dict[str, Any]]


def why_kept(p: torch.Tensor) -> str:
    """Return why a parameter cannot be stored low; "" if it can."""
    if distributed.in_fsdp1(p):
        return "is a part of FSDP1's flat parameter"
    if p.layout is not torch.strided:
        return f"is {str(p.layout).removeprefix('torch.')}"
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"is {NAMES[p.dtype]}"
    return "is empty" if p.numel() == 0 else ""


def take(weights: LowWeights, state: OptimizerState, group: dict[str, Any], first: int) -> None:
    """Store the parameters of a group low, except those that are kept, and mark the group."""
    group[GROUP] = weights.mode.name
    low: dict[torch.Tensor, int] = {}
    for at, p in enumerate(group["params"], first):
        why = weights.kept.get(p) or why_kept(p)
        if why:
            weights.kept[p] = why
        else:
            low[p] = at
    with torch.no_grad():
        store_low(weights, state, low)


def store_low(weights: LowWeights, state: OptimizerState, params: dict[torch.Tensor, int]) -> None:
    """Store parameters low, in place, and put what stands beside them in the state."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for p in params:
        sharing.setdefault(storage.storage_key(dtensor.local(p)) or id(p), []).append(p)
    for tensors in sharing.values():
        fulls = [dtensor.local(p).detach().to(torch.float32) for p in tensors]
        _set_dtype(tensors, DTYPES[weights.dtype])
        for p, full in zip(tensors, fulls, strict=True):
            begin(weights, state, p, full)
            weights.places[p] = params[p]


def _set_dtype(params: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Give parameters on one storage memory of another dtype; they stay the same objects."""
    plain = [p for p in params if dtensor.local(p) is p]
    original = Original(plain)
    if plain:
        original.store(dtype)
        original.announce()
    for p in params:
        grad = p.grad
        p.grad = None
        if dtensor.local(p) is not p:
            low = dtensor.like(dtensor.local(p).detach().to(dtype), p)
            made = torch.nn.Parameter(low, requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, made)
        if grad is not None:
            p.grad = grad.to(dtype)


def begin(weights: LowWeights, state: OptimizerState, p: torch.Tensor, full: torch.Tensor) -> None:
    """Write float32 values to a parameter, and make what stands beside it."""
    mode, row = weights.mode, low_arrays.flat(p)
    entries: dict[str, Any] = {}
    full = torch.empty_like(dtensor.local(p).detach(), dtype=torch.float32).copy_(full.detach())
    beside = None
    if mode.beside:
        beside = torch.empty_like(full, dtype=DTYPES[mode.beside])
        entries[BESIDE] = dtensor.like(beside, p)
    low_arrays.keep(
        mode, weights.dtype, low_arrays.flat(full), row,
        None if beside is None else low_arrays.flat(beside),
    )  # fmt: skip
    if mode.name == "master" and beside is not None:
        beside.copy_(full)
    if mode.name == "stochastic" and STEPS not in state.get(p, ()):
        entries[STEPS] = torch.zeros((), dtype=torch.int32)
    if p in state and p not in weights.waiting:
        state[p].update(entries)
    else:
        weights.waiting[p] = entries
    note_versions(weights, state, p)


def complete(weights: LowWeights, optimizer: torch.optim.Optimizer) -> None:
    """Put into an optimizer's state what belongs there, before a step.

    Steps are counted on the device where the optimizer's own step never waits for it.
    """
    state: OptimizerState = optimizer.state
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            if p not in weights.places:
                continue
            own = ours(weights, state, p)
            if own is weights.waiting.get(p):
                state[p].update(weights.waiting.pop(p))
            if STEPS in own and on_device:
                state[p][STEPS] = own[STEPS].to(p.device)


def ours(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> dict[str, Any]:
    """Return the dictionary that has what stands beside a low parameter.

    It is made again if it is gone: programs clear an optimizer's state to start it anew.
    """
    key = BESIDE if weights.mode.beside else STEPS
    if key not in state.get(p, ()) and p not in weights.waiting:
        with torch.no_grad():
            begin(weights, state, p, dtensor.local(p).detach().to(torch.float32))
    own: dict[str, Any] = weights.waiting[p] if p in weights.waiting else state[p]
    return own


def note_versions(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> None:
    """Note that a parameter and what stands beside it belong together as they are now."""
    weights.versions[p] = _versions(p, ours(weights, state, p).get(BESIDE))


def _versions(p: torch.Tensor, beside: torch.Tensor | None) -> tuple[int, int]:
    return _version(p), 0 if beside is None else _version(beside)


def _version(t: torch.Tensor) -> int:
    return dtensor.local(t)._version


def has_new_version(weights: LowWeights, p: torch.Tensor) -> bool:
    """Return whether a parameter was written since its version was noted."""
    noted = weights.versions.get(p)
    return noted is not None and _version(p) != noted[0]


def was_written(weights: LowWeights, p: torch.Tensor, beside: torch.Tensor) -> bool:
    """Return whether other code wrote to a parameter and not to what stands beside it.

    What undoes a step writes both alike. A parameter of which nothing was noted was just loaded.
    """
    noted = weights.versions.get(p)
    if noted is None:
        return False
    now = _versions(p, beside)
    return now[0] - noted[0] != now[1] - noted[1]


def prepare(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> torch.Tensor | None:
    """Return what stands beside a parameter, laid out as the parameter is now.

    If other code wrote to it, its weights are what they are in the low dtype.
    """
    own = ours(weights, state, p)
    beside: torch.Tensor | None = own.get(BESIDE)
    if beside is None:
        return None
    mine, its = dtensor.local(beside), dtensor.local(p)
    if mine.stride() != its.stride() or mine.device != its.device:
        mine = torch.empty_like(its, dtype=mine.dtype).copy_(mine)
        own[BESIDE] = beside = dtensor.like(mine, p)
    if was_written(weights, p, beside):
        rest = low_arrays.flat(beside)
        if weights.mode.name == "master":
            rest.copy_(low_arrays.flat(p))
        else:
            rest.zero_()
    return beside
