"""Flax nnx modules as arguments: their state goes in with the call, and what changed comes back.

A module is a graph with state that a function may change in place: batch statistics, counters,
random streams. The rewrite needs a pure function, so the modules are split into graph and state,
the state is an argument and a result, and every variable that the function changed is written back
in its own dtype. Flax is imported only where the caller's arguments came from it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from polymp.backends.jax.scoped import scoped


def among(args: Any) -> bool:
    """True if an nnx module, or anything else that keeps nnx state, is among the arguments."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(_is_node, jax.tree.leaves(args, is_leaf=_is_leaf)))


def owned(fn: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], Any]:
    """A module or a method of one as a function, and the arguments with the module in front."""
    if "flax.nnx" not in sys.modules:
        return fn, args
    if _is_node(fn):
        return type(fn).__call__, (fn, *args)
    module = getattr(fn, "__self__", None)
    return (fn.__func__, (module, *args)) if _is_node(module) else (fn, args)  # type: ignore[attr-defined]


def call(
    pure: Callable[[Callable[..., Any], Any, Any], Any],
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    named: bool = False,
) -> Any:
    """Call a function of modules by way of a function of arrays.

    Args:
        pure: calls a function of arrays with its positional and keyword arguments.
        fn: takes modules among its arguments.
        args: of the call.
        kwargs: of the call.
        named: True if the modules are to open name scopes of their paths.

    Returns:
        What `fn` returns; the modules among the arguments hold their new state.
    """
    from flax import nnx

    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
    nodes = tuple(leaf for leaf in leaves if _is_node(leaf))
    rest = [leaf for leaf in leaves if not _is_node(leaf)]
    places = tuple(map(_is_node, leaves))
    graph, state = nnx.split(nodes)
    out, after = pure(_Pure(fn, graph, tree, places, named), (state, rest), {})
    before = dict(nnx.to_flat_state(state))
    changed = []
    for path, variable in nnx.to_flat_state(after):
        new, old = jax.tree.leaves(variable), jax.tree.leaves(before.get(path))
        if any(a is not b for a, b in zip(new, old, strict=False)) or len(new) != len(old):
            changed.append((path, jax.tree.map(_as_stored, variable, before.get(path, variable))))
    if changed:
        nnx.update(nodes, nnx.from_flat_state(changed))
    return out


def write_back(old: Any, new: Any) -> None:
    """Give the modules in a pytree the state of those that stand in their places in another."""
    if not among(old):
        return
    from flax import nnx

    pairs = zip(*(jax.tree.leaves(t, is_leaf=_is_leaf) for t in (old, new)), strict=True)
    for before, after in pairs:
        if _is_node(before):
            nnx.update(before, nnx.state(after))


@dataclass(frozen=True)
class _Pure:
    """A function of modules as one of their state; equal for equal graphs, so that traces keep."""

    fn: Callable[..., Any]
    graph: Any
    tree: Any
    places: tuple[bool, ...]
    named: bool

    def __call__(self, state: Any, rest: list[Any]) -> Any:
        from flax import nnx

        nodes = nnx.merge(self.graph, state)
        for node in nodes if self.named else ():
            if isinstance(node, nnx.Module):
                scoped(node)
        left, others = iter(nodes), iter(rest)
        leaves = [next(left) if is_node else next(others) for is_node in self.places]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        out = self.fn(*args, **kwargs)
        return out, nnx.split(nodes)[1]


def _as_stored(new: Any, old: Any) -> Any:
    dtype = getattr(old, "dtype", None)
    if dtype is None or new.dtype == dtype or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return new
    return new.astype(dtype)


def _is_node(x: Any) -> bool:
    from flax import nnx

    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _is_leaf(x: Any) -> bool:
    """What flattening stops at: a state is plain data, whose variables nobody changes in place."""
    from flax import nnx

    return _is_node(x) or isinstance(x, (nnx.State, nnx.GraphDef))
