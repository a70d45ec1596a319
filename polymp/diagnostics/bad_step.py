"""`BadStep`: the first step of a training whose numbers broke, and what to change.

`catch` of both frameworks finds the step and makes this record. What they do alike is here: the
checks of losses, and what happens at a bad step. Nothing here knows a framework.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Self

from polymp import code_origin
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import HUGE, UNTRIED
from polymp.dtypes import FORMATS
from polymp.errors import BadStepError, CatchWarning, brief, escaped

# The loss has run away if it grew by this factor within the steps that were replayed.
RUNAWAY = 10.0

# After so many bad steps in a row, training does not go on.
MANY = 3

# What is found where no more can be said.
SOMETHING = "a value is not finite"


class BadStep(NamedTuple):
    """A step that made a value that is not finite; `print` shows it.

    Attributes:
        step: its number; 0 is the first call of the step.
        found: what broke: "the loss is NaN".
        fault: the op at which it broke; None if every op of the step has finite results.
        losses: of the steps before it that were replayed; the latest is the last.
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
            rate = f"Lower the learning rate, or clip the gradients.{UNTRIED}"
            return _grown(self.losses, None) or (rate if self.undone else "")
        if fault.remedy:
            return fault.remedy
        if fault.kind == "input" and ".grad" in fault.why:
            return "Call zero_grad() before the backward pass, which adds to what is there."
        if fault.kind in ("input", "index"):
            return f"Look at the data: {fault.why}."
        if grown := _grown(self.losses, fault):
            return grown
        place = f" in {fault.module}" if fault.module else ""
        if fault.kind == "number":
            return f"Use another constant, or give {fault.op} the rule fp32{place}.{UNTRIED}"
        if (fault.kind == "operation" and fault.run != "bfloat16") or fault.run == "float32":
            return f"Change the code: {fault.op} has no finite result there in float32 either."
        other = ", or use bfloat16" if fault.run == "float16" and fault.kind != "saturation" else ""
        return f"Give {fault.op} the rule fp32{place}{other}.{UNTRIED}"

    def __str__(self) -> str:
        lines = [f"step {self.step}: {self.found}"]
        if self.fault is not None:
            lines += [f"  {line}" for line in str(self.fault).splitlines()]
        if self.losses:
            lines.append(
                f"  losses before: {', '.join(f'{loss:.4g}' for loss in self.losses[-5:])}"
            )
        if self.note:
            lines.append(f"  {self.note}")
        if self.remedy and not (self.fault is not None and self.fault.remedy):  # which has it
            lines.append(f"  {self.remedy}")
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
        """Add those of a call; return whether one so far is known to be true.

        If not `alone`, other processes learn of it in `now`, so that all stop at the same step.
        """
        self._sent = (*self._sent, *sent)
        return alone and self.now(wait=False)

    def now(self, *, wait: bool = True) -> bool:
        """Return whether one that is here is true; wait for those that are on their way."""
        here = [copy for copy in self._sent if wait or copy.is_ready()]
        self._sent = tuple(copy for copy in self._sent if copy not in here)
        return any([bool(copy.values()) for copy in here])


def bad_loss(losses: Mapping[int, Any]) -> str:
    """Say which of the losses of a call is bad; "" if none. Waits for the device."""
    for number in map(float, losses.values()):
        if not math.isfinite(number):
            return f"the loss is {'NaN' if math.isnan(number) else 'Inf' if number > 0 else '-Inf'}"
    return ""


def first_difference(losses: Iterable[tuple[float, float, str]], on_cpu: bool) -> str:
    """Say which finite loss was another when its step was repeated; "" if none.

    Each has its first value, its second and its dtype. On a CPU they may differ by a few roundings;
    other devices may add up in another order.
    """
    for was, now, dtype in losses:
        near = max(4 * FORMATS[dtype].eps if dtype in FORMATS else 0.0, 1e-5) if on_cpu else 0.1
        if math.isfinite(was) and not math.isclose(was, now, rel_tol=near):
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
    """Copies of the numpy arrays that calls are given; a buffer may be filled again for the next.

    An array that is given again, with the same numbers at some places, is taken to be as it was: a
    data set is not read as a whole in each call.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[Any], bytes, Any]] = {}  # by place

    def of(self, place: int, array: Any) -> Any:
        """Return a copy of an argument."""
        import numpy as np

        ends = np.linspace(0, array.size - 1, 256 if array.size else 0).astype(np.int64)
        some = array.flat[ends].tobytes()
        it, before, copy = self._last.get(place, (None, b"", None))
        if it is None or it() is not array or before != some:
            copy = array.copy()
            self._last[place] = weakref.ref(array), some, copy
        return copy


class NoBlock:
    """A wrapper of steps, which `with` refuses in words."""

    def __enter__(self) -> NoReturn:
        """Say how it is used."""
        raise TypeError(
            "catch is not a context manager. Write step = catch(step), with the function that does "
            "a training step, and call it for each batch."
        )

    def __exit__(self, *error: object) -> None:
        """Never reached; `with` asks for it first."""


class Decorator(NoBlock):
    """The result of `catch` without a step: `wrap`, to be called with the step."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self._wrap = wrap

    def __call__(self, step: Callable[..., object]) -> Any:
        """Return the wrapped step."""
        return self._wrap(step)


class CaughtStep(NoBlock):
    """A training step that `catch` has wrapped.

    It is no method of a class, all of whose objects would share its state.

    Args:
        step: the function.
        every: steps between two copies.
        raises: whether a bad step raises.

    Attributes:
        step: the number of calls so far, which is the number of the next step.
        reports: a `BadStep` for each bad step so far.
    """

    __name__: str

    def __init__(self, step: Callable[..., object], every: int, raises: bool) -> None:
        wrapper: Any = self  # callable in both backends
        functools.update_wrapper(wrapper, step, updated=())
        self.step: int = 0
        self.reports: list[BadStep] = []
        self._every, self._raises = every, raises

    def _stopped(self, report: BadStep, last_good: Any = None, goes_on: bool = True) -> None:
        """Raise a bad step, or warn of it if training goes on."""
        self.reports.append(report)
        last = self.reports[-MANY:]
        in_a_row = all(b.step == a.step + a.undone for a, b in pairwise(last))
        if self._raises or not goes_on or (len(last) == MANY and in_a_row):
            raise BadStepError(report, last_good)
        warn(str(report))

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
    if step is not None and not callable(step):
        raise TypeError(
            "catch(step) needs the function that does a training step, got "
            f"{brief(step)}. Give the function, not what it returned."
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        kind = ValueError if type(every) is int else TypeError
        raise kind(f"catch(every=...) is a number of steps, a positive int, got {every!r}")
    if on_bad not in ("raise", "report"):
        raise ValueError(f"catch(on_bad=...) is 'raise' or 'report', got {on_bad!r}")
