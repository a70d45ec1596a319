"""A mode that shows a test every op that runs in its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EachOp(TorchDispatchMode):
    """Calls `note(op, args, kwargs)` before every op below autocast and autograd, and runs it.

    Attributes:
        seen: what `note` returned, but for None.
    """

    def __init__(self, note: Callable[[Any, Any, Any], Any] = lambda *_: None) -> None:
        super().__init__()
        self.note = note
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = self.note(op, args, kwargs or {})
        if noted is not None:
            self.seen.append(noted)
        return op(*args, **(kwargs or {}))
