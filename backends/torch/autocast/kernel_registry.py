"""Our kernels on torch's autocast keys: on which ops of which devices there is one.

Where a region's policy agrees with what torch compiled in, nothing of ours is installed. Where it
differs in some ops, those ops get a Python kernel on the device's autocast key, once, lazily, and
one in front of torch.func's transforms.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.library import Library

from polymp.backends.torch.autocast import (
    autocast_kernel,
    checkpoint,
    front_kernel,
    region_casts,
    torch_table,
)
from polymp.backends.torch.autocast.validate import check
from polymp.backends.torch.compat import dispatcher
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.rules.row import LOW


@dataclass
class Loan:
    """Kernels on a device's key for as long as casts are held there.

    Attributes:
        library: of the kernels.
        ops: whose they are.
        blocks: how many blocks hold casts.
        wanted: those of them that were asked for to stay.
    """

    library: Library
    ops: set[str]
    blocks: int = 0
    wanted: set[str] = field(default_factory=set)


class Installed:
    """What is installed in this process.

    Attributes:
        ops: pairs of a device and an op that has a kernel of ours on the device's autocast key.
        loans: by device, those of them that go again.
        told: called with the device of every region that is made ready.
        lock: held while any of it changes.
    """

    def __init__(self) -> None:
        self.ops: set[tuple[str, str]] = set()
        self.loans: dict[str, Loan] = {}
        self.told: list[Callable[[str], None]] = []
        self.lock = threading.RLock()


now = Installed()


def prepare(region: Region) -> None:
    """What has to be done once before a region like this can be entered.

    Raises:
        PolicyError: the policy has a rule that torch cannot honour.
    """
    with now.lock:
        checkpoint.keep_policies()  # also before there is one: backward may run under the first
        if region.policy is not None:
            install(region.policy, region.device, region.dtype if region.enabled else "")
        if region.enabled:
            region_casts.watch(region.device)
            front_kernel.put_on(region.device)
            for tell in now.told:
                tell(region.device)


def installed(device: str) -> tuple[str, ...]:
    """Ops of the device that have a kernel of ours on the autocast key, sorted."""
    return tuple(sorted(op for on, op in now.ops if on == device))


def install(policy: Policy, device: str, dtype: str = "") -> None:
    """Put kernels on the ops in which `policy` differs from what torch does on the device.

    Args:
        policy: without rows that wait for a scope.
        device: whose autocast key.
        dtype: the one whose kernels are to be there; "" if that is not known yet.

    Raises:
        PolicyError: a row that torch cannot honour; nothing is installed then.
    """
    check(policy, device, dtype)
    checkpoint.keep_policies()
    put(device, sorted(differing(policy, device)))


def differing(policy: Policy, device: str) -> frozenset[str]:
    """The ops that need a kernel of ours under a policy; those that wait for a scope aside."""
    return frozenset(
        op
        for low in LOW
        for op in torch_table.kernels(device) | torch_table.table(policy, low).keys()
        if not torch_table.agrees(device, policy, op, low)
    )


@contextmanager
def all_python(*devices: str) -> Iterator[None]:
    """Run every op that has a rule on our kernels, the compiled ones unused. For tests.

    Args:
        devices: whose keys; all that have a table, if none is named.
    """
    for device in devices or torch_table.DEVICES:
        put(device, sorted(torch_table.kernels(device)))
    with autocast_kernel.compiled_unused():
        yield


def put(device: str, ops: Sequence[str]) -> None:
    """Put our kernel on the device's autocast key for ops, once for each.

    Raises:
        PolicyError: the key cannot be named.
    """
    if dispatcher.autocast_key(device) is None:
        if ops:
            raise PolicyError(f"{device!r} can have no policy: torch hides its dispatch key.")
        return
    if device in now.loans:
        now.loans[device].wanted.update(now.loans[device].ops.intersection(ops))
    for name in ops:
        put_in(dispatcher.library_of(name), device, [name])


def put_in(library: Library, device: str, ops: Iterable[str]) -> None:
    """Put our kernel on the device's autocast key for ops that have none, out of a library."""
    key = str(dispatcher.autocast_key(device))
    for name in ops:
        kernel = None if (device, name) in now.ops else autocast_kernel.make(name, device, key)
        if kernel is not None:
            front_kernel.put_with_tensors(name)
            dispatcher.put(library, name, kernel, key)
            now.ops.add((device, name))
