"""A record of the decisions of a run: every op that a row decided for, with its dtypes.

The backends tell the recorder of the context they run in, which is one of `explain` or its like.
Nothing here knows a framework.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from polymp.rules.policy import Decision, Policy
from polymp.rules.row import Row

T = TypeVar("T")


class Entry(NamedTuple):
    """One op, as it was decided."""

    backend: str  # "torch" or "jax"
    op: str  # its name in the vocabulary, "" if it has none
    # The framework's own name, with a prefix: "aten:softmax.int", "jax:exp"; of a function of
    # JAX's, "".
    spelling: str
    low: str  # the region's dtype
    scope: str  # path of the module, where the backend knows it
    row: Row | None  # the row that won; None if there is none, in entries that are not kept
    dtypes: tuple[str, ...]  # of the float inputs
    decision: Decision  # the dtypes that followed
    policy: str = ""  # name of the policy
    # Under rule fp8, the recipe that the product runs by in 8 bits; "" if it does not.
    recipe: str = ""
    # Under rule fp8, why the product runs as under rule lower; "" if it does not.
    fallback: str = ""


class Recorder:
    """Receives the decisions of a run from the backends, whose tracers override its methods."""

    def __init__(self) -> None:
        self.outer: Recorder | None = None  # which notes the same
        # The policy by which a region runs, in place of its own; None if it runs by that.
        self.instead: Callable[[Policy], Policy] | None = None

    def around(self, entry: Entry, run: Callable[..., T], *args: Any) -> T:
        """Run an op that a backend is asked for, and note what was decided."""
        self.note(entry)
        return run(*args)

    def note(self, entry: Entry) -> None:
        """Note what was decided of an op that runs next."""

    def follow(self, what: Any, low: str, policy: str = "") -> str | None:
        """Return a name for the call that was decided last, to be put on all that it becomes."""


_current: ContextVar[Recorder | None] = ContextVar("polymp.rules.decision_log", default=None)


def current() -> Recorder | None:
    """The recorder of this context, if what is decided in it is recorded."""
    return _current.get()


def recorded_by(stack: ExitStack, recorder: Recorder) -> None:
    """Send the decisions made until a stack is closed to a recorder."""
    before = _current.get()
    recorder.outer = before
    stack.callback(_current.set, before)
    _current.set(recorder)


@contextmanager
def paused() -> Iterator[None]:
    """Record nothing inside: an op that was noted as a whole runs there."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
