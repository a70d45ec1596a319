"""Progress on a terminal, for calls that take more than two seconds: a line of tqdm's.

    with progress.line("locate", unit="op") as line:
        for op in ops:
            line.step()

It is written to standard error, and only if that is a terminal and tqdm is installed; it is gone
when the call ends. No thread is started, so that a line moves only when a step is made.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

AFTER = 2.0  # seconds


class Line:
    """A line on a terminal, shown once it has been open for `AFTER` seconds; or one not shown."""

    def __init__(
        self, what: str = "", total: int | None = None, unit: str = "", seen: bool = False
    ) -> None:
        self._what = what  # takes so long
        self._bar = _bar(what, AFTER, total=total, unit=f" {unit}s") if seen else None

    def step(self) -> None:
        """Count a step; called often, so that it has to be cheap."""
        if self._bar is not None:
            self._bar.update()

    def stage(self, name: str) -> None:
        """Say that a stage begins which makes no steps."""
        if self._bar is not None:
            self._bar.close()
            self._bar = _bar(f"{self._what}: {name} ...", 0.0, bar_format="{desc}")

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def line(what: str, total: int | None = None, unit: str = "step") -> Iterator[Line]:
    """Show the progress of a block, if there is a terminal to show it on."""
    with closing(Line(what, total, unit, _is_seen())) as found:
        yield found


def tell(text: str) -> None:
    """Write a line to standard error, for a call whose result has no words of its own."""
    with suppress(OSError, ValueError):  # it may be closed
        print(text, file=sys.stderr)


def _is_seen() -> bool:
    """True if standard error is a terminal and tqdm is there to write to it."""
    stream = sys.stderr
    return stream is not None and stream.isatty() and importlib.util.find_spec("tqdm") is not None


def _bar(what: str, delay: float, **options: Any) -> Any:
    from tqdm import tqdm

    # tqdm's monitor is a thread; with an interval of 0 there is none.
    alone = type("tqdm", (tqdm,), {"monitor_interval": 0})
    return alone(desc=what, file=sys.stderr, leave=False, delay=delay, **options)
