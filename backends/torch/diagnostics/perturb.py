"""A run of a function, and runs of it in which the result of every op is moved by its rounding.

`polymp.diagnostics.rounding` explains by how much, and why. Results are moved below autograd, so
that the backward pass is that of the moved run, and is moved itself.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.op_call import (
    OpCall,
    Ran,
    call_of,
    facts_of,
    float_tensors,
    is_cast,
    name_of,
)
from polymp.backends.torch.diagnostics.op_stream import OpStream, Subscriber
from polymp.diagnostics import rounding
from polymp.diagnostics.rounding import Run, Step, movement
from polymp.rules.vocabulary import vocabulary


def move(
    rows: Sequence[torch.Tensor], t: torch.Tensor, by: torch.Tensor, op: int, seed: int = 0
) -> None:
    """Move a result in some runs, the rows, by shares of its rounding `by`, which is changed, too.

    A share is a byte or more of a hash of the number, the op and the seed. So equal numbers in one
    result go the same way, as they round the same way, and opposite numbers go opposite ways.
    """
    real = t.to(by.dtype)
    # An Inf, such as that of a mask, is not moved: Inf - Inf would be NaN. No number becomes one.
    room = real.abs().neg_().add_(torch.finfo(t.dtype).max)
    torch.minimum(by, room, out=by).nan_to_num_(0.0, 0.0, 0.0).copysign_(real)
    bits = real.abs().view(torch.int64 if by.itemsize == 8 else torch.int32)
    if by.itemsize == 8:
        bits = (bits ^ (bits >> 32)).to(torch.int32)
    shares = bits
    for at, row in enumerate(rows):
        key = op * 0x9E3779B9 + (seed + at) * 0x85EBCA6B
        shares = _hash(bits, key) if at % 4 == 0 else shares.bitwise_left_shift_(8)
        moved = row.to(by.dtype).addcmul_(shares.to(by.dtype), by, value=2.0**-31)
        if moved.dtype is not row.dtype:
            row.copy_(moved)


def _hash(bits: torch.Tensor, key: int) -> torch.Tensor:
    """Return hashes of some numbers, by murmur3's finalizer."""
    mixed = bits + key % 2**31
    for factor in (-0x7A143595, -0x3D4D51CB):
        mixed.bitwise_xor_(mixed >> 16).mul_(factor)
    low = (mixed >> 16).bitwise_and_(0xFFFF)  # without the sign, else no hash were negative
    return mixed.bitwise_xor_(low).bitwise_or_(1)  # odd: the last byte has no mean, either


class Chance:
    """Moves the results of one run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moves = 0

    def op(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        reads: Sequence[torch.Tensor],
        result: object,
        made: Sequence[torch.Tensor],
    ) -> None:
        """Move the float tensors in the result of an op."""
        for t in made:
            self._move(t, result_movement(func, args, kwargs, reads, result, t))

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Move the result of a cast."""
        if result.element_size() < source.element_size():
            self._move(result, torch.finfo(result.dtype).eps / 2 * result.double().abs())

    def _move(self, t: torch.Tensor, by: torch.Tensor) -> None:
        self._moves += 1
        # Both frameworks round to 8 bits alike; where their operands differ, these have been moved.
        if t.numel() and t.itemsize > 1:
            move([t], t, by, self._moves, self._seed)


class _Probe(modes.OpMode):
    """Moves the results of ops, and notes nothing."""

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self._chance = chance
        self.looks_away = False

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        result: Any = func(*args, **kwargs)
        if (
            self.looks_away
            or not isinstance(func, torch._ops.OpOverload)
            or facts_of(func).kind != "computes"
        ):
            return result
        if func is torch.ops.aten._to_copy.default and is_cast(args[0], kwargs):
            self._chance.cast(args[0], result)
        elif reads := float_tensors(*args, *kwargs.values()):
            self._chance.op(func, args, kwargs, reads, result, float_tensors(result))
        return result


class Moved(Subscriber):
    """Moves the results of one run after the other by their rounding, and keeps them if asked."""

    def start(self, seed: int | None = None, keep: bool = False) -> None:
        """Forget the last run, and begin another."""
        self.stream.looks_away = False
        self.stream.forget()
        self._chance = None if seed is None else Chance(seed)
        self._keep = keep
        self._values: dict[int, tuple[torch.Tensor, ...]] = {}
        self._reads: dict[int, set[int]] = {}
        self._maker: dict[int, int] = {}  # storage: the call whose result it holds
        self._alive: list[Any] = []

    def before(self, ran: Ran) -> None:
        if self._keep:
            self._note_reads(ran.op_call, (ran.args, ran.kwargs))

    def _note_reads(self, op_call: OpCall, tree: object) -> None:
        reads = self._reads.setdefault(id(op_call), set())
        for t in tree_leaves(tree):
            if isinstance(t, torch.Tensor):
                maker = self._maker.get(modes.storage_key(t))
                if maker not in (None, id(op_call)):
                    reads.add(maker)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        if self._chance is not None:
            self._chance.op(ran.func, ran.args, ran.kwargs, ran.reads, result, made)
        if self._keep and made:
            self._values[id(ran.op_call)] = tuple(t.detach().double().clone() for t in made)
            for t in made:
                self._made(t, id(ran.op_call))

    def cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        if self._chance is not None:
            self._chance.cast(source, result)
        if self._keep:
            self._note_reads(op_call, source)
            maker = self._maker.get(modes.storage_key(source))
            self._made(result, id(op_call) if maker is None else maker)

    def _made(self, t: torch.Tensor, maker: int) -> None:
        self._maker[modes.storage_key(t)] = maker
        self._alive.append(modes.storage_reference(t))

    def steps(self) -> tuple[Step, ...]:
        """Return the calls of the run, in order."""
        at = self._places()
        return tuple(
            Step(
                call_of(op_call),
                tuple(v.numpy() for v in self._values.get(id(op_call), ())),
                frozenset(at[r] for r in self._reads.get(id(op_call), ()) if r in at),
            )
            for op_call in self.stream.calls
        )

    def maker(self, t: torch.Tensor) -> int | None:
        """Return the place of the call that made a tensor; None if none did or nothing is kept."""
        return self._places().get(self._maker.get(modes.storage_key(t), -1))

    def _places(self) -> dict[int, int]:
        return {id(op_call): number for number, op_call in enumerate(self.stream.calls)}


class Program:
    """A function and its arguments, to be run under its tracer: `with program.watch: ...`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: str | None,
        policy: PolicyLike,
        cotangent: Callable[[str, tuple[int, ...]], Any] | None,
    ) -> None:
        self._moved = Moved()
        self.watch: OpStream = OpStream(None, self._moved)
        self.watch.looks_away = True  # between runs
        self._fn = fn
        self._tree = tuple(args), dict(kwargs)
        self._dtype = dtype
        self._policy = policy
        self._cotangent = cotangent
        self._made: dict[str, torch.Tensor] = {}  # by the last run

    def probe(self, seed: int) -> Run:
        """Run it moved, outside of the tracer; see `Chance`."""
        with _Probe(Chance(seed)) as probe:
            return self._ran(probe)

    def probes(self, count: int) -> list[Run]:
        """So many runs in which every op is moved."""
        return [self.probe(seed) for seed in range(1, count + 1)]

    def ran(self) -> tuple[Run, Run]:
        """Run it as it is, and then as it is written, even if it is compiled, with its calls."""
        plain = self._ran(_Probe(Chance(0)))  # that is not entered
        with self.watch:  # later: torch compiles no code that it has met while a mode follows
            return plain, self.run()

    def kept(self) -> Run:
        """Run it while the tracer follows and keeps the values of its calls."""
        return self.run(keep=True)

    def kept_moved(self, count: int) -> list[Run]:
        """Likewise, moved, so many times."""
        return [self.run(seed, keep=True) for seed in range(1, count + 1)]

    def run(self, seed: int | None = None, keep: bool = False) -> Run:
        """Run the function, and differentiate it, while the tracer follows; see `Moved.start`."""
        self._moved.start(seed, keep)
        found = self._ran(self.watch)
        makers = {name: self._moved.maker(t) for name, t in self._made.items()}
        self._made = {}
        return found._replace(
            steps=self._moved.steps(), makers={n: at for n, at in makers.items() if at is not None}
        )

    def _ran(self, follower: "OpStream | _Probe") -> Run:
        follower.looks_away = True
        made = {path: tensor(x) for path, x in rounding.arrays(self._tree).items()}
        inputs: dict[str, torch.Tensor] = {}
        if self._cotangent is not None:
            inputs = {p: t.requires_grad_() for p, t in made.items() if t.is_floating_point()}
        args, kwargs = rounding.rebuilt(self._tree, iter(made.values()))
        follower.looks_away = False
        with ExitStack() as region:
            if self._dtype is not None:
                dtype = dtype_names.DTYPES[self._dtype]
                region.enter_context(autocast("cpu", dtype, policy=self._policy))
            results = rounding.results(self._fn(*args, **kwargs), "torch")
        gradients = self._gradients(results, inputs, follower) if inputs else {}
        follower.looks_away = True
        self._made = {f"results{path}": t for path, t in results.items()}
        self._made |= {f"gradients{path}": t for path, t in gradients.items()}
        return Run(
            {path: _array(t) for path, t in results.items()},
            {path: _array(g) for path, g in gradients.items()},
            {path: str(t.dtype).removeprefix("torch.") for path, t in results.items()},
        )

    def _gradients(
        self,
        results: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        follower: "OpStream | _Probe",
    ) -> dict[str, torch.Tensor]:
        wanted = {path: t for path, t in results.items() if t.requires_grad}
        if not wanted or self._cotangent is None:
            return {path: torch.zeros_like(t) for path, t in inputs.items()}
        follower.looks_away = True
        seeds = [tensor(self._cotangent(p, tuple(t.shape)), t.dtype) for p, t in wanted.items()]
        follower.looks_away = False
        found = torch.autograd.grad(
            [*wanted.values()], [*inputs.values()], seeds, allow_unused=True
        )
        pairs = zip(inputs.items(), found, strict=True)
        return {path: torch.zeros_like(t) if g is None else g for (path, t), g in pairs}


def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of a numpy array, with memory of its own; no op of a run."""
    made = torch.from_numpy(np.array(x, "float32" if x.dtype.name == "bfloat16" else None))
    return made.to(torch.bfloat16 if x.dtype.name == "bfloat16" else dtype or made.dtype)


def _array(t: torch.Tensor) -> Any:
    t = t.detach()
    return (t.double() if t.is_floating_point() else t).numpy()


# How far the result of an op may be from the exact one: see `polymp.diagnostics.rounding`.


@cache
def _op(func: torch._ops.OpOverload) -> tuple[str, str]:
    """Return an op's name in the vocabulary, or torch's own, and its class there."""
    words, name = vocabulary(), func.overloadpacket.__name__
    op = name_of(func.name().removeprefix("aten::"), name)
    if op.startswith("_foreach_"):  # the same op for each tensor of a list
        op = op.removeprefix("_foreach_").removesuffix("_")
    return op, words.ops[op].kind if op in words.ops else ""


def is_exact(func: torch._ops.OpOverload) -> bool:
    """Return whether an op's results are among its operands, or these with another sign."""
    return _op(func)[0] in rounding.EXACT


class _Parts(NamedTuple):
    """How far a result of an op may be from the exact one, for a number and for the terms of it."""

    own: float
    summed: float
    terms: float  # that a number is the sum of
    adds: bool  # True if the terms are known: see `_added`
    mixes: bool  # True of kernels that make each number of the others


def _parts(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    reads: Sequence[torch.Tensor],
    result: object,
    t: torch.Tensor,
) -> _Parts:
    (of, kind), name = _op(func), func.overloadpacket.__name__
    flops, sums = modes.flops(func, args, kwargs, result), vocabulary().traits["sums"]
    terms = 1.0
    if flops:
        terms = flops / (2 * max(t.numel(), 1))
    elif name == "cumsum":
        terms = t.shape[args[1]] if t.ndim else 1
    elif name in op_facts.SUMS or kind in sums:
        terms = max(x.numel() for x in reads) / max(t.numel(), 1)
    own, summed = movement(of, "matmul" if flops else kind, dtype_names.NAMES[t.dtype], terms)
    adds = name in op_facts.SUMS and not dispatcher.writes(func)  # what it writes is not squared
    return _Parts(own, summed, terms, adds, kind in sums)


def result_movement(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    reads: Sequence[torch.Tensor],
    result: object,
    t: torch.Tensor,
    within: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return how far one result of an op may be from the exact one, number by number.

    `within` is the dtype that this is computed in.
    """
    parts = _parts(func, args, kwargs, reads, result, t)
    magnitude = t.to(within).abs()
    if parts.adds:
        added = _added(func, args, kwargs, within).addcmul_(magnitude, magnitude)
        return added.sqrt_().mul_(parts.summed).add_(magnitude, alpha=parts.own)
    if parts.mixes and magnitude.numel():
        # Each number is made of the others: some are differences, smaller than what was subtracted.
        magnitude = magnitude.maximum(magnitude.max() if parts.terms > 1 else magnitude.mean())
    return magnitude.mul_(parts.own + parts.summed)


def movement_norm(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    reads: Sequence[torch.Tensor],
    result: object,
    t: torch.Tensor,
) -> torch.Tensor:
    """Return about the norm of `result_movement`, for terms of a sum that are as they happen."""
    parts = _parts(func, args, kwargs, reads, result, t)
    finite = t.to(wide(t)).nan_to_num(0.0, 0.0, 0.0)
    norm: torch.Tensor = torch.linalg.vector_norm(finite)
    if parts.mixes and parts.terms > 1 and t.numel():
        norm = finite.abs().max() * t.numel() ** 0.5
    # The square of a sum of independent terms is, in the mean, the sum of their squares.
    return (parts.own + parts.summed * (2**0.5 if parts.adds else 1)) * norm


def wide(t: torch.Tensor) -> torch.dtype:
    """Return a dtype in which a tensor's rounding can be told: its own, or float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def _added(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    within: torch.dtype,
) -> torch.Tensor:
    """Return the sum of the squares of the terms of a sum."""
    floats = {id(t) for t in float_tensors(args) if t.layout is torch.strided}
    squares: Any = [x.to(within).square() if id(x) in floats else x for x in args]
    kwargs = {k: within if v in dtype_names.NAMES else v for k, v in kwargs.items()}
    found: torch.Tensor = func(*squares, **kwargs).to(within).abs()
    if func.overloadpacket is torch.ops.aten.mean:
        found = found * (found.numel() / max(squares[0].numel(), 1))  # of terms that are divided
    return found
