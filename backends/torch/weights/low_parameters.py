"""The low parameters of an optimizer, what stands beside them, and their float32 values.

    optimizer.state[p]["beside"]      float32, int16 or bfloat16, laid out as p; not in `stochastic`
    optimizer.state[p]["low_steps"]   int32 []; in `stochastic`: the steps of p so far
    group["low_weights"]              the mode

They are in the optimizer's own state, so that what saves, shards, copies or takes back the state of
an optimizer has them. Before the first step they are in `LowWeights.waiting`: programs take an
optimizer with an empty state for one that has not begun (torch.distributed.checkpoint).
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast.dtype_names import DTYPES, NAMES
from polymp.backends.torch.compat import distributed, modes
from polymp.backends.torch.weights.originals import Original
from polymp.weights import random_bits, store
from polymp.weights.store import Mode, Verbs

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
        sharing.setdefault(modes.storage_key(distributed.local(p)) or id(p), []).append(p)
    for tensors in sharing.values():
        fulls = [distributed.local(p).detach().to(torch.float32) for p in tensors]
        _set_dtype(tensors, DTYPES[weights.dtype])
        for p, full in zip(tensors, fulls, strict=True):
            begin(weights, state, p, full)
            weights.places[p] = params[p]


def _set_dtype(params: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Give parameters on one storage memory of another dtype; they stay the same objects."""
    plain = [p for p in params if distributed.local(p) is p]
    original = Original(plain)
    if plain:
        original.store(dtype)
        original.announce()
    for p in params:
        grad = p.grad
        p.grad = None
        if distributed.local(p) is not p:
            low = distributed.like(distributed.local(p).detach().to(dtype), p)
            made = torch.nn.Parameter(low, requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, made)
        if grad is not None:
            p.grad = grad.to(dtype)


def begin(weights: LowWeights, state: OptimizerState, p: torch.Tensor, full: torch.Tensor) -> None:
    """Write float32 values to a parameter, and make what stands beside it."""
    mode, row = weights.mode, flat(p)
    entries: dict[str, Any] = {}
    full = torch.empty_like(distributed.local(p).detach(), dtype=torch.float32).copy_(full.detach())
    beside = None
    if mode.beside:
        beside = torch.empty_like(full, dtype=DTYPES[mode.beside])
        entries[BESIDE] = distributed.like(beside, p)
    keep(
        mode, weights.dtype, flat(full), row,
        None if beside is None else flat(beside),
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
            begin(weights, state, p, distributed.local(p).detach().to(torch.float32))
    own: dict[str, Any] = weights.waiting[p] if p in weights.waiting else state[p]
    return own


def note_versions(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> None:
    """Note that a parameter and what stands beside it belong together as they are now."""
    weights.versions[p] = _versions(p, ours(weights, state, p).get(BESIDE))


def _versions(p: torch.Tensor, beside: torch.Tensor | None) -> tuple[int, int]:
    return _version(p), 0 if beside is None else _version(beside)


def _version(t: torch.Tensor) -> int:
    return distributed.local(t)._version


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
    mine, its = distributed.local(beside), distributed.local(p)
    if mine.stride() != its.stride() or mine.device != its.device:
        mine = torch.empty_like(its, dtype=mine.dtype).copy_(mine)
        own[BESIDE] = beside = distributed.like(mine, p)
    if was_written(weights, p, beside):
        rest = flat(beside)
        if weights.mode.name == "master":
            rest.copy_(flat(p))
        else:
            rest.zero_()
    return beside


# Low weights as torch tensors: the verbs of the core's rules, and runs of them in small pieces.
#
# The rules read and write a tensor a dozen times. In pieces that fit into a processor's cache,
# or of a bounded size on a GPU, the memory between the readings stays small.


VERBS: Verbs = Verbs(
    bits=lambda x: x.view(torch.int32),
    float32=lambda x: x.view(torch.float32),
    bits16=lambda x: x.view(torch.int16),
    bfloat16=lambda x: x.view(torch.bfloat16),
    to_int32=lambda x: x.to(torch.int32),
    to_int16=lambda x: x.to(torch.int16),
    wide=lambda x: x.to(torch.float32),
    narrow=lambda x, name: x.to(DTYPES[name]),
    from_half=lambda x: x.to(torch.float32),
    where=torch.where,
)


# Elements of a piece, by device type: 2**16 of float32 with what is made of them fit into the
# second cache of a processor.
_PIECE = {"cpu": 2**16}
_PIECE_ELSEWHERE = 2**24
Random = Callable[[int, int], torch.Tensor]


def flat(t: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a dense tensor as one row, in the order of its memory."""
    t = distributed.local(t).detach()
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def shaped(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a row, of `flat`, with the shape and strides of this process's part of a tensor."""
    like = distributed.local(like)
    return row.as_strided(like.size(), like.stride(), row.storage_offset())


def load(mode: Mode, dtype: str, low: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """Return low weights as float32; weights that were written by hand as they are."""
    full: Any = beside if mode.name == "master" else torch.empty_like(low, dtype=torch.float32)
    for at in _pieces(low):
        part = None if beside is None else beside[at]
        rest = store.beside_written(VERBS, mode, dtype, low[at], part)
        if part is not None and rest is not part:
            part.copy_(rest)
        if full is not beside:
            full[at] = store.load(VERBS, mode, low[at], rest)
    return full  # type: ignore[no-any-return]


def keep(
    mode: Mode,
    dtype: str,
    full: torch.Tensor,
    low: torch.Tensor,
    beside: torch.Tensor | None,
    random: Random | None = None,
) -> None:
    """Store float32 weights in low ones and in what stands beside them."""
    for at in _pieces(low):
        if random is None:
            made, rest = store.first(VERBS, mode, dtype, full[at])
        else:
            bits = random(at.start, at.stop)
            made, rest = store.store(VERBS, mode, dtype, full[at], bits)
        low[at] = made
        if beside is not None and beside is not full:
            beside[at] = rest


def random_of(p: torch.Tensor, key: tuple[Any, Any]) -> Random:
    """Return the function that gives the random bits of a parameter, in the order of its memory."""
    part, whole, offset = distributed.local(p), p.size(), distributed.offset(p)
    device = part.device
    rows = tuple(part.size()[1:]) == tuple(whole[1:])
    if part.is_contiguous() and rows:
        first = offset[0] * (part[0].numel() if part.numel() else 0) if offset else 0
        return lambda start, stop: random_bits.random16(
            key, _places(first + start, first + stop, device)
        )
    index = torch.zeros((), dtype=torch.int64, device=device)
    step = 1
    for at in range(len(whole) - 1, -1, -1):
        along = torch.arange(offset[at], offset[at] + part.size(at), device=device) * step
        index = index + along.view(-1, *([1] * (len(whole) - 1 - at)))
        step *= whole[at]
    ordered = torch.empty_like(part, dtype=torch.int32)
    ordered.copy_(_wrapped(index))
    row = flat(ordered)
    return lambda start, stop: random_bits.random16(key, row[start:stop])


def _places(start: int, stop: int, device: torch.device) -> torch.Tensor:
    if stop < 2**31:
        return torch.arange(start, stop, dtype=torch.int32, device=device)
    return _wrapped(torch.arange(start, stop, dtype=torch.int64, device=device))


def _wrapped(index: torch.Tensor) -> torch.Tensor:
    return (((index + 2**31) & 0xFFFFFFFF) - 2**31).to(torch.int32)


def _pieces(row: torch.Tensor) -> Iterator[slice]:
    size, n = _PIECE.get(row.device.type, _PIECE_ELSEWHERE), row.numel()
    if torch.compiler.is_compiling():
        size = max(n, 1)  # the compiler keeps nothing in between
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


# Low parameters on one device, read and stored together as one row of float32 values.


class Piece(NamedTuple):
    """Low parameters on one device, to be read and stored together.

    Attributes:
        params: the parameters.
        low: their values in one row; the memory of the parameter itself if there is one.
        beside: what stands beside them in one row, likewise; None if nothing does.
        full: their float32 values in one row; `beside` itself for `master`.
    """

    params: list[torch.Tensor]
    low: torch.Tensor
    beside: torch.Tensor | None
    full: torch.Tensor


def read(weights: LowWeights, state: OptimizerState, params: list[torch.Tensor]) -> Piece:
    """Read low parameters on one device as float32, together."""
    besides = [prepare(weights, state, p) for p in params]
    low = _row(params)
    beside = None if besides[0] is None else _row(besides)
    full = load(weights.mode, weights.dtype, low, beside)
    for p in params:
        if p in weights.versions:  # what is beside it may have been written
            note_versions(weights, state, p)
    return Piece(params, low, beside, full)


def write(weights: LowWeights, state: OptimizerState, piece: Piece) -> None:
    """Store the float32 values of a piece in its parameters and in what stands beside them."""
    params = piece.params
    if weights.mode.name == "stochastic":
        at = 0
        for p in params:
            until = at + distributed.local(p).numel()
            random = random_of(p, key_of(weights, state, p))
            keep(
                weights.mode, weights.dtype, piece.full[at:until], piece.low[at:until], None, random
            )
            at = until
    else:
        keep(weights.mode, weights.dtype, piece.full, piece.low, piece.beside)
    if len(params) > 1:
        _put(params, piece.low)
        if piece.beside is not None:
            _put([state[p][BESIDE] for p in params], piece.beside)
    for p in params:  # their memory was written through aliases, which have the same version
        note_versions(weights, state, p)


def key_of(weights: LowWeights, state: OptimizerState, p: torch.Tensor) -> Any:
    """Return the key of the random bits of a parameter's next step."""
    steps = state[p][STEPS]
    taken = steps if steps.device.type != "cpu" or torch.compiler.is_compiling() else int(steps)
    return random_bits.key(weights.seed, taken, weights.places[p])


def values(piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters of a piece, and the float32 values of each, with its shape."""
    at = 0
    for p in piece.params:
        until = at + distributed.local(p).numel()
        yield p, distributed.like(shaped(piece.full[at:until], p), p)
        at = until


def _row(tensors: list[Any]) -> torch.Tensor:
    rows = [flat(t) for t in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _put(tensors: list[torch.Tensor], row: torch.Tensor) -> None:
    """Write the parts of a row to tensors, in one call."""
    rows = [flat(t) for t in tensors]
    torch._foreach_copy_(rows, list(row.split([r.numel() for r in rows])))
