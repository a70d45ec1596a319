"""Copies of a scaler's state to the host, for which the host does not wait."""

from collections.abc import Callable
from itertools import count
from typing import Self
from weakref import WeakMethod

import torch

from polymp.backends.torch.scaler import scale_update
from polymp.scaling.scale_rule import ScaleState

# Updates between two copies. A copy costs the host some microseconds.
_EVERY = 4


class AsyncRead:
    """Copies the state to the host every few updates, and keeps the last copy that has arrived.

    Attributes:
        seen: the state of that copy; None before the first.
        age: the number of updates since that state.
    """

    def __init__(self) -> None:
        self.seen: ScaleState | None = None
        self.age: int = 0
        self._on_its_way: tuple[torch.Tensor, torch.Event | None, int] | None = None
        self._given = 0  # how often the user has set the scale
        self._seen_of = 0  # `_given` when the copy in `seen` was started
        self._sent = 0  # updates since the copy on its way was started
        self._left: tuple[torch.Tensor, int] | None = None  # the scale and its version

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def updated(self, *state: torch.Tensor) -> bool:
        """Note an update; read a copy that has arrived, and start another."""
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
            # One copy for all, as bits, so that no number is converted or rounded.
            together = torch.cat([state[at].reshape(-1).view(torch.int32) for at in (1, 0, 2)])
            event = None
            copy = together.to("cpu", non_blocking=True)
            if device.type != "cpu":
                event = torch.Event(device)
                event.record()
            self._on_its_way, self._sent = (copy, event, self._given), 0
        return new

    def given(self) -> None:
        """Note that the user has set the scale: copies from before say nothing about it."""
        self._given += 1

    def wrote(self, scale: torch.Tensor) -> None:
        """Note that an update has just written the scale, float32 []."""
        self._left = scale, scale._version

    def follows(self, scale: torch.Tensor) -> bool:
        """Return False if other code than an update may have written the scale, float32 []."""
        return self._left is not None and (
            self._left[0] is scale and self._left[1] == scale._version
        )

    def at_least(self, backoff: float, min_scale: float) -> float:
        """Return a lower bound of the scale, which holds as long as only updates write it."""
        if self.seen is None or self._seen_of != self._given:
            return min_scale
        lowest = backoff * (1 - 2.0**-23)  # each time the scale is rounded to float32
        return float(max(min_scale, self.seen.scale * lowest**self.age))


# In compiled code no Python runs but that of ops, so there an op brings the state to its scaler.
Listener = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Listeners:
    """The listeners of this process.

    Attributes:
        methods: weak references to them by name; one goes when its object does.
        numbers: for the next name.
    """

    def __init__(self) -> None:
        self.methods: dict[str, WeakMethod[Listener]] = {}
        self.numbers: count[int] = count()


listeners: Listeners = Listeners()


def listen(listener: Listener) -> str:
    """Register a method to be called by `tell`, as long as its object lives."""
    name = f"scaler {next(listeners.numbers)}"
    listeners.methods[name] = WeakMethod(listener, lambda _: listeners.methods.pop(name, None))
    return name


def tell(name: str, scale: torch.Tensor, tracker: torch.Tensor, counts: torch.Tensor) -> None:
    """Call the listener of that name whenever the code that is being traced runs."""
    torch.ops.polymp.updated(counts, scale, tracker, name)


def _updated(counts: torch.Tensor, scale: torch.Tensor, tracker: torch.Tensor, name: str) -> None:
    reference = listeners.methods.get(name)
    listener = None if reference is None else reference()
    if listener is not None:
        listener(scale, tracker, counts)


_library = torch.library.Library("polymp", "DEF")
# Its schema has a write, so that no compiler leaves the op out. Its tag keeps it out of CUDA
# graphs, whose replays would not call it: compilers cut the graph there.
_library.define(
    "updated(Tensor(a!) counts, Tensor scale, Tensor tracker, str name) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl("updated", _updated, "CompositeExplicitAutograd")
_library.impl("updated", lambda *_: None, "Meta")
