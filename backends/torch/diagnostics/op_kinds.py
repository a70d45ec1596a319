"""Kinds of ops, by name and arguments: views, casts, ops of the vocabulary."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.rules.vocabulary import vocabulary


@cache
def kind_of(func: torch._ops.OpOverload) -> str:
    """Return the kind of an op: "view", "makes" for results that read no float, or "computes"."""
    name = func.overloadpacket.__name__
    aliases = [r.alias_info for r in func._schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    if view or func.namespace in ("prim", "profiler") or name in op_facts.SILENT_VIEWS:
        return "view"
    return "makes" if name in op_facts.FACTORIES else "computes"


def is_cast(source: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy is from one float dtype to another, on one device."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return (
        isinstance(dtype, torch.dtype)
        and dtype.is_floating_point
        and source.is_floating_point()
        and dtype is not source.dtype
        and (device is None or torch.device(device).type == source.device.type)
    )


def name_of(overload: str, name: str) -> str:
    """Return the name of an op that is called past the kernels, such as in place: "relu_".

    Args:
        overload: its full name: "add_.Tensor".
        name: the name without the overload's: "add_".

    Returns:
        Its name in the vocabulary, or torch's own.
    """
    if name == "_to_copy":
        return "to"
    op = vocabulary().of_aten(overload) or vocabulary().of_kernel(name)
    if not op and name.endswith("_"):
        op = vocabulary().of_aten(overload.replace(name, name[:-1], 1))
    return op or name


def float_tensors(tree: object) -> list[torch.Tensor]:
    """Return the float tensors in an op's arguments or results, in order."""
    return [t for t in tensors(tree) if t.is_floating_point()]


def tensors(tree: object) -> list[torch.Tensor]:
    """Return the tensors in an op's arguments or results, in order."""
    found: list[torch.Tensor] = []
    _collect((tree,), found)
    return found


def written(
    func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Return the float tensors that an op writes into, among its arguments."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    places = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return float_tensors([named.get(place) for place in places])


def _collect(trees: Iterable[object], found: list[torch.Tensor]) -> None:
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list)):
            _collect(tree, found)
        elif isinstance(tree, dict):
            _collect(tree.values(), found)


def dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the dtypes of tensors."""
    return tuple(dtype_names.NAMES[t.dtype] for t in tensors)
