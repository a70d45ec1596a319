"""Runs in which the result of every op is moved by its rounding, again or beside the run itself.

`Program` runs a function again and again. `Probes` are runs in lockstep with one: how far are its
tensors moved by the roundings so far?

    each op of the run    runs once more for each probe, on what the probe has in place of its
                          arguments; then its results are moved by a share of their rounding

A tensor that no rounding has moved is the same in all probes, and is kept once. What the probes
have lies in memory as the tensor does, so that it has the same views, and is let go with it.
Nothing of the run is written: not its tensors, and not the state of its random generators.
Integers and bools that are chosen from moved floats, as by argmax or x > 0, are the probes' own.

`polymp.diagnostics.rounding` explains by how much results are moved, and why. They are moved below
autograd, so that the backward pass is that of the moved run, and is moved itself.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.compat import dispatcher, distributed, modes
from polymp.backends.torch.diagnostics.op_call import (
    Own,
    Ran,
    call_of,
    float_tensors,
    name_of,
    numbers_in,
    tensors,
)
from polymp.backends.torch.diagnostics.op_stream import OpStream, Subscriber
from polymp.backends.torch.diagnostics.values import is_part, real
from polymp.backends.torch.snapshot import TrainingState, training_objects
from polymp.diagnostics import rounding, run_record
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.rounding import Run, movement
from polymp.diagnostics.run_record import FAILS, MASKED, RunRecord
from polymp.rules.vocabulary import vocabulary


class Moved(Subscriber):
    """Moves the results of a run."""

    measures = True

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moves = 0

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        for t in made:
            by = result_movement(ran, result, t)
            if by is None:
                continue
            if t.is_complex():
                t, by = torch.view_as_real(t), torch.stack([by, by], -1)
            self._moves += 1
            # Frameworks round to 8 bits alike; where their operands differ, these have been moved.
            if t.numel() and t.itemsize > 1:
                move([t], t, by, self._moves, self._seed)


def moved(seed: int) -> OpStream:
    """Return a context in which the results of ops are moved."""
    return OpStream(None, Moved(seed), counts=False)


class Program:
    """A function and its arguments."""

    _writes = False  # True if it writes into its arguments, which can be no leaves then

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
        self._dtype = dtype
        self._policy = policy
        self._cotangent = cotangent

    def ran(self) -> tuple[Run, Run]:
        """Run it as it is, and then as it is written, even if it is compiled, with its calls."""
        try:
            plain = self.run()
        except RuntimeError:
            self._writes = True
            plain = self.run()
        stream = OpStream(None)  # later: torch compiles no code that it has met while one follows
        written = self.run(stream)
        return plain, written._replace(calls=tuple(map(call_of, stream.calls)))

    def probes(self, count: int) -> list[Run]:
        """So many runs in which every op is moved."""
        return [self.run(moved(seed)) for seed in range(1, count + 1)]

    def record(self, record: Callable[..., Any], probes: int) -> RunRecord:
        """A record of it, in memory, by `record` of this backend, whose file imports this one."""
        self.ran()  # which tells whether it writes
        recorder = record(None, probes=probes)
        self.run(recorder)
        made: RunRecord = recorder.record
        return made

    def run(self, follower: AbstractContextManager[object] | None = None) -> Run:
        """Run the function, and differentiate it, in a context that follows its ops."""
        if self._cotangent is not None and not torch.is_grad_enabled():  # by who asks for gradients
            with torch.inference_mode(False), torch.enable_grad():
                return self.run(follower)
        made = {path: tensor(x) for path, x in rounding.arrays(self._tree).items()}
        inputs: dict[str, torch.Tensor] = {}
        if self._cotangent is not None:
            inputs = {p: t.requires_grad_() for p, t in made.items() if t.is_floating_point()}
        made |= {p: t.clone() for p, t in inputs.items() if self._writes}
        args, kwargs = rounding.rebuilt(self._tree, iter(made.values()))
        region: AbstractContextManager[object] = nullcontext()
        if self._dtype is not None:
            region = autocast("cpu", dtype_names.DTYPES[self._dtype], policy=self._policy)
        # Random numbers, buffers and weights are the same in all runs: others would pass for how
        # far rounding moves it.
        with put_back(self._fn), torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(0)
            with follower or nullcontext():
                with region:
                    found = rounding.results(self._fn(*args, **kwargs), "torch")
                own = torch.Tensor  # the others are numbers, and numpy's arrays
                results = {p: x if isinstance(x, own) else tensor(x) for p, x in found.items()}
                gradients = self._gradients(results, inputs) if inputs else {}
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
        try:
            found = torch.autograd.grad(
                [*wanted.values()], [*inputs.values()], seeds, allow_unused=True
            )
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            why = "a function differentiates its own result, as a training step does"
            raise RuntimeError(f"{why}: write grads=False, or return loss.detach().") from error
        pairs = zip(inputs.items(), found, strict=True)
        return {path: torch.zeros_like(t) if g is None else g for (path, t), g in pairs}


@contextmanager
def put_back(fn: Callable[..., Any], *given: object) -> Iterator[None]:
    """Put back at the end what a call has changed: tensors that it is given, and a training."""
    state = TrainingState(training_objects(fn, given), filter(has_values, tensors(*given)))
    for it in state.left_out:
        warnings.warn(f"a call will not put back {it}.", stacklevel=code_origin.outside())
    try:
        yield
    finally:
        state.put_back()


def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of a numpy array, with memory of its own; no op of a run."""
    made = torch.from_numpy(np.array(x, "float32" if x.dtype.name == "bfloat16" else None))
    return made.to(torch.bfloat16 if x.dtype.name == "bfloat16" else dtype or made.dtype)


def _array(t: torch.Tensor) -> Any:
    """Make an array of a tensor, with memory of its own: a buffer is put back later."""
    t = real(t.detach())
    return t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True).numpy()


# Probes in lockstep with a run.


def has_values(t: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are in memory of its own, where its strides say."""
    return (
        t.layout is torch.strided
        and not t.is_nested
        and not t.is_meta
        and not t.is_quantized
        and t.dtype is not torch.float4_e2m1fn_x2  # two numbers in one, which torch does not cast
        and modes.is_plain(t)
        and modes.storage_key(t) != 0
    )


def _covers(t: torch.Tensor) -> bool:
    """Return whether a tensor has the whole of its memory, in order."""
    return modes.is_dense(t) and t.is_contiguous() and not is_part(t)


class _Memory(NamedTuple):
    """The memory of a tensor, as probes have it: in the order in which the tensor's own lies."""

    of: Any  # a reference to it
    dtype: torch.dtype  # of the tensor
    numbers: torch.Tensor | None  # [probes, values in it]; None if they are not known


_SWEEP = 64  # tensors after which the numbers of freed ones are let go


class Probes:
    """The numbers that some probes, if any, have in place of the tensors of a run."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Ops whose results are as if no rounding had moved them or, of `FAILS`, not known.
        self.left_out = Counter[str]()
        self._memory: dict[int, _Memory] = {}  # by key
        self._moves = 0
        self._random: torch.Tensor | None = None  # state of its generator before it
        self._blind = False  # True if it reads numbers that are not known
        self._lost: dict[int, tuple[Any, ...]] = {}  # of lists that have such: by place, all there
        self._apart = False  # True if what it makes is as if no rounding had moved it

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's numbers in all probes, [probes, *t.shape]; None if they are its own."""
        known = self._memory.get(modes.storage_key(t)) if self._memory else None
        if known is None or known.numbers is None or known.dtype is not t.dtype:
            return None
        size = known.numbers.shape[1]
        if t.untyped_storage().nbytes() // t.element_size() != size:  # it was resized
            return None
        shape, strides = (self.count, *t.shape), (size, *t.stride())
        return known.numbers.as_strided(shape, strides, t.storage_offset())

    def unknown(self, *given: object) -> bool:
        """Return whether no one knows how far some tensor is moved: an op failed in probes."""
        if not self.left_out.get(FAILS):
            return False
        keys = map(modes.storage_key, tensors(*given))
        return any(key in self._memory and self._memory[key].numbers is None for key in keys)

    def _begun(self, t: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor, its own if it has no others yet; they may be written."""
        if (found := self.of(t)) is not None:
            return found
        size = t.untyped_storage().nbytes() // t.element_size()
        flat = t.detach().as_strided((size,), (1,), 0)
        self._keep(t, flat.expand(self.count, size).clone())
        return self._begun(t)

    def _put(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        """Give a tensor other numbers, whose memory may be written from now on."""
        if _covers(t):
            self._keep(t, numbers.reshape(self.count, t.numel()).contiguous())
        else:
            self._begun(t).copy_(numbers)

    def _keep(self, t: torch.Tensor, numbers: torch.Tensor | None) -> None:
        if len(self._memory) % _SWEEP == 0:
            self._memory = {k: it for k, it in self._memory.items() if not it.of.expired()}
        memory = _Memory(modes.storage_reference(t), t.dtype, numbers)
        self._memory[modes.storage_key(t)] = memory

    def forget(self, found: Iterable[torch.Tensor]) -> None:
        """Have tensors be the run's own in all probes."""
        for t in found:
            self._memory.pop(modes.storage_key(t), None)

    def lose(self, found: Iterable[torch.Tensor], failed: int = 0) -> None:
        """Note tensors whose numbers in probes are not known, for `failed` ops are not in them."""
        self.left_out[FAILS] += failed
        for t in found:
            if modes.storage_key(t):
                self._keep(t, None)

    def _fits(self, t: torch.Tensor) -> bool:
        """Return whether probes can have a tensor; it is counted if not."""
        if not has_values(t):
            self.left_out["sparse or wrapped tensors are not in probes"] += 1
        elif t.itemsize == 1 and t.is_floating_point():
            self.left_out["8-bit tensors are not in probes"] += 1
        else:
            return t.numel() > 0
        return False

    def unmoved(self, t: torch.Tensor) -> None:
        """Note a tensor whose numbers are made of no others."""
        if (own := self.of(t)) is not None:
            own.copy_(t.detach())
        elif _covers(t):
            self.forget([t])

    # What runs

    def before(self, ran: Ran) -> None:
        """Keep what an op is about to change."""
        if not self.count:
            return
        self._random = None
        into = [t for t in ran.into if t.numel()]
        self._look_for_unknown(ran)
        self._apart = self._talks(ran) or not all(map(self._fits, into))
        for t in () if self._blind or self._apart else into:
            if self._moved(ran.args, ran.kwargs) or not (is_exact(ran) or _is_chosen(t)):
                self._begun(t)
        if torch.Tag.nondeterministic_seeded in ran.func.tags:
            self._random = _generator(ran).get_state()

    def _look_for_unknown(self, ran: Ran) -> None:
        """Note whether an op reads what is not known; in lists this is so of some places alone."""
        self._blind, self._lost = False, {}
        if not self.left_out[FAILS]:
            return
        unread = ran.unread
        over = {id(t) for t in ran.into if id(t) in unread and _covers(t)}
        given = [*ran.args, *ran.kwargs.values()]
        lists = [x for x in given if ran.facts.lists and isinstance(x, (list, tuple))]
        alone = tensors([x for x in given if not any(x is y for y in lists)])
        self._blind = self.unknown([t for t in alone if id(t) not in over])
        places = enumerate(zip_longest(*lists))
        self._lost = {at: place for at, place in places if self.unknown(place)}

    def _talks(self, ran: Ran) -> bool:
        """Return whether an op sends something to other ranks, or has it from them; count it."""
        talks = ran.op_call.place.sends or ran.facts.receives or distributed.talks(ran.func)
        self.left_out["what comes from other ranks is not in probes"] += bool(talks)
        return bool(talks)

    def _moved(self, *given: object) -> bool:
        """Return whether some argument of an op is not the run's own in all probes."""
        return any(self.of(t) is not None for t in tensors(*given))

    def about_to_write(self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> None:
        """Keep what an op that reads no floats is about to change."""
        moved = bool(self._memory) and dispatcher.writes(func) and self._moved(args, kwargs)
        if moved and not self.unknown(args, kwargs):
            for t in filter(self._fits, dispatcher.written(func, args, kwargs)):
                self._begun(t)

    def passed(
        self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs, result: object
    ) -> None:
        """Run an op that has read no floats in all probes, if what it has read was chosen there."""
        results = tensors(result)
        if self.unknown(args, kwargs):
            self.lose(results)
            return
        if not (self._memory and self._moved(args, kwargs)):
            for t in results:
                self.unmoved(t)
            return
        given = {*map(modes.storage_key, tensors(args, kwargs))}
        new = [at for at, t in enumerate(results) if modes.storage_key(t) not in given]
        try:
            each = zip(self._each(args), self._each(kwargs), strict=True)
            runs = [tensors(func(*a, **k)) for a, k in each]
            for at in new:
                if self._fits(results[at]):
                    self._put(results[at], torch.stack([run[at] for run in runs]))
        except Exception:  # as of a result whose shape is another
            self.lose(results, 1)

    def after(self, ran: Ran, result: object) -> torch.Tensor | None:
        """Run an op in all probes, and move its results."""
        # Returns the norm of how far the first may be from the exact one; None if it is exact.
        if not self.count:
            return None
        given, whole = (ran.args, ran.kwargs), tensors(result)
        results = [*whole, *(t for t in ran.into if not any(t is m for m in whole))]
        try:
            if self._blind:
                self.lose(results)
            elif self._apart and (self._moved(*given) or self.unknown(*given)):
                self.lose(results, 1)
            elif self._apart:
                self.forget(results)
            else:
                norm = self._follow(ran, result, results)
                beside = {*map(id, tensors(*self._lost.values()))}
                self.lose(t for t in ran.into if id(t) in beside)
                self.lose(t for at, t in enumerate(whole) if at in self._lost)
                return norm
        except Exception:  # of an op that is like no other: the program goes on
            self.lose(results, 1)
        return None

    def _follow(self, ran: Ran, result: object, results: list[torch.Tensor]) -> torch.Tensor | None:
        narrow = rounds_operands(ran, result)
        steps = ran.func.overloadpacket.__name__ in rounding.STEPS
        chosen = [steps or _is_chosen(t) for t in results]
        times = rounding.FARTHER if any(chosen) and not ran.into else 1
        moves = narrow or self._moved(ran.args, ran.kwargs)
        turned = self._run(ran, narrow, times) if moves else []
        runs = self._run(ran, narrow) if turned and times > 1 and not all(chosen) else turned
        given = {*map(modes.storage_key, tensors(ran.args, ran.kwargs))}
        changed = {*map(modes.storage_key, ran.into)}
        norm, first = None, next((t for t in results if t.is_floating_point()), None)
        for at, t in enumerate(results):
            key = modes.storage_key(t)
            if (key in given and key not in changed) or not self._fits(t):
                continue  # an alias
            by = None
            # Of an optimizer, the last rounding counts, that of the new parameter: see `updated`.
            if t.is_floating_point() and not ran.op_call.place.updating:
                by = result_movement(ran, result, t.detach(), wide(t))
            if key in changed:
                if by is not None:
                    self._move(t, self._begun(t), by)
            elif runs or by is not None:
                each = [run[at] for run in (turned if chosen[at] else runs)]
                numbers = torch.stack(each) if runs else self._same(t)
                if _is_chosen(t) and t.dtype is not torch.bool:  # an index stays one
                    numbers.clamp_(t.min(), t.max())
                self._put(t, self._move(t, numbers, by))
            if t is first and by is not None:
                seen, forward = t.detach(), ran.op_call.direction != BACKWARD
                kept = masks_as_inf(seen) if forward else seen
                if kept is not seen:  # a record has neither these nor Inf
                    by.masked_fill_(kept.isinf(), 0.0)
                by.nan_to_num_(0.0, 0.0, 0.0)
                # Relative to the largest, squares stay in the range of a dtype.
                top = by.abs().amax().clamp_min_(torch.finfo(by.dtype).tiny)
                norm = top * torch.linalg.vector_norm(by.div_(top))
                if narrow:
                    moved = torch.linalg.vector_norm(t.detach())
                    norm = norm + rounding.of_operands(narrow) * moved
        return norm

    def _run(self, ran: Ran, narrow: str, times: int = 1) -> list[list[torch.Tensor]]:
        """Run an op in each probe; return the tensors in its results."""
        # Float32 operands are moved by their rounding to the format `narrow`, if it has one; all of
        # them are so many times as far from the run's own.
        runs, before = [], self._random
        generator = None if before is None else _generator(ran)
        state = None if generator is None else generator.get_state()
        try:
            given = self._each(ran.args, narrow, times), self._each(ran.kwargs, narrow, times)
            for args, kwargs in zip(*given, strict=True):
                if generator is not None and before is not None:
                    generator.set_state(before)
                runs.append(tensors(ran.func(*args, **kwargs)))
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)
        return runs

    def _each(self, tree: Any, narrow: str = "", times: int = 1) -> Sequence[Any]:
        """Return what each probe has in place of an op's arguments."""
        if isinstance(tree, torch.Tensor):
            own = self.of(tree)
            if narrow and tree.dtype is torch.float32:
                by = tree.detach().abs().mul_(rounding.unit_roundoff(narrow))
                by.masked_fill_(rounding.whole(tree.detach(), by, ()), 0.0)
                own = self._same(tree) if own is None else own.clone()
                move(own.unbind(), tree.detach(), by, 0)  # in every op that reads it alike
            if own is not None and times > 1 and tree.is_floating_point():
                farther = tree + times * (own.to(wide(tree)) - tree)
                if self._random is not None:  # a probability stays one
                    farther.clamp_(tree.min(), tree.max())
                own = torch.where(own.isfinite(), farther.to(own.dtype), own)
            return [tree] * self.count if own is None else own.unbind()
        if isinstance(tree, (list, tuple)) and tree:
            each = zip(*(self._each(x, narrow, times) for x in tree), strict=True)
            return [type(tree)(items) for items in each]
        if isinstance(tree, dict) and tree:
            values = self._each([*tree.values()], narrow, times)
            return [dict(zip(tree, found, strict=True)) for found in values]
        return [tree] * self.count

    def updated(self, t: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a parameter after its update, moved by the rounding of that."""
        own = self.of(t)
        numbers = self._same(t) if own is None else own.clone()
        return self._move(t, numbers, stored_movement(t, wide(t)))

    def _same(self, t: torch.Tensor) -> torch.Tensor:
        """Return a tensor's own numbers, once for each probe."""
        whole = t.detach().expand(self.count, *t.shape)
        return whole.clone(memory_format=torch.contiguous_format)

    def _move(
        self, t: torch.Tensor, numbers: torch.Tensor, by: torch.Tensor | None
    ) -> torch.Tensor:
        """Move the numbers of a tensor in all probes by shares of `by`, which is changed, too."""
        if by is not None:
            self._moves += 1
            move(numbers.unbind(), t.detach(), by, self._moves)
        return numbers


def _is_chosen(t: torch.Tensor) -> bool:
    """Return whether a tensor has integers or bools."""
    return not (t.is_floating_point() or t.is_complex())


def _generator(ran: Ran) -> torch.Generator:
    """Return the generator that an op draws from."""
    for given in (*ran.args, *ran.kwargs.values()):
        if isinstance(given, torch.Generator):
            return given
    device = ran.reads[0].device
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = torch.get_device_module(device).default_generators
    return generators[device.index or 0]  # type: ignore[no-any-return]


def move(
    rows: Sequence[torch.Tensor], t: torch.Tensor, by: torch.Tensor, op: int, seed: int = 0
) -> None:
    """Move a result in some runs, the rows, by shares of its rounding `by`, which is changed."""
    # A share is a byte or more of a hash of the number, the op and the seed. So equal numbers in
    # one result go the same way, as they round the same way, and so do neighbours, where a function
    # is off by the same; opposite numbers go opposite ways.
    values = t.to(by.dtype)
    # An Inf, such as that of a mask, is not moved: Inf - Inf would be NaN. No number becomes one.
    room = values.abs().neg_().add_(torch.finfo(t.dtype).max)
    torch.minimum(by, room, out=by).nan_to_num_(0.0, 0.0, 0.0).copysign_(values)
    if t.dtype is torch.float64:
        bits = values.abs().view(torch.int64) & (-1 << 37)
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


# How far the result of an op may be from the exact one: see `polymp.diagnostics.rounding`.


@cache
def _op(func: torch._ops.OpOverload) -> tuple[str, str]:
    """Return an op's name in the vocabulary, or torch's own, and its class there."""
    name = func.overloadpacket.__name__
    op = name_of(func.name().removeprefix("aten::"), name)
    if op.startswith("_foreach_"):  # the same op for each tensor of a list
        op = op.removeprefix("_foreach_").removesuffix("_")
    return op, vocabulary().op(op).kind


def is_exact(ran: Ran) -> bool:
    """Return whether an op's results are among its operands, or these with another sign."""
    adds = op_facts.accumulates(ran.func.overloadpacket.__name__, ran.args)
    return not adds or rounding.exact(_op(ran.func)[0])


def rounds_operands(ran: Ran, result: object) -> str:
    """Return the format to which a product may round its float32 operands; "" if it keeps them."""
    # GPUs do so where torch's settings allow it, which they do by default for convolutions.
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


def _parts(ran: Ran, result: object, t: torch.Tensor) -> _Parts:
    (of, kind), name = _op(ran.func), ran.func.overloadpacket.__name__
    if is_exact(ran):
        return _Parts(0.0, 0.0, 1.0, False, False)
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
    adds = name in op_facts.SUMS and not dispatcher.writes(ran.func)  # that is not squared
    return _Parts(own, summed, terms, adds, kind in sums)


def result_movement(
    ran: Ran, result: object, t: torch.Tensor, within: torch.dtype = torch.float64
) -> torch.Tensor | None:
    """Return how far each (complex) number of a result may be off; None if it is exact."""
    # `within` is the dtype that this is computed in.
    by = _movement(ran, result, t, within)
    arithmetic = ran.casts or rounding.is_arithmetic(_op(ran.func)[0])
    if by is None or t.is_complex() or t.itemsize == 1 or not arithmetic:
        return by
    return by.masked_fill_(rounding.whole(t, by, filter(has_values, ran.reads)), 0.0)


def _movement(
    ran: Ran, result: object, t: torch.Tensor, within: torch.dtype
) -> torch.Tensor | None:
    """Return the same as if whole numbers were rounded like others."""
    if ran.casts:
        narrows = t.element_size() < ran.reads[0].element_size()
        return stored_movement(t, within) if narrows else None
    if is_exact(ran):
        return None
    parts = _parts(ran, result, t)
    magnitude = _magnitude(t, within)
    if parts.adds:
        added = _added(ran, within).addcmul_(magnitude, magnitude)
        return added.sqrt_().mul_(parts.summed).add_(magnitude, alpha=parts.own)
    if parts.mixes and magnitude.numel():
        # Each number is made of the others: some are differences, smaller than what was subtracted.
        # Those of a mask are made of themselves.
        masks = _op(ran.func)[1] == "softmax"
        seen = magnitude.masked_fill(magnitude > rounding.MASK, 0.0) if masks else magnitude
        magnitude = magnitude.maximum(seen.max() if parts.terms > 1 else seen.mean())
    by = magnitude.mul_(parts.own + parts.summed)
    name = ran.func.overloadpacket.__name__
    if name in _WEIGHTS and isinstance(result, tuple) and t.shape == result[0].shape:
        by += _cancelled(name, ran.args, result, by)
    return by


# Kernels that return means and reciprocal deviations, and the places of their weights.
_WEIGHTS = {"native_layer_norm": 2, "native_group_norm": 1, "native_batch_norm": 1,
            "_native_batch_norm_legit": 1, "cudnn_batch_norm": 1}  # fmt: skip

# Of their backward, the places of the reciprocal deviations and of the weight.
_FACTORS = {"native_layer_norm_backward": (4, 5), "native_group_norm_backward": (3, 4),
            "native_batch_norm_backward": (6, 2)}  # fmt: skip


def _cancelled(name: str, args: Sequence[Any], result: tuple[Any, ...], like: torch.Tensor) -> Any:
    """Return how far numbers of a norm are off because the mean that they subtract is rounded."""
    mean, deviation, weight = result[1], result[2], args[_WEIGHTS[name]]
    lost = _magnitude(mean, like.dtype) * _magnitude(deviation, like.dtype)
    lost *= rounding.FUNCTION * _inside(mean)  # they may be stored low
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


def movement_shares(ran: Ran, result: object, t: torch.Tensor) -> tuple[float, float]:
    """Return about the norm of `result_movement`, but for the terms of a sum: see `terms_of`."""
    # It is a share of the result's norm, and one of what that were if all were its largest
    # magnitude. What becomes of operands that are rounded is in it.
    parts = _parts(ran, result, t)
    operands, own = rounding.of_operands(rounds_operands(ran, result)), parts.own + parts.summed
    mixes = parts.mixes and parts.terms > 1 and not parts.adds
    return (operands, own) if mixes else (operands + own, 0.0)


def terms_of(ran: Ran, result: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Yield each result of an op that is a sum, the norm of its terms, and how far a sum is off."""
    # That is a share of the norm, which is larger than the result's where the terms cancel. The
    # square of a sum of independent terms is, in the mean, the sum of their squares.
    name, given = ran.func.overloadpacket.__name__, ran.reads
    sums: list[tuple[Any, list[torch.Tensor]]] = []
    if name in _WEIGHTS and result[1].numel() and has_values(result[0]):  # it subtracts means
        t, lost = result[0], result[1] * result[2]
        means = norm_of(lost) / lost.numel() ** 0.5
        yield t, norm_of(t) * (1 + means**2).sqrt(), rounding.FUNCTION * _inside(t)
    elif name in op_facts.SUMS and not dispatcher.writes(ran.func):
        first = name in ("addmm", "addmv", "baddbmm")  # of three, to which a product is added
        sums = [(result, given[first : first + 2])]
    elif name == "convolution_backward":
        grad, x, weight = given
        sums = [*zip(result, ([grad, weight], [grad, x], [grad]), strict=True)]
    elif name in _FACTORS:
        factors = [x for at in _FACTORS[name] if (x := ran.args[at]) is not None]
        sums = [*zip(result, ([given[0], *factors], given[:1], given[:1]), strict=True)]
    elif name == "_softmax_backward_data":
        sums = [(result, given[:2])]
    for t, operands in sums:
        if t is None or not all(has_values(x) and x.numel() for x in (t, *operands)):
            continue
        if len(operands) == 1 and name != "cumsum":
            count = operands[0].numel() / t.numel()
        else:
            count = _parts(ran, result, t).terms
        size = t.numel() / count if name == "mean" else t.numel() * count
        size = (size / math.prod(x.numel() for x in operands)) ** 0.5
        norm = math.prod(map(norm_of, operands), start=size * abs(ran.kwargs.get("alpha", 1)))
        # Of a low result the operands are rounded, too, most often by a cast.
        yield t, norm, max((count / 3) ** 0.5 * _inside(t), torch.finfo(t.dtype).eps / 2)


def _inside(t: torch.Tensor) -> float:
    """Return the unit roundoff of what an op computes in."""
    return rounding.unit_roundoff("float64" if t.dtype is torch.float64 else "float32")


def _magnitude(t: torch.Tensor, within: torch.dtype) -> torch.Tensor:
    """Return the sizes of real or complex numbers, in a dtype."""
    return t.abs().to(within) if t.is_complex() else t.to(within).abs()


def wide(t: torch.Tensor) -> torch.dtype:
    """Return a dtype in which a tensor's rounding can be told: its own, or float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def masks_as_inf(t: torch.Tensor, number: bool = False) -> torch.Tensor:
    """Return `run_record.masks_as_inf` of a tensor; itself if it has no such numbers."""
    if t.itemsize == 1 or not t.numel() or (t.is_cpu and not t.amin() <= MASKED):
        return t
    found: torch.Tensor = run_record.masks_as_inf(t, torch, number)
    return found


def norm_of(t: torch.Tensor) -> torch.Tensor:
    """Return about the norm of a tensor; that of bfloat16 as it is, for its range is float32's."""
    dtype = None if t.dtype is torch.bfloat16 else wide(t)
    found: torch.Tensor = torch.linalg.vector_norm(t, dtype=dtype)
    return found


def _added(ran: Ran, within: torch.dtype) -> torch.Tensor:
    """Return the sum of the squares of the terms of a sum."""
    floats = {id(t) for t in numbers_in(ran.args) if t.layout is torch.strided}
    squares: Any = [_magnitude(x, within).square() if id(x) in floats else x for x in ran.args]
    kwargs = {k: within if isinstance(v, torch.dtype) else v for k, v in ran.kwargs.items()}
    found: torch.Tensor = ran.func(*squares, **kwargs).to(within).abs()
    if ran.func.overloadpacket is torch.ops.aten.mean:
        found = found * (found.numel() / max(squares[0].numel(), 1))  # of terms that are divided
    return found
