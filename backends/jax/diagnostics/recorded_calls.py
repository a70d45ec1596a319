"""Calls of a training step, recorded so that they can be repeated.

Of a call's arguments, those that an earlier call returned are the training's state, and are made
again when the calls are repeated; all others, such as the batch, are kept. A step may also change
its arguments in place, as flax nnx does: they count as returned, too.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Leaves = list[Any]


class Made(NamedTuple):
    """Stands for an argument that the call before returned.

    Attributes:
        at: its place in the results of that call.
    """

    at: int


class Call(NamedTuple):
    """A call of the step.

    Attributes:
        tree: of its arguments, `(args, kwargs)`.
        leaves: of these; what the call before returned is a `Made`.
    """

    tree: jax.tree_util.PyTreeDef
    leaves: Leaves

    @property
    def fed(self) -> dict[int, int]:
        """For each place in the results before that came back, its place in the arguments."""
        return {leaf.at: i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Made)}


class Run(NamedTuple):
    """A repeated call.

    Attributes:
        at: its number; 0 is the first that was recorded.
        before: leaves of its arguments, in memory of their own.
        result: what it returned.
        state: of the next call's arguments, by place, those that this call returned.
    """

    at: int
    before: Leaves
    result: object
    state: dict[int, Any]


class RecordedCalls:
    """The calls of a step since a copy of its arguments.

    Attributes:
        calls: likewise.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._start: Leaves = []
        self._results: dict[int, tuple[Made, weakref.ref[Any]]] = {}
        self._places: list[Made] = []

    def restart(self, leaves: Leaves) -> None:
        """Forget the calls, and copy the arguments of the next one."""
        self.calls = []
        self._start = copied(leaves)

    def add(self, linked: Leaves, tree: jax.tree_util.PyTreeDef) -> None:
        """Record a call that is about to be made, with its arguments as `linked` returns them."""
        self.calls.append(Call(tree, linked))

    def linked(self, leaves: Leaves) -> Leaves:
        """Return the arguments, with a `Made` for each that the last call returned."""
        found = [self._results.get(id(leaf)) for leaf in leaves]
        pairs = zip(leaves, found, strict=True)
        return [leaf if it is None or it[1]() is not leaf else it[0] for leaf, it in pairs]

    def returned(self, leaves: Leaves) -> None:
        """Note the leaves that the call returned, and those that it may have changed in place."""
        self._places += map(Made, range(len(self._places), len(leaves)))
        arrays = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
        self._results = {
            id(leaf): (place, weakref.ref(leaf))
            for place, leaf in zip(self._places, leaves, strict=False)
            if type(leaf) in arrays
        }

    def alive(self) -> dict[int, jax.Array]:
        """Return the results of the last call that somebody still has, by place."""
        found = {made.at: reference() for made, reference in self._results.values()}
        return {at: x for at, x in found.items() if x is not None and not x.is_deleted()}

    def repeated(self, step: Callable[..., object], last: Leaves | None = None) -> Iterator[Run]:
        """Repeat the calls, one at a time."""
        leaves = copied(self._start)
        following = [*(call.leaves for call in self.calls[1:]), last]
        for at, (call, after) in enumerate(zip(self.calls, following, strict=True)):
            before = copied(leaves)
            given, named = jax.tree.unflatten(call.tree, leaves)
            try:
                result = step(*given, **named)
            except StopIteration:  # the iterator that the step reads has ended
                return
            made = jax.tree.leaves((result, (given, named)))
            state = {i: made[x.at] for i, x in enumerate(after or ()) if isinstance(x, Made)}
            leaves = [state.get(i, x) for i, x in enumerate(after or ())]
            yield Run(at, before, result, state)


def copied(leaves: Sequence[Any]) -> Leaves:
    """Return leaves with the arrays among them copied, since a step may donate or change them."""
    return [x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]


def donated(leaves: Sequence[Any]) -> bool:
    """Return whether one of some leaves is gone, because a call has taken its memory."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
