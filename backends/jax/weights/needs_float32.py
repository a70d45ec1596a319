"""`needs_float32`: the parameters that a program reads in float32, for `keep` of `low_weights`.

Which those are is what `freeze` finds in the plan; nothing is run, and no array is made.
"""

import re
from collections.abc import Callable

import jax
import numpy as np

from polymp.backends.jax.arrays import is_typed
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.weights.freeze import freeze


def needs_float32(
    fn: Callable[..., object], params: object, *args: object, **kwargs: object
) -> dict[str, str]:
    """Return the parameters that an autocast function reads in float32, each with the reason.

        keep = needs_float32(autocast(loss_fn), params, batch)
        tx = low_weights(optax.adamw(1e-3), keep=keep)
        for path, why in keep.items():
            print(path, why)

    The other float32 parameters are read in a low dtype alone: there a low weight is as good as a
    float32 one that the region casts. Those that nothing reads are returned, too.

    Args:
        fn: what `autocast(...)` returned, of the parameters and other arguments: the loss.
        params: a pytree of float32 arrays, or an nnx module; or of `jax.ShapeDtypeStruct`.
        args: the other arguments, or their shapes.
        kwargs: the same, by name.

    Returns:
        By path, keys joined by dots as in "params.norm.scale", which op reads it and by which rule.

    Raises:
        TypeError: `fn` is no autocast function, or holds its parameters itself.
        RuntimeError: called inside an autocast function.
    """
    apart = nnx.apart(params)
    leaves, tree = jax.tree.flatten(apart.parts)
    shapes = [_shape(x) if is_typed(x) else x for x in leaves]
    typed = apart.together(jax.tree.unflatten(tree, shapes))
    kept = freeze(fn, typed, *args, **kwargs)[0].kept
    wide = (p for p, x in zip(apart.paths, leaves, strict=True) if is_typed(x) and _is_wide(x))
    return {_dotted(path): kept[path] for path in wide if path in kept}


def _shape(x: jax.Array) -> object:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _is_wide(x: jax.Array) -> bool:
    return bool(x.dtype == np.float32)


def _dotted(path: str) -> str:
    """A path as jax writes it, "['norm'].scale[0]", with its keys joined by dots: see `pin`."""
    path = path.removesuffix(".value") or path
    keys = re.findall(r"\['((?:[^'\\]|\\.)*)'\]|\[(?:<flat index )?(\w+)>?\]|\.(\w+)", path)
    return ".".join(next(filter(None, key)) for key in keys)
