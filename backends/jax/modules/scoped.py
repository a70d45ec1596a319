"""Module paths as name scopes: what rules by module path go by in JAX.

linen and haiku modules open a name scope for each module, `jax.named_scope` is there for all else.
Modules of flax nnx and equinox open none. `scoped` gives them some, by way of subclasses; while an
autocast function whose policy goes by paths is called, `naming` gives them to every model that is
called in it, however it got there, for as long as that call lasts.
"""

import functools
import reprlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import jax

M = TypeVar("M")


def scoped(model: M) -> M:
    """Give the modules of a flax nnx or equinox model name scopes: torch's paths.

        {"blocks.0.attn": ...}      the scope of model.blocks[0].attn, while it is called

    An autocast function whose policy has rules by scope does this by itself for models that are
    called in it, for all methods of equinox models, and for nnx modules among its arguments. Do it
    by hand for an nnx module that comes in another way, if a method that is not its call runs the
    modules inside. The scopes stay with the model, also through `nnx.split`, `nnx.merge` and
    transformations. A module that is there twice has the first of its paths.

    Args:
        model: an nnx module, whose modules get subclasses of their classes, in place; or an
            equinox module, which is left as it is.

    Returns:
        The nnx module, or a copy of the equinox module.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(model, tuple(_kinds())):
        raise TypeError(
            "scoped(model) names the modules of a flax nnx or equinox model, got "
            f"{reprlib.repr(model)}. linen and haiku modules have name scopes of their own."
        )
    if _is_equinox(model):
        leaves, tree = jax.tree.flatten(model)
        model = jax.tree.unflatten(tree, leaves)
    _name_inside(model, anew=True)
    return model


def _name_inside(model: object, anew: bool = False) -> list[tuple[object, type]]:
    """Give the modules inside a model subclasses with the names of their places."""
    modules = {path: module for path, module in _modules(model) if callable(module)}
    _CALLED.paths.update(".".join(map(str, path)) for path in modules)
    were: list[tuple[object, type]] = []
    for path, module in modules.items():
        above = max((p for p in modules if p == path[: len(p)] and p != path), key=len, default=())
        name = ".".join(map(str, path[len(above) :]))
        cls = type(module)
        if name and (anew or not _has_name(cls)):
            were.append((module, cls))
            plain = cls.__mro__[1] if _has_name(cls) else cls
            object.__setattr__(module, "__class__", _named(plain, name))
    return were


def _modules(model: Any) -> Iterable[tuple[tuple[object, ...], object]]:
    """The paths and modules of a model, itself with them; each module once."""
    if not _is_equinox(model):
        from flax import nnx

        return nnx.iter_modules(model)
    found: dict[int, tuple[tuple[object, ...], object]] = {}

    def add(path: tuple[object, ...], module: object) -> None:
        if id(module) in found:
            return
        found[id(module)] = path, module
        inner, _ = jax.tree_util.tree_flatten_with_path(
            module, is_leaf=lambda x: x is not module and _is_equinox(x)
        )
        for keys, leaf in inner:
            if _is_equinox(leaf):  # a bound method is a module too, which has no name
                names = (jax.tree_util.keystr((key,), simple=True) for key in keys)
                add((*path, *(name for name in names if name != "__self__")), leaf)

    add((), model)
    return found.values()


def _kinds() -> list[type]:
    """The classes of modules that open no name scopes, of libraries that are loaded."""
    homes = (("flax.nnx", "Module"), ("equinox", "Module"))
    loaded = [(sys.modules[home], name) for home, name in homes if home in sys.modules]
    return [getattr(home, name) for home, name in loaded if hasattr(home, name)]


def _is_equinox(x: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def _has_name(cls: type) -> bool:
    return "polymp_scope" in vars(cls)


@functools.cache
def _named(cls: Any, name: str) -> type:
    """A class as it is, but for a name scope round its calls; one for a name, for caches."""

    def __call__(self: object, *args: object, **kwargs: object) -> object:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)

    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "polymp_scope": name,
    }
    named: type = type(cls)(cls.__name__, (cls,), body)
    return named


# Models that are called in an autocast function


class _Called(threading.local):
    """The models of the autocast function that is called in this thread, and their names."""

    def __init__(self) -> None:
        self.ids: set[int] = set()  # of the models whose calls are under way
        self.paths: set[str] = set()  # of all modules in the models


_CALLED, _LOCK = _Called(), threading.RLock()
_NAMING: set[object] = set()  # the autocast functions that need the calls of models now
_PLAIN: dict[Any, object] = {}  # `__call__` by class, as it was


@contextmanager
def naming(inside: Callable[[], bool]) -> Iterator[None]:
    """Name the modules of every nnx and equinox model that is called in an autocast function."""
    # Which models those are shows when they are called: they may come from `nnx.merge`, or from a
    # closure. So `__call__` of every such class is another one meanwhile, which does nothing more
    # outside of autocast functions.
    _CALLED.paths.clear()
    mine = object()
    with _LOCK:
        _NAMING.add(mine)
        for cls in set(_subclasses(_kinds())) - _PLAIN.keys():
            plain = vars(cls).get("__call__")
            if hasattr(plain, "__get__") and not _has_name(cls):
                _PLAIN[cls] = plain
                cls.__call__ = _looked_at(plain, inside)
    try:
        yield
    finally:
        with _LOCK:
            _NAMING.discard(mine)
            while not _NAMING and _PLAIN:
                cls, plain = _PLAIN.popitem()
                cls.__call__ = plain


def called_paths() -> set[str]:
    """The paths of all modules in the models that were called in this thread under `naming`."""
    return _CALLED.paths


def _subclasses(classes: Iterable[type]) -> Iterator[Any]:
    for cls in classes:
        yield cls
        yield from _subclasses(cls.__subclasses__())


def _looked_at(plain: Any, inside: Callable[[], bool]) -> Callable[..., object]:
    @functools.wraps(plain)
    def __call__(self: object, *args: object, **kwargs: object) -> object:
        bound = plain.__get__(self, type(self))
        known = _has_name(type(self)) or id(self) in _CALLED.ids
        if known or not inside():
            return bound(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(_LOCK)  # the model may be another thread's too
            _CALLED.ids.add(id(self))
            stack.callback(_CALLED.ids.discard, id(self))
            for module, cls in _name_inside(self):
                stack.callback(object.__setattr__, module, "__class__", cls)
            return bound(*args, **kwargs)

    return __call__
