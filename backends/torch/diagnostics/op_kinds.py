"""Kinds of ops, by name and arguments: views, casts, ops of the vocabulary."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.backends.torch.compat import dispatcher, distributed
from polymp.rules.vocabulary import vocabulary


class OpFacts(NamedTuple):
    """The facts of an op that tracers ask for at each of its calls.

    Attributes:
        kind: "view", "makes" for results that read no float, or "computes".
        copies: True for `_to_copy`, which casts.
        writes: True if it writes into its arguments.
        receives: True if other ranks write its results.
        adds: True if it adds numbers.
    """

    kind: str
    copies: bool
    writes: bool
    receives: bool
    adds: bool


@cache
def facts_of(func: torch._ops.OpOverload) -> OpFacts:
    """Return the facts of an op."""
    name = func.overloadpacket.__name__
    return OpFacts(
        _kind_of(func, name),
        func is torch.ops.aten._to_copy.default,
        dispatcher.writes(func),
        distributed.receives(func),
        name in op_facts.ADDING,
    )


def _kind_of(func: torch._ops.OpOverload, name: str) -> str:
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


def float_tensors(*trees: object) -> list[torch.Tensor]:
    """Return the float tensors in an op's arguments or results, in order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            if tree.is_floating_point():
                found.append(tree)
        elif isinstance(tree, (tuple, list, dict)):
            found += [t for t in tensors(tree) if t.is_floating_point()]
    return found


def tensors(*trees: object) -> list[torch.Tensor]:
    """Return the tensors in an op's arguments or results, in order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list)):
            found += tensors(*tree)
        elif isinstance(tree, dict):
            found += tensors(*tree.values())
    return found


def written(
    func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Return the float tensors that an op writes into, among its arguments."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    places = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return float_tensors(*[named.get(place) for place in places])


def dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the dtypes of tensors."""
    return tuple([dtype_names.NAMES[t.dtype] for t in tensors])
