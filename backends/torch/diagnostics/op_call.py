"""`OpCall`: a call of an op, or its backward, that a tracer follows; its kind and source."""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, op_facts, torch_table
from polymp.backends.torch.compat import dispatcher, distributed, dynamo, modes, optimizers
from polymp.backends.torch.scaler import device_state, grad_scaler, optimizer_step, unscale
from polymp.diagnostics.call_record import Call
from polymp.dtypes import FORMATS, widest
from polymp.rules.row import Row
from polymp.rules.vocabulary import vocabulary

_SCALING = frozenset(
    module.__file__ for module in (optimizer_step, grad_scaler, device_state, unscale)
)


class CallSite(NamedTuple):
    """The place where an op was called."""

    module: str  # path of the innermost module whose call runs; "" outside of all
    # "file.py:12", of the innermost code outside of libraries; "" in backward code of torch's own.
    source: str
    recomputed: bool  # True inside the recomputation of a checkpoint
    updating: bool = False  # True inside an optimizer's step or a loss scaler
    compiled: bool = False  # True inside code that torch.compile has generated
    sends: bool = False  # True inside the functions of FSDP2 that send parameters and gradients


@dataclass(eq=False, slots=True)
class OpCall:
    """One call of an op, or the backward of one."""

    op: str  # its name in the vocabulary, or torch's own
    spelling: str  # torch's name, with a prefix
    place: CallSite  # where it was called
    direction: str  # "forward", "backward" or "recompute"
    region: str = ""  # the low dtype of the region, "" outside
    row: Row | None = None  # the row that decided; None if the policy has none for the op
    # dtypes of its float inputs before casts; None until they are known.
    inputs: tuple[str, ...] | None = None
    # dtypes of the float inputs of its first op that computes; for products, of the first product.
    run: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # dtypes of its float results
    casts: int = 0  # the number of casts
    cast_bytes: int = 0  # bytes read and written by them
    cached: int = 0  # the number of casts of parameters that were not needed
    flops: int = 0  # of products, convolutions and attention
    kept: int = 0  # bytes of float32 kept for backward
    recipe: str = ""  # of a product in 8 bits, "" of others
    fallback: str = ""  # why a product with rule fp8 is not in 8 bits
    backward: "OpCall | None" = None  # the backward of this call, once a part of it has run
    ops: int = 0  # the number of ops that ran in it, without casts
    cast_storages: frozenset[int] = frozenset()

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Note a cast that was made for it."""
        if self.inputs is None:
            self.inputs, self.outputs = dtypes([source]), dtypes([result])
        self.casts += 1
        self.cast_bytes += modes.stored_bytes(source) + modes.stored_bytes(result)
        self.cast_storages |= {modes.storage_key(source)}

    def computed(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        read: tuple[str, ...],
        made: tuple[str, ...],
    ) -> None:
        """Note an op that is part of it, with the dtypes that the op read and made."""
        if self.inputs is None:
            self.inputs = read
        flops = modes.flops(func, args, kwargs, result)
        if flops and not self.flops:
            self.run = read[:1]  # attention's statistics are float32 in any case
        elif not self.run:
            self.run = read or made
        self.flops += flops
        self.outputs = made or self.outputs
        self.ops += 1

    def spared(self, given: Iterable[torch.Tensor]) -> None:
        """Note casts of parameters that were not needed: it ran low, and none was made."""
        low = dtype_names.DTYPES.get(self.region)
        if self.row is None or not self.run or set(self.run) != {self.region}:
            return
        for t in given:
            if t.is_leaf and t.dtype is torch.float32 is not low:
                key = modes.storage_key(t)  # 0 of what torch.func wraps
                if key and key not in self.cast_storages:
                    self.cached += 1


def call_of(op_call: OpCall) -> Call:
    """Make the record of a call that a report has."""
    return Call(
        "torch",
        op_call.op,
        op_call.spelling,
        op_call.place.module,
        op_call.place.source,
        op_call.direction,
        op_call.region,
        op_call.row,
        op_call.inputs or (),
        _widest(op_call.run),
        op_call.outputs,
        op_call.casts,
        op_call.cast_bytes,
        (("cached", op_call.cached),) if op_call.cached else (),
        op_call.flops,
        op_call.kept,
        recipe=op_call.recipe,
        fallback=op_call.fallback,
    )


@cache
def _widest(names: tuple[str, ...]) -> str:
    """Return the dtype that holds all of some float dtypes; "" without one."""
    known = [name for name in names if name in FORMATS]
    return widest(known) if known else ""


class OpFacts(NamedTuple):
    """The facts of an op that tracers ask for at each of its calls."""

    kind: str  # "view", "makes" for results that read no float, or "computes"
    copies: bool  # True for `_to_copy`, which casts
    writes: bool  # True if it writes into its arguments
    receives: bool  # True if other ranks write its results
    # 0, or 0, 1 and -1, if a number that it is given keeps its result away from these.
    keeps: frozenset[float]
    copies_as: str  # its name if it copies numbers as they are, else ""
    draws: bool  # True if it makes random numbers
    lists: bool  # True if it takes lists of tensors, as those of optimizers do


@dataclass(eq=False, slots=True)
class Ran:
    """A kernel that runs or has run, with its arguments."""

    func: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reads: list[torch.Tensor]  # the tensors among them that are followed
    op_call: OpCall  # the call that it is part of
    facts: OpFacts
    casts: bool  # True of a cast from one float dtype to another
    gradient: bool = False  # True in a backward pass if it makes a gradient: see `GradientFlow`

    @property
    def into(self) -> list[torch.Tensor]:
        """The tensors that it writes into."""
        if not self.facts.writes:
            return []
        return [*dispatcher.written(self.func, self.args, self.kwargs)]

    @property
    def unread(self) -> set[int]:
        """The identities of tensors that it writes and does not read."""
        if not self.facts.writes:
            return set()
        into = {*map(id, self.into)}
        whole = self.func is torch.ops.aten.copy_.default or self.facts.draws
        return into if whole else into & {*map(id, self.kwargs.values())}


# Kinds of ops, by name and arguments: views, casts, ops of the vocabulary.


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
        torch.Tag.nondeterministic_seeded in func.tags,
        name.startswith(("_foreach_", "_fused_", "_amp_")),
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
    """Return the name of an op that is called past the kernels, such as in place: "relu_"."""
    if name == "_to_copy":
        return "to"
    op = vocabulary().of_aten(overload) or vocabulary().of_kernel(name)
    if not op and name.endswith("_"):
        op = vocabulary().of_aten(overload.replace(name, name[:-1], 1))
    return op or name


def float_tensors(*trees: object) -> list[torch.Tensor]:
    """Return the float tensors in an op's arguments or results, in order."""
    return [t for t in tensors(*trees) if t.is_floating_point()]


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


# `Own`: a context for ops that a tracer runs for itself.


_OFF = dispatcher.autocast_keys(torch_table.DEVICES)


class _Busy(threading.local):
    """The number of measurements that run in this thread: their ops belong to no program."""

    def __init__(self) -> None:
        self.depth: int = 0
        self.guard: Any = dispatcher.ExcludeKeys(_OFF)  # of the outermost: to make one takes long


_busy = _Busy()


def running() -> bool:
    """Return whether a subscriber runs ops of its own in this thread."""
    return _busy.depth > 0


class Own:
    """A context whose ops no stream sees and no region casts: `with Own(): ...`."""

    def __enter__(self) -> None:
        _busy.depth += 1
        if _busy.depth == 1:
            _busy.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        _busy.depth -= 1
        if not _busy.depth:
            _busy.guard.__exit__(*error)


# Call sites: the module whose call runs, and the line of the user's code.
#
# Both are read from the Python stack, so that no hook is set and no module changed.


class CallSites:
    """Finds call sites, and remembers the paths of modules."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._known: dict[CallSite, CallSite] = {}  # many are alike, and one is kept of these
        # In `model`; without it, in the outermost module that ran when one was met first.
        self._paths: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # kept alive, for paths go by identity
        if model is not None:
            self._learn(model)
        self._settled = model is not None

    def _learn(self, root: nn.Module) -> None:
        self._roots.append(root)
        for name, module in root.named_modules():
            self._paths.setdefault(id(module), dynamo.plain_name(name))

    def here(self, frame: FrameType | None) -> CallSite:
        """Return the call site of a frame, from it and the frames that called it."""
        path: str | None = None
        module: nn.Module | None = None
        source, recomputed, updating, compiled, sends, start = "", False, False, False, False, frame
        while frame is not None:
            code = frame.f_code
            if code is optimizers.MODULE_CALL:
                if path is None:
                    module = frame.f_locals["self"]  # makes a dict: costly
                    path = self._paths.get(id(module))
            elif (kind := _kind(code.co_filename)) != "library":
                if kind == "user":
                    source = source or f"{_name(code.co_filename)}:{frame.f_lineno}"
                elif kind == "fsdp":
                    sends |= not source and code.co_name in _SENDS
                elif kind == "checkpoint":
                    recomputed |= code.co_name in _RECOMPUTES
                elif kind == "compiled":
                    source, compiled = "", True  # of the generated file
                elif kind == "update":
                    updating |= not source  # with a source, it calls a closure of the user's
                elif kind == "engine":
                    break  # ops of a backward pass are not at the line that called backward()
            frame = frame.f_back
        if path is None and module is not None and not self._settled:
            self._learn(module)  # the outermost one that runs
            return self.here(start)
        place = CallSite(path or "", source, recomputed, updating, compiled, sends)
        return self._known.setdefault(place, place)


# The functions of FSDP2 that gather parameters, and the one that adds up gradients.
_SENDS = frozenset({"unshard", "wait_for_unshard", "foreach_reduce"})


# The functions of torch.utils.checkpoint that run a forward again.
_RECOMPUTES = frozenset({"recompute_fn", "unpack_hook", "backward"})
_TORCH = str(Path(torch.__file__).parent) + os.sep


@cache
def _name(filename: str) -> str:
    return Path(filename).name


@cache
def _kind(filename: str) -> str:
    """Return the kind of a file: "user", "engine", "checkpoint", "update", ..., "library"."""
    if filename.startswith(_TORCH):
        end = Path(filename.removeprefix(_TORCH)).as_posix()
        return next((kind for start, kind in _TORCH_S.items() if end.startswith(start)), "library")
    if filename in _SCALING:
        return "update"
    return "library" if code_origin.is_library(filename) else "user"


_TORCH_S = {
    "autograd/graph.py": "engine",
    "utils/checkpoint.py": "checkpoint",
    "amp/grad_scaler.py": "update",
    "optim/": "update",
    "distributed/fsdp/_fully_shard/": "fsdp",
    "_inductor/output_code.py": "compiled",
}
