"""Kernels in front of torch.func's transforms.

vmap and grad take composite ops such as linear apart before autocast sees them, so that a bias
would stay float32 and pull the result up; here the op is cast as a whole first.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.library import get_kernel

from polymp.backends.torch.autocast import compiled_region, op_facts, regions, torch_table
from polymp.backends.torch.autocast.autocast_kernel import entry_of
from polymp.backends.torch.autocast.run_op import Function, Rulings, plain, runner
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.rules import decision_log
from polymp.rules.row import Rule


@cache
def put_on(device: str) -> None:
    """Put kernels in front of torch.func's transforms for the ops of the device's table."""
    for name in sorted(torch_table.kernels(device) | op_facts.BATCHED_AS_PRODUCTS):
        put(name)


def put_with_tensors(name: str) -> None:
    """Put one for an op, if a number can stand for a tensor in it.

    Behind a transform such a number cannot be read: an op with a kernel of ours on an autocast key
    needs one here, too.
    """
    op = dispatcher.overload(name)
    if op is not None and len(dispatcher.tensors_of(op)) > 1:
        put(name)


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
        if row is None and name not in op_facts.BATCHED_AS_PRODUCTS:
            return call(*args, **kwargs)
        if ruling.agrees and name in op_facts.COMPILED_ONLY:
            return call(*args, **kwargs)
        key = dispatcher.autocast_key(device)
        if key is None or (row is not None and row.rule is Rule.FORBID):
            return call(*args, **kwargs)  # torch's kernel, or ours behind it, raises
        with dispatcher.ExcludeKeys(dispatcher.keyset(key)):
            if row is None:
                return call(*args, **kwargs)
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
