"""The uses of a model's tensors in a program, and tensors that are stored in another dtype.

For each group of tensors on one storage, `Uses` notes why it cannot be stored in the low dtype, if
a use shows it. Ops are watched below autocast and autograd, where a cast is an op like any other;
`freeze` has what no op shows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import dispatcher, distributed, modes, optimizers, tree_leaves


class Group:
    """Tensors on one storage: all are stored low, or none."""

    def __init__(self, tensors: dict[str, torch.Tensor], why: str = "") -> None:
        self.tensors = tensors  # by name, every name of each
        self.why: str = why  # they stay as they are; "" without a reason
        self.cast = False  # True once a cast to the low dtype was seen
        self.saved: list[torch.Tensor] = []  # copies, if a call was about to write the tensors

    def each(self) -> list[torch.Tensor]:
        """Return the tensors, each once."""
        return list({id(t): t for t in self.tensors.values()}.values())

    def stays(self, why: str) -> None:
        """Note a reason; the first one counts."""
        self.why = self.why or why

    def save(self) -> None:
        """Copy the tensors, once."""
        if not self.saved:
            self.saved = [t.detach().clone() for t in self.tensors.values()]

    def put_back(self) -> None:
        """Give the tensors the values back that they had when they were saved."""
        for t, saved in zip(self.tensors.values(), self.saved, strict=False):
            if not same_bits(t.detach(), saved):
                t.data.copy_(saved)


def sharing(named: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return tensors by name, those together that are on one storage."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in named:
        key = modes.storage_key(distributed.local(t)) or id(t)
        found.setdefault(key, {})[name] = t
    return list(found.values())


def by_storage(groups: Iterable[Group]) -> dict[int, Group]:
    """Return groups by the keys of their storages."""
    return {modes.storage_key(t): group for group in groups for t in group.each()}


class Op(NamedTuple):
    """An op that ran."""

    name: str  # of the overload
    inputs: tuple[str, ...]  # dtypes of the tensors it was given
    outputs: tuple[str, ...] | None  # of those that it made; None if it raised
    where: str  # path of the module whose call it ran in, as messages have it

    def __str__(self) -> str:
        made = "raised" if self.outputs is None else f"-> ({', '.join(self.outputs)})"
        return f"{self.name}({', '.join(self.inputs)}) {made}{self.where}"


class Uses(modes.OpMode):
    """Notes every op but casts of watched tensors to the low dtype, and the uses of these."""

    supports_higher_order_operators = True

    def __init__(
        self,
        groups: Iterable[Group],
        low: torch.dtype,
        paths: Mapping[int, str],
    ) -> None:
        super().__init__()
        self.groups = by_storage(groups)
        self.low = low
        self.paths = paths  # of the model's modules, by identity
        self.ops: list[Op] = []
        self._casts: dict[int, tuple[Any, Group]] = {}  # storages of casts, kept from being reused

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        # The ops of prim read a tensor's device or layout.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
        if torch.is_inference_mode_enabled() and (parts := dispatcher.parts_of(func, device)):
            with self:  # there a mode is given `to` and `linear` whole
                return parts(*args, **kwargs)
        where = module_path(self.paths)
        if group := self._cast_of(func, args, kwargs):
            made = func(*args, **kwargs)
            if made.stride() != args[0].stride():
                group.stays(f"cast into another layout by {func}{where}")
            group.cast = True
            self._casts[modes.storage_key(made)] = modes.storage_reference(made), group
            return made
        ways = [(t, modes.storage_key(t), way) for t, way in _ways(func, args, kwargs)]
        shown = not ways or not all(
            way == "view" and (key in self.groups or key in self._casts) for _, key, way in ways
        )
        for t, key, way in ways:
            if way == "write" and key in self._casts:
                self._casts[key][1].stays(f"its cast is written by {func}{where}")
            group = self.groups.get(key)
            if group is not None and way == "write":
                group.save()
                group.stays(f"written by {func}{where}")
            elif group is not None and way == "read":
                group.stays(f"read in {dtype_names.NAMES[t.dtype]} by {func}{where}")
        at = len(self.ops)
        if shown:
            self.ops.append(Op(str(func), _dtypes((args, kwargs)), None, where))
        result = func(*args, **kwargs)
        if shown:
            self.ops[at] = self.ops[at]._replace(outputs=_dtypes(result))
        return result

    def returned(self, tree: object) -> None:
        """Note returned tensors: the caller may write one that is a cast of a watched tensor."""
        for t in tensors(tree):
            if found := self._casts.get(modes.storage_key(t)):
                found[1].stays("its cast is returned")

    def _cast_of(
        self, func: modes.Op, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Group | None:
        """Return the group of a tensor that this op casts to the low dtype; None for other ops."""
        if func is not torch.ops.aten._to_copy.default or kwargs.get("dtype") is not self.low:
            return None
        # Only casts count that would not be needed if the tensor had the low dtype.
        t, device = args[0], kwargs.get("device")
        plain = kwargs.get("memory_format") in (None, torch.preserve_format)
        here = device is None or torch.device(device).type == t.device.type
        return self.groups.get(modes.storage_key(t)) if plain and here else None


def module_path(paths: Mapping[int, str]) -> str:
    """Return " in " and the path of the innermost of these modules whose call runs; or ""."""
    path = next((paths[id(m)] for m in optimizers.running_modules() if id(m) in paths), "")
    return f" in {path}" if path else ""


def first_difference(one: Sequence[Op], other: Sequence[Op]) -> tuple[Op | None, Op | None] | None:
    """Return the first ops in which two runs differ, in dtypes; None if none do."""
    return next(((a, b) for a, b in zip_longest(one, other) if a != b), None)


def _ways(
    func: modes.Op, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield an op's input tensors, and whether it reads, writes or only views each."""
    schema = getattr(func, "_schema", None)  # ops on functions have none
    if schema is None:
        yield from ((t, "read") for t in tensors((args, kwargs)))
        return
    named = {a.name: a for a in schema.arguments}
    views = any(result.alias_info is not None for result in schema.returns)
    unwritten = "view" if views and func is not torch.ops.aten.view.dtype else "read"
    pairs = [*zip(schema.arguments, args, strict=False)]
    pairs += [(named[key], value) for key, value in kwargs.items()]
    for argument, value in pairs:
        alias = argument.alias_info
        way = "read" if alias is None else "write" if alias.is_write else unwritten
        yield from ((t, way) for t in tensors(value))


def tensors(tree: object) -> list[torch.Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _dtypes(tree: object) -> tuple[str, ...]:
    return tuple(dtype_names.NAMES[t.dtype] for t in tensors(tree))


# Bit-for-bit comparison of the results of two runs, in any containers and objects.


def same(one: object, other: object) -> bool:
    """Return whether two results are the same, tensors bit for bit, in any containers."""
    parts, others = list(leaves(one)), list(leaves(other))
    if len(parts) != len(others):
        return False
    return all(
        same_bits(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and (not isinstance(a, _PLAIN) or repr(a) == repr(b))
        for a, b in zip(parts, others, strict=True)
    )


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype)


def leaves(tree: object, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield tensors and plain values in a result: in containers, and in attributes of objects."""
    for leaf in tree_leaves(tree):
        inside: Any = None
        if not isinstance(leaf, torch.Tensor | type | nn.Module):
            inside = dict(leaf) if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", None)
        if inside and id(leaf) not in seen:
            yield from leaves(inside, seen | {id(leaf)})
        else:
            yield leaf


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, device, layout and bits."""
    if a.is_nested or b.is_nested:
        same_kind = a.is_nested == b.is_nested and a.layout == b.layout and a.size(0) == b.size(0)
        return same_kind and all(map(same_bits, a.unbind(), b.unbind()))
    if a.dtype is not b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if not (_has_bits(a) and _has_bits(b)):
        return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(_bits(a), _bits(b))


def _has_bits(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized


def _bits(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


# Tensors of a model that are stored in another dtype.


def names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; a tensor with several names under each."""
    every = (model.named_parameters, model.named_buffers)
    return {name: t for named in every for name, t in named(remove_duplicate=False)}


def device_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the type of an accelerator that one of the tensors is on; else "cpu"."""
    # It is "meta" only if all are there.
    last = {"cpu": 1, "meta": 2}
    return min((t.device.type for t in tensors), key=lambda kind: last.get(kind, 0), default="cpu")


def memory(model: nn.Module) -> int:
    """Return the bytes of the memory of parameters and buffers, each piece once."""
    pieces = {modes.storage_key(t): t for t in names(model).values() if modes.storage_key(t)}
    return sum(t.untyped_storage().nbytes() for t in pieces.values())


def why_kept(t: torch.Tensor, *dtypes: torch.dtype) -> str:
    """Return why a tensor, of these dtypes, cannot be stored in another one; "" if it can."""
    if t.layout is not torch.strided:
        return f"is {str(t.layout).removeprefix('torch.')}"
    if t.dtype not in dtypes:
        return f"is {dtype_names.NAMES[t.dtype]}"
    return "is empty" if t.numel() == 0 else ""


def store(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Store tensors on one storage in a dtype: the same objects, which share memory as before."""
    first = min(t.storage_offset() for t in tensors)
    last = max(t.storage_offset() + _extent(t) for t in tensors)
    flat = tensors[0].detach().as_strided((last - first,), (1,), first).to(dtype, copy=True)
    for t in tensors:
        t.data = flat.as_strided(t.size(), t.stride(), t.storage_offset() - first)


def _extent(t: torch.Tensor) -> int:
    """Return how many elements of its memory a tensor spans."""
    return 1 + sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
