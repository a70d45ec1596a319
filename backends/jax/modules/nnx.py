"""Flax nnx modules as arguments: their state goes in with the call, and what changed comes back.

A function may change a module in place: batch statistics, counters, random streams. So modules are
split into graph and state, the state is an argument and a result, and every variable that the
function changed is written back in its own dtype.
"""

import itertools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from polymp.backends.jax.modules.scoped import scoped


def among(args: object) -> bool:
    """True if an nnx module, or anything else that keeps nnx state, is among the arguments."""
    return bool(nodes(args))


def nodes(args: object) -> list[Any]:
    """The nnx modules, and all else that keeps nnx state, among the arguments."""
    if "flax.nnx" not in sys.modules:  # else each call of a region would flatten its arguments
        return []
    return [leaf for leaf in jax.tree.leaves(args, is_leaf=is_leaf) if is_node(leaf)]


def objects(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[int | str, object]:
    """The nnx objects among the arguments of a call, by their places."""
    given: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    loaded = "flax.nnx" in sys.modules
    return {at: it for at, it in given if loaded and isinstance(it, _flax().Pytree)}


def update(it: object, other: object) -> None:
    """Give an nnx object the values of another of its kind, in place."""
    _flax().update(it, _flax().state(other))


def trace_errors() -> tuple[type[Exception], ...]:
    """The error of a traced function that changes nnx state which it did not get as an argument."""
    errors = sys.modules.get("flax.errors")
    return () if errors is None else (errors.TraceContextError,)


def copied(tree: Any) -> Any:
    """The pytree with copies of the nnx modules in it, which change in their place."""
    if not (modules := nodes(tree)):
        return tree
    copies = iter(_flax().clone(tuple(modules)))
    return jax.tree.map(lambda x: next(copies) if is_node(x) else x, tree, is_leaf=is_leaf)


def owned(
    fn: Callable[..., object], args: tuple[object, ...]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """A module or a method of one as a function, and the arguments with the module in front."""
    if is_node(fn):
        return type(fn).__call__, (fn, *args)
    module = getattr(fn, "__self__", None)
    return (fn.__func__, (module, *args)) if is_node(module) else (fn, args)  # type: ignore[attr-defined]


def call(
    pure: Callable[[Callable[..., object], tuple[object, ...], Mapping[str, object]], Any],
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    named: bool = False,
) -> Any:
    """Call a function of modules by way of a function of arrays."""
    nnx = _flax()
    function, (state, rest), modules = pure_of(fn, args, kwargs, named)
    out, after = pure(function, (state, rest), {})
    before = dict(nnx.to_flat_state(state))
    changed = []
    for path, variable in nnx.to_flat_state(after):
        new, old = jax.tree.leaves(variable), jax.tree.leaves(before.get(path))
        if any(a is not b for a, b in zip(new, old, strict=False)) or len(new) != len(old):
            changed.append((path, jax.tree.map(_as_stored, variable, before.get(path, variable))))
    if changed:
        nnx.update(modules, nnx.from_flat_state(changed))
    return out


def pure_of(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    named: bool = False,
) -> tuple[Callable[..., object], tuple[Any, list[object]], tuple[object, ...]]:
    """A function of modules as one of arrays, its arguments, and its modules."""
    # The arguments are the state of all modules, by their numbers, and a list of everything else.
    nnx = _flax()
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
    places = tuple(map(is_node, leaves))
    modules = tuple(itertools.compress(leaves, places))
    rest = [leaf for leaf, node in zip(leaves, places, strict=True) if not node]
    graph, state = nnx.split(modules)
    return _Pure(fn, graph, tree, places, named), (state, rest), modules


def of_state(fn: Callable[..., object], model: object) -> tuple[Callable[..., object], object]:
    """A function of a model, its first argument, as one of the model's state; and that state."""
    nnx = _flax()
    graph, state = nnx.split(model)
    return lambda state, *args: fn(nnx.merge(graph, state), *args), state


def shape_of(args: object) -> Hashable:
    """The graphs of the modules among the arguments; a trace holds for modules of these."""
    graphs = tuple(_flax().graphdef(node) for node in nodes(args))
    try:
        hash(graphs)
    except TypeError:  # an attribute is a dict, as of options: nnx.jit takes it, too
        return repr(graphs)
    return graphs


def leaves_with_paths(tree: object) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves that `pure_of` makes of a pytree with modules, in its order, with their paths."""
    flat = jax.tree_util.tree_leaves_with_path
    if not among(tree):
        return flat(tree)
    leaves = flat(tree, is_leaf)
    modules = [(path, leaf) for path, leaf in leaves if is_node(leaf)]
    others = [(path, leaf) for path, leaf in leaves if not is_node(leaf)]
    _, state = _flax().split(tuple(leaf for _, leaf in modules))
    of_state = [((*modules[path[0].key][0], *_attributes(path[1:])), x) for path, x in flat(state)]
    return of_state + [((*path, *keys), x) for path, leaf in others for keys, x in flat(leaf)]


def _attributes(keys: Sequence[Any]) -> list[object]:
    """The keys of a variable in a state, as keys of attributes and items of its module."""
    names = [key.key for key in keys if hasattr(key, "key")]
    attribute, item = jax.tree_util.GetAttrKey, jax.tree_util.SequenceKey
    return [attribute(name) if isinstance(name, str) else item(name) for name in names]


def write_back(old: object, new: object) -> None:
    """Give the modules in a pytree the state of those that stand in their places in another."""
    for before, after in zip(nodes(old), nodes(new), strict=True):
        update(before, after)


@dataclass(frozen=True)
class _Pure:
    """A function of modules as one of their state; equal for equal graphs, so that traces keep."""

    fn: Callable[..., object]
    graph: Any
    tree: jax.tree_util.PyTreeDef
    places: tuple[bool, ...]
    named: bool

    def __call__(self, state: Any, rest: list[object]) -> tuple[object, object]:
        nnx = _flax()
        modules = nnx.merge(self.graph, state)
        for module in modules if self.named else ():
            if isinstance(module, nnx.Module):
                scoped(module)
        left, others = iter(modules), iter(rest)
        leaves = [next(left if node else others) for node in self.places]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        out = self.fn(*args, **kwargs)
        return out, nnx.split(modules)[1]


def _as_stored(new: jax.Array, old: object) -> jax.Array:
    dtype = getattr(old, "dtype", None)
    if dtype is None or new.dtype == dtype or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return new
    return new.astype(dtype)


def is_node(x: object) -> bool:
    """True for a module or a variable."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def is_leaf(x: object) -> bool:
    """True for leaves of a flattening: modules, variables, and states, which are plain data."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef))


def _flax() -> Any:
    return sys.modules["flax.nnx"]
