"""The parameters of a frozen function: their places among a call's arrays, and their dtypes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_typed
from polymp.backends.jax.autocast.jitted_calls import ARRAY
from polymp.backends.jax.autocast.transform import PlannedCall
from polymp.backends.jax.modules import nnx


class Signature(NamedTuple):
    """A call as it is traced.

    Attributes:
        fn: of arrays; where modules are among the arguments, of their state and everything else.
        tree: of the positional and keyword arguments.
        statics: the leaves, with `ARRAY` for each array.
    """

    fn: Callable[..., object]
    tree: jax.tree_util.PyTreeDef
    statics: tuple[object, ...]

    def first(self, params: nnx.Apart) -> list[int]:
        """The places of the parameters among all arrays, in the order of `params.parts`."""
        leaves = jax.tree.unflatten(self.tree, range(len(self.statics)))
        if nnx.is_pure(self.fn):
            (state, others), _ = leaves
            mine = nnx.leading(state, params.modules)
            mine += jax.tree.leaves(others[: params.others])
        else:
            mine = jax.tree.leaves(leaves[0][0])
        places = self.places()
        return [places[i] for i in mine if i in places]

    def places(self) -> dict[int, int]:
        """By number of a leaf, its place among the arrays."""
        return _places(self.statics)

    def passed_on(self, traced: PlannedCall) -> list[int]:
        """The outputs that are the state of modules as it came in, and no results of `fn`."""
        if not nnx.is_pure(self.fn):
            return []
        (before, _), _ = jax.tree.unflatten(self.tree, range(len(self.statics)))
        _, after = jax.tree.unflatten(traced.tree, range(len(traced.statics)))
        ours: jax.tree_util.PyTreeDef = jax.tree.structure(before)
        if ours != jax.tree.structure(after):
            return []
        invars = compat.binders(traced.plan.jaxpr)[1]
        outvars = compat.opened(traced.plan.jaxpr)[0].outvars
        ins, outs = self.places(), _places(traced.statics)
        return [
            outs[b]
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            if a in ins and b in outs and outvars[outs[b]] is invars[ins[a]]
        ]


def _places(statics: Sequence[object]) -> dict[int, int]:
    arrays = (i for i, leaf in enumerate(statics) if leaf is ARRAY)
    return {leaf: place for place, leaf in enumerate(arrays)}


class FrozenParams:
    """The parameters that a frozen function takes.

    Args:
        tree: of the parameters, their modules taken apart.
        params: the ones it was frozen for.
        dtypes: by number of a leaf, that of an array.
        lows: by number of a leaf, the low dtype that it is stored in.
    """

    def __init__(
        self,
        tree: jax.tree_util.PyTreeDef,
        params: nnx.Apart,
        dtypes: Mapping[int, str],
        lows: Mapping[int, str],
    ) -> None:
        self.tree = tree
        self.params: nnx.Apart = params._replace(
            parts=None, together=lambda parts: parts
        )  # holds no array
        self.dtypes = dtypes
        self.lows = lows

    def low(self, call: Signature) -> dict[int, tuple[str, str]]:
        """By place among all arrays, path and dtype of what is stored low."""
        pairs = zip(self.dtypes, call.first(self.params), strict=True)
        return {place: (self.params.paths[i], self.lows[i]) for i, place in pairs if i in self.lows}

    def check(self, served: object) -> None:
        """Refuse parameters that are not of this structure and these dtypes."""
        apart = nnx.apart(served)
        leaves, tree = jax.tree.flatten(apart.parts)
        paths = self.params.paths
        if tree != self.tree:
            ours, theirs = set(paths), set(apart.paths)
            raise TypeError(
                "The first argument has another structure than the parameters that freeze "
                f"returned. {_some('Missing', ours - theirs)}{_some('New', theirs - ours)}"
                f"Frozen: {self.tree}. Given: {tree}."
            )
        have = {i: dtype_of(leaves[i]) for i in self.dtypes}
        other = [i for i, dtype in self.dtypes.items() if have[i] != dtype]
        if other:
            i = other[0]
            raise TypeError(
                f"{paths[i]} is {have[i]}, but was frozen as "
                f"{self.dtypes[i]}; {len(other)} of {len(self.dtypes)} arrays differ. Pass the "
                "parameters that freeze returned."
            )


def _some(word: str, paths: Iterable[str]) -> str:
    first, *rest = [*sorted(paths), ""][:4] if paths else [""]
    shown = ", ".join(filter(None, (first, *rest)))
    return f"{word}: {shown}. " if shown else ""


def dtype_of(leaf: object) -> str:
    """The name of an array's dtype as jax has it, without float64 say; of others, their type's."""
    if not is_typed(leaf):
        return type(leaf).__name__
    if isinstance(leaf, (np.ndarray, np.generic)):
        return str(jax.dtypes.canonicalize_dtype(leaf.dtype).name)
    return str(leaf.dtype.name)
