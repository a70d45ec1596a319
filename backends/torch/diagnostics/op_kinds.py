"""Kinds of ops, by name and arguments: views, casts, ops of the vocabulary."""

from collections.abc import Iterable, Mapping
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
        keeps: 0, or 0, 1 and -1, if a number that it is given keeps its result away from these.
        copies_as: its name if it copies numbers as they are, else "".
    """

    kind: str
    copies: bool
    writes: bool
    receives: bool
    keeps: frozenset[float]
    copies_as: str


@cache
def facts_of(func: torch._ops.OpOverload) -> OpFacts:
    """Return the facts of an op."""
    name = func.overloadpacket.__name__
    return OpFacts(
        _kind_of(func, name),
        func is torch.ops.aten._to_copy.default,
        dispatcher.writes(func),
        distributed.receives(func),
        op_facts.KEEPS.get(name, frozenset()),
        name if name in op_facts.COPIES else "",
    )


def _kind_of(func: torch._ops.OpOverload, name: str) -> str:
    aliases = [r.alias_info for r in func._schema.returns]
    if name in op_facts.FACTORIES:
        return "makes"
    view = any(alias is not None and not alias.is_write for alias in aliases)
    if view or func.namespace in ("prim", "profiler") or name in op_facts.SILENT_VIEWS:
        return "view"
    return "computes"


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


def numbers_in(*trees: object) -> list[torch.Tensor]:
    """Return the float and complex tensors in an op's arguments or results, in order."""
    return [t for t in tensors(*trees) if t.is_floating_point() or t.is_complex()]


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


def dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the dtypes of tensors."""
    return tuple([dtype_names.NAMES[t.dtype] for t in tensors])
