"""What was decided in a run: every op that a row spoke of, with its dtypes.

    with polymp.recording() as record:
        loss = loss_fn(model(x), y)
    print(policy.unused(record))

The backends add to the record of the context they run in. Nothing here knows a framework.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from polymp.rules.policy import Decision
from polymp.rules.row import Row

T = TypeVar("T")


class Entry(NamedTuple):
    """One op, as it was decided.

    Attributes:
        backend: "torch" or "jax".
        op: its name in the vocabulary, "" if it has none.
        spelling: the framework's own name, with a prefix: "aten:softmax.int", "jax:exp"; of a
            function of JAX's, "".
        low: the region's dtype.
        scope: path of the module, where the backend knows it.
        row: the row that won; None, in what is noted and not kept, if there is none.
        dtypes: of the float inputs.
        decision: what it said.
        policy: name of the policy.
    """

    backend: str
    op: str
    spelling: str
    low: str
    scope: str
    row: Row | None
    dtypes: tuple[str, ...]
    decision: Decision
    policy: str = ""


class Decisions:
    """The entries of a run, in the order in which they were decided.

    torch decides at every call, JAX once for each equation when it plans a function.

    Attributes:
        entries: all of them.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def rows(self) -> set[Row]:
        """The rows that won at least once."""
        return {entry.row for entry in self.entries if entry.row is not None}

    def of(self, op: str) -> list[Entry]:
        """The entries of an op of the vocabulary."""
        return [entry for entry in self.entries if entry.op == op]

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Decisions({len(self.entries)} entries, {len(self.rows())} rows)"


class Recorder:
    """The side of a record that backends call; tracers of theirs override what they need.

    Attributes:
        record: what was decided.
    """

    def __init__(self) -> None:
        self.record = Decisions()
        self.outer: Recorder | None = None  # is told the same

    def around(self, entry: Entry, run: Callable[..., T], *args: Any) -> T:
        """Run an op that a backend is asked for, and note what was decided.

        Args:
            entry: its row is None where no row spoke of the op.
            run: runs it.
            args: of `run`.
        """
        self.note(entry)
        return run(*args)

    def note(self, entry: Entry) -> None:
        """Note what was decided of an op that runs next; an op without a row is passed over."""
        told: Recorder | None = self
        while told is not None and entry.row is not None:
            told.record.entries.append(entry)
            told = told.outer

    def follow(self, what: Any, low: str, policy: str = "") -> str | None:
        """A name for the call that was decided last, to be found on all that it becomes.

        Args:
            what: the backend's own record of the call.
            low: the region's dtype, "" outside of enabled regions.
            policy: name of the region's, likewise.

        Returns:
            None, for nobody follows calls.
        """

    def spared(self, what: Any, why: str) -> None:
        """A cast of a call was not made, for a reason: "shared", "cancelled"."""


_current: ContextVar[Recorder | None] = ContextVar("polymp.rules.decision_log", default=None)


def current() -> Recorder | None:
    """The recorder of this context, if what is decided in it is recorded."""
    return _current.get()


@contextmanager
def recorded_by(recorder: Recorder, passes_on: bool = True) -> Iterator[None]:
    """Hand what is decided inside to a recorder.

    Args:
        recorder: that gets it.
        passes_on: True to tell the recorder around it, too: who explains or audits takes nothing.
    """
    recorder.outer = _current.get() if passes_on else None
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)
