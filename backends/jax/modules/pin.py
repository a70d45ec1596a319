"""Parameters that keep a dtype when the others are converted."""

import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax

from polymp.backends.jax.arrays import float_dtype, is_float
from polymp.dtypes import FORMATS
from polymp.errors import PolicyError
from polymp.rules import scopes

P = TypeVar("P")


@dataclass(frozen=True, repr=False)
class Pins:
    """Some parameters of a tree, and the dtype that they keep.

    Attributes:
        dtype: its name.
        paths: of the pinned leaves, sorted.
    """

    dtype: str
    paths: tuple[str, ...]

    def to(self, params: P, dtype: jax.typing.DTypeLike) -> P:
        """Convert the parameters to another dtype, but for the pinned ones, which keep every digit.

        Args:
            params: a tree like the one that was pinned, or the nnx module, which is changed in
                place.
            dtype: for the float leaves that are not pinned.

        Returns:
            The converted tree, or the module itself.

        Raises:
            PolicyError: a pinned leaf is not there, or is narrower than its dtype: what it lost
                cannot be brought back. Nothing is converted then.
            TypeError: `dtype` is no float dtype.
        """
        target = float_dtype(dtype, "to(params, dtype): dtype").name
        self.check(params)

        def convert(keys: tuple[object, ...], leaf: Any) -> object:
            if not is_float(leaf):
                return leaf
            return leaf.astype(self.dtype if leaf_path(keys) in self.paths else target)

        state = _state(params)
        new: P = jax.tree_util.tree_map_with_path(convert, state)
        if state is params:
            return new
        sys.modules["flax.nnx"].update(params, new)
        return params

    def check(self, params: object) -> None:
        """Raise if something else has converted pinned parameters.

        Args:
            params: a tree like the one that was pinned, or the nnx module.

        Raises:
            PolicyError: one is not there, or narrower than its dtype.
        """
        found = dict(_leaves(params))
        for path in self.paths:
            if path not in found:
                raise PolicyError(f"pinned parameter {path!r} is not in the tree")
            have = found[path].dtype.name
            if have not in FORMATS or not FORMATS[have].holds(FORMATS[self.dtype]):
                raise PolicyError(
                    f"parameter {path!r} is pinned to {self.dtype} and has become {have}: what it "
                    "lost cannot be brought back. Convert with `pins.to(params, dtype)`."
                )

    def __repr__(self) -> str:
        return f"Pins({self.dtype!r}, {len(self.paths)} parameters)"


def pin(params: object, dtype: jax.typing.DTypeLike, paths: Sequence[str] = ("*",)) -> Pins:
    """Keep parameters in a dtype when the tree is converted to another.

        pins = pin(params, "float32", ["*.norm"])
        params = pins.to(params, "bfloat16")        # all but the normalisations
        pins.check(params)                          # an error if something else converted them

    Pins are about storage alone: the policy decides in which dtype ops compute.

    Args:
        params: a pytree of arrays, or a flax nnx module. The path of a leaf is its keys, joined by
            dots: "params.block.norm.scale".
        dtype: a float dtype, or its name: "float32", "fp32".
        paths: patterns; one that matches a part of the tree holds for every leaf in it.

    Returns:
        The pins.

    Raises:
        PolicyError: a pattern matches no float leaf, a leaf is narrower than the dtype, or there
            is no such dtype.
    """
    try:
        full = float_dtype(dtype).name
    except TypeError:
        full = ""
    if full not in FORMATS:
        raise PolicyError(f"pin(): no dtype {reprlib.repr(dtype)}; known: {', '.join(FORMATS)}")
    if isinstance(paths, str):
        raise PolicyError(f"pin(): paths={paths!r} is not a list. Write paths=[{paths!r}].")
    leaves = [path for path, leaf in _leaves(params) if is_float(leaf)]
    pinned: set[str] = set()
    hint = partial(scopes.hint, paths=leaves, none="the tree has no float leaves.")
    for pattern in paths:
        pinned |= scopes.matching(pattern, leaves, "pin()", "float parameter", hint)
    pins = Pins(full, tuple(sorted(pinned)))
    pins.check(params)
    return pins


def _leaves(params: object) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(_state(params))
    return [(leaf_path(keys), x) for keys, x in leaves]


def _state(params: object) -> object:
    """The arrays of an nnx module as a tree; any other tree as it is."""
    nnx = sys.modules.get("flax.nnx")
    return nnx.state(params) if nnx is not None and isinstance(params, nnx.Module) else params


def leaf_path(keys: tuple[Any, ...]) -> str:
    """The keys of a leaf, joined by dots; an nnx variable's own "value" is no part of it."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator=".")
