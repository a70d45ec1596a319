"""`BadStep`: the first step of a training whose numbers broke, and what to change.

`catch` of both frameworks finds the step and makes this record. What they do alike is here: the
checks of losses, and what happens at a bad step. Nothing here knows a framework.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Self, overload

from polymp import code_origin
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import HUGE, UNTRIED
from polymp.dtypes import FORMATS
from polymp.errors import BadStepError, CatchWarning, escaped
from polymp.mailbox import Copy, Mailbox

# The loss has run away if it grew by this factor within the steps that were replayed.
RUNAWAY = 10.0

# After so many bad steps in a row, training does not go on.
MANY = 3

# Of the mean loss, the share that stays at each step; a loss is compared with it from this many on.
STAYS, WARM_UP = 0.9, 10

# What is found where no more can be said.
SOMETHING = "a value is not finite"


class BadStep(NamedTuple):
    """A step that made a value that is not finite, or whose loss jumped; `print` shows it.

    Attributes:
        step: its number; 0 is the first call of the step.
        found: what broke: "the loss is NaN".
        fault: the op at which it broke; None if every op of the step has finite results.
        losses: of the steps before it, as far as they were replayed; the latest is the last.
        undone: the number of steps that were taken back, this one included; 0 if they could not be
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


class Mean(NamedTuple):
    """The mean of the last values of a loss, in which older ones count less."""

    value: Any = math.nan  # float32 [], on the loss's device; NaN before the first
    seen: int = 0  # how many values it is of


class LossVerbs(NamedTuple):
    """A framework's functions of losses on their devices."""

    is_bad: Callable[[Any], Any]  # whether a loss is Inf or NaN, bool []
    # Likewise, or whether it is above so many times a mean; and the mean with it in it.
    compared: Callable[[Any, Any, float], tuple[Any, Any]]
    sent: Callable[[Sequence[Any]], Sequence[Copy]]  # bools [], to the host
    alone: Callable[[], bool]  # False if other processes learn of a bad loss in `now` alone


class LossChecks:
    """The findings on the steps since the last `now`; some are still on their way to the host."""

    def __init__(
        self, verbs: LossVerbs, jump: float | None, means: Mapping[int, Mean] | None = None
    ) -> None:
        self.means: Mapping[int, Mean] = means or {}  # by the place of a loss in the results
        self._verbs, self._jump = verbs, jump
        self._mailbox: Mailbox[None] = Mailbox()

    def add(self, losses: Mapping[int, Any], bad: Sequence[Any] = ()) -> bool:
        """Check the losses of a call; return whether one so far, or of `bad`, is known to be bad.

        Several processes learn of it in `now` alone, so that all of them stop at the same step.
        """
        for copy in self._verbs.sent([*bad, *(self._is_bad(at, x) for at, x in losses.items())]):
            self._mailbox.post(copy, None)
        return self._verbs.alone() and self._arrived(wait=False)

    def now(self) -> bool:
        """Wait for what is on its way, and return whether something was bad."""
        return self._arrived(wait=True)

    def described(self, losses: Mapping[int, Any]) -> str:
        """Check the losses of a call, and say which is bad; "" if none. Waits for the device."""
        for at, loss in losses.items():
            mean = self.means.get(at, Mean())
            if bool(self._is_bad(at, loss)):
                number = float(loss)
                if math.isfinite(number):
                    before = float(mean.value)
                    return f"the loss is {number:.4g}; the mean of the last ones is {before:.4g}"
                sign = "-" if number == -math.inf else ""
                return f"the loss is {'NaN' if math.isnan(number) else f'{sign}Inf'}"
        return ""

    def _is_bad(self, at: int, loss: Any) -> Any:
        if self._jump is None:
            return self._verbs.is_bad(loss)
        mean = self.means.get(at, Mean())
        jump = self._jump if mean.seen >= WARM_UP else math.inf
        bad, value = self._verbs.compared(loss, mean.value, jump)
        self.means = {**self.means, at: Mean(value, mean.seen + 1)}
        return bad

    def _arrived(self, *, wait: bool) -> bool:
        return any([bool(bad) for bad, _ in self._mailbox.taken(wait=wait)])  # takes all


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


def sample_of(array: Any) -> int:
    """Return a hash of some numbers of a numpy array, which has no version, to notice a write."""
    return hash(array.flat[:: max(1, array.size // 256)].tobytes())


def described(found: Mapping[Any, str], name: Callable[[Any], str], after: str = "") -> str:
    """Say which values are not finite, of which each is "Inf" or "NaN"; "" if none."""
    if not found:
        return ""
    (of, what), *others = found.items()
    more = f", and {len(others)} more" if others else ""
    return f"{name(of)} is {what}{after}{more}"


class CaughtStep:
    """A training step that `catch` has wrapped.

    It is no method of a class, all of whose objects would share its state.

    Args:
        step: the function.
        every: steps between two copies.
        raises: whether a bad step raises.
        jump: the factor by which a loss may grow; None for any.

    Attributes:
        step: the number of calls so far, which is the number of the next step.
        reports: a `BadStep` for each bad step so far.
    """

    __name__: str

    def __init__(
        self, step: Callable[..., object], every: int, raises: bool, jump: float | None
    ) -> None:
        wrapper: Any = self  # callable in both backends
        functools.update_wrapper(wrapper, step, updated=())
        self.step: int = 0
        self.reports: list[BadStep] = []
        self._every, self._raises, self._jump = every, raises, jump

    def _stopped(self, report: BadStep, last_good: Any = None, goes_on: bool = True) -> None:
        """Raise a bad step, or warn of it if training goes on."""
        self.reports.append(report)
        if self._raises or not goes_on or in_a_row(self.reports):
            raise BadStepError(report, last_good)
        warn(str(report))

    def __enter__(self) -> NoReturn:
        """Say how it is used."""
        raise TypeError(
            "catch is not a context manager. Write step = catch(step), with the function that does "
            "a training step, and call it for each batch."
        )

    def __exit__(self, *error: object) -> None:
        """Never reached; `with` asks for it first."""

    @overload
    def __get__(self, it: None, owner: type) -> Self: ...

    @overload
    def __get__(self, it: object, owner: type | None = None) -> NoReturn: ...

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


def in_a_row(reports: Sequence[BadStep]) -> bool:
    """Return whether the last bad steps followed each other, so that undoing does not help."""
    last = reports[-MANY:]
    return len(last) == MANY and all(b.step == a.step + a.undone for a, b in pairwise(last))


def checked_arguments(step: object, every: object, on_bad: object, jump: object) -> None:
    """Check the arguments of `catch`."""
    if step is not None and not callable(step):
        raise TypeError(
            f"catch(step) needs the function that does a training step, got {step!r}. Give the "
            "function, not what it returned."
        )
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(f"catch(every=...) is a number of steps, a positive int, got {every!r}")
    if every < 1:
        raise ValueError(f"catch(every=...) is a number of steps, a positive int, got {every!r}")
    if on_bad not in ("raise", "report"):
        raise ValueError(f"catch(on_bad=...) is 'raise' or 'report', got {on_bad!r}")
    if jump is not None and not (isinstance(jump, (int, float)) and jump > 1):
        raise ValueError(
            "catch(jump=...) is the factor by which a loss may grow, above 1, or None, got "
            f"{jump!r}"
        )
