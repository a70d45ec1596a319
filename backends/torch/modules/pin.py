"""`pin`: parameters that keep their dtype when the model is cast to another.

Pinning is about storage alone: the policy decides in which dtype an op computes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.modules import subclass
from polymp.errors import PolicyError
from polymp.rules import scopes


class Pin(NamedTuple):
    """The dtype of a pinned module's tensors."""

    dtype: str  # of its float parameters and buffers
    names: frozenset[str] | None  # of those; None for all, those registered later, too

    def tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's own float tensors that are pinned, with their names."""
        own = (*module._parameters.items(), *module._buffers.items())
        for name, tensor in own:
            if tensor is None or not tensor.is_floating_point():
                continue
            if self.names is None or name in self.names:
                yield name, tensor


class Pinned(subclass.Extension):
    """A module's class, once pinned."""

    KEY: ClassVar[str] = "_polymp_pin"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply `fn` as `to`, `half` and `cuda` do, then put back what it rounded."""
        # `fn` goes on as it is: modules, such as torchmetrics', know it by its name.
        pin = self.__dict__.get(Pinned.KEY)
        pinned = pin.tensors(self) if pin else ()
        dtype = dtype_names.DTYPES[pin.dtype if pin else "float32"]
        before = {name: (t.data, None if t.grad is None else t.grad.data) for name, t in pinned}
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        for name, (data, grad) in before.items():
            made: Any = self._parameters.get(name)
            if made is None:
                self._buffers[name] = _like(self._buffers[name], data, dtype)
                continue
            made.data = _like(made.data, data, dtype)
            if grad is not None:
                made.grad.data = _like(made.grad, grad, dtype)
        if before and isinstance(self, nn.RNNBase):
            self.flatten_parameters()
        return self

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Load, and cast tensors that have replaced pinned ones to the pinned dtype."""
        super()._load_from_state_dict(*args, **kwargs)
        pin = self.__dict__.get(Pinned.KEY)
        if pin is None:
            return
        dtype = dtype_names.DTYPES[pin.dtype]
        for name, tensor in list(pin.tensors(self)):
            if tensor.dtype is not dtype:  # a new tensor: this one may be the caller's
                made = tensor.detach().to(dtype)
                if name in self._parameters:
                    made = nn.Parameter(made, tensor.requires_grad)
                setattr(self, name, made)


def _like(made: Any, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy `t` to `dtype`, and to the device and layout of `made`; `made` or `t` if it has them."""
    if made.dtype is dtype:
        return cast(torch.Tensor, made)
    if t.dtype is dtype and t.device == made.device and t.stride() == made.stride():
        return t
    return torch.empty_like(made, dtype=dtype).copy_(t)


class Pinning(subclass.Handle):
    """The handle that `pin` returns: after `remove()` the modules can be cast again.

    Args:
        dtype: the name of the pinned dtype.
        modules: the pinned modules.

    Attributes:
        dtype: likewise.
    """

    _call = "pin(model, dtype)"

    def __init__(self, dtype: str, modules: Iterable[nn.Module]) -> None:
        super().__init__(Pinned, modules)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Pinning({self.dtype!r}, {len(self._modules)} modules)"


def pin(
    module: nn.Module, dtype: str | torch.dtype, *, paths: Sequence[str] | None = None
) -> Pinning:
    """Keep the parameters of a module in a dtype, whatever the model is cast to later.

        pin(model, "float32", paths=["*.norm*", "lm_head"])
        model.to("cuda", torch.bfloat16)         # all but those; theirs were never rounded

    Float parameters, their gradients and float buffers, such as running statistics, are cast to the
    dtype now and stay in it through `to`, `half`, `double` and the like, and through
    `load_state_dict(assign=True)`. A parameter that is tied to another module of `module` is pinned
    there, too; so call pin on a model that has both.

    This is about storage. The policy decides in which dtype the module's ops run: in a region, a
    pinned weight is cast for a matmul like any other. To run ops of a module in float32, use
    `scoped`.

    The modules are changed in place: the class of each becomes a subclass of the same name. Casts
    that do not call the module are not seen: `module.weight.data = ...`, another Parameter assigned
    by hand, FSDP's own mixed precision.

    Args:
        module: any module, with its submodules; modules added later are not pinned.
        dtype: a float dtype, by name, by an alias such as "fp32", or torch's own.
        paths: patterns of module paths in `module`, as in the scopes of a policy; None for all.

    Returns:
        A handle, not the module.

    Raises:
        TypeError: `module` is no module, or a submodule cannot be pinned.
        PolicyError: there is no such float dtype; a pattern is malformed or matches nothing; or a
            module is pinned already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"pin() takes a torch.nn.Module and a dtype, not {module!r}.")
    name = _dtype(dtype)
    pins = _pins(module, name, paths)
    for path, (own, _) in pins.items():
        what = subclass.check(own, path, "pin")
        if Pinned.KEY in own.__dict__:
            raise PolicyError(
                f"{what} is pinned already, to {own.__dict__[Pinned.KEY].dtype}. "
                "Take that off first, by remove() of the handle that pin() returned."
            )
    for own, kept in pins.values():
        subclass.extend(own, Pinned, kept)
    wanted = dtype_names.DTYPES[name]
    if any(t.dtype is not wanted for m, kept in pins.values() for _, t in kept.tensors(m)):
        module._apply(lambda t: t)
    return Pinning(name, [m for m, _ in pins.values()])


def _dtype(dtype: object) -> str:
    try:
        return dtype_names.NAMES[dtype_names.of(dtype, "pin(): dtype")]
    except (TypeError, ValueError) as error:
        raise PolicyError(str(error)) from None


def _pins(
    root: nn.Module, dtype: str, paths: Sequence[str] | None
) -> dict[str, tuple[nn.Module, Pin]]:
    """Return the modules to pin, by path, and those that share a parameter with them."""
    modules = dict(root.named_modules())
    meant = set(modules)
    if paths is not None:
        if isinstance(paths, str):
            raise PolicyError(f"pin(): paths={paths!r} is not a list. Write paths=[{paths!r}].")
        hint = partial(subclass.hint, models=[root])
        found = (scopes.matching(p, modules, "pin()", "module", hint) for p in paths)
        meant = set().union(*found)
    pins = {path: (m, Pin(dtype, None)) for path, m in modules.items() if path in meant}
    shared = {id(t) for m, kept in pins.values() for _, t in kept.tensors(m)}
    for path, module in modules.items():
        names = frozenset(n for n, t in Pin(dtype, None).tensors(module) if id(t) in shared)
        if names and path not in pins:
            pins[path] = module, Pin(dtype, names)
    return pins
