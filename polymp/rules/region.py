"""Regions and the stack of them.

A region says how ops run between entering and leaving it. A frame of the stack holds the region
and what the backend has to restore on leaving, never the object that the user entered, so one
object may be entered twice, recursively, or by many threads. Nothing here knows a framework.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from polymp import dtypes
from polymp.errors import PolicyError
from polymp.fp8 import recipes
from polymp.rules.policy import Policy
from polymp.rules.row import Rule

F = TypeVar("F", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class Region:
    """The settings of a region: they hold from entering it to leaving it."""

    backend: str  # "torch" or "jax"
    device: str  # the device type whose ops run by it, such as "cpu" or "cuda"
    enabled: bool  # False for a subregion in which ops run in the dtypes of their inputs
    dtype: str  # the low dtype, by full name; an alias or a dtype object becomes that
    cache: bool  # True if the casts of parameters may be kept until the region ends
    # The table that decides; None for the backend's own table of that device.
    policy: Policy | None = None
    scope: str = ""  # path of the module that the region is in, names joined by dots

    def __post_init__(self) -> None:
        # Only a disabled region has another dtype than a float one, by torch's own name.
        with suppress(ValueError):
            object.__setattr__(self, "dtype", dtypes.name(self.dtype))
        if self.enabled and self.policy is not None and self.policy.fp8:
            _check_fp8(self.policy, self.dtype)


def _check_fp8(policy: Policy, dtype: str) -> None:
    """Refuse an enabled region of another dtype than bfloat16 with products in 8 bits."""
    in_8_bits = any(row.rule is Rule.FP8 and row.dtype in ("", dtype) for row in policy.rows)
    if in_8_bits and dtype != recipes.REGION_DTYPE:
        raise PolicyError(
            f"autocast(): policy {policy.name!r} runs products in 8 bits, which needs a region of "
            f"dtype bfloat16, not {dtype}: {recipes.NOT_FLOAT16}. Write bfloat16, or a policy "
            "without rule fp8."
        )


class Stack(threading.local, Generic[F]):
    """The open regions of this thread, as frames, oldest first.

    A frame is a tuple: the region, and after it the state that leaving restores. Regions need not
    be left in the reverse order of entering: tasks of one event loop interleave, and so do
    generators. A frame that is pulled out from under younger ones of its device hands its state on
    to the next of them, so that when all are left the state is what it was before the first. Of
    two regions that are equal, the youngest one is left.

    Attributes:
        frames: the frames of this thread.
    """

    def __init__(self) -> None:
        """Start with no open region; called once for each thread."""
        self.frames: list[F] = []

    def pull(self, region: Region) -> F | None:
        """Take out the youngest frame whose region equals `region`."""
        frames = self.frames
        for at in range(len(frames) - 1, -1, -1):
            if frames[at][0] == region:
                pulled = frames.pop(at)
                for i, younger in enumerate(frames[at:], start=at):
                    if younger[0].device == region.device:
                        frames[i] = cast(F, (younger[0], *pulled[1:]))
                        return None
                return pulled
        raise RuntimeError(f"cannot leave {region}: it is not open in this thread")
