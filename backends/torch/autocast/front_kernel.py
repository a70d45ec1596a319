"""Kernels in front of torch.func's transforms.

vmap and grad take composite ops such as linear apart before autocast sees them. Where a policy has
another rule for such an op than torch, the op is cast as a whole first, here. Where it has the same
rule, as without a policy, the transform does what it does under torch.autocast, bit for bit.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.library import get_kernel
from torch.utils._pytree import tree_map_only

from polymp.backends.torch.autocast import compiled_region, regions, torch_table
from polymp.backends.torch.autocast.autocast_kernel import entry_of
from polymp.backends.torch.autocast.run_op import Function, Rulings, plain, runner
from polymp.backends.torch.compat import dispatcher, dynamo, modes
from polymp.rules import decision_log
from polymp.rules.row import Rule

# What `region_casts` watches and Python passes numbers to, which no kernel behind a transform can
# read. Source: torch v2.13 torch/csrc/utils/python_arg_parser.cpp, numbers as tensors.
TAKE_NUMBERS = "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor div_.Tensor_mode copy_".split()


@cache
def put(name: str) -> None:
    """Put one for an op, once, if torch has the op."""
    op = dispatcher.overload(name)
    if op is not None:
        front = get_kernel(op, dispatcher.FUNC_FRONT)
        kernel = _kernel(op, name, front)
        dispatcher.put(dispatcher.library_of(name), name, kernel, dispatcher.FUNC_FRONT)


def _wrapped(places: Sequence[int], args: Sequence[Any]) -> Sequence[Any]:
    """Replace numbers in the places of tensors by tensors, as torch wraps them."""
    if all(at >= len(args) or isinstance(args[at], torch.Tensor) for at in places):
        return args
    made, tensors = list(args), [args[at] for at in places if isinstance(args[at], torch.Tensor)]
    for at in places:
        if at < len(args) and isinstance(args[at], (bool, int, float, complex)):
            wide = {float: torch.float64, complex: torch.complex128}.get(type(args[at]))
            if tensors and all(t.dim() == 0 for t in tensors):  # then dtypes count alike
                wide = torch.result_type(tensors[0], args[at])
            made[at] = torch.tensor(args[at], dtype=wide)
    return made


def _kernel(op: torch._ops.OpOverload, name: str, front: Any) -> Function:
    rulings = {device: Rulings(name, device) for device in torch_table.DEVICES}
    places = dispatcher.tensors_of(op)

    def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            return front.call_boxed(keys, *args, **kwargs)

        device = _device(args)
        args = tuple(_wrapped(places, args))
        if (
            device not in rulings
            or not torch.is_autocast_enabled(device)
            or not compiled_region.entered()
        ):
            return call(*args, **kwargs)
        ruling = rulings[device].of(regions.in_force(device))
        row = ruling.row
        if row is None or ruling.agrees:
            return call(*args, **kwargs)
        key = dispatcher.autocast_key(device)
        if key is None or row.rule is Rule.FORBID:
            return call(*args, **kwargs)  # torch's kernel, or ours behind it, raises
        with dispatcher.ExcludeKeys(dispatcher.keyset(key)):
            args = tree_map_only(torch.Tensor, modes.matched_tangent, args)
            run = runner(op, name, device)
            if (found := decision_log.current()) is not None:
                entry = entry_of(op, name, device, ruling, args, kwargs)
                return found.around(entry, run, ruling, plain, call, args, kwargs)
            return run(ruling, plain, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


def _device(args: Sequence[Any]) -> str | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type
        if isinstance(arg, (list, tuple)) and (found := _device(arg)):
            return found
    return None
