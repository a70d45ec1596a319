"""The uses of a model's tensors in a program: casts, reads and writes.

For each group of tensors on one storage, `Uses` notes why it cannot be stored in the low dtype, if
a use shows it. Ops are watched below autocast and autograd, where a cast is an op like any other;
`freeze_trial` has what no op shows.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast import dtype_names, fp8_product
from polymp.backends.torch.compat import modes, optimizers


class Group:
    """Tensors on one storage: all are stored low, or none.

    Args:
        tensors: by name, every name of each.
        why: why they stay as they are; "" without a reason.

    Attributes:
        tensors: likewise.
        why: likewise.
        cast: True once a cast to the low dtype was seen.
        forms: the weight in 8 bits, in the forms that products have read.
        saved: copies of the tensors, in the order of `tensors`, if a call was about to write them.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], why: str = "") -> None:
        self.tensors = tensors
        self.why: str = why
        self.cast = False
        self.forms: fp8_product.Forms = {}
        self.saved: list[torch.Tensor] = []

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
                self.forms.clear()


class Op(NamedTuple):
    """An op that ran.

    Attributes:
        name: of the overload.
        inputs: dtypes of the tensors it was given.
        outputs: dtypes of those that it made; None if it raised.
        where: path of the module whose call it ran in.
        digests: hashes of its results, if they were requested.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] | None
    where: str
    digests: tuple[str, ...] = ()

    def __str__(self) -> str:
        made = "raised" if self.outputs is None else f"-> ({', '.join(self.outputs)})"
        return f"{self.name}({', '.join(self.inputs)}) {made}{_in(self.where)}"


class Uses(modes.OpMode):
    """Notes every op, and the uses of watched storages.

    Args:
        groups: the watched tensors.
        low: the low dtype.
        paths: of the model's modules, by identity.
        elsewhere: tensors whose storages are watched for any op.
        digests: True to hash the results of ops.

    Attributes:
        ops: the ops, in order; without casts of watched tensors to the low dtype.
        touched: the storages of `elsewhere` that an op used, and the first op on each.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        groups: Iterable[Group],
        low: torch.dtype,
        paths: Mapping[int, str],
        elsewhere: Iterable[torch.Tensor] = (),
        digests: bool = False,
    ) -> None:
        super().__init__()
        self.groups: dict[int, Group] = {modes.storage_key(t): g for g in groups for t in g.each()}
        self.low = low
        self.paths = paths
        self.digests = digests
        self.ops: list[Op] = []
        self.touched: dict[int, str] = {}
        self._elsewhere = {modes.storage_key(t) for t in elsewhere}
        self._casts: dict[int, tuple[Any, Group]] = {}  # storages of casts, kept from being reused

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        # The ops of prim read a tensor's device or layout.
        if func.namespace == "prim" or fp8_product.noted.quantising:
            return func(*args, **kwargs)
        where = module_path(self.paths)
        ways = list(_ways(func, args, kwargs))
        group = self._cast_of(func, args, kwargs)
        if group is not None:
            return self._cast(group, func, args, kwargs, where)
        shown = not self._only_views(ways)
        self._look(func, ways, where)
        if shown:
            self.ops.append(Op(str(func), _dtypes((args, kwargs)), None, where))
        at = len(self.ops) - 1
        result = func(*args, **kwargs)
        if shown:
            done = tuple(map(digest, _tensors(result))) if self.digests else ()
            self.ops[at] = self.ops[at]._replace(outputs=_dtypes(result), digests=done)
        return result

    def returned(self, tree: object) -> None:
        """Note returned tensors: the caller may write one that is a cast of a watched tensor."""
        for t in _tensors(tree):
            if found := self._casts.get(modes.storage_key(t)):
                found[1].stays("its cast is returned")

    def _cast_of(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Group | None:
        """Return the group of a tensor that this op casts to the low dtype; None for other ops.

        Only casts count that would not be needed if the tensor had the low dtype.
        """
        if func is not torch.ops.aten._to_copy.default:
            return None
        t, device = args[0], kwargs.get("device")
        plain = kwargs.get("memory_format") in (None, torch.preserve_format)
        here = device is None or torch.device(device).type == t.device.type
        low = kwargs.get("dtype") is self.low
        return self.groups.get(modes.storage_key(t)) if plain and here and low else None

    def _cast(
        self,
        group: Group,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, object],
        where: str,
    ) -> torch.Tensor:
        made: torch.Tensor = func(*args, **kwargs)
        if made.stride() != args[0].stride():
            group.stays(f"cast into another layout by {func}{_in(where)}")
        group.cast = True
        self._casts[modes.storage_key(made)] = modes.storage_reference(made), group
        return made

    def _only_views(self, ways: Sequence[tuple[torch.Tensor, str]]) -> bool:
        """Return whether an op only views watched tensors or casts of them."""
        keys = [modes.storage_key(t) for t, way in ways if way == "view"]
        known = all(key in self.groups or key in self._casts for key in keys)
        return bool(keys) and len(keys) == len(ways) and known

    def _look(
        self, func: torch._ops.OpOverload, ways: Sequence[tuple[torch.Tensor, str]], where: str
    ) -> None:
        """Note the uses of watched storages by an op, before it runs."""
        for t, way in ways:
            key = modes.storage_key(t)
            if key in self._elsewhere:
                self.touched.setdefault(key, f"{func}{_in(where)}")
            if way == "write" and (cast := self._casts.get(key)):
                cast[1].stays(f"its cast is written by {func}{_in(where)}")
            group = self.groups.get(key)
            if group is None or way == "view":
                continue
            if way == "write":
                group.save()
                group.stays(f"written by {func}{_in(where)}")
            else:
                group.stays(f"read in {dtype_names.NAMES[t.dtype]} by {func}{_in(where)}")


def module_path(paths: Mapping[int, str]) -> str:
    """Return the path of the innermost of these modules whose call runs; "" outside of all."""
    return next((paths[id(m)] for m in optimizers.running_modules() if id(m) in paths), "")


def first_difference(one: Sequence[Op], other: Sequence[Op]) -> tuple[Op | None, Op | None] | None:
    """Return the first ops in which two runs differ, in dtypes or bits; None if none do."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return a, b
    longer = max(one, other, key=len)
    if len(one) == len(other):
        return None
    rest = longer[min(len(one), len(other))]
    return (rest, None) if longer is one else (None, rest)


def _ways(
    func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield an op's input tensors, and whether it reads, writes or only views each."""
    schema = getattr(func, "_schema", None)  # ops on functions have none
    if schema is None:
        yield from ((t, "read") for t in _tensors((args, kwargs)))
        return
    named = {a.name: a for a in schema.arguments}
    views = any(result.alias_info is not None for result in schema.returns)
    pairs = (
        *zip(schema.arguments, args, strict=False),
        *((named[k], v) for k, v in kwargs.items()),
    )
    for argument, value in pairs:
        alias = argument.alias_info
        way = "read"
        if alias is not None and alias.is_write:
            way = "write"
        elif alias is not None and views and func is not torch.ops.aten.view.dtype:
            way = "view"
        yield from ((t, way) for t in _tensors(value))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _dtypes(tree: object) -> tuple[str, ...]:
    return tuple(dtype_names.NAMES[t.dtype] for t in _tensors(tree))


def _in(path: str) -> str:
    return f" in {path}" if path else ""


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
        inside = None if isinstance(leaf, torch.Tensor | type | nn.Module) else _attributes(leaf)
        if inside and id(leaf) not in seen:
            yield from leaves(inside, seen | {id(leaf)})
        else:
            yield leaf


def _attributes(value: object) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    return getattr(value, "__dict__", None)


def digest(t: torch.Tensor) -> str:
    """Return a hash of the bits of a tensor; "" if it has none that can be read."""
    if not _has_bits(t):
        return ""
    return hashlib.blake2b(_bits(t).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, device and bits."""
    if a.dtype is not b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if not (_has_bits(a) and _has_bits(b)):
        return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(_bits(a), _bits(b))


def _has_bits(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested and not t.is_quantized


def _bits(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)
