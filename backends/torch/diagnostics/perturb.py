"""A run of a function, and runs of it in which the result of every op is moved by its rounding.

`polymp.diagnostics.rounding` explains by how much, and why. Results are moved below autograd, so
that the backward pass is that of the moved run, and is moved itself.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.measure import real
from polymp.backends.torch.diagnostics.op_call import (
    KernelCall,
    Own,
    call_of,
    facts_of,
    float_tensors,
    is_cast,
    name_of,
    numbers_in,
    running,
)
from polymp.backends.torch.diagnostics.op_stream import OpStream
from polymp.backends.torch.snapshot import Snapshot, own_modules, training_objects
from polymp.diagnostics import rounding
from polymp.diagnostics.rounding import Run, movement
from polymp.diagnostics.run_record import RunRecord
from polymp.rules.vocabulary import vocabulary


def move(
    rows: Sequence[torch.Tensor], t: torch.Tensor, by: torch.Tensor, op: int, seed: int = 0
) -> None:
    """Move a result in some runs, the rows, by shares of its rounding `by`, which is changed, too.

    A share is a byte or more of a hash of the number, the op and the seed. So equal numbers in one
    result go the same way, as they round the same way, and so do neighbours, where a function is
    off by the same; opposite numbers go opposite ways.
    """
    real = t.to(by.dtype)
    # An Inf, such as that of a mask, is not moved: Inf - Inf would be NaN. No number becomes one.
    room = real.abs().neg_().add_(torch.finfo(t.dtype).max)
    torch.minimum(by, room, out=by).nan_to_num_(0.0, 0.0, 0.0).copysign_(real)
    if t.dtype is torch.float64:
        bits = real.abs().view(torch.int64) & (-1 << 37)
        bits = (bits ^ (bits >> 32)).to(torch.int32)
    else:
        bits = t.abs().to(torch.float32).view(torch.int32) & (-1 << 8)
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


class Moved(modes.OpMode):
    """A run in which the results of ops are moved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._moves = 0

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        result: Any = func(*args, **kwargs)
        if (
            running()
            or not isinstance(func, torch._ops.OpOverload)
            or facts_of(func).kind != "computes"
        ):
            return result
        if func is torch.ops.aten._to_copy.default and is_cast(args[0], kwargs):
            if result.element_size() < args[0].element_size():
                self._move(result, stored_movement(result, torch.float64))
        elif reads := numbers_in(*args, *kwargs.values()):
            for t in numbers_in(result):
                by = result_movement(KernelCall(func, args, kwargs, reads), result, t)
                if t.is_complex():
                    t, by = torch.view_as_real(t), torch.stack([by, by], -1)
                self._move(t, by)
        return result

    def _move(self, t: torch.Tensor, by: torch.Tensor) -> None:
        self._moves += 1
        # Both frameworks round to 8 bits alike; where their operands differ, these have been moved.
        if t.numel() and t.itemsize > 1:
            move([t], t, by, self._moves, self._seed)


class Program:
    """A function and its arguments."""

    backend = "torch"

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: str | None,
        policy: PolicyLike | None,
        cotangent: Callable[[str, tuple[int, ...]], Any] | None,
    ) -> None:
        self._fn = fn
        self._tree = tuple(args), dict(kwargs)
        models = training_objects(fn, ()).models
        self._parts = [part for m in models for part in m.modules() if not _has_lazy(part)]
        self._dtype = dtype
        self._policy = policy
        self._cotangent = cotangent

    def ran(self) -> tuple[Run, Run]:
        """Run it as it is, and then as it is written, even if it is compiled, with its calls."""
        plain = self.run()
        stream = OpStream(None)  # later: torch compiles no code that it has met while one follows
        written = self.run(stream)
        return plain, written._replace(calls=tuple(map(call_of, stream.calls)))

    def probes(self, count: int) -> list[Run]:
        """So many runs in which every op is moved."""
        return [self.run(Moved(seed)) for seed in range(1, count + 1)]

    def record(self, record: Callable[..., Any], probes: int) -> RunRecord:
        """A record of it, in memory, by `record` of this backend, whose file imports this one."""
        recorder = record(None, probes=probes)
        self.run(recorder)
        made: RunRecord = recorder.record
        return made

    def run(self, follower: AbstractContextManager[object] | None = None) -> Run:
        """Run the function, and differentiate it, in a context that follows its ops."""
        made = {path: tensor(x) for path, x in rounding.arrays(self._tree).items()}
        inputs: dict[str, torch.Tensor] = {}
        if self._cotangent is not None:
            inputs = {p: t.requires_grad_() for p, t in made.items() if t.is_floating_point()}
        args, kwargs = rounding.rebuilt(self._tree, iter(made.values()))
        region: AbstractContextManager[object] = nullcontext()
        if self._dtype is not None:
            region = autocast("cpu", dtype_names.DTYPES[self._dtype], policy=self._policy)
        # Random numbers and buffers, such as running means, are the same in all runs: others would
        # pass for how far rounding moves it.
        buffers = (t for part in self._parts for t in part.buffers(recurse=False))
        kept = [(t, t._version, t.detach().clone()) for t in buffers if not t.is_inference()]
        before = Snapshot(modules=own_modules(self._parts))
        try:
            with torch.random.fork_rng(devices=()), follower or nullcontext():
                torch.default_generator.manual_seed(0)
                with region:
                    results = rounding.results(self._fn(*args, **kwargs), "torch")
                gradients = self._gradients(results, inputs) if inputs else {}
        finally:
            before.put_back()
            with torch.no_grad():
                for t, version, values in kept:
                    if t._version != version:
                        t.copy_(values)
        return Run(
            {path: _array(t) for path, t in results.items()},
            {path: _array(g) for path, g in gradients.items()},
            {path: str(t.dtype).removeprefix("torch.") for path, t in results.items()},
        )

    def _gradients(
        self, results: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        wanted = {path: t for path, t in results.items() if t.requires_grad}
        if not wanted or self._cotangent is None:
            return {path: torch.zeros_like(t) for path, t in inputs.items()}
        with Own():
            seeds = [tensor(self._cotangent(p, tuple(t.shape)), t.dtype) for p, t in wanted.items()]
        found = torch.autograd.grad(
            [*wanted.values()], [*inputs.values()], seeds, allow_unused=True
        )
        pairs = zip(inputs.items(), found, strict=True)
        return {path: torch.zeros_like(t) if g is None else g for (path, t), g in pairs}


def _has_lazy(module: torch.nn.Module) -> bool:
    """Return whether a module has tensors that its first call makes."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(is_lazy, own))


def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of a numpy array, with memory of its own; no op of a run."""
    made = torch.from_numpy(np.array(x, "float32" if x.dtype.name == "bfloat16" else None))
    return made.to(torch.bfloat16 if x.dtype.name == "bfloat16" else dtype or made.dtype)


def _array(t: torch.Tensor) -> Any:
    t = real(t.detach())
    return (t.double() if t.is_floating_point() else t).numpy()


# How far the result of an op may be from the exact one: see `polymp.diagnostics.rounding`.


@cache
def _op(func: torch._ops.OpOverload) -> tuple[str, str]:
    """Return an op's name in the vocabulary, or torch's own, and its class there."""
    name = func.overloadpacket.__name__
    op = name_of(func.name().removeprefix("aten::"), name)
    if op.startswith("_foreach_"):  # the same op for each tensor of a list
        op = op.removeprefix("_foreach_").removesuffix("_")
    return op, vocabulary().op(op).kind


def is_exact(func: torch._ops.OpOverload) -> bool:
    """Return whether an op's results are among its operands, or these with another sign."""
    return _op(func)[0] in rounding.EXACT


def rounds_operands(ran: KernelCall, result: object) -> str:
    """Return the format to which a product may round its float32 operands; "" if it keeps them.

    GPUs do so where torch's settings allow it, which they do by default for convolutions.
    """
    found = float_tensors(result)
    if not found or found[0].device.type != "cuda" or found[0].dtype is not torch.float32:
        return ""
    if not modes.flops(ran.func, ran.args, ran.kwargs, result):
        return ""
    of = torch.backends.cuda.matmul
    if "convolution" in ran.func.overloadpacket.__name__:
        of = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    has_it = torch.cuda.get_device_capability(found[0].device) >= (8, 0)
    return "tf32" if has_it and of.fp32_precision == "tf32" else ""


class _Parts(NamedTuple):
    """How far a result of an op may be from the exact one, for a number and for the terms of it."""

    own: float
    summed: float
    terms: float  # that a number is the sum of
    adds: bool  # True if the terms are known: see `_added`
    mixes: bool  # True of kernels that make each number of the others


def _parts(ran: KernelCall, result: object, t: torch.Tensor) -> _Parts:
    (of, kind), name = _op(ran.func), ran.func.overloadpacket.__name__
    flops = modes.flops(ran.func, ran.args, ran.kwargs, result)
    sums = vocabulary().traits["sums"]
    terms = 1.0
    if flops:
        terms = flops / (2 * max(t.numel(), 1))
    elif name == "cumsum":
        terms = t.shape[ran.args[1]] if t.ndim else 1
    elif name in op_facts.SUMS or kind in sums:
        terms = max(x.numel() for x in ran.reads) / max(t.numel(), 1)
    dtype = t.dtype.to_real() if t.is_complex() else t.dtype
    own, summed = movement(of, "matmul" if flops else kind, dtype_names.NAMES[dtype], terms)
    writes = dispatcher.writes(ran.func)  # what it writes is not squared
    adds = name in op_facts.SUMS and not writes
    return _Parts(own, summed, terms, adds, kind in sums)


def result_movement(
    ran: KernelCall, result: object, t: torch.Tensor, within: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return how far one result of an op may be from the exact one, for each (complex) number.

    `within` is the dtype that this is computed in.
    """
    parts = _parts(ran, result, t)
    magnitude = _magnitude(t, within)
    if parts.adds:
        added = _added(ran, within).addcmul_(magnitude, magnitude)
        return added.sqrt_().mul_(parts.summed).add_(magnitude, alpha=parts.own)
    if parts.mixes and magnitude.numel():
        # Each number is made of the others: some are differences, smaller than what was subtracted.
        magnitude = magnitude.maximum(magnitude.max() if parts.terms > 1 else magnitude.mean())
    by = magnitude.mul_(parts.own + parts.summed)
    name = ran.func.overloadpacket.__name__
    if name in _WEIGHTS and isinstance(result, tuple) and t.shape == result[0].shape:
        by += _cancelled(name, ran.args, result, by)
    return by


# Kernels that return means and reciprocal deviations, and the places of their weights.
_WEIGHTS = {"native_layer_norm": 2, "native_group_norm": 1, "native_batch_norm": 1,
            "_native_batch_norm_legit": 1, "cudnn_batch_norm": 1}  # fmt: skip


def _cancelled(name: str, args: Sequence[Any], result: tuple[Any, ...], like: torch.Tensor) -> Any:
    """Return how far numbers of a norm are off because the mean that they subtract is rounded."""
    mean, deviation, weight = result[1], result[2], args[_WEIGHTS[name]]
    lost = _magnitude(mean, like.dtype) * _magnitude(deviation, like.dtype)
    inside = "float64" if mean.dtype is torch.float64 else "float32"  # they may be stored low
    lost *= rounding.FUNCTION * rounding.unit_roundoff(inside)
    if weight is not None:
        lost *= weight.abs().max()
    if name == "native_layer_norm" or not mean.numel():  # of a batch in evaluation it has none
        return lost if mean.numel() else 0.0
    if name == "native_group_norm":
        lost = lost.repeat_interleave(like.shape[1] // lost.shape[1], 1)
    return lost.reshape(-1, like.shape[1], *[1] * (like.dim() - 2))


def stored_movement(t: torch.Tensor, within: torch.dtype) -> torch.Tensor:
    """Return how far numbers may be from what was rounded to their dtype."""
    return t.detach().to(within).abs().mul_(torch.finfo(t.dtype).eps / 2)


def movement_shares(ran: KernelCall, result: object, t: torch.Tensor) -> tuple[float, float]:
    """Return about the norm of `result_movement`, for terms of a sum that are as they happen.

    It is a share of the result's norm, and one of what that were if all were its largest magnitude.
    What becomes of operands that are rounded is in it.
    """
    parts = _parts(ran, result, t)
    operands = rounding.of_operands(rounds_operands(ran, result))
    # The square of a sum of independent terms is, in the mean, the sum of their squares.
    own = parts.own + parts.summed * (2**0.5 if parts.adds else 1)
    return (operands, own) if parts.mixes and parts.terms > 1 else (operands + own, 0.0)


def _magnitude(t: torch.Tensor, within: torch.dtype) -> torch.Tensor:
    """Return the sizes of real or complex numbers, in a dtype."""
    return t.abs().to(within) if t.is_complex() else t.to(within).abs()


def wide(t: torch.Tensor) -> torch.dtype:
    """Return a dtype in which a tensor's rounding can be told: its own, or float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def _added(ran: KernelCall, within: torch.dtype) -> torch.Tensor:
    """Return the sum of the squares of the terms of a sum."""
    floats = {id(t) for t in numbers_in(ran.args) if t.layout is torch.strided}
    squares: Any = [_magnitude(x, within).square() if id(x) in floats else x for x in ran.args]
    kwargs = {k: within if isinstance(v, torch.dtype) else v for k, v in ran.kwargs.items()}
    found: torch.Tensor = ran.func(*squares, **kwargs).to(within).abs()
    if ran.func.overloadpacket is torch.ops.aten.mean:
        found = found * (found.numel() / max(squares[0].numel(), 1))  # of terms that are divided
    return found
