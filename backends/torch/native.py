"""What torch registers on its own autocast keys, as policies.

For each device that has one, the shipped table `torch-<device>` describes torch 2.13's compiled
kernels. The engine leaves an op to its compiled kernel where a policy agrees with that table.
"""

from functools import cache

from polymp import rules
from polymp.backends.torch import compat
from polymp.rules import Policy, Row, Rule

DEVICES = ("cpu", "cuda", "mps", "xpu")


@cache
def policy(device: str) -> Policy:
    """torch's own table of the device; an empty one for a device without."""
    return rules.load(f"torch-{device}") if device in DEVICES else Policy(f"torch-{device}", ())


@cache
def kernels(device: str) -> frozenset[str]:
    """Ops that this torch has a compiled autocast kernel for on the device.

    Read before polymp registers a kernel of its own on that device's key.
    """
    key = compat.autocast_key(device)
    return frozenset() if key is None else compat.registered(key)


def row(device: str, op: str) -> Row | None:
    """What torch does with the op: its row, or None where it has no kernel or we no row."""
    return policy(device).table.get(op) if op in kernels(device) else None


@cache
def agrees(device: str, other: Policy, op: str) -> bool:
    """True if torch's compiled kernel, or the lack of one, is what `other` asks for the op."""
    ours, theirs = row(device, op), other.table.get(op)
    if theirs is not None and theirs.rule is Rule.WIDEST and other.halves != policy(device).halves:
        return False
    return ours == theirs


def drift(device: str) -> tuple[list[str], list[str]]:
    """Ops that this torch registers and our table lacks, and the other way round; sorted."""
    table = policy(device).table.keys()
    return sorted(kernels(device) - table), sorted(table - kernels(device))
