"""Module paths as name scopes: what rules by module path go by in JAX.

linen and haiku modules open a name scope for each module, `jax.named_scope` is there for all else.
Flax nnx modules open none; `scoped` makes them.
"""

from functools import cache
from typing import Any, TypeVar

import jax

M = TypeVar("M")


def scoped(model: M) -> M:
    """Give the modules of a flax nnx model name scopes: the paths that torch would call them by.

        {"blocks.0.attn": ...}      the scope of model.blocks[0].attn, while it is called

    An autocast function whose policy has rules by scope does this to the modules among its
    arguments by itself; it is for modules that come in another way, such as by `nnx.merge`. The
    scopes stay with the model, also through `nnx.split` and `nnx.merge`. A module that is there
    twice has the first of its paths. Only calls of the modules count, not their other methods.

    Args:
        model: an nnx module; its modules get subclasses of their classes, in place.

    Returns:
        The model.

    Raises:
        TypeError: it is no nnx module.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"scoped(model) names the modules of a flax nnx model, got {model!r}. linen and haiku "
            "modules have name scopes of their own."
        )
    modules = {path: module for path, module in nnx.iter_modules(model) if callable(module)}
    for path, module in modules.items():
        above = max((p for p in modules if p == path[: len(p)] and p != path), key=len, default=())
        name = ".".join(map(str, path[len(above) :]))
        cls = type(module)
        plain = cls.__mro__[1] if "polymp_scope" in vars(cls) else cls
        if name:
            object.__setattr__(module, "__class__", _named(plain, name))
    return model


@cache
def _named(cls: Any, name: str) -> Any:
    """A class as it is, but for a name scope round its calls; one for a name, for caches."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)

    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "polymp_scope": name,
    }
    return type(cls)(cls.__name__, (cls,), body)
