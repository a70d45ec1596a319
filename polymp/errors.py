"""The errors of polymp.

Where torch.amp raises, its exception type and message are the contract and these are not used.
"""

import reprlib

_LONGEST = 1000  # characters of a line of a message
_BRIEF = 200  # of a value in it

_repr = reprlib.Repr()
_repr.maxother = 80


def escaped(text: str) -> str:
    """The text with characters that a terminal would obey or cannot show as `repr` has them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def brief(value: object) -> str:
    """The `repr` of a value that a user gave, shortened, in one line: of a model or a tensor."""
    return _shortened(" ".join(_repr.repr(value).split()), _BRIEF)


def readable(text: str) -> str:
    """A message of any length for a person: `escaped`, and very long lines without their middle."""
    return escaped("\n".join(_shortened(line, _LONGEST) for line in text.split("\n")))


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


class PolympError(Exception):
    """Any error that polymp itself raises; its text echoes what users wrote shortly and escaped."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(readable(arg) if isinstance(arg, str) else arg for arg in args))


class PolicyError(PolympError, ValueError):
    """A policy that cannot be read, or that a backend cannot run ops by."""


class NoPolicyError(PolicyError):
    """There is no policy of this name, or its file cannot be read."""


class ForbiddenOpError(PolympError, RuntimeError):
    """An op that the policy forbids was called in a region."""


class BackendMissingError(PolympError, ImportError):
    """A backend whose framework is not installed."""


class StuckError(PolympError, RuntimeError):
    """A scaler has skipped `stuck_after` steps in a row, and its `on_stuck` is "raise"."""


class UnscaledError(PolympError, RuntimeError):
    """An optimizer steps on gradients that went through float16, and no scaler takes the step."""


class BadStepError(PolympError, RuntimeError):
    """A training step made a value that is not finite.

    Args:
        report: the `polymp.diagnostics.bad_step.BadStep`.
        last_good: see the attribute.

    Attributes:
        report: likewise.
        last_good: in JAX, the arguments of the bad step, `(args, kwargs)`: the state of the
            training before it. None in torch, where the state was put back in place.
    """

    def __init__(self, report: object, last_good: object = None) -> None:
        super().__init__(str(report))
        self.report = report
        self.last_good = last_good


class RecordError(PolympError, ValueError):
    """A file that is no record, or no whole one; or records that cannot be compared."""


class UsageError(PolympError):
    """A command that cannot be carried out; the text says why, in one line."""


class ScalerWarning(UserWarning):
    """A loss scaler that is missing, or is stuck."""


class CatchWarning(UserWarning):
    """`catch` has undone a bad step, or cannot see all of the training."""


class PolicyWarning(UserWarning):
    """A part of a policy that has no effect where it is used."""


class LowWeightsWarning(UserWarning):
    """Weights in a low dtype whose updates are rounded away."""


class VersionWarning(UserWarning):
    """A library in another version than those that polymp is tested with."""
