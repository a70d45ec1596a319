"""Our kernels on torch's autocast keys: which ops of which devices have one.

Ops in which a policy differs from torch's own kernels get a Python kernel on the device's autocast
key, and one in front of torch.func's transforms; both once, when the first such region is made.
All other ops keep torch's kernels, but those that write into tensors: see `region_casts.watch`.
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

import torch

from polymp.backends.torch.autocast import autocast_kernel, region_casts, regions, torch_table
from polymp.backends.torch.compat import accelerators, dispatcher, modes
from polymp.errors import PolicyError
from polymp.rules.policy import Policy, Region
from polymp.rules.row import LOW
from polymp.rules.vocabulary import vocabulary


class Installed:
    """The kernels of ours that are installed in this process."""

    def __init__(self) -> None:
        # Pairs of a device and an op with a kernel of ours on the device's autocast key.
        self.ops: set[tuple[str, str]] = set()
        # By device, the library of kernels on every op, and the records that need them.
        self.everywhere: dict[str, torch.library.Library] = {}
        self.records: set[object] = set()
        self.lock = threading.RLock()  # held while any of it changes


now: Installed = Installed()


def prepare(region: Region) -> None:
    """Do what a region needs once, before it can be entered: install kernels, watch writes."""
    with now.lock:
        regions.keep_policies()  # before the first, too: backward may run under it
        if region.policy is not None:
            install(region.policy, region.device, region.dtype if region.enabled else "")
        if region.enabled:
            region_casts.watch(region.device)
            for name in TAKE_NUMBERS:
                put_in_front(name)
            if now.records:
                _cover(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Return the ops with a kernel of ours on the device's autocast key, sorted."""
    return tuple(sorted(op for on, op in now.ops if on == device))


def install(policy: Policy, device: str, dtype: str = "") -> None:
    """Put kernels on the ops in which a policy differs from torch's kernels on a device."""
    torch_table.check(policy, device, dtype)
    regions.keep_policies()
    put(device, sorted(differing(policy, device)))
    for low in LOW:
        for name, row in torch_table.table(policy, low, device).items():
            if row.rule in autocast_kernel.AS_A_WHOLE:
                put_in_front(name)


def differing(policy: Policy, device: str) -> frozenset[str]:
    """Return the ops that need a kernel of ours under a policy, apart from scopes."""
    return frozenset(
        op
        for low in LOW
        for op in torch_table.kernels(device) | torch_table.table(policy, low, device).keys()
        if torch_table.as_mul(device, policy, op, low)
        or not torch_table.agrees(device, policy, op, low)
    )


def put(device: str, ops: Sequence[str]) -> None:
    """Put our kernel on the device's autocast key for ops, once for each."""
    if dispatcher.autocast_key(device) is None:
        if ops:
            raise PolicyError(
                f"autocast({device!r}) cannot have a policy: Python cannot name the device's "
                "autocast key, so that no kernel can be put there. Write policy=None."
            )
        return
    for name in ops:
        if (device, name) not in now.ops and _put_in(dispatcher.library_of(name), device, [name]):
            now.ops.add((device, name))


def _put_in(library: torch.library.Library, device: str, names: Sequence[str]) -> bool:
    """Put our kernels, of a library, on the device's autocast key; return whether there are any."""
    key = str(dispatcher.autocast_key(device))
    made = ((name, autocast_kernel.make(name, device, key)) for name in names)
    kernels = {name: kernel for name, kernel in made if kernel is not None}
    for name in kernels:
        put_in_front(name)
    dispatcher.put(library, kernels, key)
    return bool(kernels)


# While a record of decisions is made: torch's own kernels record nothing.


def put_everywhere(stack: ExitStack) -> None:
    """Put our kernels on every op of the vocabulary, until a stack is closed."""
    # At once on devices that are present or have a region, on others when they get one.
    record = object()

    def end() -> None:
        with now.lock:
            now.records.discard(record)
            if not now.records and _is_alone():  # else another thread can be in one of the kernels
                for device, library in list(now.everywhere.items()):
                    dispatcher.destroy(library)
                    del now.everywhere[device]

    stack.callback(end)
    stack.callback(end)  # an interrupt may end one of the two
    with now.lock:
        now.records.add(record)
        fakes = modes.innermost_mode() is not None
        known = {device for _, device, *_ in list(regions.prepared.values())}
        known |= {"cpu", accelerators.accelerator()}
        for device in torch_table.DEVICES:
            if fakes or device in known:
                _cover(device)


def _cover(device: str) -> None:
    """Put kernels on every op of the vocabulary on a device's key, where there are none."""
    if device in now.everywhere or device not in torch_table.DEVICES:
        return
    library = now.everywhere[device] = torch.library.Library("aten", "IMPL")
    region_casts.watch(device)
    named = {overload for op in vocabulary().ops.values() for overload in op.aten}
    if dispatcher.autocast_key(device) is not None:
        own = (name for name in sorted(named) if "::" not in name)
        _put_in(library, device, [name for name in own if (device, name) not in now.ops])


# Modules in whose functions a thread waits, and calls nothing of torch's.
_WAITING = frozenset({"threading", "queue", "selectors", "socket", "multiprocessing.connection"})


def _is_alone() -> bool:
    """Return whether no other thread of Python's can be on its way into a kernel."""
    mine = threading.get_ident()
    return all(
        thread == mine or frame.f_globals.get("__name__") in _WAITING
        for thread, frame in sys._current_frames().items()
    )


# What `region_casts` watches and Python passes numbers to, which no kernel behind a transform can
# read. Source: torch v2.13 torch/csrc/utils/python_arg_parser.cpp, numbers as tensors.
TAKE_NUMBERS = "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor div_.Tensor_mode copy_".split()


@cache
def put_in_front(name: str) -> None:
    """Put one for an op, once, if torch has the op."""
    kernel = autocast_kernel.make_in_front(name)
    if kernel is not None:
        dispatcher.put(dispatcher.library_of(name), {name: kernel}, dispatcher.FUNC_FRONT)
