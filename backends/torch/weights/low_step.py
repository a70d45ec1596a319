"""A step of any optimizer on low weights: it is lent float32 parameters for as long as it runs.

    read      float32 parameters are made of the low ones, float32 gradients of theirs
    lend      they stand in the optimizer's groups, and are the keys of its state
    step      the optimizer's own step, as it is written
    write     the low parameters and what stands beside them are made of the new values

An optimizer of torch.optim treats every parameter alone. For it this happens in pieces of bounded
size, so that no second float32 model is ever alive. Any other optimizer may look at all parameters
at once (LBFGS, and who knows what users write), so it is lent all of them together.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from polymp.backends.torch.compat import distributed, dynamo, inductor, optimizers
from polymp.backends.torch.weights import low_parameters
from polymp.backends.torch.weights.low_parameters import BESIDE, OURS, STEPS, LowWeights, Piece
from polymp.weights import random_bits, store
from polymp.weights.store import Mode, Verbs

# Bytes of float32 parameters that are lent at a time, unless one parameter alone has more.
LENT = 2**27
Closure = Callable[[], Any]


class Loan:
    """Float32 parameters in the place of low ones, in the groups and the state of an optimizer.

    Args:
        optimizer: whose parameters they are.
        weights: how they are kept low.
        pieces: the low parameters to lend for.
        alone: parameters that stay in the groups as they are; all others are taken out meanwhile.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: LowWeights,
        pieces: list[Piece],
        alone: list[torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self.weights = weights
        self.pieces = pieces
        self.lent: dict[torch.Tensor, torch.Tensor] = {}  # by low parameter
        self._lists = [(g["params"], list(g["params"])) for g in optimizer.param_groups]
        self._aside: dict[torch.Tensor, dict[str, Any]] = {}
        self._alone = {id(p) for p in alone}
        for piece in pieces:
            for p, full in low_parameters.values(piece):
                lent = torch.nn.Parameter(full, requires_grad=p.requires_grad)
                self.lent[p] = lent

    def give(self) -> None:
        """Put the float32 parameters in the place of the low ones, with float32 gradients."""
        state = self.optimizer.state
        for p, lent in self.lent.items():
            lent.grad = None if p.grad is None else p.grad.to(torch.float32)
            state[lent] = own = state.pop(p)  # the same dict: some optimizers hold on to it
            self._aside[p] = {key: own.pop(key) for key in OURS if key in own}
        for params, before in self._lists:
            params[:] = [
                self.lent.get(p, p) for p in before if p in self.lent or id(p) in self._alone
            ]

    def take_back(self) -> None:
        """Put the low parameters back in their places."""
        state = self.optimizer.state
        for params, before in self._lists:
            params[:] = before
        for p, lent in self.lent.items():
            state[p] = own = state.pop(lent, {})
            own.update(self._aside.pop(p))

    def write(self) -> None:
        """Store the float32 parameters in the low ones."""
        for piece in self.pieces:
            low_parameters.write(self.weights, self.optimizer.state, piece)


def step(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    kind: type[torch.optim.Optimizer],
    closure: Closure | None,
) -> Any:
    """Take one step of an optimizer on low weights."""
    loss = None
    together = not is_piecewise(kind)
    run = optimizers.step_without_hooks(kind)
    if closure is not None and not together:
        with torch.enable_grad():
            loss = closure()
    refuse_sparse(optimizer)
    low_parameters.complete(weights, optimizer)
    for params, alone in pieces(optimizer, weights, together):
        read = [low_parameters.read(weights, optimizer.state, each) for each in params]
        loan = Loan(optimizer, weights, read, alone)
        with _lent(loan):
            if closure is not None and together:
                result = run(optimizer, _outside(loan, closure))
            else:
                result = run(optimizer)
        loan.write()
        count(optimizer, list(loan.lent))
        weights.stepped.update((p, True) for p in (*loan.lent, *alone) if p.grad is not None)
    return loss if closure is not None and not together else result


@contextmanager
def _lent(loan: Loan) -> Iterator[None]:
    loan.give()
    try:
        yield
    finally:
        loan.take_back()


def _outside(loan: Loan, closure: Closure) -> Closure:
    """Return a closure that runs on the low parameters, which have the values lent so far."""

    def evaluate() -> Any:
        loan.take_back()
        with torch.no_grad():
            loan.write()
        try:
            return closure()
        finally:
            loan.give()

    return evaluate


def is_piecewise(kind: type) -> bool:
    """Return whether an optimizer's step treats every parameter alone, as torch.optim's do."""
    own: Any = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    return own.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


def pieces(
    optimizer: torch.optim.Optimizer, weights: LowWeights, together: bool
) -> Iterator[tuple[list[list[torch.Tensor]], list[torch.Tensor]]]:
    """Yield what to lend at a time: low parameters by device, and others that step with them."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    low = [p for p in every if p in weights.places and (together or p.grad is not None)]
    others = [p for p in every if p not in weights.places]
    if together:
        yield [piece for some in _alike(low) for piece in _read_at_once(some, weights)], others
        return
    if others or not low:
        yield [], others
    for some in _alike(low):
        yield _read_at_once(some, weights), []


def _alike(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parameters on one device, of `LENT` bytes at most in float32."""
    some: list[torch.Tensor] = []
    size = 0
    for p in params:
        more = 4 * distributed.local(p).numel()
        if some and (size + more > LENT or p.device != some[0].device):
            yield some
            some, size = [], 0
        some.append(p)
        size += more
    if some:
        yield some


def _read_at_once(params: list[torch.Tensor], weights: LowWeights) -> list[list[torch.Tensor]]:
    """Return which parameters are read into one row; float32 copies stay where they are."""
    return [[p] for p in params] if weights.mode.name == "master" else [params]


def count(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Count a step of parameters whose rounding is random, unless a fused optimizer skipped it."""
    found = getattr(optimizer, "found_inf", None)
    for p in params:
        steps = optimizer.state[p].get(STEPS)
        if steps is not None and p.grad is not None:
            taken = 1 if found is None else (found == 0).to(steps)
            steps += taken


def refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient is sparse."""
    for at, group in enumerate(optimizer.param_groups):
        for number, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"low_weights(): the gradient of parameter {number} of group {at}, of shape "
                    f"{tuple(p.shape)}, is sparse. The step would have to store the whole weight "
                    "again, and rows without a gradient would not stay as they are. Make the "
                    "embedding with sparse=False, or give its weight an optimizer of its own."
                )


# A step on low weights inside code that torch.compile compiles: one graph for all of it.
#
# Dynamo has a handler of its own for optimizers, which takes parameters from the optimizer's
# groups alone. So the step that is traced is that of a twin: an object with the methods of the
# optimizer's class that is no optimizer for dynamo, whose parameters are float32 values inside
# the graph. The compiler then reads the low weights, computes, and stores, in one kernel for
# each parameter, and no float32 weight is ever in memory.
#
# The graph of the caller breaks here, as it does at every optimizer of torch's.


Step = Callable[..., None]


@dynamo.untraced("the step of low_weights compiles a graph of its own")
def compiled_step(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    kind: type[torch.optim.Optimizer],
    compiled: dict[str, Step],
    closure: Closure | None,
) -> Any:
    """Take one step of an optimizer on low weights, compiled where that is possible.

    The first step of a parameter, which makes its state, runs as it is written; so do the steps of
    fused optimizers, which are one kernel already, of sharded parameters, of float16 weights, and
    of optimizers that are not of torch.optim.
    """
    with torch.no_grad():
        if not _can_compile(optimizer, weights, kind):
            return step(optimizer, weights, kind, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [
            [p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        ]
        every = [p for group in with_grad for p in group]
        if any(not weights.stepped.get(p) for p in every):
            step(optimizer, weights, kind, None)
            return loss
        refuse_sparse(optimizer)
        low_parameters.complete(weights, optimizer)
        for p in every:
            if p in weights.places:
                low_parameters.prepare(weights, optimizer.state, p)
        if "step" not in compiled:
            compiled["step"] = torch.compile(_step_of(kind, weights), options=inductor.OPTIONS)
        _run(optimizer, weights, with_grad, compiled["step"])
    return loss


def _can_compile(
    optimizer: torch.optim.Optimizer, weights: LowWeights, kind: type[torch.optim.Optimizer]
) -> bool:
    groups = optimizer.param_groups
    return (
        is_piecewise(kind)
        and weights.dtype == "bfloat16"
        and not any(group.get("fused") for group in groups)
        and all(distributed.local(p) is p for group in groups for p in group["params"])
    )


def _run(
    optimizer: torch.optim.Optimizer,
    weights: LowWeights,
    with_grad: list[list[torch.Tensor]],
    step: Step,
) -> None:
    state: Any = optimizer.state
    every = [p for group in with_grad for p in group]
    own = [{k: v for k, v in state[p].items() if k not in OURS} for p in every]
    settings = []
    for group in optimizer.param_groups:
        settings.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
        if "capturable" in group:
            settings[-1]["capturable"] = True  # as dynamo does: nothing may wait in a graph
    step(
        [p.detach() for p in every],
        [p.grad for p in every],
        own,
        [viewed(state[p].get(BESIDE)) if p in weights.places else None for p in every],
        [state[p].get(STEPS) if p in weights.places else None for p in every],
        [weights.places.get(p) for p in every],
        [len(group) for group in with_grad],
        settings,
    )
    for p, entries in zip(every, own, strict=True):
        state[p].update(entries)
        if p in weights.places:
            low_parameters.note_versions(weights, state, p)


def _step_of(kind: Any, weights: LowWeights) -> Step:
    """Return the function to compile for optimizers of a class."""
    mode, seed = weights.mode, weights.seed
    twin_class, own_step = _twin_class(kind), optimizers.plain_step(kind)

    def step(
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
        besides: list[torch.Tensor | None],
        steps: list[torch.Tensor | None],
        places: list[int | None],
        sizes: list[int],
        settings: list[dict[str, Any]],
    ) -> None:
        fulls = []
        for p, grad, beside, place in zip(params, grads, besides, places, strict=True):
            full = p
            if place is not None:
                full = load(mode, p.to(torch.float32), opened(beside))
            full.grad = grad.to(torch.float32) if place is not None else grad
            fulls.append(full)
        twin = twin_class.__new__(twin_class)
        twin.param_groups = []
        first = 0
        for size, setting in zip(sizes, settings, strict=True):
            twin.param_groups.append({**setting, "params": fulls[first : first + size]})
            first += size
        twin.state = dict(zip(fulls, states, strict=True))
        twin.defaults = settings[0]
        own_step(twin)
        for p, full, beside, count, place in zip(
            params, fulls, besides, steps, places, strict=True
        ):
            if place is None:
                continue
            random = None
            if count is not None:
                index = torch.arange(p.numel(), dtype=torch.int32, device=p.device).view(p.shape)
                random = random_bits.random16(random_bits.key(seed, count, place), index)
            low, rest = keep(mode, full, random)
            p.copy_(low)
            if beside is not None:
                put(beside, rest)
            if count is not None:
                count += 1

    return step


@cache
def _twin_class(kind: Any) -> Any:
    """Return a class with an optimizer's methods that dynamo takes for no optimizer."""
    methods = {
        name: optimizers.traceable(value)
        for each in reversed(kind.__mro__[:-1])
        for name, value in vars(each).items()
        if name not in ("__dict__", "__weakref__", "__init__", "__doc__", "__module__")
    }
    return type(f"{kind.__name__}Twin", (), methods)


# The verbs of low weights inside a compiled graph, where 16-bit numbers are kept in 32 bits.
#
# Inductor makes no vector code for a CPU kernel in which an int16 number occurs, and such a
# kernel takes ten times as long. So in the graph a bfloat16 number is the float32 number of the
# same value, and an int16 number the int32 number. Rounding is done on the bits: inductor would
# remove a cast to bfloat16 and back. Remainders, which are int16 in memory, are read as bfloat16
# numbers of the same bits. They are written by an op that inductor does not look into: a cast to
# bfloat16 would change those that are the bits of a NaN.


_UPPER = -0x10000


def _narrow(full: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round float32 to the nearest bfloat16 number, ties to even, as float32; NaN to anything."""
    assert dtype == "bfloat16"
    bits = full.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER).view(torch.float32)


VERBS: Verbs = Verbs(
    bits=lambda x: x.view(torch.int32),
    float32=lambda x: x.view(torch.float32),
    bits16=lambda x: x.view(torch.int32) >> 16,
    bfloat16=lambda x: (x << 16).view(torch.float32),
    to_int32=lambda x: x,
    to_int16=lambda x: x,  # what is stored in int16 is cut off there
    wide=lambda x: x,
    narrow=_narrow,
    from_half=lambda x: x.to(torch.float32),
    where=torch.where,
)


def keep(mode: Mode, full: torch.Tensor, random: Any) -> tuple[torch.Tensor, Any]:
    """Return float32 weights as they are stored: the low weights, and what stands beside them.

    Where the low weight is the usual cast, the compiler makes it, of NaN too.
    """
    if mode.name == "master":
        return full, full
    return store.store(VERBS, mode, "bfloat16", full, random)


def load(mode: Mode, low: torch.Tensor, rest: Any) -> torch.Tensor:
    """Return low weights as float32; those written by hand as they are.

    It is `store.beside_written` and `store.load` in fewer operations: what does not fit to a weight
    is known by its size. A weight that was written through `data`, and is nearer than a last place
    to the one before, counts as the one before.
    """
    if mode.name == "split":
        full = (low.view(torch.int32) + rest).view(torch.float32)  # NaN with any payload
        return torch.where(full == full, full, low)
    # Half of the last place of a weight is at most its 2**-8th part.
    if mode.name == "master":
        place = low.abs() * 2.0**-8 + 2.0**-126
        return torch.where((rest - low).abs() <= place, rest, low)
    return low


def viewed(beside: torch.Tensor | None) -> torch.Tensor | None:
    """Return what stands beside a weight for a graph: int16 as bfloat16 of the same bits."""
    if beside is not None and beside.dtype is torch.int16:
        return beside.view(torch.bfloat16)
    return beside


def opened(beside: torch.Tensor | None) -> Any:
    """Return what stands beside a weight, from `viewed`, as the verbs take it."""
    if beside is None or beside.dtype is torch.float32:
        return beside
    return beside.to(torch.float32).view(torch.int32) >> 16


def put(beside: torch.Tensor, rest: torch.Tensor) -> None:
    """Write what the verbs have made of it."""
    if rest.dtype is torch.int32:
        torch.ops.polymp.put_bits(beside, rest)
    else:
        beside.copy_(rest)


def _put_bits(into: torch.Tensor, x: torch.Tensor) -> None:
    into.view(torch.int16).copy_(x)


_library = torch.library.Library("polymp", "FRAGMENT")


_library.define("put_bits(Tensor(a!) into, Tensor x) -> ()")


_library.impl("put_bits", _put_bits, "CompositeExplicitAutograd")


_library.impl("put_bits", lambda into, x: None, "Meta")
