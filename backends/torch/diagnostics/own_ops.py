"""`Own`: a context for ops that a tracer runs for itself."""

import threading

import torch

from polymp.backends.torch.compat import dispatcher


class _Busy(threading.local):
    """The number of measurements that run in this thread: their ops belong to no program."""

    def __init__(self) -> None:
        self.depth = 0


_busy = _Busy()


def running() -> bool:
    """Return whether a tracer runs ops of its own in this thread."""
    return _busy.depth > 0


class Own:
    """A context whose ops no tracer sees and no region casts: `with Own(keys): ...`.

    Args:
        keys: autocast's dispatch keys.
    """

    def __init__(self, keys: torch._C.DispatchKeySet) -> None:
        self._keys = keys

    def __enter__(self) -> None:
        _busy.depth += 1
        self._guard = dispatcher.ExcludeKeys(self._keys)
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        _busy.depth -= 1
