"""Every op that runs, seen below autograd, and the op call of the vocabulary that it is part of.

    an op of the vocabulary is called        -> an `OpCall` opens          (kernels)
    its casts and the ops in it run          -> they are noted on it       (the dispatch mode)
    the engine runs its backward             -> a second `OpCall` for it   (by autograd node)

The `Subscriber` of an `OpStream` hears of each; that of `audit` measures. Nothing here changes what
runs.
"""

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any, Self

import torch
import torch.nn as nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polymp.backends.torch.autocast import kernel_registry, regions
from polymp.backends.torch.autocast.autocast_kernel import op_on
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.op_call import (
    CallSite,
    CallSites,
    OpCall,
    OpFacts,
    Own,
    Ran,
    dtypes,
    facts_of,
    float_tensors,
    is_cast,
    name_of,
    numbers_in,
    running,
    tensors,
)
from polymp.backends.torch.scaler.optimizer_step import closure_of
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.rules import decision_log
from polymp.rules.policy import Policy, Region
from polymp.rules.vocabulary import vocabulary

# Classes whose ops, without a row, are told apart below autograd as well: views, and one kernel
# each. Other classes that compute nothing have ops that are made of several, such as quantile.
_SEEN_BELOW = frozenset({"layout", "indexing", "accumulation"})


class Subscriber:
    """Hears of the ops of an `OpStream`.

    Ops that it runs in `Own` are cast by no region, and no stream sees them. It is called in `Own`,
    but for `sees`, `before` and `viewed`, which enter that where they run ops: it takes too long
    to be entered at each op.
    """

    # The stream, which has this object: a cycle would keep the tensors of a step in memory.
    of: "weakref.ref[OpStream]"
    measures = False  # True to hear of what has run, and of optimizers, too
    gradients = False  # True to hear of backward passes, and which ops make gradients in them

    @property
    def stream(self) -> "OpStream":
        """The stream, a stack for all that has to be left at its end."""
        stream = self.of()
        assert stream is not None, "whoever asks runs in it"
        return stream

    def begin(self) -> None:
        """Called when the stream begins."""

    def sees(self, facts: OpFacts, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> None:
        """Called before every op, also one that the classes of its arguments take apart."""

    def before(self, ran: Ran) -> None:
        """Called before an op runs that reads floats."""

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        """Called after it, with the float tensors in its result."""

    def viewed(self, args: Sequence[Any]) -> OpCall | None:
        """Called before a view; return the call that its autograd node is of."""
        return None

    def unwatched(
        self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs, result: object
    ) -> None:
        """Called after an op that makes no float of floats, as `zeros_like`, and is no view."""

    def follows(self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> bool:
        """Return whether to follow an op that reads no float: for a constant that it is given."""
        return False

    def backward_began(self) -> None:
        """Called when a backward pass has begun, as its first op is about to run."""

    def knows(self, t: torch.Tensor) -> bool:
        """Return whether an op has made a tensor of others, or read it, outside of that pass."""
        return False

    def began_with(self, t: torch.Tensor) -> None:
        """Called with a gradient that no op has made: a backward pass began with it."""

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Called before an optimizer steps, and whether it has a closure."""

    def stepped(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Called after it."""


# Who wrote memory in a backward pass: the numbers of the pass and of the node.
Writer = tuple[float, int]
GRADIENT: Writer = (math.inf, 0)  # an op that made a gradient, in whatever pass
_AGAIN: Writer = (-1, 0)  # the forward again, for the backward


class GradientFlow:
    """Tells the gradients of a backward pass from other values, such as the 2 * x of a square.

    A gradient is what an op makes of one, what a node of the graph has from another node, and what
    no op has made or read before: what the pass began with, or the work of kernels not seen here.
    """

    def __init__(self, hear: Subscriber) -> None:
        self._hear = hear
        self._newest = -1  # the number of the latest pass
        self._written: dict[int, Writer] = {}  # by memory
        self.over = False  # True once an op has run outside of it

    def writer(self, ran: Ran) -> Writer:
        """Return who writes the results of an op in a backward pass; `GRADIENT` if they are one."""
        if ran.op_call.direction == RECOMPUTE:
            return _AGAIN
        here, gradient = self.here(), False
        for t in ran.reads:
            key = modes.storage_key(t)
            by = self._written.get(key)
            if by is None and not self._hear.knows(t):
                by = self._written[key] = GRADIENT
                self._hear.began_with(t)
            # A pass inside of another one reads what its own forward made there: no gradient.
            gradient |= by is not None and by != here and by[0] >= here[0]
        return GRADIENT if gradient else here

    def here(self) -> Writer:
        """Return the pass and the node that run here."""
        task, node = dispatcher.backward_task(), dispatcher.backward_node()
        assert task is not None, "in a backward pass"
        assert node is not None, "likewise"
        if task > self._newest:
            self._newest = task
            if self.over:  # else it runs inside of the one before
                self._written, self.over = {}, False
            with Own():
                self._hear.backward_began()
        return task, node

    def wrote(self, tensors: Iterable[torch.Tensor], by: Writer) -> None:
        """Note who wrote tensors."""
        for t in tensors:
            self._written[modes.storage_key(t)] = by


class OpStream(decision_log.Recorder, ExitStack):  # which is left at no line of ours
    """Follows the ops that run in a thread, and in the backward passes that it starts."""

    def __init__(
        self,
        model: nn.Module | None,
        subscriber: Subscriber | None = None,
        counts: bool = True,
        compiled: bool = False,  # True to let compiled code run as it is; else it runs uncompiled
    ) -> None:
        super().__init__()
        ExitStack.__init__(self)
        self.calls: list[OpCall] = []  # in order
        self.region: tuple[str, str] = ("", "")  # low dtype and policy of the first that was met
        self.transforms = False  # True once an op has run that torch.func transforms
        self.looks_away: int = 0  # while it follows nothing, the thread that had it look away
        self.counts = counts  # False if nobody uses dtypes, casts and FLOPs, and `calls`
        self.floats = float_tensors if counts else numbers_in  # from trees to what is followed
        self._call_sites = CallSites(model)
        # Each autograd node that is made while ops run, with the call that made it: when the engine
        # runs it, the ops in it are the backward of that call.
        self._of_node: dict[int, OpCall] = {}
        self._first_node = 0
        self._open: list[OpCall] = []
        self._rows: int = 0  # kernels that run an op by its row, with autocast off inside
        self._below: int = 0  # ops that run, in whose kernels nothing is seen
        self._mode = _Mode(self, compiled)
        self.hear: Subscriber = subscriber or Subscriber()
        self.hear.of = weakref.ref(self)
        self.flow = GradientFlow(self.hear) if self.hear.gradients else None

    def is_here(self) -> bool:
        """Return whether it follows the ops of this thread."""
        return modes.sees(self._mode)

    # Called by the kernels on the autocast keys

    def around(
        self, entry: decision_log.Entry, run: Callable[..., Any], *args: object
    ) -> Any:  # `args` end with those of the call, and its keyword arguments
        """Run an op whose kernel was called; ops that run meanwhile are part of it."""
        if not self.region[0]:
            self.region = entry.low, entry.policy
        self.transforms |= modes.is_transformed()
        if self.instead is not None:
            entry, args = self._instead(self.instead, entry, args)
        by_row = entry.row is not None
        self._rows += by_row
        try:
            return self._around(entry, run, *args)
        finally:
            self._rows -= by_row

    def _around(self, entry: decision_log.Entry, run: Callable[..., Any], *args: object) -> Any:
        if isinstance(self.outer, OpStream):
            run = partial(self.outer.around, entry, run)
        if entry.row is None and entry.op and vocabulary().ops[entry.op].kind in _SEEN_BELOW:
            return run(*args)  # the dispatch mode sees the ops in it
        place, direction, origin = self.where(sys._getframe(1))
        if origin is not None:  # a part of the backward of another call, in a region
            return run(*args)
        overload = entry.spelling.removeprefix("aten:")
        op = entry.op or name_of(overload, overload.partition(".")[0])
        given = float_tensors(args[-2:]) if self.counts else []
        op_call = self._noted(
            OpCall(op, entry.spelling, place, direction, entry.low, entry.row, dtypes(given),
                   recipe=entry.recipe, fallback=entry.fallback)
        )  # fmt: skip
        self._open.append(op_call)
        try:
            result = run(*args)
        finally:
            self._open.pop()
        if not self.counts:
            return result
        if entry.row is None and not op_call.ops and not op_call.casts:
            at = next(i for i in reversed(range(len(self.calls))) if self.calls[i] is op_call)
            del self.calls[at]  # a view, or made of other calls, which are in the list
        op_call.outputs = dtypes(float_tensors(result))
        if self._below and entry.decision.run:
            op_call.run = (entry.decision.run,)
        asked = entry.decision.out is None and "float32" not in op_call.outputs  # by its dtype=
        if entry.decision.run == "float32" and op_call.run and not asked:
            op_call.run = ("float32",)  # also if the op casts inside, as softmax(dtype=) does
        op_call.spared(given)
        return result

    def _instead(
        self,
        change: Callable[[Policy], Policy],
        entry: decision_log.Entry,
        args: Sequence[Any],
    ) -> tuple[decision_log.Entry, tuple[Any, ...]]:
        """Return an op's entry and what its kernel runs by, with another policy in the region."""
        own, module = args[0], self.where(sys._getframe(1))[0].module
        policy = change(own.policy).at(module)
        on_device = op_on(entry.spelling.removeprefix("aten:"), own.region.device)
        other = on_device.in_region(_with_policy(own.region, policy), args[-2])
        return on_device.log_entry(other, args[-2]), (other, *args[1:])

    # Called by the dispatch mode

    def op_call(self, func: torch._ops.OpOverload, frame: FrameType | None) -> OpCall:
        """Return the call that an op is part of; a new one if it is part of none."""
        if self._open and (
            dispatcher.backward_node() is None or self._open[-1].direction != FORWARD
        ):
            return self._open[-1]
        place, direction, origin = self.where(frame)
        if place.sends:  # copies of FSDP's own
            return self._alone(func, place, direction)
        if origin is None:
            return self._noted(self._alone(func, place, direction))
        if origin.backward is None:
            origin.backward = self._noted(
                OpCall(origin.op, origin.spelling, place, BACKWARD, origin.region, origin.row,
                       recipe=origin.recipe, fallback=origin.fallback)
            )  # fmt: skip
        return origin.backward

    def _noted(self, op_call: OpCall) -> OpCall:
        """Return a new call, which is in the list if there is one."""
        if self.counts:
            self.calls.append(op_call)
        return op_call

    def where(self, frame: FrameType | None) -> tuple[CallSite, str, OpCall | None]:
        """Return call site and direction, and the call whose backward, by torch, runs here."""
        place, node = self._call_sites.here(frame), dispatcher.backward_node()
        if place.recomputed or node is None:
            return place, RECOMPUTE if place.recomputed else FORWARD, None
        origin = self._of_node.get(node)
        if origin is None:
            return place, BACKWARD, None
        if not place.source:
            at = origin.place._replace(sends=True) if place.sends else origin.place
            return at, BACKWARD, origin
        # The user's own backward, or a hook, in which ops are called as anywhere.
        return place._replace(module=place.module or origin.place.module), BACKWARD, None

    def maker(self, node: int) -> OpCall | None:
        """Return the call that made an autograd node; None if it is not known."""
        return self._of_node.get(node)

    def _alone(self, func: torch._ops.OpOverload, place: CallSite, direction: str) -> OpCall:
        overload = func.name().removeprefix("aten::")
        op = name_of(overload, func.overloadpacket.__name__)
        return OpCall(op, f"aten:{overload}", place, direction)

    def made_by(self, op_call: OpCall) -> None:
        """Remember which call the autograd node that was made last belongs to."""
        if (node := dispatcher.latest_node()) >= self._first_node:
            self._of_node.setdefault(node, op_call)

    def run(self, ran: Ran) -> Any:
        """Run an op; ops that its kernel calls are cast by the region that it is in."""
        func, args, kwargs, reads = ran.func, ran.args, ran.kwargs, ran.reads
        if self._rows or not reads or ran.facts.copies_as:
            return func(*args, **kwargs)
        device = reads[0].device.type
        if dispatcher.calls_no_other(func, device) and all(map(modes.is_dense, reads)):
            return func(*args, **kwargs)
        self._below += 1
        try:
            return dispatcher.in_region(func, args, kwargs, device)
        finally:
            self._below -= 1

    def run_parts(self, func: torch._ops.OpOverload, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        """Run the ops that an op is made of, followed; return NotImplemented for another op."""
        device = next((t.device.type for t in tensors(args, kwargs)), "cpu")
        if (parts := dispatcher.parts_of(func, device)) is None:
            return NotImplemented
        with self._mode:
            if self._rows:
                return parts(*args, **kwargs)
            return dispatcher.in_region(parts, args, kwargs, device)

    def view(
        self, func: torch._ops.OpOverload, args: Sequence[object], frame: FrameType | None
    ) -> None:
        """Note a view, before it is made: it is no call itself, but its backward may be one."""
        # Without gradients a view has no node: the latest is that of the function that it is in.
        node = dispatcher.latest_node() if torch.is_grad_enabled() else -1
        if node < self._first_node or node in self._of_node:
            return
        maker = self.hear.viewed(args)
        if maker is None and self.counts:
            place, direction, _ = self.where(frame)
            maker = self._alone(func, place, direction)
        if maker is not None:
            self._of_node[node] = maker

    # Entering and leaving

    def __enter__(self) -> Self:
        try:
            self.begin()
            return self
        except BaseException:  # an interrupt may come at any line
            self.close()
            raise

    def begin(self) -> None:
        """Enter all that has to be left at the end."""
        self._first_node = dispatcher.latest_node() + 1
        kernel_registry.put_everywhere(self)
        decision_log.recorded_by(self, self)
        self.enter_context(self._mode)
        self.callback(self.go_on)
        if self.hear.measures:
            before, after = self.hear.stepping, self.hear.stepped
            self.callback(register_optimizer_step_pre_hook(partial(self._tell, before)).remove)
            self.callback(register_optimizer_step_post_hook(partial(self._tell, after)).remove)
        self.hear.begin()

    def _tell(
        self,
        hear: Callable[[torch.optim.Optimizer, bool], None],
        optimizer: torch.optim.Optimizer,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        """Tell of an optimizer, or a part of one, that steps in this thread."""
        if self.is_here() or self.looks_away == threading.get_ident():
            with Own(), torch.no_grad():
                hear(optimizer, closure_of(args[1:], kwargs) is not None)

    def look_away(self) -> None:
        """Follow nothing until `go_on`; free of cost if no other mode is inside of this one."""
        self.looks_away = threading.get_ident()
        if modes.innermost_mode() is self._mode:
            self._mode.__exit__(None, None, None)

    def go_on(self) -> None:
        """Follow again what runs, after `look_away` in the same thread."""
        if self.looks_away and not self.is_here():
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self.looks_away = 0


@cache
def _with_policy(region: Region, policy: Policy) -> Region:
    """Return a region with another policy; one object, as those that are in force."""
    return replace(region, policy=policy)


class _Mode(modes.OpMode):
    """Hands every op to a stream."""

    supports_higher_order_operators = True
    looks_on = True  # it changes and records nothing: see `modes.is_recorded`

    def __init__(self, stream: OpStream, compiled: bool) -> None:
        super().__init__(compiled)
        self.of = weakref.ref(stream)  # which has this mode

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        stream: Any = self.of()
        hear: Subscriber = stream.hear
        followed = isinstance(func, torch._ops.OpOverload) and not running()
        if followed:
            facts = facts_of(func)
            hear.sees(facts, func, args, kwargs)
        if modes.unwrapped_first(types):
            return NotImplemented
        if not followed or stream.looks_away:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # there a mode is given `to` and `linear` whole
            result = stream.run_parts(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if facts.kind == "view":
            stream.view(func, args, sys._getframe(1))
            return func(*args, **kwargs)
        source: Any = args[0] if facts.copies else None
        casts = facts.copies and is_cast(source, kwargs)
        reads = [source] if casts else stream.floats(*args, *kwargs.values())
        makes = facts.kind == "makes" or not reads
        flow = stream.flow
        if makes and not hear.follows(func, args, kwargs):
            result = func(*args, **kwargs)
            if flow is not None and dispatcher.backward_task() is not None:
                flow.wrote(stream.floats(result), flow.here())
            if hear.measures:
                with Own():
                    hear.unwatched(func, args, kwargs, result)
            return result
        op_call = stream.op_call(func, sys._getframe(1))
        # In a backward pass, ops have nodes if it is differentiated itself.
        grows = op_call.direction != BACKWARD or torch.is_grad_enabled()
        if grows and not op_call.place.sends:
            stream.made_by(op_call)
        if reads and op_call.inputs is None and not op_call.region:
            op_call.region = regions.low_dtype(reads[0].device.type)
        ran = Ran(func, args, kwargs, reads, op_call, facts, casts)
        by = None
        if flow is not None and op_call.direction != FORWARD:
            by = flow.writer(ran)
            ran.gradient = by is GRADIENT
        elif flow is not None:
            flow.over = True
        read = dtypes(reads) if stream.counts else ()
        hear.before(ran)
        result = stream.run(ran)
        made = stream.floats(result)
        if flow is not None and by is not None:
            flow.wrote(made or ran.into, by)
        if casts and stream.counts:
            op_call.cast(source, result)
        elif stream.counts:
            op_call.computed(func, args, kwargs, result, read, dtypes(made))
        if hear.measures:
            with Own():
                hear.after(ran, result, made)
        return result
