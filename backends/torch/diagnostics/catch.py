"""`catch`: stop a training at the first step whose numbers break, and name the op.

every call      the loss is checked on the device; without a loss scaler, gradients are, too
every N calls   the findings are read, the weights are checked, and the state is copied
at a bad value  go back to the copy, repeat the steps one by one with every check, stop before
                the first bad one, and let `locate` replay it
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import torch

from polymp import code_origin
from polymp.backends.torch.diagnostics import locate as replay
from polymp.backends.torch.diagnostics import step_checks
from polymp.backends.torch.diagnostics.recorded_calls import Call, StateCopy, versions_of
from polymp.backends.torch.diagnostics.step_checks import MeanLoss, StepChecks
from polymp.backends.torch.diagnostics.training_objects import TrainingObjects, training_objects
from polymp.backends.torch.diagnostics.training_state import (
    TrainingState,
    put_settings,
    settings,
    weights,
)
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.bad_step import BadStep, CaughtStep, checked_arguments, in_a_row
from polymp.errors import BadStepError, CatchWarning

P = ParamSpec("P")
R = TypeVar("R")


@overload
def catch(
    step: Callable[P, R],
    *,
    every: int = ...,
    on_bad: Literal["raise", "report"] = ...,
    jump: float | None = ...,
    of: object = ...,
) -> "Catch[P, R]": ...


@overload
def catch(
    step: None = None,
    *,
    every: int = ...,
    on_bad: Literal["raise", "report"] = ...,
    jump: float | None = ...,
    of: object = ...,
) -> "Callable[[Callable[P, R]], Catch[P, R]]": ...


def catch(
    step: Callable[P, R] | None = None,
    *,
    every: int = 100,
    on_bad: Literal["raise", "report"] = "raise",
    jump: float | None = None,
    of: object = (),
) -> "Catch[P, R] | Callable[[Callable[P, R]], Catch[P, R]]":
    """Wrap a training step, so that a loss, gradient or weight that is not finite stops it.

        step = polymp.torch.catch(step)
        for batch in batches:
            loss = step(*batch)

    Every call checks on the device, without a wait, that the floats among its results are finite;
    results with one element count, such as the loss. Without a loss scaler, it also checks the
    gradients that optimizers step with. Every `every` calls the state of the training is copied.
    When something is not finite, the training goes back to the last copy, repeats the calls up to
    the first bad one, and stops before it: models, optimizers, schedulers, loss scalers and random
    numbers are as they were after the last good step. `locate` then names the op.

    The models and optimizers are found by looking at the step as Python does when it runs it: at
    its arguments, closure, globals, and the object whose method it is. The arguments of up to
    `every` calls are kept. Give the batch as an argument: what a step draws from an iterator
    itself cannot be repeated. Under several ranks, every rank wraps its step.

    Args:
        step: does one step of training, with any optimizer, region and scaler, or without.
        every: calls between two copies.
        on_bad: "raise" raises the error; "report" warns, and training goes on without the bad
            step, whose batch is left out. Its results are returned as they are. Three bad steps in
            a row raise: to leave out batches does not help.
        jump: also stop when the loss is more than this factor above the mean of the last ones; from
            the eleventh step on, when there is a mean to compare it with.
        of: models, optimizers and others to copy that are not found, in a list.

    Returns:
        The wrapped step, with the same arguments and results; without `step`, a decorator.

    Raises:
        TypeError: `step` is not callable, or `every` is no whole number.
        ValueError: another argument is out of its range.
    """
    checked_arguments(step, every, on_bad, jump)
    if step is None:
        return lambda fn: catch(fn, every=every, on_bad=on_bad, jump=jump, of=of)
    return Catch(step, every, on_bad == "raise", jump, of)


class Catch(CaughtStep, Generic[P, R]):
    """A `CaughtStep` of torch; `of` is as in `catch`."""

    def __init__(
        self, step: Callable[P, R], every: int, raises: bool, jump: float | None, of: object
    ) -> None:
        super().__init__(step, every, raises, jump)
        self._fn, self._of = step, of
        self._copy: StateCopy | None = None
        self._checks = StepChecks(jump)
        self._written = 0  # calls in a row between which other code wrote to the training
        self._met: list[torch.optim.Optimizer] = []  # that stepped, and were not found before
        self._renews = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do a step, and check it.

        Args:
            args: of the step.
            kwargs: of the step.

        Returns:
            The step's results.

        Raises:
            BadStepError: a value is not finite. The training is in the state before that step.
            ValueError: no model and no optimizer was found.

        Warns:
            CatchWarning: likewise, if `on_bad` is "report".
        """
        copy, bad = self._current(args, kwargs), list[torch.Tensor]()
        versions = versions_of((args, kwargs))
        call = Call(args, kwargs, versions, settings(copy.objects), [])
        copy.calls.append(call)
        self.step += 1
        scaled, steps = copy.objects.scaled, list[torch.optim.Optimizer]()

        def look(optimizer: torch.optim.Optimizer) -> None:
            steps.append(optimizer)
            if not scaled:
                bad.extend(step_checks.bad(_gradients(step_checks.with_gradients(optimizer))))

        with step_checks.stepping(look):
            result = self._fn(*args, **kwargs)
        call.losses.extend(loss.clone() for loss in step_checks.losses(result))
        if not (steps or scaled):  # other code steps, after this call
            bad.extend(step_checks.bad(_gradients(copy.named.values())))
        self._meet(copy, steps, call)
        copy.left = copy.versions()
        if self._checks.add(result, bad):
            self._stop(copy)
        return result

    def _meet(self, copy: StateCopy, steps: Sequence[torch.optim.Optimizer], call: Call) -> None:
        """Have the next copy hold optimizers that were not found; tell what cannot be checked."""
        known = [it.state for it in (*copy.objects.optimizers, *self._met)]  # of wrappers, too
        new = [it for it in steps if all(it.state is not state for state in known)]
        self._met += {id(it): it for it in new}.values()
        self._renews = self._renews or bool(new)
        if self.step == 1 and copy.objects.scaled and not call.losses:
            warnings.warn(
                f"catch: the step returns no loss, and the scaler checks the gradients, so that "
                f"only the weights are checked, every {self._every} calls. Return the loss.",
                CatchWarning,
                stacklevel=code_origin.outside(),
            )

    def check(self) -> None:
        """Check losses and weights now, and wait for the device: before saving a checkpoint.

        Under several ranks, every rank calls it.

        Raises:
            BadStepError: as a call does.

        Warns:
            CatchWarning: as a call does.
        """
        if self._copy is not None:
            bad_weights = step_checks.bad(weights(self._copy.objects).values())
            found = self._checks.now() or any(map(bool, bad_weights))
            if step_checks.any_rank(found):
                self._stop(self._copy)

    def _current(self, args: Sequence[object], kwargs: Mapping[str, object]) -> StateCopy:
        """Return the copy to go back to; a new one, after a check, if it is time for one."""
        copy = self._copy
        written = copy.written() if copy is not None else ""
        self._written = self._written + 1 if written else 0
        if self._written == _OFTEN and self._every > 1:
            warnings.warn(
                f"catch: {written!r} is written between two calls of the step, again and again, so "
                "that the training is copied before each. Do all of it in the step that is "
                "wrapped: forward, backward, optimizer.step() and what follows it.",
                CatchWarning,
                stacklevel=code_origin.outside(),
            )
        full = self._renews or (copy is not None and len(copy.calls) >= self._every)
        if copy is not None and not written and not full:
            return copy
        self.check()
        self._copy, copy, self._renews = None, None, False  # gives its memory back
        objects = training_objects(self._fn, [self._of, self._met, *args, *kwargs.values()])
        if not (objects.models or objects.optimizers):
            raise ValueError(
                f"catch found no model and no optimizer in {self._fn!r}. Name them: "
                "catch(step, of=[model, optimizer])."
            )
        self._copy = copy = StateCopy(objects, self._checks.mean)
        return copy

    def _stop(self, copy: StateCopy) -> None:
        """Go back to before the first bad step, and say which it was."""
        report = self._replayed(copy)
        self.reports.append(report)
        self._copy, self._checks = None, StepChecks(self._jump, copy.mean)
        if self._raises or in_a_row(self.reports):
            raise BadStepError(report)
        warnings.warn(str(report), CatchWarning, stacklevel=code_origin.outside())

    def _replayed(self, copy: StateCopy) -> BadStep:
        objects, calls, mean = copy.objects, copy.calls, copy.mean
        names = {id(t): name for name, t in copy.named.items()}
        broken = TrainingState(objects)
        copy.state.put_back()
        losses: list[float] = []
        for at, call in enumerate(calls):
            put_settings(objects, call.settings)
            before, gradients = TrainingState(objects), dict[str, str]()

            def look(it: torch.optim.Optimizer, found: dict[str, str] = gradients) -> None:
                grads = {
                    names.get(id(p), "of no model"): p.grad for p in step_checks.with_gradients(it)
                }
                found |= step_checks.not_finite({n: g for n, g in grads.items() if g is not None})

            try:
                with step_checks.stepping(look):
                    result = self._fn(*call.args, **call.kwargs)
            except StopIteration:  # the iterator that the step reads has ended
                before.put_back()
                return BadStep(self.step - 1, _SOMETHING, None, tuple(losses), 0, _UNREPEATED)
            if step_checks.any_rank(bool(differs := step_checks.differing(call.losses, result))):
                broken.put_back()
                return self._differing(calls, at, differs)
            if objects.scaled:
                gradients.clear()
            elif not gradients:
                grads = {name: t.grad for name, t in copy.named.items() if t.grad is not None}
                gradients |= step_checks.not_finite(grads)
            found = (
                step_checks.described_losses(result, mean, self._jump)
                or step_checks.described("the gradient of", gradients)
                or step_checks.described("the weight", step_checks.not_finite(weights(objects)))
            )
            if not step_checks.any_rank(bool(found)):
                losses += step_checks.values(result)
                mean = step_checks.mean_after(result, mean)
                continue
            before.put_back()
            first, undone = self.step - len(calls) + at, len(calls) - at
            note = "" if call.versions == versions_of(call[:2]) else _WRITTEN
            fault = _located(self._fn, call, objects)
            before.put_back()  # locate leaves what it does not know, such as schedulers
            eps = ""
            stepped = fault is None and found.startswith("the weight")
            lost = step_checks.lost_eps(objects.optimizers) if stepped else {}
            if step_checks.any_rank(bool(lost)):
                eps = self._with_eps(call, objects, lost)
                before.put_back()
            return BadStep(first, found or _ELSEWHERE, fault, tuple(losses), undone, note, eps)
        repeated = TrainingState(objects)
        broken.put_back()
        fault = _located(self._fn, calls[-1], objects)
        repeated.put_back()
        return BadStep(self.step - 1, _SOMETHING, fault, tuple(losses), 0, _UNREPEATED)

    def _with_eps(
        self, call: Call, objects: TrainingObjects, lost: Mapping[str, list[dict[str, Any]]]
    ) -> str:
        """Try a step with a larger eps in some groups of optimizers; say if that helps."""
        groups = [(group, group["eps"]) for many in lost.values() for group in many]
        try:
            for group, _ in groups:
                group["eps"] = _EPS
            self._fn(*call.args, **call.kwargs)
            helps = not step_checks.not_finite(weights(objects))
        finally:
            for group, eps in groups:
                group["eps"] = eps
        return _LOST_EPS.format(whose=next(iter(lost)), eps=_EPS) if lost and helps else ""

    def _differing(self, calls: Sequence[Call], at: int, differs: str) -> BadStep:
        """Name the bad step by the losses that it had: the replay is of another training."""
        first = self.step - len(calls)
        found = [step_checks.described_losses(c.losses, MeanLoss(), None) for c in calls]
        last = next((i for i, words in enumerate(found) if words), len(calls) - 1)
        losses = [float(loss) for c in calls[:last] for loss in c.losses]
        note = _DIFFERS.format(step=first + at, losses=differs or "another on another rank")
        return BadStep(first + last, found[last] or _SOMETHING, None, tuple(losses), 0, note)


def _gradients(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (p.grad for p in params if p.grad is not None)


# After so many calls in a row that found the training written by other code, say so.
_OFTEN = 3

# An eps that float16 holds, with digits to spare.
_EPS = 1e-4
_LOST_EPS = (
    "{whose}, so that it divides by zero. Give it eps={eps:g}, with which this step was tried and "
    "is finite, or keep the weights in float32 and lower the ops, as polymp.torch.autocast does."
)
_ELSEWHERE = "another rank found a value that is not finite"
_SOMETHING = "a value is not finite"
_WRITTEN = "Tensors among its arguments were written since, so that their values may be others now."
_DIFFERS = (
    "Repeating step {step} gave the loss {losses}. So not all of the training was put back, such "
    "as an optimizer that only a library reaches, and no op was looked for. Name what is missing: "
    "catch(step, of=[...]). The training is as the last step left it."
)
_UNREPEATED = (
    "Repeating the steps did not give that value again, and the training is now in the state after "
    "them. The step reads its batch itself, or other code changed the training in a way that does "
    "not show: give the step its batch as an argument, and do all of the step in it."
)


def _located(fn: Callable[..., Any], call: Call, objects: TrainingObjects) -> Fault | None:
    model = objects.models[0] if len(objects.models) == 1 else None
    kwargs = dict(call.kwargs)
    if "model" in kwargs:  # the step's own, and not locate's
        fn = functools.partial(fn, model=kwargs.pop("model"))
    return replay.locate(fn, *call.args, model=model, **kwargs)
