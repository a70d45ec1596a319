"""The compiled kernels on torch's own autocast keys, as policies.

For each device that has one, the shipped table `torch-<device>` describes torch's compiled
kernels: the rows of all supported versions, of which those count whose op the installed torch has.
An op runs on its compiled kernel wherever a policy agrees with that table.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache

import torch

from polymp import versions
from polymp.backends.torch.autocast import layer_norm
from polymp.backends.torch.autocast.op_facts import PRODUCTS, UNTOUCHED, has_low, in_float32
from polymp.backends.torch.compat import dispatcher
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import Row, Rule
from polymp.rules.vocabulary import vocabulary

# So many tables are kept, those used last; kernels keep what they have read in them.
POLICIES = 32

DEVICES = ("cpu", "cuda", "mps", "xpu")

# Ops that torch registers in builds for one vendor's GPUs alone: whether this is such a build.
# Source: torch v2.13 aten/src/ATen/cudnn/AutocastRNN.cpp, miopen/AutocastRNN.cpp.
BUILDS = {
    "_cudnn_rnn": torch.version.cuda is not None,
    "miopen_rnn": torch.version.hip is not None,
}

# Ops that torch has and did not register yet in its first supported versions: the version that did.
# Source: torch v2.12 aten/src/ATen/autocast_mode.h.
SINCE = {"rms_norm": (2, 12)}


@cache
def policy(device: str) -> Policy:
    """Return this torch's own table of the device; an empty one for a device without."""
    name = f"torch-{device}"
    if device not in DEVICES:
        return Policy(name, ())
    shipped, here = policy_files.load(name), versions.parts(torch.__version__)
    return replace(shipped, rows=tuple(r for r in shipped.rows if SINCE.get(r.of, here) <= here))


@cache
def kernels(device: str) -> frozenset[str]:
    """Return the ops that have a compiled autocast kernel in this torch on the device.

    Read before polymp registers a kernel of its own on that device's key. Without the overloads
    that take named dimensions, until torch 2.12: no policy has rules for them.
    """
    key = dispatcher.autocast_key(device)
    found = frozenset() if key is None else dispatcher.registered(key)
    return frozenset(op for op in found if not dispatcher.takes_names(op))


def table(policy: Policy, dtype: str, device: str = "") -> Mapping[str, Row]:
    """Return the overloads of this torch that have a row in regions of a dtype, with the rows.

    Where torch has no low kernel of an op on the device, the fp32 row of the device's own table
    stands in for a row that does not name the op, or for none.
    """
    return _table(policy, dtype, device, len(vocabulary().registered))


@lru_cache(maxsize=2 * POLICIES)
def _table(policy: Policy, dtype: str, device: str, registered: int) -> Mapping[str, Row]:
    words = vocabulary()
    spelled = {overload: op.name for op in words.ops.values() for overload in op.aten}
    own = (row.of.removeprefix("aten:") for row in policy.rows if row.of.startswith("aten:"))
    found: dict[str, Row] = {}
    op_of = dict.fromkeys(own, "") | spelled
    asked = ((op, dtype, f"aten:{overload}") for overload, op in op_of.items())
    for (overload, op), won in zip(op_of.items(), policy.winners(asked), strict=True):
        named = won is not None and won.of in (op, f"aten:{overload}")
        low = won is None or won.rule in (Rule.LOWER, Rule.WIDEST)
        found_row = won
        # Rows that name no op mean those that can: "cpu" has the fewest low kernels.
        if low and not named and not has_low(overload, "cpu", dtype):
            own = row(device, overload, dtype)
            found_row = own if own is not None and own.rule is Rule.FP32 else None
        if found_row is None or found_row.rule is Rule.PARTS or overload in UNTOUCHED:
            continue
        if dispatcher.overload(overload) is not None:  # this torch is too old or too new for it
            found[overload] = found_row
    return found


def row(device: str, op: str, dtype: str) -> Row | None:
    """Return the row of an op in torch's table; None if torch has no kernel or the table no row.

    A registered op has no kernel of torch's; its row is the rule it was registered with. An op that
    this build of torch leaves out is never called, and has the row that other builds give it.

    Args:
        device: the device type.
        op: name of an overload.
        dtype: the low dtype of the region.

    Returns:
        The row, or None.
    """
    if op in kernels(device) or "::" in op or not BUILDS.get(op, True):
        return table(policy(device), dtype).get(op)
    return None


def as_mul(device: str, policy: Policy, op: str, dtype: str) -> Row | None:
    """Return the row that an op follows where it adds nothing up; None if it keeps its own.

    It is that of a multiplication. Tables that do as torch does, errors included, are torch's.
    """
    rows = table(policy, dtype, device)
    lowers = op in PRODUCTS and op in rows and rows[op].rule in (Rule.LOWER, Rule.FP8)
    if not lowers or policy.halves == "raise":
        return None
    row = rows.get("mul.Tensor")
    return Row("mul", Rule.WIDEST) if row is None or row.rule is Rule.KEEP else row


def agrees(device: str, other: Policy, op: str, dtype: str) -> bool:
    """Return whether torch's compiled kernel, or the lack of one, does what `other` asks for."""
    ours, theirs = row(device, op, dtype), table(other, dtype, device).get(op)
    if ours is None and theirs is not None and theirs.rule is Rule.FP32_KEEP:
        if vocabulary().picks(vocabulary().of_aten(op)):
            return device != "cpu"  # see `run_op`
        return in_float32(op) and layer_norm.kernel(op, device) is None
    if ours is None or theirs is None:
        return ours is theirs
    if "::" in op or ours.rule is not theirs.rule:
        return False
    if theirs.rule is Rule.WIDEST and other.halves != policy(device).halves:
        return False
    return (theirs.apply or ours.apply) == ours.apply and theirs.instead in ("", ours.instead)


def drift(device: str) -> tuple[list[str], list[str]]:
    """Return the ops that torch registers and our table lacks, and those the other way round.

    Ops that this build of torch leaves out do not count as ops of the table.

    Args:
        device: the device type.

    Returns:
        Two sorted lists.
    """
    ours = table(policy(device), "float16")
    known = {op for op in ours if "::" not in op and BUILDS.get(op, True)}
    return sorted(kernels(device) - known), sorted(known - kernels(device))
