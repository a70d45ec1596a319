"""Our kernels on torch's autocast keys: which ops of which devices have one.

Where a region's policy agrees with torch's compiled kernels, nothing of ours is installed. Ops in
which it differs get a Python kernel on the device's autocast key, and one in front of torch.func's
transforms; both once, when the first such region is made.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from polymp.backends.torch.autocast import (
    autocast_kernel,
    checkpoint,
    front_kernel,
    region_casts,
    torch_table,
)
from polymp.backends.torch.autocast.validate import check
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.rules.row import LOW


@dataclass
class Loan:
    """Kernels on a device's key for as long as casts are held there.

    Attributes:
        library: of the kernels.
        ops: the ops that have them.
        blocks: the open blocks.
        wanted: the ops whose kernels a policy needs, too, and that keep them.
    """

    library: torch.library.Library
    ops: set[str]
    blocks: set[object] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)


class Installed:
    """The kernels of ours that are installed in this process.

    Attributes:
        ops: pairs of a device and an op that has a kernel of ours on the device's autocast key.
        loans: by device, the kernels that are taken away again.
        told: functions that are called with the device of every region that is prepared.
        lock: held while any of it changes.
    """

    def __init__(self) -> None:
        self.ops: set[tuple[str, str]] = set()
        self.loans: dict[str, Loan] = {}
        self.told: list[Callable[[str], None]] = []
        self.lock: threading.RLock = threading.RLock()


now: Installed = Installed()


def prepare(region: Region) -> None:
    """Do what a region needs once, before it can be entered: install kernels, watch writes."""
    with now.lock:
        checkpoint.keep_policies()  # also before there is one: backward may run under the first
        if not region.enabled:
            dynamo.backward_outside()
        if region.policy is not None:
            install(region.policy, region.device, region.dtype if region.enabled else "")
        if region.enabled:
            region_casts.watch(region.device)
            for name in front_kernel.TAKE_NUMBERS:
                front_kernel.put(name)
            for tell in now.told:
                tell(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Return the ops with a kernel of ours on the device's autocast key, sorted."""
    return tuple(sorted(op for on, op in now.ops if on == device))


def install(policy: Policy, device: str, dtype: str = "") -> None:
    """Put kernels on the ops in which a policy differs from torch's kernels on a device."""
    check(policy, device, dtype)
    dynamo.backward_outside()
    checkpoint.keep_policies()
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
    if device in now.loans:
        now.loans[device].wanted.update(now.loans[device].ops.intersection(ops))
    for name in ops:
        put_in(dispatcher.library_of(name), device, [name])


def put_in(library: torch.library.Library, device: str, ops: Iterable[str]) -> None:
    """Put our kernel, of a library, on the device's autocast key for ops that have none."""
    key = str(dispatcher.autocast_key(device))
    for name in ops:
        kernel = None if (device, name) in now.ops else autocast_kernel.make(name, device, key)
        if kernel is not None:
            front_kernel.put(name)
            dispatcher.put(library, name, kernel, key)
            now.ops.add((device, name))
