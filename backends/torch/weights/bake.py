"""`bake`: a model exported with the casts of its region written out as ops.

The program has plain ops and no regions. While torch.export traces, `bake_trace` sees every op
first.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from polymp.backends.torch.compat import export
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.weights import mkldnn_lstm
from polymp.backends.torch.weights.bake_trace import Trace
from polymp.errors import PolicyError


def bake(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a model as it runs in the region in force, with the casts written out.

        with autocast("cpu", torch.bfloat16, policy="lean"):
            program = bake(model, (x,))
        program.module()(x)                 # outside: the same bits as model(x) in the region

    Policies, scopes, regions inside the model, polymp's or torch.amp's, and registered ops have the
    same effect as when the model runs. The program can be loaded, compiled and run without polymp.
    Parameters keep their names and dtypes. A parameter is cast once for all its uses, or at each
    use if the region has `cache_enabled=False`.

    An op with a row stays whole; an op without one that is made of ops with rows is taken apart.
    Run the program outside of regions: inside one it would be cast again. Rules for ops that a
    compiled kernel calls inside itself, as relu calls clamp_min, are not written out. Where a
    module has a fast path that torch.export does not take, as torch's transformer layers have
    without gradients, the program has the slow one.

    Args:
        model: any module that torch.export can trace, non-strictly.
        inputs: example inputs.
        kwargs: example inputs by keyword.
        dynamic_shapes: as in torch.export.export.

    Returns:
        The exported program.

    Raises:
        TypeError: `model` is no module or a GraphModule, or `inputs` is no tuple.
        PolicyError: no region is enabled for the device of the model's tensors, around the call or
            inside; or a region is entered in a branch of control flow.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bake() takes a torch.nn.Module and its inputs, not {model!r}.")
    if isinstance(model, torch.fx.GraphModule):  # recompiling replaces its class's __call__
        raise TypeError(
            f"bake() cannot follow the call of a GraphModule ({type(model).__name__}). "
            "Give it the model that the graph was made of."
        )
    if not isinstance(inputs, tuple):
        raise TypeError(
            f"bake() takes the inputs of {type(model).__name__} as a tuple, such as (x,), "
            f"not as {type(inputs).__name__}."
        )
    trace = Trace(torch.is_autocast_cache_enabled(), mkldnn_lstm.in_use())
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
        node.target in (export.ENTER, export.LEAVE) or str(node.target) == export.WITHIN
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
        mode = export.proxy_mode()
        if (
            trace is None or mode is None or trace.mode is not None
        ):  # called by others, or by itself
            return super().__call__(*args, **kwargs)
        trace.watch(mode)
        with export.without_recorder() as recorder, _Entering(recorder):
            return super().__call__(*args, **kwargs)


class _Entering(TorchFunctionMode):
    """Replaces the mode by which torch.export records regions, so that they are only entered.

    All other calls are passed on to that mode.
    """

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is export.ENTER or func is export.LEAVE:
            return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
        return self.recorder.__torch_function__(func, types, args, kwargs or {})
