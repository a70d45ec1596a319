"""Regions and the stack of them.

A region says how ops run between entering and leaving it. A frame of the stack holds the region
and what the backend has to restore on leaving, never the object that the user entered, so one
object may be entered twice, recursively, or by many threads. Nothing here knows a framework.
"""

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from polymp.rules import Policy

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Region:
    """What holds inside a region.

    Attributes:
        backend: "torch" or "jax".
        device: device type that the region speaks for, such as "cpu" or "cuda".
        enabled: False for a subregion in which ops run in the formats of their inputs.
        format: the low format, by full name.
        cache: True if the casts of parameters may be kept until the region ends.
        policy: the table that decides; None for the backend's own table of that device.
    """

    backend: str
    device: str
    enabled: bool
    format: str
    cache: bool
    policy: Policy | None = None


@dataclass(slots=True)
class _Frame(Generic[P]):
    region: Region
    previous: P


class Stack(threading.local, Generic[P]):
    """The open regions of this thread, oldest first.

    Leaving need not happen in the reverse order of entering: tasks of one event loop, and
    generators, interleave. A frame that is left while younger frames of its device are open hands
    its previous state on to the next of them, so that when all are left the state is what it was
    before the first. Two regions that are equal are interchangeable: the youngest one is left.
    """

    def __init__(self) -> None:
        """Start with no open region; called once for each thread."""
        self._frames: list[_Frame[P]] = []

    def __len__(self) -> int:
        return len(self._frames)

    def current(self, device: str) -> Region | None:
        """The innermost open region of the device, or None."""
        for frame in reversed(self._frames):
            if frame.region.device == device:
                return frame.region
        return None

    def push(self, region: Region, previous: P) -> None:
        """Open `region`; `previous` is what leaving it restores."""
        self._frames.append(_Frame(region, previous))

    def pop(self, region: Region) -> P | None:
        """Close the youngest open region equal to `region`.

        Returns:
            What to restore now, or None if a younger region of the same device stays in force.

        Raises:
            RuntimeError: no such region is open in this thread.
        """
        frames = self._frames
        if frames and frames[-1].region is region:  # the common case
            return frames.pop().previous
        for at in range(len(frames) - 1, -1, -1):
            if frames[at].region == region:
                left = frames.pop(at)
                for younger in frames[at:]:
                    if younger.region.device == region.device:
                        younger.previous = left.previous
                        return None
                return left.previous
        raise RuntimeError(f"cannot leave {region}: it is not open in this thread")
