"""Nested tuples, lists and dicts of arrays, the same for every framework's arrays.

Nothing here imports one: an array is what has a dtype and a shape.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def is_array(x: object) -> bool:
    """True for numpy's, torch's and JAX's arrays."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


def flat(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths, such as "[0]['x']"; None is no leaf."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from flat(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for at, item in enumerate(tree):
            yield from flat(item, f"{path}[{at}]")
    elif tree is not None:
        yield path, tree


def arrays(tree: object) -> dict[str, Any]:
    """The arrays of a tree by their paths."""
    return {path: x for path, x in flat(tree) if is_array(x)}


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """A tree with other arrays, in the order of `arrays`."""
    if isinstance(tree, dict):
        made = {key: rebuilt(tree[key], leaves) for key in sorted(tree, key=str)}
        return {key: made[key] for key in tree}
    if isinstance(tree, (list, tuple)):
        items = [rebuilt(item, leaves) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return next(leaves) if is_array(tree) else tree


def results(tree: object, of: str) -> dict[str, Any]:
    """Return the arrays that a function returned, by their paths."""
    for path, x in flat(tree):
        if not is_array(x) and not isinstance(x, (bool, int, float, str)):
            raise TypeError(
                f"the {of} function returns {type(x).__name__} as result{path}: return arrays, or "
                "tuples, lists and dicts of them."
            )
    return arrays(tree)
