"""Our kernels on torch's autocast keys: which ops of which devices have one.

Where a region's policy agrees with torch's compiled kernels, nothing of ours is installed. Ops in
which it differs get a Python kernel on the device's autocast key, and one in front of torch.func's
transforms; both once, when the first such region is made.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import get_kernel
from torch.utils._pytree import tree_map_only

from polymp.backends.torch.autocast import (
    autocast_kernel,
    compiled_region,
    region_casts,
    regions,
    torch_table,
)
from polymp.backends.torch.autocast.autocast_kernel import (
    Function,
    Rulings,
    entry_of,
    plain,
    runner,
)
from polymp.backends.torch.autocast.torch_table import check
from polymp.backends.torch.compat import accelerators, dispatcher, dynamo, modes
from polymp.errors import PolicyError
from polymp.rules import decision_log
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary


class Installed:
    """The kernels of ours that are installed in this process.

    Attributes:
        ops: pairs of a device and an op that has a kernel of ours on the device's autocast key.
        on_prepare: functions that are called with the device of every region that is prepared.
        everywhere: by device, the kernels on every op, if a record needs them.
        lock: held while any of it changes.
    """

    def __init__(self) -> None:
        self.ops: set[tuple[str, str]] = set()
        self.on_prepare: list[Callable[[str], None]] = []
        self.everywhere: dict[str, Everywhere] = {}
        self.lock: threading.RLock = threading.RLock()


class Everywhere:
    """Kernels of ours on every op of a device, for all records that are made at the time.

    Attributes:
        library: of the kernels.
        ops: the ops that have been gone through.
        records: those that need the kernels.
    """

    def __init__(self) -> None:
        self.library: torch.library.Library = torch.library.Library("aten", "IMPL")
        self.ops: set[str] = set()
        self.records: set[object] = set()


now: Installed = Installed()


def prepare(region: Region) -> None:
    """Do what a region needs once, before it can be entered: install kernels, watch writes."""
    with now.lock:
        compiled_region.keep_policies()  # before the first, too: backward may run under it
        if region.policy is not None:
            install(region.policy, region.device, region.dtype if region.enabled else "")
        if region.enabled:
            region_casts.watch(region.device)
            for name in TAKE_NUMBERS:
                put_in_front(name)
            for call in now.on_prepare:
                call(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Return the ops with a kernel of ours on the device's autocast key, sorted."""
    return tuple(sorted(op for on, op in now.ops if on == device))


def install(policy: Policy, device: str, dtype: str = "") -> None:
    """Put kernels on the ops in which a policy differs from torch's kernels on a device."""
    check(policy, device, dtype)
    compiled_region.keep_policies()
    put(device, sorted(differing(policy, device)))


def differing(policy: Policy, device: str) -> frozenset[str]:
    """Return the ops that need a kernel of ours under a policy, apart from scopes."""
    return frozenset(
        op
        for low in LOW
        for op in torch_table.kernels(device) | torch_table.table(policy, low, device).keys()
        if torch_table.as_mul(device, policy, op, low)
        or not torch_table.agrees(device, policy, op, low)
    )


@contextmanager
def all_python(*devices: str) -> Iterator[None]:
    """Run every op that has a rule on our kernels, on all devices if none is named. For tests."""
    for device in devices or torch_table.DEVICES:
        put(device, sorted(torch_table.kernels(device)))
    with autocast_kernel.compiled_unused():
        yield


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
        if (device, name) not in now.ops and _put_in(dispatcher.library_of(name), device, name):
            now.ops.add((device, name))


def _put_in(library: torch.library.Library, device: str, name: str) -> bool:
    """Put our kernel, of a library, on the device's autocast key; return whether there is one."""
    key = str(dispatcher.autocast_key(device))
    kernel = autocast_kernel.make(name, device, key)
    if kernel is not None:
        put_in_front(name)
        dispatcher.put(library, name, kernel, key)
    return kernel is not None


# While a record of decisions is made: torch's compiled kernels record nothing.


def put_everywhere(stack: ExitStack) -> None:
    """Put our kernels on every op of the vocabulary, until a stack is closed.

    At once on devices that are present or have a region, on others when they get one.
    """
    record = _Record()
    stack.callback(record.end)
    stack.callback(record.end)  # an interrupt may end one of the two
    with now.lock:
        fakes = modes.innermost_mode() is not None
        known = {region.device for region in list(regions.prepared.tickets)}
        for device in torch_table.DEVICES:
            if fakes or device in known or accelerators.is_here(device):
                record.cover(device)
        now.on_prepare.append(record.cover)


class _Record:
    """One that needs our kernels on every op of the devices that have a region."""

    def cover(self, device: str) -> None:
        """Put kernels on a device's key, where there are none."""
        if device not in torch_table.DEVICES:
            return
        kernels = now.everywhere.get(device)
        if kernels is None:
            kernels = now.everywhere[device] = Everywhere()
        elif self in kernels.records:
            return
        kernels.records.add(self)
        region_casts.watch(device)
        named = {overload for op in vocabulary().ops.values() for overload in op.aten}
        if dispatcher.autocast_key(device) is not None:
            for name in sorted(n for n in named - kernels.ops if "::" not in n):
                if (device, name) not in now.ops:
                    _put_in(kernels.library, device, name)
                kernels.ops.add(name)

    def end(self) -> None:
        """Let the kernels go; again after an interrupt, which may come at any line.

        They go when no record needs them and no other thread can be in one.
        """
        with now.lock:
            now.on_prepare[:] = [call for call in now.on_prepare if call != self.cover]
            for kernels in now.everywhere.values():
                kernels.records.discard(self)
            for device, kernels in list(now.everywhere.items()):
                if not kernels.records and _is_alone():
                    dispatcher.destroy(kernels.library)
                    del now.everywhere[device]


# Modules in whose functions a thread waits, and calls nothing of torch's.
_WAITING = frozenset({"threading", "queue", "selectors", "socket", "multiprocessing.connection"})


def _is_alone() -> bool:
    """Return whether no other thread of Python's can be on its way into a kernel."""
    mine = threading.get_ident()
    return all(
        thread == mine or frame.f_globals.get("__name__") in _WAITING
        for thread, frame in sys._current_frames().items()
    )


# Kernels in front of torch.func's transforms.
#
# vmap and grad take composite ops such as linear apart before autocast sees them. Where a policy
# has another rule for such an op than torch, the op is cast as a whole first, here. Where it has
# the same rule, as without a policy, the transform does what it does under torch.autocast, bit
# for bit.
#
# What `region_casts` watches and Python passes numbers to, which no kernel behind a transform can
# read. Source: torch v2.13 torch/csrc/utils/python_arg_parser.cpp, numbers as tensors.
TAKE_NUMBERS = "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor div_.Tensor_mode copy_".split()


@cache
def put_in_front(name: str) -> None:
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
            or not compiled_region.in_region()
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
