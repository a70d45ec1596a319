"""Kernels of ours for a while: on every op that lowers, or on every op of the vocabulary.

The first are for blocks that hold casts, because torch's own kernels hold none. The second are for
records of decisions, because compiled kernels record nothing.
"""

import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
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


def lend(devices: Iterable[str], block: object) -> None:
    """Put our kernels on every op that lowers on the devices, until `take_back` of the block."""
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
                loans[device] = Loan(torch.library.Library("aten", "IMPL"), ops if key else set())
            loans[device].blocks.add(block)
            kernel_registry.put_in(loans[device].library, device, sorted(loans[device].ops))


def take_back(block: object) -> None:
    """Undo a block's `lend`; again after an interrupt, which may come at any line.

    Kernels go when no block is open and no other thread can be in a kernel.
    """
    with kernel_registry.now.lock:
        for loan in kernel_registry.now.loans.values():
            loan.blocks.discard(block)
        if not _alone():  # the next call will try again
            return
        for device, loan in list(kernel_registry.now.loans.items()):
            if not loan.blocks:
                dispatcher.destroy(loan.library)
                kernel_registry.now.ops.difference_update((device, name) for name in loan.ops)
                kernel_registry.put(device, sorted(loan.wanted))
                del kernel_registry.now.loans[device]


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


class _Recording:
    """Kernels of ours on every op, for as long as a record is made.

    They are put on a device's key when the first region is made for it, for that takes a while.
    """

    def __init__(self) -> None:
        self.libraries: dict[str, torch.library.Library] = {}  # by device

    def cover(self, device: str) -> None:
        """Put kernels on a device's key, once."""
        if device in self.libraries or device not in torch_table.DEVICES:
            return
        library = self.libraries[device] = torch.library.Library("aten", "IMPL")
        lend((device,), self)  # so that no block takes its kernels back meanwhile
        key = dispatcher.autocast_key(device)
        named = {overload for op in vocabulary().ops.values() for overload in op.aten}
        missing = sorted(n for n in named if (device, n) not in kernel_registry.now.ops)
        for name in missing if key else ():
            kernel = autocast_kernel.make(name, device, str(key))
            if kernel is not None and "::" not in name:
                front_kernel.put(name)
                dispatcher.put(library, name, kernel, str(key))

    def end(self) -> None:
        """Take the kernels away; again after an interrupt, which may come at any line."""
        told = kernel_registry.now.told
        told[:] = [tell for tell in told if tell != self.cover]
        for library in self.libraries.values():
            dispatcher.destroy(library)
        take_back(self)


def recorded(stack: ExitStack) -> None:
    """Put kernels of ours on every op, until a stack is closed.

    At once on devices that are present or have a region, on others when they get one.
    """
    made = _Recording()
    stack.callback(made.end)
    stack.callback(made.end)  # an interrupt may end one of the two
    with kernel_registry.now.lock:
        fakes = modes.innermost_mode() is not None
        known = {region.device for region in list(regions.prepared.tickets)}
        for device in torch_table.DEVICES:
            if fakes or device in known or accelerators.is_here(device):
                made.cover(device)
        kernel_registry.now.told.append(made.cover)
