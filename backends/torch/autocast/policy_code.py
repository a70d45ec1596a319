"""Policy codes: the policies in force in a thread, as two dtypes in torch's autocast state.

torch has no place for a policy. It has an autocast state in each thread, though, which torch
restores around backward and checkpoints, by which torch.compile guards its graphs, and which
torch's own autocast class restores. So the policies in force are written there: every set of
policies by device gets a code, a pair of dtypes, and the code is written as the low dtypes of two
devices that no build of torch has tensors on. Pairs are enough for two thousand sets; a process
that uses more gets codes of three dtypes, the third of a device that hardly anyone has. When these
are gone, too, a policy is refused.
"""

import threading
from collections.abc import Iterator
from dataclasses import astuple
from functools import cache
from hashlib import sha256
from itertools import chain

import torch
from torch import get_autocast_dtype, set_autocast_dtype, set_autocast_enabled

from polymp.backends.torch.autocast.dtype_names import NAMES
from polymp.backends.torch.compat import dynamo
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.versions import __version__

Code = tuple[torch.dtype, ...]

# Devices whose tensors no torch build has, but whose autocast state every one keeps: a flag and a
# low dtype, restored and guarded like any other's. Since torch 2.4. Dynamo compares the dtype only
# where the flag is on, so it is on while a policy is coded here.
SLOTS = ("ipu", "maia")
NONE: Code = (get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1]))

# The third slot, of codes that are given out once there is no pair left.
THIRD = "mtia"
NO_THIRD: torch.dtype = get_autocast_dtype(THIRD)

# How many sets of policies have a pair, and how many have a code.
PAIRS: int = len(NAMES) ** 2 - 1
ALL: int = PAIRS * len(NAMES)

_WRITTEN = "polymp writes them into torch's autocast state of that device."

# In a set of policies by device: that of the module which is running, for devices without one.
SCOPE = ""


class Codes:
    """The codes that this process has given out. None is ever given to other policies.

    A graph that torch.compile made under a code is kept, and guarded by it.

    Attributes:
        policies: by code, the policies by device. As long as `NONE` is the only one, no policy was
            ever used, and the code in force need not be read.
        free: the codes that are left.
        three: True once there are codes of three dtypes.
        digest: what the policies and their codes are known by in other processes.
        lock: held while a code is given out.
    """

    def __init__(self) -> None:
        self.policies: dict[Code, dict[str, Policy]] = {NONE: {}}
        pairs = [(a, b) for a in NAMES for b in NAMES if (a, b) != NONE]
        more = ((a, b, c) for c in NAMES if c != NO_THIRD for a, b in pairs)
        self.free: Iterator[Code] = chain(pairs, more)
        self.three: bool = False
        self.digest: str = f"polymp {__version__}"
        self.lock: threading.Lock = threading.Lock()


codes: Codes = Codes()


def policy_of(device: str) -> Policy | None:
    """Return the policy in force for the device in this thread; None for torch's own table."""
    return policy_at(device, *in_force())


@dynamo.at_trace_time
def policy_at(device: str, *code: torch.dtype) -> Policy | None:
    """Return the policy for a device under the policies of a code; None for torch's table."""
    policies = codes.policies.get(code, {})
    return policies.get(device, policies.get(SCOPE))


@dynamo.no_frame
def in_force() -> Code:
    """Return the code of the policies in force in this thread."""
    code = get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1])
    if codes.three and (third := get_autocast_dtype(THIRD)) != NO_THIRD:
        return *code, third
    return code


@dynamo.no_frame
def write(code: Code) -> None:
    """Put the policies of a code in force in this thread."""
    if code != NONE:
        dynamo.compile_by(codes.digest)
    for slot, dtype in zip(SLOTS, code[:2], strict=True):
        set_autocast_enabled(slot, code != NONE)
        set_autocast_dtype(slot, dtype)
    if codes.three:
        set_autocast_enabled(THIRD, len(code) == 3)
        set_autocast_dtype(THIRD, code[2] if len(code) == 3 else NO_THIRD)


def inside(region: Region, outer: Code) -> Code:
    """Return the code of the policies inside a region that is entered where `outer` is in force."""
    if region.device in SLOTS and len(codes.policies) > 1:
        raise PolicyError(
            f"autocast({region.device!r}) cannot be used in a process that has used policies: "
            f"{_WRITTEN} Use it in a process without policies."
        )
    if region.device == THIRD and codes.three:
        raise PolicyError(
            f"autocast({region.device!r}) cannot be used in a process that has used more than "
            f"{PAIRS:,} sets of policies: {_WRITTEN} Use it in a process with fewer policies; "
            "equal ones count once."
        )
    policies = {d: p for d, p in codes.policies.get(outer, {}).items() if d != region.device}
    if region.policy is not None:
        policies[region.device] = region.policy
    return _code(frozenset(policies.items()))


def of_scope(policy: Policy) -> Code:
    """Return the code of a policy for all devices, as `scoped` gives it to a module."""
    return _code(frozenset({(SCOPE, policy)}))


@cache
def _code(policies: frozenset[tuple[str, Policy]]) -> Code:
    if not policies:
        return NONE
    with codes.lock:
        code = next(codes.free, None)
        if code is None:
            names = " and ".join(sorted({repr(policy.name) for _, policy in policies}))
            raise PolicyError(
                f"no code is left for policy {names}: this process has used as many sets of "
                f"policies as torch's autocast state can tell apart, {ALL:,}. Use fewer policies, "
                "of which equal ones count once, or start another process."
            )
        codes.three = len(code) == 3
        known = sorted(
            (device, p.name, p.halves, p.fp8, [astuple(row)[:-1] for row in p.rows])  # no source
            for device, p in policies
        )
        codes.digest = sha256(f"{codes.digest} {known}".encode()).hexdigest()
        codes.policies[code] = dict(policies)
        return code
