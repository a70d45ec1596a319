"""Models and tensors that cannot be frozen, and why; found without a call of the model."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.fp8_weight import Forms
from polymp.backends.torch.compat import distributed, modes, storage
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.pin import Pinned
from polymp.backends.torch.weights import freeze_usage, originals
from polymp.backends.torch.weights.frozen_module import FrozenModule
from polymp.errors import PolicyError


def examples(model: Any, inputs: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    """Check the example calls of a model; return a tuple of arguments for each."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze() takes a torch.nn.Module and its inputs, not {model!r}.")
    listed = inputs if isinstance(inputs, list) else [inputs]
    wrong = [type(one).__name__ for one in listed if not isinstance(one, tuple)]
    if wrong or not listed:
        given = f"a list with {wrong[0]} in it" if wrong else "an empty list"
        given = given if isinstance(inputs, list) else wrong[0]
        named = " Write freeze(model, (), kwargs=...) for inputs by keyword." * ("dict" in wrong)
        raise TypeError(
            f"freeze() takes the inputs of {type(model).__name__} as a tuple, such as (x,), or a "
            f"list of tuples, not as {given}.{named}"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"freeze() takes kwargs as a dict, not as {type(kwargs).__name__}.")
    return listed


def check(module: nn.Module, path: str) -> None:
    """Refuse a module that cannot be frozen, or that has tensors that cannot."""
    odd = (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)
    what = f"freeze(): {type(module).__name__}" + (f" at {path!r}" if path else "")
    if not path or isinstance(module, odd):
        subclass.check(module, path, "freeze")
        if module._compiled_call_impl is not None:
            raise TypeError(f"{what} is compiled by its own compile(). Freeze it before that.")
    if FrozenModule.KEY in module.__dict__:
        raise PolicyError(
            f"{what} is frozen already, for {module.__dict__[FrozenModule.KEY].region!r}. "
            "Take that off first, by remove() of the handle that freeze() returned."
        )
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and (odd_kind := _odd(t)):
            raise TypeError(f"{what} has {name!r}, {odd_kind}. {_INSTEAD}")


_INSTEAD = "Freeze a model whose parameters and buffers are plain tensors."


def _odd(t: torch.Tensor) -> str:
    """Return why freeze() cannot store a tensor of this kind; "" for a plain one."""
    if t.is_quantized:
        return "which is quantized"
    if t.is_meta:
        return "which is on meta, without values"
    if not modes.is_plain(t):
        return f"whose class, {type(t).__name__}, changes what ops do"
    if t.is_inference():
        return "an inference tensor, made under torch.inference_mode()"
    return "a part of FSDP's flat parameter" if distributed.in_fsdp1(t) else ""


def device(model: nn.Module) -> str:
    """Return the device type that a model's float tensors are on."""
    found = {t.device.type for t in originals.names(model).values() if t.is_floating_point()}
    if len(found) != 1:
        name = type(model).__name__
        if not found:
            raise PolicyError(f"freeze(): {name} has no float tensors to store.")
        raise PolicyError(
            f"freeze(): the float tensors of {name} are on {', '.join(sorted(found))}. "
            "Name the device to freeze: freeze(..., device_type='cuda')."
        )
    return found.pop()


def groups(model: nn.Module, device: str) -> list[freeze_usage.Group]:
    """Group the model's tensors by their memory, with reasons to keep them that need no call."""
    pinned = {
        id(t)
        for m in model.modules()
        if Pinned.KEY in m.__dict__
        for _, t in m.__dict__[Pinned.KEY].tensors(m)
    }
    sharing: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in originals.names(model).items():
        sharing.setdefault(storage.storage_key(t) or id(t), {})[name] = t
    groups = []
    for tensors in sharing.values():
        group = freeze_usage.Group(tensors)
        for name, t in tensors.items():
            if why := "pinned to float32" if id(t) in pinned else _why(t, device):
                alone = all(other is t for other in tensors.values())
                group.stays(why if alone else f"shares memory with {name!r}: {why}")
        groups.append(group)
    return groups


def one_by_one(
    model: nn.Module, groups: Iterable[freeze_usage.Group]
) -> list[tuple[torch.Tensor, Forms]]:
    """Return the tensors that could be stored in 8 bits, each with the forms of its group.

    Tensors that share memory are stored together, and in 8 bits they would share none. A recurrent
    layer is one op in inference mode, which no weight in 8 bits can be given to.
    """
    recurrent = nn.RNNBase, nn.RNNCellBase
    layers = [module for module in model.modules() if isinstance(module, recurrent)]
    others = {id(t) for layer in layers for t in layer.parameters()}
    free = [group for group in groups if not group.why and len(group.each()) == 1]
    pairs = [(group.each()[0], group.forms) for group in free]
    return [(t, forms) for t, forms in pairs if id(t) not in others]


def _why(t: torch.Tensor, device: str) -> str:
    """Return why a tensor cannot be stored low in any use; "" if it can."""
    if t.requires_grad:
        return "requires gradients"
    if t.dtype is not torch.float32:
        return f"is {dtype_names.NAMES[t.dtype]}"
    if t.device.type != device:
        return f"is on {t.device.type}"
    if t.layout is not torch.strided:
        return f"is {str(t.layout).removeprefix('torch.')}"
    return "is empty" if t.numel() == 0 else ""


def refuse_trained(name: str, groups: Iterable[freeze_usage.Group]) -> None:
    """Raise if every tensor that could be stored low is trained."""
    trained = [n for g in groups for n, t in g.tensors.items() if t.requires_grad]
    if trained and all(g.why for g in groups):
        raise PolicyError(
            f"freeze(): all parameters of {name} that could be stored low, {len(trained)} of them, "
            "require gradients. Call requires_grad_(False) first on those that are not trained, or "
            "model.requires_grad_(False). Those that are trained stay float32."
        )


def refuse_nothing(name: str, groups: Iterable[freeze_usage.Group]) -> NoReturn:
    """Raise an error with the reasons why no tensor can be stored low."""
    why = {n: g.why for g in groups for n, t in g.tensors.items() if t.is_floating_point()}
    shown = reasons(why)
    more = f"; and {len(shown) - 6} more reasons" if len(shown) > 6 else ""
    trained = any(t.requires_grad for g in groups for t in g.tensors.values())
    hint = " For weights that are not trained call requires_grad_(False) first." if trained else ""
    raise PolicyError(
        f"freeze(): no weight of {name} can be stored low. {'; '.join(shown[:6])}{more}.{hint}"
    )


def reasons(kept: Mapping[str, str]) -> list[str]:
    """Return the reasons why tensors stay, a line for each."""
    reasons: dict[str, list[str]] = {}
    for name, why in kept.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {why}"
        for why, names in reasons.items()
    ]
