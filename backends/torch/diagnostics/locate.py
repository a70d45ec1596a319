"""`locate`: replay a step that broke, and name the op that broke it.

The step runs once more, watched by an `OpStream`, and the inputs of ops that may be at fault are
measured. After a fault in a region it runs again with other policies, to find one that helps. Each
time, what it wrote gets its old values back, so that training can go on.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polymp.backends.torch.compat import dispatcher, distributed, modes, optimizers, tree_leaves
from polymp.backends.torch.diagnostics.op_call import OpFacts, Own, Ran, tensors
from polymp.backends.torch.diagnostics.op_stream import OpStream
from polymp.backends.torch.diagnostics.perturb import wide
from polymp.backends.torch.diagnostics.values import Event, Values, measurable, real
from polymp.backends.torch.scaler.device_state import AsyncRead
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.backends.torch.snapshot import Snapshot
from polymp.diagnostics.audit_records import Fault, operand_numbers
from polymp.diagnostics.blame import tell_nothing_found
from polymp.diagnostics.remedy import Change, remedy_of, tried
from polymp.errors import brief


def locate(
    step_fn: Callable[..., Any], *args: object, model: nn.Module | None = None, **kwargs: object
) -> Fault | None:
    """Replay a step, and return the op that made its first value that is not finite.

        if not loss.isfinite():
            print(polymp.torch.locate(train_step, batch))

    Calls `step_fn(*args, **kwargs)` once more, measures every op, and follows Inf and NaN at the
    end, in the loss or a gradient, back to the op that made them. Its dtype's range may be too
    small, a number or a value before it may have become zero in its dtype, an input may not be
    finite, or the operation itself may have no finite result there. The fault names the row of the
    policy that decided, and the op's inputs. Infinities that a program makes on purpose and removes
    again, such as those of a mask, are no fault, nor are values that are dropped.

    If the step has a region and breaks, it is called again with ops in float32, to find which of
    them make it finite. If it breaks with all ops in float32, too, the fault of that call is
    returned.

    Tensors that the step writes in place, `.grad` of leaves, the parameters and states of torch's
    optimizers and of its schedulers, loss scalers (torch.amp's and polymp's) and the random numbers
    of torch, numpy and Python are put back afterwards. Other objects that the step changes are not.

    A step that talks to other ranks, as one of DistributedDataParallel or FSDP does, is replayed by
    all of them: call `locate` on every rank. Ops that run in other threads are not seen.

    Args:
        step_fn: does the step, or its forward pass alone.
        args: of the call.
        model: its modules and parameters are called by their names; by default a module among
            `args`, or `step_fn` itself if it is a module.
        kwargs: of the call.

    Returns:
        The fault, to be printed; None if no op made an Inf or NaN, which is also written to
        standard error.

    Raises:
        TypeError: `step_fn` is not callable, or `model` no module.
        RuntimeError: the step reads an iterator that has ended; or it talks to other ranks, and
            they did not all call `locate`. The step is given up before it talks, so that the run
            can go on.
        Exception: any that the step raises, if no fault was found in the ops before it.
    """
    if not callable(step_fn):
        raise TypeError(
            f"locate(step_fn, *args) needs a function, got {brief(step_fn)}. Give the function and "
            "its arguments, not what it returned."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"locate(model=...) needs a torch.nn.Module, got {brief(model)}. If it is an "
            "argument of the step, bind it: locate(functools.partial(step, model=...))."
        )
    leaves = tree_leaves((args, kwargs))
    if model is None:
        model = next((leaf for leaf in (step_fn, *leaves) if isinstance(leaf, nn.Module)), None)
    given = leaves if all(isinstance(leaf, _KNOWN) for leaf in leaves) else None
    step = partial(step_fn, *args, **kwargs)
    first = _replayed(step, model, given)
    if first.fault is None:
        why = "the step ran no op of torch on floats in this thread: there was nothing to look at"
        tell_nothing_found(why * first.empty)
        return None
    # Other ranks may have found nothing, and would not come again. And torch.func takes ops apart
    # that have kernels of their own where a policy has a row for them, as a trial has not.
    if first.talked or first.transforms:
        return first.fault._replace(remedy=remedy_of(first.fault))

    def repeat(change: Change | None = None, scale: float = 1.0) -> Fault | None:
        return _replayed(step, model, given, change, scale).fault

    try:
        return tried(first.fault, first.ops, repeat, first.scaled)
    except Exception:  # the step is made for its own dtypes, or cannot be called again
        return first.fault._replace(remedy=remedy_of(first.fault))


# An argument of another class may have tensors that are not found.
_KNOWN = (torch.Tensor, nn.Module, Optimizer, int, float, complex, str, type(None))


class Replay(NamedTuple):
    """A replay of a step."""

    fault: Fault | None
    ops: list[str]  # names of those in regions
    empty: bool  # whether no op ran
    talked: bool  # whether it has talked to other ranks
    transforms: bool  # whether torch.func has transformed ops
    scaled: bool  # whether there is a loss scaler


def _replayed(
    step: Callable[[], object],
    model: nn.Module | None,
    given: Sequence[Any] | None,
    change: Change | None = None,
    scale: float = 1.0,
) -> Replay:
    """Run a step and put back what it wrote; see `Repeat` for the change and the scale."""
    values = LocateValues(model, given, scale)
    stream = OpStream(model, values, counts=False)
    stream.instead = change
    try:
        with stream:
            returned = step()
        fault = values.fault()
        del returned  # what is still there may be an end of the run
    except (Exception, SystemExit) as error:  # the second, of a guard in a script
        fault = values.fault()
        if isinstance(error, StopIteration) and fault is None:
            raise RuntimeError(
                "locate(step_fn, *args) calls the step once more, and an iterator that it reads, "
                "such as a data loader's, has ended. Give the step its batch as an argument: "
                "locate(step_fn, batch)."
            ) from error
        if fault is None:
            raise
    finally:
        values.put_back()
    calls = (event.op_call for event in values.events)
    ops = [call.op for call in calls if call.region]
    talked = values.has_talked
    return Replay(fault, ops, not values.events, talked, stream.transforms, values.scaled)


class LocateValues(Values):
    """Measures the inputs of ops that may be at fault, and keeps what the step writes.

    An op may be at fault if its result is not finite, or if its dtype made a value or a number
    zero: see `polymp.diagnostics.blame`. The host reads the range of each result as soon as it is
    there. Most ops are not at fault, and their inputs need no measurement.
    """

    def __init__(
        self, model: nn.Module | None, given: Sequence[Any] | None, scale: float = 1.0
    ) -> None:
        super().__init__(model, given)
        self._scale_by, self.scaled = scale, False
        self._meeting = _Meeting()
        self._new: set[int] = set()  # keys of memory that the step makes of no floats
        self._written: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._steps: list[Snapshot] = []  # before those of optimizers
        # Of scalers and schedulers, and the buffers of modules, with copies.
        self._dicts: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        if not self._meeting.met:  # torch.compile warns of such a hook
            hook = register_module_forward_pre_hook(self._meeting.module)
            self.stream.callback(hook.remove)
        alive = [*_alive(*_CHANGED, Optimizer, nn.Parameter, nn.Module)]
        changed = [it for it in alive if isinstance(it, _CHANGED)]
        self._dicts = [(own, _copied(own)) for own in map(vars, changed)]
        scheduled = [own["optimizer"] for own, _ in self._dicts if "optimizer" in own]
        self._steps.append(Snapshot(settings=scheduled, random_numbers=True))
        # `zero_grad` may drop gradients before any op runs.
        self._keep_grads(it for it in alive if isinstance(it, nn.Parameter))
        optimizers = (vars(it) for it in alive if isinstance(it, Optimizer))
        groups = chain.from_iterable(own.get("param_groups", ()) for own in optimizers)
        self._keep_grads(p for group in groups for p in group["params"])
        for it, (own, _) in zip(changed, self._dicts, strict=True):
            if not (isinstance(it, _SCALERS) and "_scale" in own and it.is_enabled()):
                continue  # "_scale" is missing where __init__ refused an argument
            self.scaled = True
            name = "_init_scale" if own["_scale"] is None else "_scale"
            if self._scale_by != 1.0:
                with Own():
                    own[name] = own[name] * self._scale_by
        # A step may put another tensor in the place of a buffer; scripted modules have no dict.
        buffers = (vars(it).get("_buffers") for it in alive if isinstance(it, nn.Module))
        self._dicts += [(own, own.copy()) for own in buffers if isinstance(own, dict)]

    @property
    def has_talked(self) -> bool:
        """Whether the step has talked to other ranks."""
        return self._meeting.with_others

    # What the step writes

    def sees(self, facts: OpFacts, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> None:
        self._keep_grads(tensors(*args, *kwargs.values()))
        if facts.receives and distributed.talks(func):
            self._meeting.wait(func.name())
        for t in dispatcher.written(func, args, kwargs) if facts.writes else ():
            key = 0 if modes.unwrapped_first([type(t)]) else modes.storage_key(t)
            if key and key not in self._written and not self._is_own(t):
                memory = t.untyped_storage()
                self._written[key] = memory, _bytes(memory).clone()

    def _keep_grads(self, given: Iterable[torch.Tensor]) -> None:
        """Keep the gradients of leaves."""
        for t in given:
            if t.requires_grad and t.is_leaf:
                self._grads.setdefault(id(t), (t, t.grad))

    def unwatched(
        self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs, result: object
    ) -> None:
        super().unwatched(func, args, kwargs, result)
        made = {*map(modes.storage_key, tensors(result))}
        self._new |= made.difference(map(modes.storage_key, tensors(args, kwargs)))

    def _is_own(self, t: torch.Tensor) -> bool:
        """Return whether the step made the memory of a tensor, or an op of it has written there."""
        return modes.storage_key(t) in self._new or self._provenance.maker(t) is not None

    def stepping(self, optimizer: Optimizer, closure: bool) -> None:
        super().stepping(optimizer, closure)  # first: it has the stream look away
        params = optimizers.parameters(optimizer)
        grads = [(p, p.grad) for p in params if p.grad is not None]  # a fused step may scale them
        old = [p for p, grad in grads if not self._is_own(grad)]
        self._steps.append(Snapshot(params, grads=old, optimizers=[optimizer]))

    def put_back(self) -> None:
        """Give all that the step wrote its old values back."""
        for before in reversed(self._steps):
            before.put_back()
        with torch.no_grad():
            for memory, was in self._written.values():
                if memory.nbytes() >= was.nbytes:  # else it was freed, as FSDP does
                    _bytes(memory)[: was.nbytes].copy_(was)
        for t, grad in self._grads.values():
            t.grad = grad
        for own, was in self._dicts:
            own.clear()
            own.update(was)

    # What it may be at fault for

    def noted(self, ran: Ran, event: Event, results: list[torch.Tensor]) -> None:
        lost = event.lost is not None and any(self.ranges.read([event.lost.both]))
        finite = all(map(math.isfinite, self.ranges.read(event.ranges)))
        if not ran.facts.writes and (lost or event.numbers or not finite):
            event.operands = tuple(map(_operand, ran.reads))


def _operand(t: torch.Tensor) -> torch.Tensor:
    if not measurable(t):
        return torch.tensor([math.inf, 0.0, 0.0, 0.0, 0.0, 0.0])
    x = real(t.detach())
    return operand_numbers(torch, x.to(wide(x)))  # type: ignore[no-any-return]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Memory as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Classes whose objects a step changes.
_SCALERS = (torch.amp.GradScaler, GradScaler)
_CHANGED = (*_SCALERS, AsyncRead, LRScheduler)


def _alive(*classes: type[Any]) -> Iterator[Any]:
    """Yield the objects of some classes, and of those derived from them, that the process has."""
    waiting = [*classes]
    for kind in waiting:
        waiting += kind.__subclasses__()
    kinds = {*waiting}
    yield from (it for it in gc.get_objects() if type(it) in kinds)


def _copied(value: Any) -> Any:
    """Copy a dict with the dicts in it; return other values as they are."""
    if not isinstance(value, dict):
        return value
    copy = value.copy()
    copy.update((key, _copied(inner)) for key, inner in value.items())
    return copy


class _Meeting:
    """Keeps a replay from talking to ranks that do not replay, and would not answer.

    The first op of a replay that talks waits until all ranks have come to theirs. They count
    themselves in the store of the default process group; a rank that gives up subtracts itself.
    """

    patience = timedelta(seconds=60)

    def __init__(self) -> None:
        # True once the ranks have met, and from the start where there are no others.
        self.met: bool = distributed.ranks() == 1
        self.with_others: bool = False

    def module(self, module: nn.Module, _: Any) -> None:
        """Wait before a forward pass: after an error halfway through, wrappers cannot go on."""
        if distributed.will_talk(module):
            self.wait(f"a call of {type(module).__name__}")

    def wait(self, what: str) -> None:
        """Wait for the other ranks, once."""
        if self.met:
            return
        self.met = self.with_others = True
        ranks = distributed.ranks()
        store = dist.distributed_c10d.PrefixStore("polymp.locate", distributed.default_store())
        came = store.add("came", 1)
        full = -(-came // ranks) * ranks
        all_came = f"{full} came"
        if came == full:
            store.set(all_came, "")
            return
        try:
            store.wait([all_came], self.patience)
        except RuntimeError:  # a file store raises no DistStoreError
            came = store.add("came", -1) + 1
            if came == full:  # the last one came in this moment
                store.add("came", 1)
                return
            raise RuntimeError(
                f"locate() replays a step that talks to other ranks ({what}), and "
                f"{came + ranks - full} of {ranks} ranks called it within "
                f"{self.patience.total_seconds():g} seconds. Call it on every rank: let them agree "
                "first, for example by an all_reduce of loss.isfinite(). Or replay what one rank "
                "can do alone, for example the forward pass of model.module."
            ) from None
