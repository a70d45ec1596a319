"""`catch`: stop a training at the first step whose numbers break, and name the op.

every call      the loss is checked on the device; without a loss scaler, gradients are, too
every N calls   the findings are read, the weights are checked, and the state is copied
at a bad value  go back to the copy, repeat the steps one by one with every check, stop before
                the first bad one, and let `locate` replay it
"""

import functools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from polymp.backends.torch.compat import (
    distributed,
    optimizers,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from polymp.backends.torch.compat.modes import storage_key
from polymp.backends.torch.diagnostics import locate as replay
from polymp.backends.torch.diagnostics.values import extremes, moments, with_gradients
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.backends.torch.snapshot import (
    AsyncCopy,
    Snapshot,
    TrainingObjects,
    TrainingState,
    training_objects,
    whole_model,
)
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.bad_step import (
    RAISED,
    BatchCopies,
    CaughtStep,
    Repeated,
    checked_arguments,
    described,
    warn,
)
from polymp.diagnostics.call_record import BACKWARD

P = ParamSpec("P")
R = TypeVar("R")
Named = dict[str, torch.Tensor]


def catch(
    step: Callable[P, R] = None,  # type: ignore[assignment]  # noqa: RUF013
    *,
    every: int = 100,
    on_bad: Literal["raise", "report"] = "raise",
    of: object = (),
) -> "Catch[P, R]":
    """Wrap a training step, so that a loss, gradient or weight that is not finite stops it.

        step = polymp.torch.catch(step)
        for batch in batches:
            loss = step(*batch)

    Every call checks on the device, without a wait, that the floats among its results are finite;
    results with one element count, such as the loss. Without a loss scaler, it also checks the
    gradients that optimizers step with. Every `every` calls the state of the training is copied.
    When something is not finite, the training goes back to the last copy, repeats the calls up to
    the first bad one, and stops before it: models, optimizers, schedulers, loss scalers and random
    numbers are as they were after the last good step. `locate` then names the op. So it is if the
    step itself raises an error, or leaves the program, because a value is not finite.

    The models and optimizers are found by looking at the step as Python does when it runs it: at
    its arguments, closure, globals, and the object whose method it is. The batches of up to
    `every` calls are copied. Give the batch as an argument: what a step draws from an iterator
    itself cannot be repeated. Under several ranks, every rank wraps its step.

    Args:
        step: does one step of training, with any optimizer, region and scaler, or without.
        every: calls between two copies.
        on_bad: "raise" raises the error; "report" warns, and training goes on without the bad
            step, whose batch is left out. Its results are returned as they are. Three bad steps in
            a row raise: to leave out batches does not help.
        of: models, optimizers and others to copy that are not found, in a list.

    Returns:
        The wrapped step, with the same arguments and results.

    Raises:
        TypeError: `step` is not callable, `every` is no whole number, or `of` has nothing to copy.
        ValueError: another argument is out of its range.
    """
    checked_arguments(step, every, on_bad)
    for it in of if isinstance(of, (list, tuple)) else [of]:
        if it is not None and not any(training_objects(lambda: None, [it])):
            raise TypeError(
                f"catch(of=...): {reprlib.repr(it)} is no model, no optimizer and has no "
                "state_dict() and load_state_dict(). Write of=[model, optimizer]."
            )
    return Catch(step, every, on_bad == "raise", of)


def losses(result: object) -> dict[int, torch.Tensor]:
    """Return the floats with one element among a step's results, each as a tensor []."""
    # Python's floats if no tensor is one: beside a loss they may be a time, or the best one so far.
    leaves = tree_leaves(result)
    found = {
        at: distributed.local(leaf.detach()).reshape(())
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() == 1
    }
    floats = ((at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, float))
    return found or {at: torch.tensor(leaf, dtype=torch.float64) for at, leaf in floats}


class Call(NamedTuple):
    """A call of the step, to be repeated."""

    args: tuple[Any, ...]  # copies, but for what is the training's own
    kwargs: dict[str, Any]
    # Of what other code may change between two calls: the settings of optimizers, such as the
    # learning rate, and random numbers, some of which a data loader draws.
    before: Snapshot
    losses: dict[int, torch.Tensor]  # by their places in the results, on their devices


class StateCopy(TrainingState):
    """The state from which calls are repeated, and copies of their arguments."""

    def __init__(self, objects: TrainingObjects) -> None:
        super().__init__(objects)
        for it in self.left_out:
            warn(f"catch leaves out {it}. It stays as it is when steps are undone.")
        self.objects = objects
        self.scaled = _has_scaler(objects)
        self.broken: TrainingState  # after the calls, while they are repeated
        self.before: TrainingState  # before the one that is repeated
        self._names = {id(t): name for name, t in self.named.items()}
        self._memory = {*map(storage_key, self.named.values())}
        # Of the calls' arguments, by tensor: the version that was copied, and the copy.
        self._copies: Any = WeakTensorKeyDictionary()
        self._arrays = BatchCopies()
        self.left = self.versions()  # when the last call ended

    def versions(self) -> dict[str, int]:
        """Return the versions of the tensors by name; every write to a tensor changes its own."""
        return {name: t._version for name, t in self.named.items() if not t.is_inference()}

    def written(self) -> str:
        """Return the name of a tensor that was written since the last call ended; "" if none."""
        now = self.versions().items()
        return next((name for name, version in now if version != self.left[name]), "")

    def gradients(self, optimizer: torch.optim.Optimizer | None = None) -> Named:
        """Return the gradients that an optimizer steps with, by name; without one, all."""
        own = self.named.values() if optimizer is None else with_gradients(optimizer)
        named = [(self._names.get(id(p), f"parameter {at}"), p.grad) for at, p in enumerate(own)]
        return {f"the gradient of {name}": grad for name, grad in named if grad is not None}

    def trained(self) -> Named:
        """Return the parameters that optimizers write, and these' states, by name."""
        found: Named = {}
        for it in self.objects.optimizers:
            own = (p for p in optimizers.parameters(it) if id(p) in self._names)
            found |= {f"the weight {self._names[id(p)]}": p for p in own}
        for it in self.objects.optimizers:
            for p in it.state:
                state = moments(it, self._names.get(id(p), "a tensor"), p)
                found |= {f"the optimizer's {key}": t for key, t in state.items()}
        return found

    def kept(self, tree: tuple[Any, Any], shared: bool = True) -> tuple[Any, Any]:
        """Return a call's arguments, with copies of the batch, into which others may write."""
        # If `shared`, a tensor or a numpy array that is given again as it was has one copy.
        leaves, structure = tree_flatten(tree)
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, np.ndarray):
                leaves[at] = self._arrays.of(at, leaf) if shared else leaf.copy()
            elif isinstance(leaf, torch.Tensor) and leaf.is_leaf:
                if storage_key(leaf) not in self._memory:
                    leaves[at] = self._copy_of(leaf) if shared else _copied(leaf)
        args, kwargs = tree_unflatten(leaves, structure)
        return args, kwargs

    def _copy_of(self, t: torch.Tensor) -> torch.Tensor:
        if t.is_inference():  # it has no version
            return _copied(t)
        known = self._copies.get(t)
        if known is None or known[0] != t._version:
            known = self._copies[t] = t._version, _copied(t)
        copy: torch.Tensor = known[1]
        return copy


class Catch(CaughtStep[P, R]):
    """A `CaughtStep` of torch; `of` is as in `catch`."""

    _in_place = True
    _unrepeated = (
        "Repeating the steps did not give that value again, and the training is now in the state "
        "after them. The step reads its batch itself, made lazy parameters, or other code changed "
        "the training in a way that does not show: give the step its batch as an argument, call a "
        "lazy model once before, and do all of the step in it."
    )

    def __init__(self, step: Callable[P, R], every: int, raises: bool, of: object) -> None:
        super().__init__(step, every, raises)
        self._of = of
        self._written = 0  # calls in a row between which other code wrote to the training
        self._met: list[torch.optim.Optimizer] = []  # that stepped, and were not found before
        self._renews = False

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        copy: StateCopy | None = self._copy
        written = copy.written() if copy is not None else ""
        self._written = self._written + 1 if written else 0
        if self._written == _OFTEN and self._every > 1:
            warn(
                f"catch: {written!r} is written between two calls of the step, again and again, so "
                "that the training is copied before each. Do all of it in the step that is "
                "wrapped: forward, backward, optimizer.step() and what follows it."
            )
        if copy is None or written or self._renews or len(self._calls) >= self._every:
            self.check()
            self._copy = copy = None  # gives its memory back
            self._calls, self._renews = [], False
            objects = training_objects(self._fn, [self._of, self._met, *args, *kwargs.values()])
            if not (objects.models or objects.optimizers):
                raise ValueError(
                    f"catch found no model and no optimizer in {self._fn!r}. Name them: "
                    "catch(step, of=[model, optimizer])."
                )
            self._copy = copy = StateCopy(objects)
        before = Snapshot(settings=copy.objects.optimizers, random_numbers=True)
        self._calls.append(Call(*copy.kept((args, kwargs)), before, {}))
        return args, kwargs

    def _do(self, args: Any, kwargs: Any) -> tuple[R, dict[int, torch.Tensor], bool]:
        copy: StateCopy = self._copy
        bad: list[torch.Tensor] = []
        result, steps = self._run(
            copy, args, kwargs, lambda g: bad.extend(bad_by_device(g.values()))
        )
        own = {at: loss.clone() for at, loss in losses(result).items()}
        known = [it.state for it in (*copy.objects.optimizers, *self._met)]  # of wrappers, too
        new = [it for it in steps if all(it.state is not state for state in known)]
        self._met += {id(it): it for it in new}.values()  # the next copy has them
        self._renews = self._renews or bool(new) or copy.has_made()
        copy.left = copy.versions()
        bad += [~loss.isfinite() for loss in own.values()]
        return result, own, self._checks.add(_sent(bad), _alone())

    def _run(
        self, copy: StateCopy, args: Any, kwargs: Any, check: Callable[[Named], object]
    ) -> tuple[R, list[torch.optim.Optimizer]]:
        """Do the step; return its results, and the optimizers that stepped in it."""
        # `check` is given their gradients before they step; of a step without one, all at its end.
        steps: list[torch.optim.Optimizer] = []

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            steps.append(optimizer)
            if not copy.scaled:
                check(copy.gradients(optimizer))

        hook = register_optimizer_step_pre_hook(look)
        try:
            result = self._fn(*args, **kwargs)
        finally:
            hook.remove()
        if not (steps or copy.scaled):  # other code steps, after this call
            check(copy.gradients())
        return result, steps

    def _bad_state(self) -> bool:
        return any(map(bool, bad_by_device(self._copy.trained().values())))

    def _broke(self, error: BaseException) -> bool:
        if distributed.ranks() > 1 or isinstance(error, torch.OutOfMemoryError):
            return False  # other ranks have no error
        try:
            if self._checks.now() or self._bad_state():
                return True
            call, raised = self._calls[-1], TrainingState(self._copy.objects)
            call.before.put_back()
            self._copy.before = TrainingState(self._copy.objects)
            try:
                fault, _ = self._located(call, None)
            finally:
                raised.put_back()
        except RAISED:  # for another reason; after some errors of a GPU, nothing runs on it
            return False
        # Of a loss scaler's steps, some have gradients that are not finite, and are skipped.
        return fault is not None and not (self._copy.scaled and fault.direction == BACKWARD)

    def _anywhere(self, found: bool) -> bool:
        return any_rank(found)

    def _repeated(self) -> Iterator[Repeated]:
        copy: StateCopy = self._copy
        if copy.has_made():  # it has no values to go back to
            return
        copy.broken = TrainingState(copy.objects)
        copy.put_back()
        for call in self._calls:
            call.before.put_back()
            copy.before, gradients = TrainingState(copy.objects), dict[str, str]()
            args, kwargs = copy.kept(call[:2], shared=False)

            def check(grads: Named, found: dict[str, str] = gradients) -> None:
                found |= not_finite(grads)

            def bad(gradients: dict[str, str] = gradients) -> str:
                return described(gradients, str) or described(not_finite(copy.trained()), str)

            try:
                result, _ = self._run(copy, args, kwargs, check)
            except StopIteration:  # the iterator that the step reads has ended
                copy.before.put_back()
                return
            except RAISED as error:
                words = f"the step raised {type(error).__name__}: {error}".partition("\n")[0]
                yield Repeated({}, True, functools.partial(str, words))
                continue
            on_cpu = all(loss.device.type == "cpu" for loss in call.losses.values())
            yield Repeated(losses(result), on_cpu, bad)

    def _another(self, step: int, losses: str) -> str:
        self._copy.broken.put_back()
        return _DIFFERS.format(step=step, losses=losses or "another on another rank")

    def _located(self, call: Call, before: None) -> tuple[Fault | None, str]:
        copy, fn, kwargs = self._copy, self._fn, dict(call.kwargs)
        if "model" in kwargs:  # the step's own, and not locate's
            fn = functools.partial(fn, model=kwargs.pop("model"))
        copy.before.put_back()
        fault = replay.locate(fn, *call.args, model=whole_model(copy.objects), **kwargs)
        copy.before.put_back()  # locate leaves what it does not know
        return fault, ""


# After so many calls in a row that found the training written by other code, say so.
_OFTEN = 3

_DIFFERS = (
    "Repeating step {step} gave the loss {losses}, so no op was looked for. Either the step reads "
    "its batch itself: give it the batch as an argument. Or not all of the training was put back, "
    "such as an optimizer that only a library reaches: name it, catch(step, of=[...]). The "
    "training is as the last step left it."
)


def _copied(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _has_scaler(objects: TrainingObjects) -> bool:
    """Return whether a loss scaler is among some objects, which skips steps with bad gradients."""
    scalers = (torch.amp.GradScaler, GradScaler)
    own = [*objects.others, *(getattr(it, "scaler", None) for it in objects.others)]  # of a plugin
    return any(isinstance(it, scalers) and it.is_enabled() for it in own)


# Whether the numbers of a training step are finite: its losses, gradients and weights.


def _sent(bad: Sequence[torch.Tensor]) -> list[AsyncCopy]:
    """Send the host whether one is true, on any rank; all ranks have to ask."""
    ranks = distributed.ranks()
    if not bad and ranks == 1:
        return []
    bad = bad or [torch.zeros((), dtype=torch.bool, device=_device())]
    device = max((b.device for b in bad), key=lambda d: d.type != "cpu")
    found = torch.stack([b.to(device, non_blocking=True) for b in bad]).any()
    return [AsyncCopy(over_ranks(found) if ranks > 1 else found)]


def _alone() -> bool:
    # On a CPU all ranks learn of it at once.
    return distributed.ranks() == 1 or _device().type == "cpu"


def bad_by_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each device, whether one of its tensors has Inf or NaN: bool []."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for t in tensors:
        values = _values(t)
        if values.numel():
            by_device.setdefault(values.device, []).append(values)
    with torch.no_grad():
        found = [torch.stack([*chain(*extremes(many))]) for many in by_device.values()]
        return [~ends.isfinite().all() for ends in found]


def not_finite(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the tensors that have Inf or NaN, by name: "Inf" or "NaN". Waits for the device."""
    found = {}
    for name, t in named.items():
        values = _values(t)
        if not bool(values.isfinite().all()):
            found[name] = "NaN" if bool(values.isnan().any()) else "Inf"
    return found


def _values(t: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor; none on meta, and of float4, of which torch casts none."""
    local = distributed.local(t.detach())
    if local.is_meta or local.dtype is torch.float4_e2m1fn_x2:
        return torch.empty(0)
    return local.coalesce().values() if local.is_sparse else local


def any_rank(found: bool) -> bool:
    """Return whether any rank found something; all ranks have to ask."""
    if distributed.ranks() == 1:
        return found
    return bool(over_ranks(torch.tensor(found, device=_device())))


def over_ranks(found: torch.Tensor) -> torch.Tensor:
    """Return whether any rank found something, bool []; all ranks have to ask."""
    most = found.to(_device(), torch.float32)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.bool()


def _device() -> torch.device:
    """Return a device on which ranks can talk."""
    nccl = distributed.ranks() > 1 and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
