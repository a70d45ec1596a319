"""The low parameters of an optimizer, what stands beside them, and their float32 values.

    optimizer.state[p]["beside"]      float32, int16 or bfloat16, laid out as p; not in `stochastic`
    optimizer.state[p]["low_steps"]   int32 []; in `stochastic`: the steps of p so far
    group["low_weights"]              the mode

They are in the optimizer's own state, so that what saves, shards, copies or takes back the state of
an optimizer has them. Before the first step they are in `LowWeights.waiting`: programs take an
optimizer with an empty state for one that has not begun (torch.distributed.checkpoint).
"""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from polymp import weights
from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.compat import distributed, optimizers
from polymp.backends.torch.weights import freeze_usage
from polymp.weights import Mode, Verbs

BESIDE, STEPS, GROUP = "beside", "low_steps", "low_weights"
OURS = (BESIDE, STEPS)
Param = torch.Tensor
State = MutableMapping[Param, dict[str, Any]]


class Piece(NamedTuple):
    """Low parameters on one device, to be read and stored together."""

    params: list[Param]
    low: torch.Tensor  # their values in one row; the memory of the parameter itself if there is one
    beside: torch.Tensor | None  # what stands beside them, likewise
    full: torch.Tensor  # their float32 values in one row; `beside` itself for `master`

    def values(self) -> Iterator[tuple[Param, torch.Tensor]]:
        """Yield the parameters, and the float32 values of each, with its shape."""
        at = 0
        for p in self.params:
            part = distributed.local(p)
            row = self.full[at : at + part.numel()]
            shaped = row.as_strided(part.size(), part.stride(), row.storage_offset())
            yield p, distributed.like(shaped, p)
            at += part.numel()


@dataclass(eq=False)
class LowWeights:
    """How an optimizer keeps its parameters low."""

    mode: Mode
    seed: int  # of the random bits
    kept: dict[Param, str]  # the parameters that stay as they are, and why
    places: dict[Param, int] = field(default_factory=dict)  # of the low ones, among all
    stepped: set[Param] = field(default_factory=set)  # those that have taken a step, low or kept
    # What will be in the state of parameters that have taken none.
    waiting: dict[Param, dict[str, Any]] = field(default_factory=dict)
    compiled: Callable[..., None] | None = None  # the step that torch.compile has made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compiled": None}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Store parameters low, in place, except those that are kept, and mark the groups."""
        low: dict[Param, int] = {}
        for at, p in enumerate(optimizers.parameters(optimizer)):
            if p in self.places:
                continue
            if why := self.kept.get(p) or why_kept(p):
                self.kept[p] = why
            else:
                low[p] = at
        for group in optimizer.param_groups:
            group[GROUP] = self.mode.name
        with torch.no_grad():
            for together in freeze_usage.sharing((str(at), p) for p, at in low.items()):
                params = list(together.values())
                fulls = [distributed.local(p).detach().to(torch.float32) for p in params]
                _set_low(params)
                for p, full in zip(params, fulls, strict=True):
                    self.begin(optimizer.state, p, full)
                    self.places[p] = low[p]

    def begin(self, state: State, p: Param, full: torch.Tensor) -> None:
        """Write float32 values to a parameter, and make what stands beside it."""
        own = state[p] if p in state and p not in self.waiting else self.waiting.setdefault(p, {})
        beside = None
        if self.mode.beside:
            beside = torch.empty_like(full, dtype=DTYPES[self.mode.beside])
            own[BESIDE] = distributed.like(beside, p)
        else:
            own.setdefault(STEPS, torch.zeros((), dtype=torch.int32))
        row = None if beside is None else flat(beside)
        keep(self.mode, flat(full), flat(p), row)

    def complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Put into an optimizer's state what belongs there, before a step."""
        # Steps are counted on the device where the optimizer's own step never waits for it.
        state: State = optimizer.state
        for group in optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                if p not in self.places:
                    continue
                own = self.entries(state, p)
                if p in self.waiting:
                    state[p].update(self.waiting.pop(p))
                if STEPS in own and on_device:
                    state[p][STEPS] = own[STEPS].to(p.device)

    def entries(self, state: State, p: Param) -> dict[str, Any]:
        """Return the dictionary that has what stands beside a low parameter."""
        key = BESIDE if self.mode.beside else STEPS
        # It is made again if it is gone: programs clear an optimizer's state to start it anew.
        if key not in state.get(p, ()) and p not in self.waiting:
            with torch.no_grad():
                self.begin(state, p, distributed.local(p).detach().to(torch.float32))
        own: dict[str, Any] = self.waiting[p] if p in self.waiting else state[p]
        return own

    def beside(self, state: State, p: Param) -> torch.Tensor | None:
        """Return what stands beside a parameter, laid out as the parameter is now."""
        if p.dtype is not torch.bfloat16:
            raise RuntimeError(
                f"low_weights(): a weight of shape {tuple(p.shape)} was bfloat16, and is {p.dtype} "
                "now, so that what stands beside it no longer fits. Do not cast the model after "
                "low_weights(). For float32 weights, load optimizer.float32_state_dict(model) "
                "into a model in float32."
            )
        own = self.entries(state, p)
        beside: torch.Tensor | None = own.get(BESIDE)
        if beside is None:
            return None
        mine, its = distributed.local(beside), distributed.local(p)
        if mine.stride() != its.stride() or mine.device != its.device:
            mine = torch.empty_like(its, dtype=mine.dtype).copy_(mine)
            own[BESIDE] = beside = distributed.like(mine, p)
        return beside

    def read(self, state: State, params: list[Param]) -> list[Piece]:
        """Read low parameters on one device as float32."""
        if self.mode.name == "master" and len(params) > 1:  # float32 copies stay where they are
            return [piece for p in params for piece in self.read(state, [p])]
        besides = [self.beside(state, p) for p in params]
        low = _row(params)
        beside = None if besides[0] is None else _row(besides)
        return [Piece(params, low, beside, load(self.mode, low, beside))]

    def write(self, state: State, piece: Piece) -> None:
        """Store the float32 values of a piece in its parameters and in what stands beside them."""
        params, low, beside, full = piece
        if self.mode.name == "stochastic":
            at = 0
            for p in params:
                until, steps = at + distributed.local(p).numel(), state[p][STEPS]
                taken = steps if steps.device.type != "cpu" else int(steps)
                random = random_of(p, weights.key(self.seed, taken, self.places[p]))
                keep(self.mode, full[at:until], low[at:until], None, random)
                at = until
        else:
            keep(self.mode, full, low, beside)
        if len(params) > 1:
            _put(params, low)
            if beside is not None:
                _put([state[p][BESIDE] for p in params], beside)


def why_kept(p: Param) -> str:
    """Return why a parameter cannot be stored low; "" if it can."""
    if distributed.in_fsdp1(p):
        return "is a part of FSDP1's flat parameter"
    part = distributed.local(p)
    if hasattr(type(part), "__tensor_flatten__"):
        return f"is a {type(p).__name__}, whose numbers are in other tensors"
    if why := freeze_usage.why_kept(p, torch.float32, torch.bfloat16):
        return why
    # Of others `empty_like` keeps the strides; see `flat`.
    dense = torch.empty_like(part, device="meta").stride() == part.stride()
    return "" if dense else "has strides with gaps or overlaps"


def _set_low(params: list[Param]) -> None:
    """Give parameters on one storage memory in bfloat16; they stay the same objects."""
    plain = [p for p in params if distributed.local(p) is p]
    if plain:
        freeze_usage.store(plain, torch.bfloat16)
        torch.autograd.graph.increment_version(plain)
    for p in params:
        grad = p.grad
        p.grad = None
        if distributed.local(p) is not p:
            low = distributed.like(distributed.local(p).detach().to(torch.bfloat16), p)
            made = torch.nn.Parameter(low, requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, made)
        if grad is not None:
            p.grad = grad.to(torch.bfloat16)


def as_saved(value: Any) -> Any:
    """Return an int16 tensor as bfloat16 on the same memory; all else as it is."""
    # NCCL and gloo, which gather a state, have no int16.
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int16:
        return value
    return distributed.like(distributed.local(value).view(torch.bfloat16), value)


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
    narrow=lambda x: x.to(torch.bfloat16),
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


def load(mode: Mode, low: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """Return low weights as float32; weights that were written by hand as they are."""
    full: Any = beside if mode.name == "master" else torch.empty_like(low, dtype=torch.float32)
    for at in _pieces(low):
        part = None if beside is None else beside[at]
        rest = weights.beside_written(VERBS, mode, low[at], part)
        if part is not None and rest is not part:
            part.copy_(rest)
        if full is not beside:
            full[at] = weights.load(VERBS, mode, low[at], rest)
    return full  # type: ignore[no-any-return]


def keep(
    mode: Mode,
    full: torch.Tensor,
    low: torch.Tensor,
    beside: torch.Tensor | None,
    random: Random | None = None,
) -> None:
    """Store float32 weights in low ones and in what stands beside them."""
    for at in _pieces(low):
        bits = None if random is None else random(at.start, at.stop)
        made, rest = weights.store(VERBS, mode, full[at], bits)
        low[at] = made
        if beside is not None and beside is not full:
            beside[at] = rest


def random_of(p: Param, key: tuple[Any, Any]) -> Random:
    """Return the function that gives the random bits of a parameter, in the order of its memory."""
    part, whole, offset = distributed.local(p), p.size(), distributed.offset(p)
    device = part.device
    rows = tuple(part.size()[1:]) == tuple(whole[1:])
    if part.is_contiguous() and rows:
        first = offset[0] * (part[0].numel() if part.numel() else 0) if offset else 0

        def places(start: int, stop: int) -> torch.Tensor:
            row = torch.arange(first + start, first + stop, device=device)
            return row.to(torch.int32)  # which wraps around

        return lambda start, stop: weights.random16(key, places(start, stop))
    index = torch.zeros((), dtype=torch.int64, device=device)
    step = 1
    for at in range(len(whole) - 1, -1, -1):
        along = torch.arange(offset[at], offset[at] + part.size(at), device=device) * step
        index = index + along.view(-1, *([1] * (len(whole) - 1 - at)))
        step *= whole[at]
    row = flat(torch.empty_like(part, dtype=torch.int32).copy_(index))
    return lambda start, stop: weights.random16(key, row[start:stop])


def _row(tensors: list[Any]) -> torch.Tensor:
    rows = [flat(t) for t in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _put(tensors: list[torch.Tensor], row: torch.Tensor) -> None:
    """Write the parts of a row to tensors, in one call."""
    rows = [flat(t) for t in tensors]
    torch._foreach_copy_(rows, list(row.split([r.numel() for r in rows])))


def _pieces(row: torch.Tensor) -> Iterator[slice]:
    size, n = _PIECE.get(row.device.type, _PIECE_ELSEWHERE), row.numel()
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
