"""Records the decisions that the backends make in a block, as they tell them to `explain`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from polymp.rules import decision_log
from polymp.rules.decision_log import Entry
from polymp.rules.row import Row


class Decisions(decision_log.Recorder):
    """The entries of a run, in the order in which they were decided."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def note(self, entry: Entry) -> None:
        if entry.row is not None and not _planned_again():
            self.entries.append(entry)

    def rows(self) -> set[Row]:
        return {entry.row for entry in self.entries if entry.row is not None}

    def of(self, op: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.op == op]

    def __len__(self) -> int:
        return len(self.entries)


@contextmanager
def recording() -> Iterator[Decisions]:
    """Record the decisions of a block, of the backends that are imported by then."""
    kernels = sys.modules.get("polymp.backends.torch.autocast.kernel_registry")
    with ExitStack() as stack:
        if kernels is not None:  # torch's compiled kernels record nothing: ours take their place
            kernels.put_everywhere(stack)
        decisions = Decisions()
        decision_log.recorded_by(stack, decisions)
        yield decisions


def _planned_again() -> bool:
    """Whether a pass of JAX's planner plans a call again, whose decisions were told before."""
    planner = sys.modules.get("polymp.backends.jax.autocast.planner")
    again = planner and planner._CastPuller.through.__code__
    frame = sys._getframe(2) if again else None
    while frame is not None:
        if frame.f_code is again:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
