"""Kernels of ours for a while: on every op that lowers, or on every op of the vocabulary.

The first are for blocks that hold casts, because torch's own kernels hold none. The second are for
records of decisions, because compiled kernels record nothing.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from polymp.backends.torch.autocast import (
    autocast_kernel,
    front_kernel,
    kernel_registry,
    op_facts,
    region_casts,
    regions,
    torch_table,
)
from polymp.backends.torch.autocast.kernel_registry import Loan
from polymp.backends.torch.compat import accelerators, dispatcher, modes
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary


def lend(devices: Iterable[str]) -> None:
    """Put our kernels on every op that lowers on the devices, until `take_back`."""
    with kernel_registry.now.lock:
        for device in devices:
            region_casts.watch(device)
            loans = kernel_registry.now.loans
            if device not in loans:
                key = dispatcher.autocast_key(device)
                ops = {
                    name
                    for name in lowered(device)
                    if (device, name) not in kernel_registry.now.ops
                }
                loans[device] = loan = Loan(torch.library.Library("aten", "IMPL"), ops)
                kernel_registry.put_in(loan.library, device, sorted(ops) if key else ())
            loans[device].blocks += 1


def take_back(devices: Iterable[str]) -> None:
    """Undo one `lend`. Kernels go when no block is open and no other thread can be in a kernel."""
    with kernel_registry.now.lock:
        for device in devices:
            kernel_registry.now.loans[device].blocks -= 1
        if not _alone():  # the next call will try again
            return
        for device, loan in list(kernel_registry.now.loans.items()):
            if not loan.blocks:
                del kernel_registry.now.loans[device]
                dispatcher.destroy(loan.library)
                kernel_registry.now.ops.difference_update((device, name) for name in loan.ops)
                kernel_registry.put(device, sorted(loan.wanted))


# Modules in whose functions a thread waits, and calls nothing of torch's.
_WAITING = frozenset({"threading", "queue", "selectors", "socket", "multiprocessing.connection"})


def _alone() -> bool:
    """Return whether no other thread of Python's can be on its way into a kernel."""
    mine = threading.get_ident()
    return all(
        thread == mine or frame.f_globals.get("__name__") in _WAITING
        for thread, frame in sys._current_frames().items()
    )


@cache
def lowered(device: str) -> frozenset[str]:
    """Return the ops that torch's table of the device lowers, and that our kernels can run."""
    rows = (
        (name, torch_table.row(device, name, "bfloat16")) for name in torch_table.kernels(device)
    )
    return frozenset(
        name
        for name, row in rows
        if row is not None and row.rule is Rule.LOWER and name not in op_facts.COMPILED_ONLY
    )


@contextmanager
def _for_a_while(device: str, ops: Sequence[str]) -> Iterator[None]:
    """Put our kernels on the device's autocast key for ops, and take them away at the end."""
    key = dispatcher.autocast_key(device)
    with dispatcher.temporary_library("aten") as library:
        for name in ops if key else ():
            kernel = autocast_kernel.make(name, device, str(key))
            if kernel is not None and "::" not in name:
                front_kernel.put(name)
                dispatcher.put(library, name, kernel, str(key))
        yield


class _Recording:
    """Kernels of ours on every op, for as long as a record is made.

    They are put on a device's key when the first region is made for it, for that takes a while.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.devices: set[str] = set()

    def cover(self, device: str) -> None:
        """Put kernels on a device's key, once."""
        if device in self.devices or device not in torch_table.DEVICES:
            return
        self.devices.add(device)
        lend((device,))  # so that no block takes its kernels back meanwhile
        self.stack.callback(take_back, (device,))
        named = {overload for op in vocabulary().ops.values() for overload in op.aten}
        missing = sorted(n for n in named if (device, n) not in kernel_registry.now.ops)
        self.stack.enter_context(_for_a_while(device, missing))


@contextmanager
def recorded() -> Iterator[None]:
    """Put kernels of ours on every op, for the length of a record.

    At once on devices that are present or have a region, on others when they get one.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        made = _Recording(stack)
        with kernel_registry.now.lock:
            fakes = modes.innermost_mode() is not None
            known = {region.device for region in list(regions.prepared.tickets)}
            for device in torch_table.DEVICES:
                if fakes or device in known or accelerators.is_here(device):
                    made.cover(device)
            kernel_registry.now.told.append(made.cover)
        stack.callback(kernel_registry.now.told.remove, made.cover)
        yield
