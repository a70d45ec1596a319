"""`bake`: a model exported with the casts of its region written out as ops.

The program has plain ops and no regions. While torch.export traces, a mode sees every op
first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from polymp.backends.torch.autocast import regions, torch_table
from polymp.backends.torch.autocast.autocast_kernel import op_on
from polymp.backends.torch.compat import dispatcher, dynamo, modes
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.weights.freeze_usage import tensors
from polymp.errors import PolicyError, brief


def bake(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a model as it runs in a region, with the casts written out.

        with autocast("cpu", torch.bfloat16, policy="lean"):
            program = bake(model, (x,))
        program.module()(x)                 # outside: the same bits as model(x) in the region

    The program needs no polymp. Parameters keep their names and dtypes, and are cast once for all
    their uses, or at each use if the region has `cache_enabled=False`. An op with a row stays
    whole; an op without one that is made of ops with rows is taken apart. Run the program outside
    of regions: inside one it would be cast again. Where a module has a fast path that torch.export
    does not take, as torch's transformer layers have without gradients and an LSTM on a CPU, the
    program has the slow one, whose bits may differ.

    Args:
        model: any module that torch.export can trace, non-strictly.
        inputs: example inputs.
        kwargs: example inputs by keyword.
        dynamic_shapes: as in torch.export.export.

    Returns:
        The exported program.

    Raises:
        TypeError: `model` is no module, a scripted or a traced one, or `inputs` is no tuple.
        PolicyError: no region is enabled for the device of the model's tensors, around the call or
            inside; or a region is entered in a branch of control flow.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bake() takes a torch.nn.Module and its inputs, not {brief(model)}.")
    subclass.check(model, "", "bake")
    if not isinstance(inputs, tuple):
        raise TypeError(
            f"bake() takes the inputs of {type(model).__name__} as a tuple, such as (x,), "
            f"not as {type(inputs).__name__}."
        )
    trace = Trace()
    subclass.extend(model, _Baked, trace)
    try:
        program = torch.export.export(
            model, inputs, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
    finally:
        subclass.restore(model, _Baked)
    if not trace.in_region:
        raise PolicyError(
            f"bake(): no region was enabled for the tensors of {type(model).__name__}, so there is "
            "nothing to write out. Write: with autocast(device_type, dtype): bake(model, inputs)."
        )
    if any(
        node.target in (dynamo.ENTER, dynamo.LEAVE) or str(node.target) == dynamo.WITHIN
        for node in _nodes(program)
    ):
        raise PolicyError(
            f"bake(): {type(model).__name__} enters a region in a branch of control flow, where it "
            "cannot be written out. Enter it around the control flow."
        )
    return program


def _nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a program, those of graphs inside graphs, too."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


class _Baked(subclass.Extension):
    """The model's class while it is exported."""

    KEY = "_polymp_bake"

    def __call__(self, *args: object, **kwargs: object) -> Any:
        trace = self.__dict__.get(self.KEY)
        mode = dynamo.proxy_mode()
        # Called by others, or by itself.
        if trace is None or mode is None or trace.mode is not None:
            return super().__call__(*args, **kwargs)
        trace.watch(mode)
        with dynamo.without_recorder() as recorder, _Entering(recorder):
            return super().__call__(*args, **kwargs)


class _Entering(TorchFunctionMode):
    """Stands for the mode by which torch.export records regions, so that they are only entered."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dynamo.ENTER or func is dynamo.LEAVE:
            return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
        return self.recorder.__torch_function__(func, types, args, kwargs or {})


Function = Callable[..., Any]


class Trace:
    """Runs each op before torch.export records it.

    Where autocast has a kernel for it, that runs, and the ops that it calls are recorded: casts,
    and the op.
    """

    def __init__(self) -> None:
        self.in_region: bool = False  # True once a tensor's device had an enabled region
        self.mode: Any = None  # that records ops; None until the model is called
        self._keep = torch.is_autocast_cache_enabled()  # a parameter's cast serves all its uses
        self._casting = False  # in a kernel of autocast's
        self._apart = False  # in a kernel that takes an op apart
        self._casts: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def watch(self, mode: Any) -> None:
        """Give every op that `mode` is about to record to this trace first."""
        self.mode = mode
        dynamo.decompositions(mode).update(
            (op, partial(self._shown, op)) for op in dispatcher.all_ops()
        )

    def _shown(self, op: modes.Op, /, *args: object, **kwargs: object) -> Any:
        """Run an op, so that its parts are recorded; return NotImplemented to record the op."""
        if self._casting and op is torch.ops.aten.to.dtype:
            return self._cast(op, args, kwargs)
        if self._apart and all(str(result.type) == "bool" for result in op._schema.returns):
            with dynamo.unrecorded():  # the compiled kernel asks, say, if cuDNN can be used
                return op(*args, **kwargs)
        devices = _enabled(tensors((args, kwargs)))
        if not devices:
            return NotImplemented
        self.in_region = True
        outer, self._casting = self._casting, True
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # torch's own map does not know of graphs
        try:
            for device in devices:
                kernel = _kernel(op, device)
                if kernel is not None:
                    return kernel(*args, **kwargs)
            self._casting = outer
            return self._in_parts(self._parts(op, devices, args, kwargs), devices)
        finally:
            self._casting = outer
            torch.set_autocast_cache_enabled(cache)

    def _cast(self, op: modes.Op, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Make a cast for autocast; of a parameter, return the one that there is already."""
        t, dtype, *rest = args
        if not (self._keep and isinstance(t, nn.Parameter) and t.dtype is torch.float32):
            return NotImplemented
        tracer = dynamo.proxy_mode().tracer  # a branch has a graph of its own
        version = 0 if t.is_inference() else t._version
        key = id(tracer), id(t), version, dtype, torch.is_grad_enabled()
        if key not in self._casts:
            self._casting = False
            try:
                self._casts[key] = tracer, t, op(t, dtype, *rest, **kwargs)
            finally:
                self._casting = True
        return self._casts[key][-1]

    def _in_parts(self, parts: Function | None, devices: list[str]) -> Any:
        """Run the parts of an op, if autocast acts on ops in them; else return NotImplemented."""
        if parts is None:
            return NotImplemented
        with dynamo.trial():
            acts = self._acts_in(parts, devices)
        if not acts:
            return NotImplemented
        outer, self._apart = self._apart, True
        try:
            return parts()
        finally:
            self._apart = outer

    def _acts_in(self, parts: Function, devices: list[str]) -> bool:
        """Run them with autocast and without: do other ops reach the device, until one fails?"""
        # Without it, dtypes may not fit; either way a kernel may read a tensor, and none has
        # memory.
        with torch.no_grad(), suppress(Exception), _Reached() as inside:
            parts()
        off = dispatcher.ExcludeKeys(dispatcher.autocast_keys(devices))
        with torch.no_grad(), suppress(Exception), _Reached(inside.seen) as outside, off:
            parts()
        if inside.seen != outside.seen:
            return True
        deeper = (self._parts(op, devices, *given) for op, *given in inside.calls)
        return any(each is not None and self._acts_in(each, devices) for each in deeper)

    def _parts(
        self, op: modes.Op, devices: list[str], args: modes.Args, kwargs: modes.Kwargs
    ) -> Function | None:
        """Return a function that calls the parts of an op on these devices; None without parts."""
        has, schema = partial(dispatcher.has_kernel, op.name()), op._schema
        if schema.is_mutable or any(has(device.upper()) for device in devices):
            return None
        key = next(filter(has, dispatcher.COMPOSITE), None)
        views = any(result.alias_info is not None for result in schema.returns)
        if key is None or (views and key != dispatcher.COMPOSITE[0]):
            return None
        if not any(t.is_floating_point() for t in tensors((args, kwargs))):
            return None
        return partial(dispatcher.called_at(op, key), *args, **kwargs)


def _kernel(op: modes.Op, device: str) -> Function | None:
    """Return autocast's kernel of an op on the device, in the region in force; None without."""
    name, key = op.name().removeprefix("aten::"), str(dispatcher.autocast_key(device))
    if not dispatcher.has_kernel(op.name(), key):
        return None
    in_region = op_on(name, device).in_region(regions.in_force(device))
    compiled = in_region.agrees and name in torch_table.kernels(device)
    if not compiled and (in_region.row is None or in_region.agrees):
        return None
    return dispatcher.called_at(op, key)


class _Reached(modes.OpMode):
    """Notes the ops that reach the device, and their arguments; stops when they are not `like`."""

    def __init__(self, like: list[Any] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[modes.Op, Any, Any]] = []
        self.seen: list[Any] = []  # the ops, each with the dtypes it is called with
        self.like = like

    def op(self, func: modes.Op, types: modes.Types, args: modes.Args, kwargs: modes.Kwargs) -> Any:
        if dispatcher.is_dispatched(func):  # the others read a tensor's device, layout or sizes
            self.calls.append((func, args, kwargs))
            self.seen.append((func, [t.dtype for t in tensors((args, kwargs))]))
            if self.like is not None and self.seen != self.like[: len(self.seen)]:
                raise RuntimeError("autocast acts")  # torch would log why the op fails without it
        return func(*args, **kwargs)


def _enabled(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the devices of tensors that have an enabled region, in the dispatcher's order."""
    found = {t.device.type for t in tensors}
    on = [d for d in found if dispatcher.autocast_key(d) and torch.is_autocast_enabled(d)]
    return sorted(on, key=lambda device: (device == "cpu", device))  # the CPU's key comes last
