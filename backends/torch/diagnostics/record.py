"""`record`: write a record of a run, to be compared with that of another run.

    recorder = polymp.torch.record("run.rec", model)
    for batch in data:
        with recorder:
            step(batch)

`polymp.diagnostics.run_record` has the file; `perturb` says how far rounding moves a tensor.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from os import PathLike
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parameter import is_lazy

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import dispatcher, distributed, dynamo, modes, optimizers
from polymp.backends.torch.diagnostics.op_call import (
    OpCall,
    Own,
    Ran,
    call_of,
    facts_of,
    tensors,
)
from polymp.backends.torch.diagnostics.op_stream import OpStream, Subscriber
from polymp.backends.torch.diagnostics.perturb import (
    Probes,
    has_values,
    masks_as_inf,
    movement_shares,
    norm_of,
    rounds_operands,
    terms_of,
    wide,
)
from polymp.backends.torch.diagnostics.values import is_part
from polymp.diagnostics import run_record
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.run_record import (
    AMAX,
    BLOCK,
    COMPILED,
    ELEMENTS,
    GRADIENT,
    INPUT,
    MOST,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    Looks,
    Options,
    RecordedArray,
    RecordedStep,
    RecordWriter,
    RunRecord,
    Summaries,
    check_matched,
    checked,
    selected,
    signs,
)
from polymp.errors import brief


def record(
    path: str | PathLike[str] | None,
    model: nn.Module | None = None,
    *,
    probes: int = 8,
    modules: Sequence[str] = (),
    every: int = 1,
    steps: int | None = None,
) -> "Recorder":
    """Record the steps of a run: a few numbers of each array that its ops make.

        recorder = polymp.torch.record("run.rec", model)
        for batch in data:
            with recorder:
                train_step(batch)

    Each `with` block is a step. Recorded are the result of every op call, forward and backward, the
    arrays that were there before, the gradients of the model's parameters, and how an optimizer, or
    what writes them after a backward pass, changed these. The steps compute the same bits, and the
    host reads nothing from the device before a block ends. A step that raises is not recorded.

    With probes, the record also has how far rounding moves each of these numbers. A probe is the
    same step with every result moved by a share of its rounding; probes run op by op beside the
    step. Each takes its memory again, and two to three times its time; without probes, a recorded
    step takes two to four times its time, on CPUs, eight times with tiny tensors, and the memory of
    a copy of the parameters.

    Of code that torch.compile has compiled, the record has what each forward graph reads and its
    first result, but no ops: to find the block that differs, compile block by block,
    `block.compile()`. How far rounding moves such a result is not known.

    Args:
        path: of the file; of several ranks each writes its own, "run.rank3.rec" for "run.rec". None
            to keep the steps in memory alone.
        model: its modules and parameters are called by their names; without it, modules are called
            by their paths in the outermost one that runs, and no gradients and updates are
            recorded.
        probes: number of probes, at least 2, or 0 for none.
        modules: patterns of module paths, as in policies: "blocks.*.attn". Op calls elsewhere are
            not recorded.
        every: one of so many steps is recorded, the first among them.
        steps: how many are recorded at most; None for all.

    Returns:
        The recorder; `recorder.record` is the record so far.

    Raises:
        TypeError: `model` is no module, or an option is of the wrong type.
        ValueError: a number is out of range.
        PolicyError: a pattern can match no module path.
        RecordError: there is no folder for the file, or a pattern matches no module of the model.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"record(path, model) needs a torch.nn.Module, got {brief(model)}.")
    options = checked(path, probes, modules, every, steps)
    if model is not None:
        paths = [dynamo.plain_name(name) for name, _ in model.named_modules()]
        check_matched(options.modules, paths, type(model).__name__)
    return Recorder(model, options)


class Recorder:
    """Records the steps that run in its `with` blocks; see `record`."""

    def __init__(self, model: nn.Module | None, options: Options) -> None:
        self._model = model
        self._options = options
        self.recording = False  # whether its block is entered
        self._running: tuple[OpStream, _Step] | None = None
        self._writer = RecordWriter(options, partial(_described, model))

    @property
    def record(self) -> RunRecord:
        """The record so far; of a path, as it was written."""
        return self._writer.record

    def __enter__(self) -> Self:
        if self.recording:
            raise RuntimeError("This recorder records a step already: leave its block first.")
        if (number := self._writer.begin()) is not None:
            step = _Step(number, self._model, self._options)
            stream = OpStream(self._model, step, compiled=True)
            stream.__enter__()
            self._running = stream, step
        self.recording = True
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Say how it is used."""
        raise TypeError(
            "polymp.torch.record makes a context manager, and no function. Write recorder = "
            "polymp.torch.record(path, model), and `with recorder:` around each step."
        )

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.recording = False
        running, self._running = self._running, None
        if running is None:
            return
        stream, step = running
        stream.__exit__(kind, *error)
        if kind is None:
            with Own(), torch.no_grad():
                self._writer.write(step.recorded())


def _described(model: nn.Module | None) -> dict[str, Any]:
    """Return the fields of the header."""
    ranks = distributed.ranks()
    first = next(model.parameters(), None) if model is not None else None
    return {
        "framework": "torch",
        "versions": {"torch": torch.__version__},
        "model": type(model).__name__ if model is not None else "",
        "device": str(first.device) if first is not None else str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "rank": dist.get_rank() if ranks > 1 else 0,
        "ranks": ranks,
    }


@dataclass(eq=False, slots=True)
class _Array:
    """An array of the record, whose numbers are still on its device."""

    of: tuple[str, str, str, str, str]  # kind, name, module, source, direction
    dtype: torch.dtype
    shape: torch.Size
    op_call: OpCall | None = None
    reads: "dict[_Array, None]" = field(default_factory=dict)
    # Of one in the memory of a CPU the place of its summary; else its `sums`.
    summary: int | torch.Tensor | None = None
    changes: torch.Tensor | None = None
    own: torch.Tensor | None = None  # norm of its rounding
    shares: tuple[float, float] = (0.0, 0.0)  # see `movement_shares`
    terms: "_Terms | None" = None
    narrow: str = ""  # the format to which it rounded its operands
    unknown: bool = False  # True if an op that it is made of failed in probes


# Of a sum: the norm of its terms, relative to its own, and how far it is off, as a share of that.
_Terms = tuple[torch.Tensor, float]

# By memory, the arrays that are in it, or that it was made of.
_Makers = tuple[_Array, ...]


# Elements of a buffer up to which a step is looked at for a change of it; a table is larger.
_LARGEST = 2**16


class _Step(Subscriber):
    """Follows the ops of one step, and sums up their results."""

    measures = True
    gradients = True

    def __init__(self, number: int, model: nn.Module | None, options: Options) -> None:
        self._number = number
        self._model = model
        self._modules = options.modules
        self._selected: dict[str, bool] = {}
        self._probes = Probes(options.probes)
        self._left_out = Counter[str]()
        self._summaries = Summaries()
        self._arrays: dict[object, _Array] = {}  # by op call, in the order of the record
        self._ends: dict[tuple[str, str], _Array] = {}  # gradients and updates
        self._makers: dict[int, _Makers] = {}
        self._terms: dict[int, _Terms] = {}  # by memory
        self._keys = modes.KeptKeys()
        self._reads: dict[_Array, None] = {}  # what the op that runs reads
        # The last array, whose numbers are not summed up yet, for its call may compute more.
        self._last: tuple[_Array, torch.Tensor] | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        # Buffers that a step may change, as running means are.
        self._statistics: dict[str, torch.Tensor] = {}
        self._named: dict[int, tuple[str, torch.Tensor]] = {}  # the same and buffers, by memory
        if model is not None:
            named = {dynamo.plain_name(n): p for n, p in model.named_parameters()}
            self._parameters = {n: p for n, p in named.items() if not p.is_complex()}
            if left := len(named) - len(self._parameters):
                self._left_out["complex parameters"] += left
            buffers = {dynamo.plain_name(n): b for n, b in model.named_buffers()}
            for name, t in (self._parameters | buffers).items():
                if is_lazy(t):  # it has no memory yet
                    continue
                own = distributed.local(t.detach())
                self._named.setdefault(modes.storage_key(own), (name, own))
                changes = name in buffers and t.is_floating_point()
                if changes and has_values(own) and t.numel() <= _LARGEST:
                    self._statistics[name] = own
        self._sizes = {p.numel() for p in self._parameters.values() if not is_lazy(p)}
        # Parameters by the memory of the gradients that they have before the step.
        keys = ((self._gradient_key(name), name) for name in self._parameters)
        self._graded = {key: name for key, name in keys if key}
        # Of buffers, and of parameters that are updated: their numbers before, and in probes.
        self._old: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._updated: dict[int, dict[str, None]] = {}  # that were, and not read since, by memory
        self._within: dict[int, list[str]] = {}  # all, by memory, after a backward pass has begun
        self._writes: dict[int, list[str]] = {}  # of these, those that the op that runs updates
        self._spent = set[_Array]()  # what updates by a gradient read beside it
        self._settings: dict[str, dict[str, Any]] = {}
        self._rooms: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._stepped: set[int] = set()  # identities of the optimizers that have stepped

    # What runs

    def before(self, ran: Ran) -> None:
        with Own():
            last, writes = self._last, ran.facts.writes
            if last is not None and (writes or last[0].op_call is not ran.op_call):
                self._sum_up()
            self._reads, unread = {}, ran.unread
            self._note_writes(ran)
            for at, t in enumerate(tensors(*ran.args, *ran.kwargs.values())):
                if id(t) not in unread:
                    for array in self._made_of(t, ran.op_call, at):
                        self._reads[array] = None
            if all((GRADIENT, name) in self._ends for name in chain(*self._writes.values())):
                self._spent.update(self._reads if self._writes else ())
            if not ran.op_call.place.compiled:
                self._probes.before(ran)

    def _note_writes(self, ran: Ran) -> None:
        """Note the parameters that an op updates, before it does."""
        into = map(modes.storage_key, ran.into if ran.facts.writes else ())
        found = [key for key in into if key in self._within]
        self._writes = {key: self._within[key] for key in found}
        new = (key for key in found if key not in self._updated)
        self._note_update([name for key in new for name in self._within[key]])

    def _made_of(self, t: torch.Tensor, op_call: OpCall, at: int) -> _Makers:
        """Return the arrays that an operand was made of; one that none made is one itself."""
        key = modes.storage_key(t)
        known = self._makers.get(key, ())
        made = (known and key not in self._updated) or key in self._writes
        if made or not has_values(t) or t.is_complex() or not self._records(op_call):
            return known
        if updates := tuple(filter(None, map(self._update, self._updated.pop(key, ())))):
            self._arrays |= {a: a for update in updates for a in (*update.reads, update)}
            self._made(t, updates)
            return updates
        if named := self._named.get(key) or self._gathered(t, key):  # it may be read as a view
            array = self._summed(INPUT, *named)
        elif (of := self._graded.get(key)) is not None and self._gradient_key(of) == key:
            where = of.rpartition(".")[0], "", op_call.direction
            array = self._summed(INPUT, f"{of}.grad", t, *where)
        else:
            place, direction = op_call.place, op_call.direction
            name = f"operand {at + 1} of {op_call.op}"
            array = self._summed(INPUT, name, t, place.module, place.source, direction)
        self._arrays[array] = array
        self._made(t, (array,))
        return (array,)

    def _gathered(self, t: torch.Tensor, key: int) -> tuple[str, torch.Tensor] | None:
        """Return a parameter that is now in other memory, as FSDP2 and functional_call have it."""
        if self._model is None or t.numel() not in self._sizes:  # most others are told by it
            return None
        for name, p in self._model.named_parameters():
            own = p if is_lazy(p) else distributed.local(p.detach())
            if own is not p and modes.storage_key(own) == key:
                return dynamo.plain_name(name), own
        return None

    def _gradient_key(self, name: str) -> int:
        """Return the memory of a parameter's gradient; 0 without one."""
        grad = self._parameters[name].grad
        own = None if grad is None else distributed.local(grad)
        return modes.storage_key(own) if own is not None and has_values(own) else 0

    def _records(self, op_call: OpCall) -> bool:
        """Return whether a call is to be in the record, if it computes floats."""
        place = op_call.place
        if place.updating or place.compiled or place.sends:
            return False
        if place.module not in self._selected:
            found = selected([place.module], self._modules)
            self._selected[place.module] = bool(found)
        return self._selected[place.module]

    def _made(self, t: torch.Tensor, makers: _Makers) -> None:
        key = modes.storage_key(t)
        if key and key not in self._makers:
            self._keys.keep(t)
        if key:
            self._makers[key] = makers

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        op_call, into = ran.op_call, ran.into
        if op_call.place.compiled:  # kernels beside it, which no one sees, write the same tensors
            self._forget(tensors(result, into))
            return
        norm = self._probes.after(ran, result)
        results = [t for t in made or into if t.is_floating_point() and has_values(t)]
        lists, copies = ran.facts.lists, bool(ran.facts.copies_as)
        if ran.casts and op_call.op == "to" and any(array.op_call for array in self._reads):
            # By the program itself, and no region; of inputs and weights it is as one of a region.
            copies = not made or made[0].itemsize > ran.reads[0].itemsize
        # In a backward pass some make no gradient, such as the factor 2 * x of a square.
        computes = op_call.direction != BACKWARD or ran.gradient
        computes = computes and not (lists or copies)
        if results and computes and not self._writes and self._records(op_call):
            if not self._probes.count:
                # What is made of a sum that has no row, as of the second result of a backward,
                # has its terms.
                unseen = [x for x in map(modes.storage_key, ran.reads) if x in self._terms]
                for t in results if unseen else ():
                    self._terms[modes.storage_key(t)] = self._terms[unseen[0]]
                for t, terms, off in terms_of(ran, result):
                    self._terms[modes.storage_key(t)] = terms / norm_of(t), off
            makers: _Makers = (self._array_of(ran, result, results[0], norm),)
        else:
            makers = tuple(self._reads)
            if copies:
                self._copied(ran.reads[-1], *tensors(result))
            if any(t.is_complex() for t in tensors(result)):
                self._left_out["complex results"] += 1
            elif made and not results:
                self._left_out["results that are sparse or wrapped"] += 1
        for t in into:
            if not (lists or op_call.place.updating):
                self._made(t, self._joined(t, makers) if copies else makers)
        changes = {*map(id, into)}
        for t in tensors(result):
            if id(t) not in changes:
                self._made(t, makers)

    def _array_of(
        self, ran: Ran, result: object, t: torch.Tensor, norm: torch.Tensor | None
    ) -> _Array:
        """Return the array of a call, which is the last result of the ops in it.

        Of a backward it is the first: the gradient that goes on to the calls before, if there is
        one, and the others are gradients of parameters.
        """
        op_call, place = ran.op_call, ran.op_call.place
        array = self._arrays.pop(id(op_call), None)
        if array is None or op_call.direction != BACKWARD:
            if array is None:
                of = RESULT, op_call.op, place.module, place.source, op_call.direction
                array = _Array(of, t.dtype, t.shape, op_call)
            array.dtype, array.shape, array.own = t.dtype, t.shape, norm
            array.narrow = rounds_operands(ran, result) or array.narrow
            if not self._probes.count and t.itemsize > 1:
                own = movement_shares(ran, result, t)  # beside that of the ops before it
                array.shares = math.hypot(array.shares[0], own[0]), own[1]
                terms = self._terms.pop(modes.storage_key(t), None)
                if all(t is not written for written in ran.into):
                    array.terms = terms
            self._last = array, t.detach()
        self._arrays[id(op_call)] = array
        array.reads |= self._reads
        return array

    def _copied(self, source: torch.Tensor, t: torch.Tensor) -> None:
        if (terms := self._terms.get(modes.storage_key(source))) is not None:
            self._terms[modes.storage_key(t)] = terms

    def _joined(self, t: torch.Tensor, makers: _Makers) -> _Makers:
        """Return the makers of a tensor's memory, of which it may be a part, once it is written."""
        if not (has_values(t) and is_part(t)):
            return makers
        return tuple(dict.fromkeys((*self._makers.get(modes.storage_key(t), ()), *makers)))

    def follows(self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> bool:
        self._probes.about_to_write(func, args, kwargs)
        return False

    def unwatched(
        self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs, result: object
    ) -> None:
        makes = facts_of(func).kind == "makes"
        read = [] if makes else tensors(args, kwargs)  # ones_like reads no numbers
        known = (self._makers.get(modes.storage_key(t), ()) for t in read)
        makers = tuple(dict.fromkeys(chain.from_iterable(known)))  # through integers, as of argmax
        for t in tensors(result):
            self._made(t, makers)
        self._probes.passed(func, () if makes else args, {} if makes else kwargs, result)

    def knows(self, t: torch.Tensor) -> bool:
        return bool(self._makers.get(modes.storage_key(t)))

    # Numbers

    def _summed(
        self,
        kind: str,
        name: str,
        t: torch.Tensor,
        module: str | None = None,
        source: str = "",
        direction: str = FORWARD,
        probes: torch.Tensor | None = None,
    ) -> _Array:
        """Sum up an array; without a module, one of a parameter or buffer."""
        module = name.rpartition(".")[0] if module is None else module
        array = _Array((kind, name, module, source, direction), t.dtype, t.shape)
        self._sum(array, t.detach(), self._probes.of(t) if probes is None else probes)
        return array

    def _sum_up(self) -> None:
        """Sum up the last array."""
        if self._last is not None:
            (array, t), self._last = self._last, None
            self._sum(array, t, self._probes.of(t))

    def _sum(self, array: _Array, t: torch.Tensor, moved: torch.Tensor | None) -> None:
        array.unknown = self._probes.unknown(t)
        kind, _, _, source, direction = array.of
        if kind in (INPUT, RESULT) and direction != BACKWARD:
            t = masks_as_inf(t, kind == INPUT and bool(source) and t.numel() == 1)
        if t.is_cpu:
            # `numpy()` would forbid to resize the memory, for good; dynamo traces only that.
            compiling, own = torch.compiler.is_compiling(), t.to(wide(t)).resolve_neg()
            array.summary = self._summaries.add(own.numpy() if compiling else np.from_dlpack(own))
        else:
            array.summary = sums(t)
        array.changes = changes(t, moved, self._room) if moved is not None and t.numel() else None

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory that is kept for the step: to get other memory takes longer than sums."""
        key, count = (like.dtype, like.device), like.numel()
        if key not in self._rooms or len(self._rooms[key]) < count:
            with torch.inference_mode(False):
                self._rooms[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._rooms[key][:count].view(like.shape)

    # Optimizers

    def backward_began(self) -> None:
        for name in () if self._within else filter(self._is_here, self._parameters):
            self._within.setdefault(modes.storage_key(self._own_part(name)), []).append(name)

    def begin(self) -> None:
        with Own(), torch.no_grad():
            self._old = {n: (b.to(wide(b), copy=True), None) for n, b in self._statistics.items()}
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            from polymp.backends.torch.compat import inductor

            self.stream.enter_context(inductor.graphs_watched(self._graph_runs))

    def _forget(self, found: Iterable[torch.Tensor]) -> None:
        """Note tensors that compiled code has written."""
        for t in found:
            self._makers.pop(modes.storage_key(t), None)
            self._probes.forget([t])

    def _graph_runs(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Record what a compiled forward graph reads, and then its first result."""
        if not self.stream.is_here():
            return lambda results: None
        forward = dispatcher.backward_node() is None
        place, direction, _ = self.stream.where(sys._getframe(1))
        call = OpCall(COMPILED, COMPILED, place, direction)
        given, reads = {modes.storage_key(t): t for t in tensors(inputs)}, list[_Makers]()
        with Own(), torch.no_grad():
            if forward:
                self._sum_up()
                reads += [self._made_of(t, call, at) for at, t in enumerate(given.values())]

        def ran(results: Sequence[Any]) -> None:
            with Own(), torch.no_grad():
                self._left_out[COMPILED] += 1
                made = [t for t in tensors(results) if has_values(t)]
                # A graph hands on what it reads, for its backward pass.
                self._forget(t for t in made if modes.storage_key(t) not in given)
                first = next((t for t in made if t.is_floating_point()), None)
                if first is not None and forward:
                    at = place.module, place.source, direction
                    array = self._summed(RESULT, COMPILED, first, *at)
                    array.reads = dict.fromkeys(chain.from_iterable(reads))
                    self._arrays[array] = array
                    self._made(first, (array,))

        return ran

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not closure and not self._probes.count:  # of its ops none is recorded
            self.stream.look_away()
        if id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            for group in optimizer.param_groups:
                kind = type(optimizer).__name__
                count = sum(name.rpartition(" ")[0] == kind for name in self._settings)
                self._settings[f"{kind} {count + 1}"] = dict(_plain(group))
        self._keep_old(self._own(optimizer))

    def _keep_old(self, names: Iterable[str]) -> None:
        """Copy the numbers of parameters before the first update of them in the step."""
        for name in names:
            if name not in self._old:
                p = self._own_part(name)
                moved = self._probes.of(p)
                self._old[name] = p.to(wide(p), copy=True), None if moved is None else moved.clone()

    def _own_part(self, name: str) -> torch.Tensor:
        """Return this process's part of a parameter."""
        return distributed.local(self._parameters[name].detach())

    def _is_here(self, name: str) -> bool:
        """Return whether a parameter has floats here; a lazy one has none before its first call."""
        p = self._parameters[name]
        return p.is_floating_point() and not is_lazy(p) and has_values(self._own_part(name))

    def _own(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the model's parameters that an optimizer changes."""
        ours = {*map(id, optimizers.parameters(optimizer))}
        own = (name for name, p in self._parameters.items() if id(p) in ours)
        return [*filter(self._is_here, own)]

    def stepped(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self._sum_up()
        self._note_update(self._own(optimizer))
        if not closure and not self._probes.count:
            self.stream.go_on()

    def _note_update(self, names: Sequence[str]) -> None:
        """Note an update of parameters, and sum up their gradients before they are gone."""
        self._gradients(names)
        self._keep_old(names)
        for name in names:
            key = modes.storage_key(self._own_part(name))
            self._updated.setdefault(key, {})[name] = None

    def _gradients(self, names: Iterable[str]) -> None:
        """Sum up the gradients of parameters."""
        for name in names:
            if (grad := self._parameters[name].grad) is None:
                continue
            grad = distributed.local(grad)
            if not has_values(grad):
                self._left_out["gradients that are sparse or wrapped"] += 1
                self._probes.lose([self._own_part(name)], 1)  # what it updates
                continue
            array = self._summed(GRADIENT, name, grad, direction=BACKWARD)
            key = modes.storage_key(grad)
            array.reads = dict.fromkeys(self._makers.get(key, ()))
            array.terms = self._terms.get(key)
            self._ends[GRADIENT, name] = array

    def _update(self, name: str) -> _Array | None:
        """Sum up how the step has changed a parameter, or a running mean; None if not."""
        old, moved = self._old[name]
        new = self._statistics.get(name)
        if new is None:
            new = self._own_part(name)
        elif torch.equal(new.to(old.dtype), old):
            return None
        moved = old if moved is None else moved
        probes = self._probes.updated(new).to(old.dtype) - moved if self._probes.count else None
        change = new.to(old.dtype) - old
        array = self._summed(UPDATE, name, change, direction=BACKWARD, probes=probes)
        array.dtype, array.unknown = new.dtype, self._probes.unknown(new)
        array.own = norm_of(new) * (torch.finfo(new.dtype).eps / 2)
        gradient = self._ends.get((GRADIENT, name))
        makers = self._makers.get(modes.storage_key(new), ())  # of running means
        array.reads = dict.fromkeys(makers if gradient is None else (gradient,))
        self._ends[UPDATE, name] = array
        return array

    # The end

    def recorded(self) -> RecordedStep:
        """Read the numbers of the step from the device."""
        self._sum_up()
        if self._model is None:
            check_matched(self._modules, self._selected, "the step")
        done = {name for kind, name in self._ends if kind == GRADIENT}
        self._gradients(name for name in self._parameters if name not in done)
        for name in dict.fromkeys(chain(self._statistics, *self._updated.values())):
            self._update(name)
        self._left_out += self._probes.left_out
        ends = [self._ends[end] for end in sorted(self._ends, key=lambda end: end[0] == UPDATE)]
        arrays = [*dict.fromkeys((*self._arrays.values(), *ends))]
        used = {*ends}
        for array in reversed(arrays):  # what updates alone read is left out: how it became them
            kept = array in used or array not in self._spent
            (used if kept else self._spent).update(array.reads)
        arrays = [array for array in arrays if array in used or array not in self._spent]
        parts = ((a.summary, a.changes, a.own, a.terms and a.terms[0]) for a in arrays)
        read = _read([*chain.from_iterable(parts)])
        summaries, places = self._summaries.read(), {array: at for at, array in enumerate(arrays)}
        rows = []
        for at, array in enumerate(arrays):
            reads = _places_before(at, array, places)
            found, *rest = read[4 * at : 4 * at + 4]
            whole = summaries[found] if isinstance(found, int) else found
            rows.append(self._finished(array, reads, whole, *rest))
        return RecordedStep(self._number, tuple(rows), self._settings, dict(self._left_out))

    def _finished(
        self, array: _Array, reads: tuple[int, ...], whole: Any, moved: Any, norm: Any, terms: Any
    ) -> RecordedArray:
        if not isinstance(whole, tuple):
            whole = tuple(whole[:VALUES].tolist()), *map(int, whole[VALUES:])
        numbers, zeros, bad = whole
        size = array.shape.numel()
        own, of_top = array.shares
        if rms := numbers[RMS]:
            own += of_top * numbers[AMAX] / rms + (0 if norm is None else norm[0] / size**0.5 / rms)
        times = 1.0
        if array.terms is not None and terms[0] < math.inf:
            times = min(max(float(terms[0]), 1.0), MOST)
            own = max(own, array.terms[1] * times)
        by: tuple[float, ...] = ()
        if array.unknown:
            by = (math.inf,) * VALUES
        elif moved is not None:
            by = run_record.spread(moved.reshape(self._probes.count, -1), numbers, size)
        elif self._probes.count and not self._left_out:  # else it may be moved by what is left out
            by = (0.0,) * len(numbers)
        ran: tuple[str, tuple[str, ...], str] = "", (), ""
        if array.op_call is not None:
            call = call_of(array.op_call)
            ran = call.rule, call.inputs, array.narrow or call.run
        dtype = dtype_names.NAMES.get(array.dtype) or str(array.dtype).removeprefix("torch.")
        counts = zeros, bad, float(own) if rms else 0.0
        named = *array.of, *ran, dtype, tuple(array.shape)
        return RecordedArray(*named, *counts, reads, numbers, by, times)


def _places_before(at: int, array: _Array, places: Mapping[_Array, int]) -> tuple[int, ...]:
    """Return the places of what an array reads: of a call that ends later, of what that reads."""
    found, waiting, seen = set[int](), [*array.reads], {array}
    while waiting:
        if (read := waiting.pop()) in places and read not in seen:
            seen.add(read)
            if places[read] < at:
                found.add(places[read])
            else:
                waiting += read.reads
    return tuple(sorted(found))


def _plain(group: Mapping[str, Any]) -> Iterable[tuple[str, float | bool | str]]:
    """Yield the numbers, bools and texts among the hyperparameters of a group."""
    for key, value in group.items():
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(value, (bool, int, float, str)):
            yield key, value
        elif isinstance(value, tuple):
            for at, each in enumerate(value):
                yield from _plain({f"{key}[{at}]": each})


def _read(found: Sequence[Any]) -> list[Any]:
    """Read the tensors among some objects as numpy arrays of float64: one copy from each device."""
    by_device: dict[torch.device, list[int]] = {}
    for at, t in enumerate(found):
        if isinstance(t, torch.Tensor):
            by_device.setdefault(t.device, []).append(at)
    read = list(found)
    for device, places in by_device.items():
        rows = [found[at].reshape(-1).to(exact(device)) for at in places]
        whole = torch.cat(rows).cpu().double().numpy()
        end = 0
        for at, row in zip(places, rows, strict=True):
            read[at] = whole[end : end + len(row)]
            end += len(row)
    return read


# The numbers that a record has of a tensor, computed where the tensor is and read later. Of tensors
# in the memory of a CPU `run_record.Summaries` has them, in less time.


def exact(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are computed on a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def sums(t: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of floats, integers or bools, and how many are zero and bad."""
    x, dtype = t.detach().reshape(-1), exact(t.device)
    if not len(x):
        return torch.zeros(VALUES + 2, dtype=dtype, device=t.device)
    wide = x.to(dtype)
    found: torch.Tensor = run_record.sums_of(wide, _looks(wide), torch)
    return found


def changes(
    t: torch.Tensor,
    probes: torch.Tensor,
    room: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
) -> torch.Tensor:
    """Return `run_record.changes` of a float tensor; probes are [count, *t.shape]."""
    dtype = wide(t)
    x, moved = t.detach().reshape(-1).to(dtype), probes.reshape(len(probes), -1).to(dtype)
    by = torch.sub(moved, x, out=room(moved)).nan_to_num_(0.0, 0.0, 0.0)
    x = x.nan_to_num(0.0, 0.0, 0.0)
    found: torch.Tensor = run_record.changes(x, by, _places(x), torch)
    return found


def _looks(x: torch.Tensor) -> Looks:
    """Return `run_record.looks_of` a row, on its device."""
    outer, inner = _signs(x.device, x.dtype, 1 << (len(x) // BLOCK).bit_length())
    return Looks(outer, inner, _places(x))


def _places(x: torch.Tensor) -> torch.Tensor:
    """Return `run_record.places` of a row, on its device."""
    count = ELEMENTS.stop - ELEMENTS.start
    return torch.arange(count, device=x.device) * (len(x) - 1) // (count - 1)


@cache
def _signs(device: torch.device, dtype: torch.dtype, blocks: int) -> Sequence[torch.Tensor]:
    """Return `run_record.signs` on a device."""
    with torch.inference_mode(False):
        return [torch.from_numpy(each).to(device, dtype) for each in signs(blocks)]
