"""Flax's checkpoints of scalers: flax asks for a conversion of a class, and not for its leaves."""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar


class _Stateful(Protocol):
    @property
    def state(self) -> object: ...


S = TypeVar("S", bound=_Stateful)


def register(kind: type[S], with_state: Callable[[S, Any], S]) -> None:
    """Let flax save and restore objects of a class by their state, where flax is loaded."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        _register(serialization, kind, with_state)


@cache
def _register(serialization: Any, kind: type[S], with_state: Callable[[S, Any], S]) -> None:
    def to_state_dict(one: S) -> dict[str, object]:
        return {"state": serialization.to_state_dict(one.state)}

    def from_state_dict(one: S, saved: Mapping[str, object]) -> S:
        return with_state(one, serialization.from_state_dict(one.state, saved["state"]))

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict)
