"""`Mailbox`: values that a device still computes, read when they have come to the host.

A copy of a value is posted when its program is started; later the host takes the copies that have
arrived. Each framework has an `AsyncCopy`, which starts one and knows whether it is there.
"""

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

Note = TypeVar("Note")


class Copy(Protocol):
    """A copy of an array on its way to the host."""

    def is_ready(self) -> bool:
        """Return whether `values` would not wait."""

    def values(self) -> Any:
        """Return the array on the host. Waits for it."""


class Mailbox(Generic[Note]):
    """Copies on their way to the host, the oldest first, each with a note of what it is."""

    def __init__(self) -> None:
        # A tuple, so that who keeps this object's attributes can put them back.
        self._waiting: tuple[tuple[Copy, Note], ...] = ()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def post(self, copy: Copy, note: Note) -> None:
        """Add a copy."""
        self._waiting = (*self._waiting, (copy, note))

    def taken(self, *, wait: bool = False) -> Iterator[tuple[Any, Note]]:
        """Take out copies that have arrived, in order; the values and the note of each.

        With `wait`, all of them: the host waits for those that have not arrived.
        """
        while self._waiting and (wait or self._waiting[0][0].is_ready()):
            (copy, note), *rest = self._waiting
            self._waiting = tuple(rest)
            yield copy.values(), note
