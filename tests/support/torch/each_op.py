"""A mode that shows a test every op that runs in its block."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from polymp.backends.torch.autocast import kernel_registry, regions
from polymp.rules.policy import Policy, Region

ROOT = Path(__file__).parents[3]
OURS = tuple(str(ROOT / folder) for folder in ("polymp", "backends"))
# An interrupt while a region is entered or left can leave it open, as one of torch.amp's.
REGIONS = tuple(f"torch/autocast/{name}.py" for name in ("api", "regions", "region_casts"))


def files(frame: FrameType | None) -> Iterator[str]:
    """The file of a frame, and those of its callers."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def interrupted(program: Callable[[], object], at: int) -> None:
    """Run a program and interrupt it at a line of polymp, counted from 1; in no region's own."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        name = frame.f_code.co_filename
        if not name.startswith(OURS) or any(f.endswith(REGIONS) for f in files(frame)):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{Path(name).name}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(None)


def at_every_line(run: Callable[[int], object], step: int = 1) -> Iterator[str]:
    """Call `run` with 1, 2, ... until nothing is interrupted any more; yield the lines."""
    for at in itertools.count(1, step):
        try:
            run(at)
        except KeyboardInterrupt as error:
            yield str(error)
        else:
            return


@contextmanager
def inside(
    device: str,
    dtype: str = "float16",
    *,
    enabled: bool = True,
    policy: Policy | None = None,
) -> Iterator[Region]:
    region = Region("torch", device, enabled, dtype, True, policy)
    kernel_registry.prepare(region)
    with regions.PreparedRegion(regions.ticket(region)):
        yield region


class EachOp(TorchDispatchMode):
    """Calls `note(op, args, kwargs)` before every op below autocast and autograd, and runs it."""

    def __init__(self, note: Callable[[Any, Any, Any], Any] = lambda *_: None) -> None:
        super().__init__()
        self.note = note
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = self.note(op, args, kwargs or {})
        if noted is not None:
            self.seen.append(noted)
        return op(*args, **(kwargs or {}))
