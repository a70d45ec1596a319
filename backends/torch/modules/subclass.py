"""Modules that get methods of ours: the object stays, and its class becomes a subclass.

    extend(linear, Scoped, data)     type(linear) is now  Linear(Scoped, Linear)
    restore(linear, Scoped)          type(linear) is Linear again

The new class has the old one's name, and the methods of ours come before the old ones. Their data
is in the module's `__dict__`, where `state_dict` does not look; without data they do nothing. Hooks
would not work: torch runs none after an interrupt, and torch.compile does not guard them.
"""

import copyreg
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.fx
import torch.nn as nn

from polymp.rules import scopes


class Extension(nn.Module):
    """A class of methods that `extend` gives to modules."""

    KEY: ClassVar[str]  # of their data in the module's `__dict__`

    def __init_subclass__(cls, **_: object) -> None:
        """Do nothing, so that classes which keep a list of their subclasses do not get this."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class below does; loading extends the module again."""
        below: type = type(self)
        while made := _made(below):
            below = made[1]
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *state = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            arguments = (below, *arguments[1:])
        return _extended_again, (function, arguments, _data(self)), *state


class Handle:
    """The handle of a function that extends modules: `remove()` undoes it.

    So does the end of a `with` block. Copied or pickled together with the model, it is the handle
    of the copy.
    """

    _call: ClassVar[str]  # how the user's function is called

    def __init__(self, extension: type[Extension], modules: Iterable[nn.Module]) -> None:
        self._extension = extension
        self._modules = list(modules)

    def remove(self) -> None:
        """Take the methods away; the modules get their own classes back."""
        for module in self._modules:
            restore(module, self._extension)
        self._modules = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __call__(self, *_: object, **__: Any) -> NoReturn:
        """Refuse to be called: this is not the model."""
        name = self._call.partition("(")[0]
        raise TypeError(
            f"{name}() changes the model in place and returns a handle with remove(). "
            f"Write {self._call}, and call the model itself."
        )


def check(module: nn.Module, path: str, doing: str) -> str:
    """Refuse a module that cannot be extended."""
    what = f"{doing}(): {type(module).__name__}" + (f" at {path!r}" if path else "")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{what} is a ScriptModule. Call {doing}() before torch.jit.script.")
    if isinstance(module, torch.fx.GraphModule):
        raise TypeError(
            f"{what} is traced, and makes itself a class of its own. "
            f"Call {doing}() on the model that it was traced from."
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(
            f"{what} is lazy, and changes its class in its first call. "
            f"Call the model once before {doing}()."
        )
    return what


def hint(pattern: str, models: Sequence[nn.Module]) -> str:
    """Say which paths of modules a pattern that matches none may mean."""
    named = [item for model in models for item in model.named_modules()]
    first = {module: path for path, module in reversed(named)}
    for model in models:
        for path, module in model.named_modules(remove_duplicate=False):
            if scopes.depth(pattern, path):
                return f"{path!r} is also {first[module]!r}, and a module's first path counts."
    return scopes.hint(pattern, [path for path, _ in named], "it has no modules inside.")


def extend(module: nn.Module, extension: type[Extension], data: object) -> None:
    """Give a module the extension's methods and their data."""
    _strip(module)
    if not isinstance(module, extension):
        module.__class__ = _class(extension, type(module))
    module.__dict__[extension.KEY] = data


def restore(module: nn.Module, extension: type[Extension]) -> None:
    """Take the extension's methods away again."""
    # If another class has been put on top, as torch's parametrizations do, the methods stay and do
    # nothing.
    module.__dict__.pop(extension.KEY, None)
    _strip(module)


def _strip(module: nn.Module) -> None:
    """Take off the classes on top whose data is gone."""
    while (made := _made(type(module))) and made[0].KEY not in module.__dict__:
        module.__class__ = made[1]


def _class(extension: type[Extension], base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a base; one for each base, so that copies and graphs share it."""
    for known in base.__subclasses__():
        if _made(known) == (extension, base):
            return known
    names: dict[str, Any] = {"_made": (extension, base), "__doc__": base.__doc__}
    names |= {name: getattr(base, name) for name in ("__module__", "__qualname__")}
    if own := getattr(base, "__deepcopy__", None):
        names["__deepcopy__"] = _copying(own)
    return types.new_class(base.__name__, (extension, base), exec_body=lambda ns: ns.update(names))


def _made(cls: type) -> tuple[type[Extension], type[nn.Module]] | None:
    """Return the extension and the base that a class was made of here; None for other classes."""
    found: tuple[type[Extension], type[nn.Module]] | None = vars(cls).get("_made")
    return found


def _data(module: nn.Module) -> list[tuple[type[Extension], Any]]:
    """Return the extensions of a module and their data, the lowest first."""
    made = filter(None, map(_made, reversed(type(module).__mro__)))
    return [(e, module.__dict__[e.KEY]) for e, _ in made if e.KEY in module.__dict__]


def _copying(own: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a `__deepcopy__` that extends again what a class's own one makes without data."""

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = own(module, memo)
        inside = dict(made.named_modules())
        for path, each in module.named_modules():
            if path in inside:
                memo[id(each)] = twin = inside[path]
                for extension, data in _data(each):
                    if extension.KEY not in twin.__dict__:
                        extend(twin, extension, data)
        return made

    return copied


def _extended_again(
    function: Callable[..., nn.Module],
    arguments: Any,
    data: list[tuple[type[Extension], Any]],
) -> nn.Module:
    module = function(*arguments)
    for extension, its in data:
        extend(module, extension, its)
    return module
