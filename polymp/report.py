"""What was decided in a run: every op that a row spoke of, with its formats.

    with polymp.recording() as report:
        loss = loss_fn(model(x), y)
    print(policy.unused(report))

The backends add to the report of the context they run in. Nothing here knows a framework.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from polymp.rules import Decision, Row


class Entry(NamedTuple):
    """One op, as it was decided.

    Attributes:
        backend: "torch" or "jax".
        op: its name in the vocabulary, "" if it has none.
        spelling: the framework's own name, with a prefix: "aten:softmax.int", "jax:exp"; of a
            function of JAX's, "".
        low: the region's format.
        scope: path of the module, where the backend knows it.
        row: the row that won.
        formats: of the float inputs.
        decision: what it said.
    """

    backend: str
    op: str
    spelling: str
    low: str
    scope: str
    row: Row
    formats: tuple[str, ...]
    decision: Decision


class Report:
    """The entries of a run, in the order in which they were decided.

    torch decides at every call, JAX once for each equation when it plans a function.

    Attributes:
        entries: all of them.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def rows(self) -> set[Row]:
        """The rows that won at least once."""
        return {entry.row for entry in self.entries}

    def of(self, op: str) -> list[Entry]:
        """The entries of an op of the vocabulary."""
        return [entry for entry in self.entries if entry.op == op]

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Report({len(self.entries)} entries, {len(self.rows())} rows)"


_current: ContextVar[Report | None] = ContextVar("polymp.report", default=None)

# What a backend has to do while a report is made.
preparations: list[Callable[[], AbstractContextManager[None]]] = []


def current() -> Report | None:
    """The report that is being made in this context, if there is one."""
    return _current.get()


@contextmanager
def recording() -> Iterator[Report]:
    """Record what is decided inside, in this thread, by every backend that is imported.

    Ops then take longer. Code that torch.compile or jax.jit compiled before is not looked at
    again, and decides nothing.
    """
    report = Report()
    with ExitStack() as stack:
        for prepare in preparations:
            stack.enter_context(prepare())
        token = _current.set(report)
        stack.callback(_current.reset, token)
        yield report
