"""The ops of a model that `bake` exports, seen before torch.export records them.

Every op is given to a `Trace` first. Where autocast has a kernel for it, that runs, and the ops
that it calls are recorded: casts, and the op.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast import regions, torch_table
from polymp.backends.torch.autocast.run_op import Rulings
from polymp.backends.torch.compat import dispatcher, export, modes
from polymp.backends.torch.weights import mkldnn_lstm

Function = Callable[..., Any]


class Trace:
    """Runs each op before torch.export records it.

    Args:
        keep: True if a parameter's cast serves all its uses.
        mkldnn: True if torch uses mkldnn; torch.export turns it off while it traces.

    Attributes:
        keep: likewise.
        mkldnn: likewise.
        in_region: True once a tensor was seen whose device has an enabled region.
        mode: the mode that records ops; None until the model is called.
    """

    def __init__(self, keep: bool, mkldnn: bool) -> None:
        self.keep = keep
        self.mkldnn = mkldnn
        self.in_region: bool = False
        self.mode: Any = None
        self._casting = False  # in a kernel of autocast's
        self._apart = False  # in a kernel that takes an op apart
        self._casts: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def watch(self, mode: Any) -> None:
        """Give every op that `mode` is about to record to this trace first."""
        self.mode = mode
        export.decompositions(mode).update(
            (op, functools.partial(self._shown, op)) for op in dispatcher.all_ops()
        )

    def _shown(self, op: torch._ops.OpOverload, /, *args: object, **kwargs: object) -> Any:
        """Run an op, so that its parts are recorded; return NotImplemented to record the op."""
        if self._casting and op is torch.ops.aten.to.dtype:
            return self._cast(op, args, kwargs)
        if self._apart and all(str(result.type) == "bool" for result in op._schema.returns):
            with export.unrecorded():  # the compiled kernel asks, say, if cuDNN can be used
                return op(*args, **kwargs)
        devices = _enabled(_tensors((args, kwargs)))
        if not devices:
            return NotImplemented
        self.in_region = True
        with _no_cache():
            for device in devices:
                kernel = _kernel(op, device)
                if kernel is not None:
                    return self._by(kernel, args, kwargs)
            return self._in_parts(op, devices, args, kwargs)

    def _by(self, kernel: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        outer, self._casting = self._casting, True
        try:
            return kernel(*args, **kwargs)
        finally:
            self._casting = outer

    def _cast(
        self, op: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Make a cast for autocast; of a parameter, return the one that there is already."""
        t, dtype, *rest = args
        if not (self.keep and isinstance(t, nn.Parameter) and t.dtype is torch.float32):
            return NotImplemented
        tracer = export.proxy_mode().tracer  # a branch has a graph of its own
        version = 0 if t.is_inference() else t._version
        key = id(tracer), id(t), version, dtype, torch.is_grad_enabled()
        if key not in self._casts:
            self._casting = False
            try:
                self._casts[key] = tracer, t, op(t, dtype, *rest, **kwargs)
            finally:
                self._casting = True
        return self._casts[key][-1]

    def _in_parts(
        self,
        op: torch._ops.OpOverload,
        devices: Sequence[str],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Any:
        """Run an op in parts, if autocast acts on ops in it; else return NotImplemented.

        To find out, the op runs with autocast and without, and the ops that reach the device are
        compared.
        """
        parts = self._parts(op, devices, args, kwargs)
        if parts is None:
            return NotImplemented
        with export.unrecorded():
            acts = self._acts_in(parts, devices, args, kwargs)
        if not acts:
            return NotImplemented
        outer, self._apart = self._apart, True
        try:
            return parts(*args, **kwargs)
        finally:
            self._apart = outer

    def _acts_in(
        self,
        parts: Function,
        devices: Sequence[str],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> bool:
        keys = (dispatcher.keyset(str(dispatcher.autocast_key(device))) for device in devices)
        with torch.no_grad(), _Reached() as inside:
            parts(*args, **kwargs)
        off = dispatcher.ExcludeKeys(functools.reduce(torch._C.DispatchKeySet.__or__, keys))
        with torch.no_grad(), _Reached() as outside, off:
            parts(*args, **kwargs)
        if inside.seen() != outside.seen():
            return True
        for op, inputs, named in inside.calls:
            deeper = self._parts(op, devices, inputs, named)
            if deeper is not None and self._acts_in(deeper, devices, inputs, named):
                return True
        return False

    def _parts(
        self,
        op: torch._ops.OpOverload,
        devices: Sequence[str],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Function | None:
        """Return a function that calls the parts of an op on these devices; None without parts."""
        key = _composite(op, devices)
        if key is None or not any(t.is_floating_point() for t in _tensors((args, kwargs))):
            return None
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*op.tags}:
            return None  # each try would make symbols for sizes that no op uses
        if self.mkldnn and mkldnn_lstm.takes(op, args):
            return mkldnn_lstm.run
        return dispatcher.called_at(op, key)


@functools.cache
def _rulings(name: str, device: str) -> Rulings:
    return Rulings(name, device)


def _kernel(op: torch._ops.OpOverload, device: str) -> Function | None:
    """Return autocast's kernel of an op on the device, in the region in force.

    None where torch has none: without a row, or if torch does as the row says on its own.
    """
    name, key = op.name().removeprefix("aten::"), str(dispatcher.autocast_key(device))
    if not dispatcher.has_kernel(op.name(), key):
        return None
    ruling = _rulings(name, device).of(regions.in_force(device))
    compiled = ruling.agrees and name in torch_table.kernels(device)
    if not compiled and (ruling.row is None or ruling.agrees):
        return None
    return dispatcher.called_at(op, key)


def _composite(op: torch._ops.OpOverload, devices: Sequence[str]) -> str | None:
    """Return the key of the kernel that takes an op apart; None without one, or if it writes."""
    has = functools.partial(dispatcher.has_kernel, op.name())
    schema = op._schema
    if schema.is_mutable or any(has(device.upper()) for device in devices):
        return None
    key = next(filter(has, dispatcher.COMPOSITE), None)
    views = any(result.alias_info is not None for result in schema.returns)
    return None if views and key != dispatcher.COMPOSITE[0] else key


class _Reached(modes.OpMode):
    """Notes the ops that reach the device, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, Any, Any]] = []

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        if func.namespace != "prim":  # these read a tensor's device or layout
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def seen(self) -> list[Any]:
        """Return the ops, each with the dtypes it was called with."""
        return [(op, [t.dtype for t in _tensors(inputs)]) for op, *inputs in self.calls]


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _enabled(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the devices of tensors that have an enabled region, in the dispatcher's order."""
    found = {t.device.type for t in tensors}
    on = [d for d in found if dispatcher.autocast_key(d) and torch.is_autocast_enabled(d)]
    return sorted(on, key=lambda device: (device == "cpu", device))  # the CPU's key comes last


@contextmanager
def _no_cache() -> Iterator[None]:
    """Keep no casts in torch's own map, which does not know of graphs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
