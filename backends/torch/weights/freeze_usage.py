"""What a program does with the tensors of a model: who reads them, who writes, who asks.

In go groups of tensors, each on one storage, and a low dtype; out comes, for each group, why it
cannot be stored in that dtype, if anything was seen that says so. Ops are watched below autocast
and autograd, where a cast is an op like any other. How a model is run, and what is made of the
answer, is not known here.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import nn_modules, storage
from polymp.backends.torch.weights import compare_bits


class Group:
    """Tensors on one storage: all are stored low, or none.

    Attributes:
        tensors: by name, every name of each.
        why: why it stays as it is; "" as long as nothing says so.
        cast: True once it was seen to be cast to the low dtype.
        saved: what the tensors held, in the order of `tensors`, if a call was about to write them.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], why: str = "") -> None:
        self.tensors = tensors
        self.why = why
        self.cast = False
        self.saved: list[torch.Tensor] = []

    def each(self) -> list[torch.Tensor]:
        """The tensors, each once."""
        return list({id(t): t for t in self.tensors.values()}.values())

    def stays(self, why: str) -> None:
        """Note a reason; the first one counts."""
        self.why = self.why or why

    def save(self) -> None:
        """Keep what the tensors hold; once."""
        if not self.saved:
            self.saved = [t.detach().clone() for t in self.tensors.values()]

    def put_back(self) -> None:
        """Give the tensors what they held when it was saved."""
        for t, saved in zip(self.tensors.values(), self.saved, strict=False):
            if not compare_bits.same_bits(t.detach(), saved):
                t.data.copy_(saved)


class Op(NamedTuple):
    """An op that ran.

    Attributes:
        name: of the overload.
        inputs: dtypes of the tensors it was given.
        outputs: dtypes of those that it made; None if it raised.
        where: path of the module whose call it ran in.
        digests: of the bits that it made, if they were asked for.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] | None
    where: str
    digests: tuple[str, ...] = ()

    def __str__(self) -> str:
        made = "raised" if self.outputs is None else f"-> ({', '.join(self.outputs)})"
        return f"{self.name}({', '.join(self.inputs)}) {made}{_in(self.where)}"


class Uses(TorchDispatchMode):
    """Notes every op, and of those on watched storages what they do with them.

    Attributes:
        ops: that ran, in order; casts of watched tensors to the low dtype are left out.
        touched: storages other than those of the groups, and the first op on each.
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups = {storage.storage_key(t): g for g in groups for t in g.each()}
        self.low = low
        self.paths = paths
        self.digests = digests
        self.ops: list[Op] = []
        self.touched: dict[int, str] = {}
        self._elsewhere = {storage.storage_key(t) for t in elsewhere}
        self._casts: dict[int, tuple[Any, Group]] = {}  # storages of casts, kept from being reused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # device and layout are asked so, past the dispatcher
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
            done = tuple(map(compare_bits.digest, _tensors(result))) if self.digests else ()
            self.ops[at] = self.ops[at]._replace(outputs=_dtypes(result), digests=done)
        return result

    def returned(self, tree: Any) -> None:
        """The program handed these tensors out; what is a cast may be written by whoever has it."""
        for t in _tensors(tree):
            if found := self._casts.get(storage.storage_key(t)):
                found[1].stays("its cast is returned")

    def _cast_of(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Group | None:
        """The group of a tensor that is cast to the low dtype, where that dtype spares the cast.

        None if the op is anything else.
        """
        if func is not torch.ops.aten._to_copy.default:
            return None
        t, device = args[0], kwargs.get("device")
        plain = kwargs.get("memory_format") in (None, torch.preserve_format)
        here = device is None or torch.device(device).type == t.device.type
        low = kwargs.get("dtype") is self.low
        return self.groups.get(storage.storage_key(t)) if plain and here and low else None

    def _cast(
        self, group: Group, func: Any, args: Any, kwargs: Mapping[str, Any], where: str
    ) -> torch.Tensor:
        made: torch.Tensor = func(*args, **kwargs)
        if made.stride() != args[0].stride():
            group.stays(f"cast into another layout by {func}{_in(where)}")
        group.cast = True
        self._casts[storage.storage_key(made)] = storage.storage_reference(made), group
        return made

    def _only_views(self, ways: Sequence[tuple[torch.Tensor, str]]) -> bool:
        """True for a view of watched tensors or of their casts, which once stored low are one."""
        keys = [storage.storage_key(t) for t, way in ways if way == "view"]
        known = all(key in self.groups or key in self._casts for key in keys)
        return bool(keys) and len(keys) == len(ways) and known

    def _look(self, func: Any, ways: Sequence[tuple[torch.Tensor, str]], where: str) -> None:
        """Note what an op does with watched storages, before it does."""
        for t, way in ways:
            key = storage.storage_key(t)
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


# What tells the dtype of a tensor, or makes it be read where no op is seen.
_ASKS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("dtype", "itemsize", "nbytes")),
    *(
        getattr(torch.Tensor, name)
        for name in "element_size type type_as numpy tolist __array__ __dlpack__ data_ptr storage "
        "untyped_storage float double __deepcopy__ __reduce_ex__".split()
    ),
    torch.result_type,
}

# In a region the answer changes nothing there: it is for an error raised outside of regions.
_HARMLESS = {nn.RNNBase.check_input.__code__}


class Asks(TorchFunctionMode):
    """Notes whose dtype the Python program asks for; what it does with it cannot be seen."""

    def __init__(self, groups: Iterable[Group], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.groups = {storage.storage_key(t): g for g in groups for t in g.each()}
        self.paths = paths

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked: Sequence[Any] = ()
        if func in _ASKS:
            asked = args
        elif func is torch.Tensor.to:
            told = (*args[1:], *kwargs.values())
            asked = args if torch.float32 in told else told
        tensors = [t for t in asked if isinstance(t, torch.Tensor)]
        if tensors and not _harmless(sys._getframe(1)):
            for group in filter(None, (self.groups.get(storage.storage_key(t)) for t in tensors)):
                group.stays(f"its dtype is asked for{_in(module_path(self.paths))}")
        return func(*args, **kwargs)


def _harmless(frame: FrameType) -> bool:
    return code_origin.is_ours(frame.f_code.co_filename) or frame.f_code in _HARMLESS


def module_path(paths: Mapping[int, str]) -> str:
    """The path of the innermost of these modules whose call runs here; "" outside of all."""
    return next((paths[id(m)] for m in nn_modules.running_modules() if id(m) in paths), "")


def first_difference(one: Sequence[Op], other: Sequence[Op]) -> tuple[Op | None, Op | None] | None:
    """The first ops in which two runs differ, in dtypes or bits; None if they are the same."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return a, b
    longer = max(one, other, key=len)
    if len(one) == len(other):
        return None
    rest = longer[min(len(one), len(other))]
    return (rest, None) if longer is one else (None, rest)


def _ways(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, str]]:
    """The tensors an op is given, and whether it reads, writes or only views each."""
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _dtypes(tree: Any) -> tuple[str, ...]:
    return tuple(dtype_names.NAMES[t.dtype] for t in _tensors(tree))


def _in(path: str) -> str:
    return f" in {path}" if path else ""
