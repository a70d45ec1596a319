"""The inputs of `assert_parity`: numbers that both frameworks can be given, checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymp.diagnostics import trees
from polymp.dtypes import name as dtype_name

_LOW = ("bfloat16", "float16")


def checked_dtype(dtype: object) -> str | None:
    """Return the full name of a region's low dtype, None for no region."""
    if dtype is None:
        return None
    name = dtype_name(dtype, (*_LOW, "float32"), "assert_parity(): dtype")
    return None if name == "float32" else name


def arguments(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of both calls."""
    import numpy as np

    if isinstance(inputs, Mapping):
        return (), {str(name): _prepared(x, f"[{name!r}]") for name, x in inputs.items()}
    if (
        isinstance(inputs, np.ndarray)
        or not isinstance(inputs, Sequence)
        or (isinstance(inputs, (str, bytes)))
    ):
        raise TypeError(
            "inputs are a list of positional arguments, or a dict of keyword arguments; got "
            f"{type(inputs).__name__}. For one array write [array]."
        )
    return tuple(_prepared(x, f"[{at}]") for at, x in enumerate(inputs)), {}


def _prepared(x: object, path: str) -> Any:
    """An input with its arrays in dtypes that both frameworks have; errors as in `arguments`."""
    import numpy as np

    if isinstance(x, dict):
        return {key: _prepared(item, f"{path}[{key!r}]") for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([_prepared(item, f"{path}[{at}]") for at, item in enumerate(x)])
    if x is None or (isinstance(x, (bool, int, float, str)) and not isinstance(x, np.generic)):
        return x
    if not isinstance(x, (np.ndarray, np.generic)):
        raise TypeError(
            f"input {path} is {type(x).__module__}.{type(x).__name__}. Give numpy arrays, numbers, "
            "and lists, tuples and dicts of them."
        )
    array = np.asarray(x)
    if array.size == 0:
        raise ValueError(f"input {path} has shape {array.shape}: there is nothing to compare.")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu":
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"input {path} has integers beyond 32 bits, which JAX lacks.")
        array = array.astype(np.int64)
    elif array.dtype.kind != "b" and array.dtype.name not in ("float32", *_LOW):
        raise TypeError(
            f"input {path} is {array.dtype.name}. Give float32, float16, bfloat16, integers or "
            "bool; float64 becomes float32."
        )
    if array.dtype.kind not in "ib" and not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"input {path} has Inf or NaN, for which there is no tolerance.")
    return array


def widened(tree: Any) -> Any:
    """Return prepared inputs with float32 in place of lower dtypes."""
    import numpy as np

    found = [
        x.astype(np.float32) if x.dtype.name in _LOW else x for x in trees.arrays(tree).values()
    ]
    return trees.rebuilt(tree, iter(found))


def cotangent(path: str, shape: tuple[int, ...]) -> Any:
    """Float32 numbers that are the same for a path and a shape in every run."""
    import numpy as np

    seed = [len(path), *path.encode(), *shape]
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
