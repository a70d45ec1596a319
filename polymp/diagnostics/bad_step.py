"""`BadStep`: the first step of a training whose numbers broke, and what to change.

`catch` of both frameworks finds the step and makes this record. What they do alike is here: the
checks of losses, and what happens at a bad step. Nothing here knows a framework.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

from polymp import code_origin
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import UPDATE
from polymp.diagnostics.remedy import SLOWER, UNTRIED, remedy_of
from polymp.dtypes import FORMATS
from polymp.errors import BadStepError, CatchWarning, brief, escaped

# The loss has run away if it grew by this factor within the steps that were replayed.
RUNAWAY = 10.0

# Products of numbers of this size overflow in every dtype; no weight that trains has it.
HUGE = 1e18

# Where no op is found in the first step, before which nothing was updated.
_AT_ONCE = "Look at the arguments, and at the magnitudes in an audit of this step."

# After so many bad steps in a row, training does not go on.
MANY = 3

# A step may raise these for numbers that are not finite, as distributions and guards in scripts do.
RAISED = (ValueError, ArithmeticError, RuntimeError, AssertionError, SystemExit)

P = ParamSpec("P")
R = TypeVar("R")


class BadStep(NamedTuple):
    """A step that made a value that is not finite; `print` shows it.

    Attributes:
        step: its number; 0 is the first call of the step.
        found: what broke: "the loss is NaN".
        fault: the op at which it broke; None if every op of the step has finite results.
        losses: of the steps before it that were replayed; the latest is the last. Of several
            numbers that the step returns, the one that is not finite.
        undone: the number of steps that were taken back, this one included; 0 if none could be
            repeated.
        note: a sentence on what a replay could not show; "" if there is nothing to say.
    """

    step: int
    found: str
    fault: Fault | None = None
    losses: tuple[float, ...] = ()
    undone: int = 1
    note: str = ""

    @property
    def remedy(self) -> str:
        """The change that may help, and whether it was tried; "" if no step could be repeated."""
        fault = self.fault
        if fault is None:
            other = SLOWER if self.step else _AT_ONCE
            return _grown(self.losses, None) or (other if self.undone and not self.note else "")
        if fault.direction == UPDATE or fault.kind in ("input", "index", "inside"):
            return remedy_of(fault)
        return _grown(self.losses, fault) or remedy_of(fault)

    def __str__(self) -> str:
        lines = [f"step {self.step}: {self.found}"]
        if self.fault is not None:
            lines += [f"  {line}" for line in str(self.fault._replace(remedy="")).splitlines()]
        if self.losses:
            lines.append(
                f"  losses before: {', '.join(f'{loss:.4g}' for loss in self.losses[-5:])}"
            )
        if self.note:
            lines.append(f"  {self.note}")
        helps = (self.fault.remedy if self.fault is not None else "", self.remedy)
        lines += [f"  {line}" for line in dict.fromkeys(helps) if line]
        return escaped("\n".join(lines))


def _grown(losses: Sequence[float], fault: Fault | None) -> str:
    """Say what has grown without bound before a step, and what helps; "" if nothing has."""
    if len(losses) > 1 and losses[-1] > RUNAWAY * abs(min(losses)) > 0:
        grown = f"The loss grew from {min(losses):.3g} to {losses[-1]:.3g} in the steps before"
        return f"{grown}: lower the learning rate, or clip the gradients.{UNTRIED}"
    for i, operand in enumerate(fault.inputs if fault is not None else ()):
        if operand.largest > HUGE:
            name = operand.name or f"input {i} of {fault.op if fault else ''}"
            return (  # a weight, or the batch, or what they made
                f"{name} is as large as {operand.largest:.3g}: lower the learning rate, clip the "
                f"gradients, or look at the data.{UNTRIED}"
            )
    return ""


class LossChecks:
    """Whether losses were bad: bools [] on their way to the host, an `AsyncCopy` of each."""

    def __init__(self) -> None:
        self._sent: tuple[Any, ...] = ()

    def add(self, sent: Iterable[Any], alone: bool) -> bool:
        """Add those of a call; return whether one so far is known to be true."""
        # If not `alone`, other processes learn of it in `now`, so that all stop at the same step.
        self._sent = (*self._sent, *sent)
        return alone and self.now(wait=False)

    def now(self, *, wait: bool = True) -> bool:
        """Return whether one that is here is true; wait for those that are on their way."""
        here = [copy for copy in self._sent if wait or copy.is_ready()]
        self._sent = tuple(copy for copy in self._sent if copy not in here)
        return any([bool(copy.values()) for copy in here])


def bad_loss(losses: Mapping[int, Any], name: Callable[[int], str]) -> str:
    """Say which of the losses of a call is bad; "" if none. Waits for the device."""
    for at, number in zip(losses, map(float, losses.values()), strict=True):
        if not math.isfinite(number):
            what = "NaN" if math.isnan(number) else "Inf" if number > 0 else "-Inf"
            return f"the loss{name(at) if len(losses) > 1 else ''} is {what}"
    return ""


def _before(bad: Mapping[int, Any], losses: Iterable[Mapping[int, Any]]) -> tuple[float, ...]:
    """Return earlier losses in the place of the one that is bad, or that is the only one."""
    broken = [at for at, loss in bad.items() if len(bad) == 1 or not math.isfinite(loss)]
    return tuple(float(each[at]) for at in broken[:1] for each in losses if at in each)


class Repeated(NamedTuple):
    """A call of a step that was repeated."""

    losses: Mapping[int, Any]
    on_cpu: bool  # whether the losses are
    found: Callable[[], str]  # says what else is not finite; "" if nothing is
    before: Any = None  # the state of the training before it, if it is no longer the training's own


def first_difference(losses: Mapping[int, Any], again: Repeated) -> str:
    """Say which finite loss was another when its step was repeated; "" if none."""
    # On a CPU they may differ by a few roundings; other devices may add up in another order.
    for at, loss in losses.items():
        if at not in again.losses or not math.isfinite(was := float(loss)):
            continue
        now, dtype = float(again.losses[at]), str(loss.dtype).rpartition(".")[2]
        near = max(4 * FORMATS[dtype].eps if dtype in FORMATS else 0.0, 1e-5)
        if not math.isclose(was, now, rel_tol=near if again.on_cpu else 0.1):
            return f"{now:.4g}, where it was {was:.4g}"
    return ""


def described(found: Mapping[Any, str], name: Callable[[Any], str], after: str = "") -> str:
    """Say which values are not finite, of which each is "Inf" or "NaN"; "" if none."""
    if not found:
        return ""
    (of, what), *others = found.items()
    more = f", and {len(others)} more" if others else ""
    return f"{name(of)} is {what}{after}{more}"


class BatchCopies:
    """Copies of numpy arrays that calls are given; a buffer may be filled again for the next."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[Any], bytes, Any]] = {}  # by place

    def of(self, place: int, array: Any) -> Any:
        """Return a copy of an argument."""
        import numpy as np

        # An array that is given again, with the same numbers at some places, is taken to be as it
        # was: a data set is not read as a whole in each call.
        ends = np.linspace(0, array.size - 1, 256 if array.size else 0).astype(np.int64)
        some = array.flat[ends].tobytes()
        it, before, copy = self._last.get(place, (None, b"", None))
        if it is None or it() is not array or before != some:
            copy = array.copy()
            self._last[place] = weakref.ref(array), some, copy
        return copy


class NoBlock:
    """A wrapper of functions, which `with` refuses in words."""

    _usage: str  # the words

    def __enter__(self) -> NoReturn:
        """Say how it is used."""
        raise TypeError(self._usage)

    def __exit__(self, *error: object) -> None:
        """Never reached; `with` asks for it first."""


class CaughtStep(NoBlock, Generic[P, R]):
    """A training step that `catch` has wrapped.

    It is no method of a class, all of whose objects would share its state.

    Args:
        step: the function.
        every: steps between two copies.
        raises: whether a bad step raises.

    Attributes:
        step: the number of calls so far that have not raised, which is the number of the next step.
        reports: a `BadStep` for each bad step so far.
    """

    __name__: str
    _usage = (
        "catch is not a context manager. Write step = catch(step), with the function that does a "
        "training step, and call it for each batch."
    )
    _copy: Any = None  # of the state, from which the calls since can be repeated
    _calls: list[Any]  # these, each with the `losses` that it had

    _unrepeated: str  # the note where a bad value did not come again
    _in_place: bool  # whether the step changes its training in place, and not by its results

    def __init__(self, step: Callable[P, R], every: int, raises: bool) -> None:
        functools.update_wrapper(self, step, updated=())
        self.step: int = 0
        self.reports: list[BadStep] = []
        self._fn, self._every, self._raises = step, every, raises
        self._calls, self._checks = [], LossChecks()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do a step, and check it.

        Args:
            args: of the step.
            kwargs: of the step.

        Returns:
            The step's results.

        Raises:
            BadStepError: a value is not finite; the training is in the state before that step, or
                the error has that state. In torch, also if the step raised an error for it.
            TypeError: in JAX, the call is traced.
            ValueError: in torch, no model and no optimizer was found.

        Warns:
            CatchWarning: likewise, if `on_bad` is "report".
        """
        given = self._begin(args, kwargs)
        self.step += 1
        result: R
        try:
            result, losses, bad = self._do(*given)
        except BaseException as error:
            if isinstance(error, RAISED) and self._broke(error):
                self._stop(goes_on=False)
            self._calls.pop()  # it is not repeated
            self.step -= 1
            raise
        self._calls[-1].losses.update(losses)
        if self.step == 1 and not losses:
            warn(
                "catch: the step returns no loss, a float with one element, so that a bad step may "
                f"show up to {self._every} calls later. Return the loss."
            )
        if bad:
            result = self._without(result, self._stop())
        return result

    def check(self) -> None:
        """Check losses and state now, and wait for the device: before saving a checkpoint.

        Under several ranks, every rank calls it. In JAX, what the program has let go of is not
        checked, and a bad step raises whatever `on_bad` is.

        Raises:
            BadStepError: as a call does.

        Warns:
            CatchWarning: as a call does.
        """
        if self._calls and self._anywhere(self._bad_state() or self._checks.now()):
            self._stop(goes_on=self._in_place)

    # Of a backend, which also says what differs in the methods below these.

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Record a call, and copy the training if it is time; return the arguments."""
        raise NotImplementedError

    def _do(self, args: Any, kwargs: Any) -> tuple[R, dict[int, Any], bool]:
        """Do the step; return its results, its losses by place, and whether one is bad."""
        raise NotImplementedError

    def _bad_state(self) -> bool:
        """Return whether the state after the last call is not finite."""
        raise NotImplementedError

    def _broke(self, error: BaseException) -> bool:
        """Return whether a value was not finite in the last call, which raised, or before it."""
        return False

    def _repeated(self) -> Iterator[Repeated]:
        """Repeat the calls from the copy."""
        raise NotImplementedError

    def _another(self, step: int, losses: str) -> str:
        """Return the note on a step that had other losses when it was repeated."""
        raise NotImplementedError

    def _name(self, at: int) -> str:
        """Return the name, after a space, of one of several losses, by its place."""
        return ""

    def _located(self, call: Any, before: Any) -> tuple[Fault | None, str]:
        """Return the op at which a call broke, and a note."""
        raise NotImplementedError

    def _without(self, result: Any, before: Any) -> Any:
        """Return the results of a call, with the state before a bad step in place of its own."""
        return result

    def _back_to(self, before: Any) -> tuple[Any, bool]:
        """Return the arguments that have the state before a bad step, and if it is known."""
        return None, True

    def _anywhere(self, found: bool) -> bool:
        """Return whether any process found something; all ask."""
        return found

    def _stop(self, goes_on: bool = True) -> Any:
        """Raise the first bad step, or warn of it if training goes on; return the state before."""
        report, before = self._first_bad()
        self._copy, self._calls, self._checks = None, [], LossChecks()
        last_good, known = self._back_to(before)
        self.reports.append(report)
        last = self.reports[-MANY:]
        in_a_row = all(b.step == a.step + max(a.undone, 1) for a, b in pairwise(last))
        if self._raises or not (goes_on and known) or (len(last) == MANY and in_a_row):
            raise BadStepError(report, last_good)
        steps = f"\n  Steps {report.step} to {report.step + report.undone - 1} are left out."
        warn(f"{report}{steps if report.undone > 1 else ''}")
        return before

    def _first_bad(self) -> tuple[BadStep, Any]:
        """Repeat the calls; return the first bad step, and the state before it if it is known."""
        first, losses = self.step - len(self._calls), list[Mapping[int, float]]()
        for at, (call, again) in enumerate(zip(self._calls, self._repeated(), strict=False)):
            differs = first_difference(call.losses, again)
            if self._anywhere(bool(differs)):
                return self._by_losses(self._another(first + at, differs)), None
            found = bad_loss(again.losses, self._name) or again.found()
            if self._anywhere(bool(found)):
                fault, note = self._located(call, again.before)
                if not found:
                    found, note = "another rank has a bad value", "Read the errors of all ranks."
                undone = len(self._calls) - at
                earlier = _before(again.losses, losses)
                return BadStep(first + at, found, fault, earlier, undone, note), again.before
            losses.append({at: float(loss) for at, loss in again.losses.items()})
        return self._by_losses(self._unrepeated), None

    def _by_losses(self, note: str) -> BadStep:
        """Return the bad step by the losses that the calls had: repeated, they are other steps."""
        losses = [call.losses for call in self._calls]
        found = [bad_loss(each, self._name) for each in losses]
        bad = next((at for at, words in enumerate(found) if words), len(found) - 1)
        before = _before(losses[bad], losses[:bad])
        first = self.step - len(found)
        return BadStep(first + bad, found[bad] or "a value is not finite", None, before, 0, note)

    def __get__(self, it: object, owner: type | None = None) -> Self:
        """Refuse to be called as a method."""
        if it is None:
            return self
        name = self.__name__
        raise TypeError(
            f"catch wraps a function, or the method of one object, and {type(it).__name__}.{name} "
            "was wrapped in its class. Remove the decorator, and write in __init__: "
            f"self.{name} = catch(self.{name})"
        )


def warn(message: str) -> None:
    """Give a warning at the line of the user's that called."""
    warnings.warn(message, CatchWarning, stacklevel=code_origin.outside())


def checked_arguments(step: object, every: object, on_bad: object) -> None:
    """Check the arguments of `catch`."""
    if not callable(step):
        raise TypeError(  # None for @catch(every=10)
            f"catch(step) needs the function that does a training step, got {brief(step)}. Give "
            "the function, not what it returned, with options, too: step = catch(step, every=10)."
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        kind = ValueError if type(every) is int else TypeError
        raise kind(f"catch(every=...) is a number of steps, a positive int, got {every!r}")
    if on_bad not in ("raise", "report"):
        raise ValueError(f"catch(on_bad=...) is 'raise' or 'report', got {on_bad!r}")
