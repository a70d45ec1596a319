"""A scaler's state on its way to the host, while nobody waits for it."""

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakMethod

import torch

from polymp.backends.torch.scaler import scale_update
from polymp.scaling.scale_rule import ScaleState

# Updates between two copies. A copy costs the host some microseconds.
_EVERY = 4


class AsyncRead:
    """Copies the state to the host now and then, and tells what the last copy that arrived said.

    Attributes:
        seen: the state of the last copy that has arrived; None before the first.
        age: updates since the state that `seen` is.
    """

    def __init__(self) -> None:
        self.seen: ScaleState | None = None
        self.age = 0
        self._on_its_way: tuple[torch.Tensor, torch.Event | None, int] | None = None
        self._given = 0  # how often a scale was given
        self._seen_of = 0  # what that was when `seen` was sent
        self._sent = 0  # updates since the copy on its way was started
        self._left: tuple[torch.Tensor, int] | None = None  # the scale and its version

    def __reduce__(self) -> Any:
        return AsyncRead, ()

    def updated(self, *state: torch.Tensor) -> bool:
        """Note an update; take in a copy that has arrived, start another.

        Args:
            *state: scale [], tracker [] and counts [3] of `scale_update`, on one device.

        Returns:
            True if `seen` is new.
        """
        self.age += 1
        self._sent += 1
        new = False
        if self._on_its_way is not None:
            copy, event, given = self._on_its_way
            if event is None or event.query():
                (tracker,), numbers = copy[:1].tolist(), copy[1:].view(torch.float32).tolist()
                self.seen = scale_update.state_of(numbers[0], tracker, *numbers[1:])
                self.age = self._sent
                self._on_its_way, self._seen_of, new = None, given, True
        device = state[0].device
        if self._on_its_way is None and self._sent >= _EVERY:
            # In one piece, as bits: nothing is converted, nor rounded.
            together = torch.cat([state[at].reshape(-1).view(torch.int32) for at in (1, 0, 2)])
            event = None
            copy = together.to("cpu", non_blocking=True)
            if device.type != "cpu":
                event = torch.Event(device)
                event.record()
            self._on_its_way, self._sent = (copy, event, self._given), 0
        return new

    def given(self) -> None:
        """Note that the scale was set by hand: what was sent before says nothing about it."""
        self._given += 1

    def wrote(self, scale: torch.Tensor) -> None:
        """Note that an update has just written the scale, float32 []."""
        self._left = scale, scale._version

    def follows(self, scale: torch.Tensor) -> bool:
        """False if something else than an update may have written the scale, float32 []."""
        return self._left is not None and (
            self._left[0] is scale and self._left[1] == scale._version
        )

    def at_least(self, backoff: float, min_scale: float) -> float:
        """A scale that the state's cannot be below, as long as only updates write it."""
        if self.seen is None or self._seen_of != self._given:
            return min_scale
        lowest = backoff * (1 - 2.0**-23)  # each time the scale is rounded to float32
        return float(max(min_scale, self.seen.scale * lowest**self.age))


# In compiled code no Python runs but that of ops, so there an op brings the state to its scaler.
Hears = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Listeners:
    """The methods that listen in this process, by their names.

    Attributes:
        methods: references to them; one goes when its object does.
    """

    def __init__(self) -> None:
        self.methods: dict[str, WeakMethod[Hears]] = {}
        self.numbers = count()


listeners = Listeners()


def listen(hears: Hears) -> str:
    """A name under which `tell` reaches a method of an object, as long as the object lives.

    Args:
        hears: called with scale [], tracker [] and counts [3].
    """
    name = f"scaler {next(listeners.numbers)}"
    listeners.methods[name] = WeakMethod(hears, lambda _: listeners.methods.pop(name, None))
    return name


def tell(name: str, scale: torch.Tensor, tracker: torch.Tensor, counts: torch.Tensor) -> None:
    """Call what listens under the name, when the code that is being traced runs."""
    torch.ops.polymp.updated(counts, scale, tracker, name)


def _updated(counts: torch.Tensor, scale: torch.Tensor, tracker: torch.Tensor, name: str) -> None:
    listening = listeners.methods.get(name)
    hears = None if listening is None else listening()
    if hears is not None:
        hears(scale, tracker, counts)


_library = torch.library.Library("polymp", "DEF")
# It says that it writes, so that no compiler leaves it out.
# And that a CUDA graph cannot hold it, for a replay would not call it: a compiler cuts there.
_library.define(
    "updated(Tensor(a!) counts, Tensor scale, Tensor tracker, str name) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("updated", _updated, "CompositeExplicitAutograd")
_library.impl("updated", lambda *_: None, "Meta")
