"""Policy codes: which policies are in force in a thread, as two dtypes in torch's autocast state.

torch has no place for a policy. Its autocast state, per thread, is what torch restores around
backward and checkpoints, what torch.compile guards its graphs by, and what torch's own autocast
class leaves as it was: policies that stand in it are restored, guarded and read just as the rest.
So every set of policies by device that is ever in force gets a code, a pair of dtypes, and the code
is written as the low dtypes of two devices that no build of torch has tensors on.
"""

import threading
from functools import cache

import torch
from torch import get_autocast_dtype, set_autocast_dtype, set_autocast_enabled

from polymp.backends.torch.autocast.dtype_names import NAMES
from polymp.backends.torch.compat import dynamo
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.region import Region

Code = tuple[torch.dtype, ...]

# Devices whose tensors no torch build has, but whose autocast state every one keeps: a flag and a
# low dtype, restored and guarded like any other's. Since torch 2.4. Dynamo compares the dtype only
# where the flag is on, so it is on while a policy is coded here.
SLOTS = ("ipu", "maia")
NONE: Code = (get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1]))

# In a set of policies by device: that of the module which is running, for devices without one.
SCOPE = ""


class Codes:
    """The codes that this process has given out. None is ever given to other policies.

    A graph that torch.compile made under a code is kept, and guarded by it.

    Attributes:
        policies: by code, the policies by device. As long as `NONE` is the only one, no policy was
            ever used, and the code in force need not be read.
        free: the codes that are left.
        lock: held while a code is given out.
    """

    def __init__(self) -> None:
        self.policies: dict[Code, dict[str, Policy]] = {NONE: {}}
        self.free = iter([(a, b) for a in NAMES for b in NAMES if (a, b) != NONE])
        self.lock = threading.Lock()


codes = Codes()


def policy_of(device: str) -> Policy | None:
    """The policy in force for the device in this thread; None for torch's own table."""
    return policy_at(device, *in_force())


@dynamo.at_trace_time
def policy_at(device: str, *code: torch.dtype) -> Policy | None:
    """The policy for a device where the policies in force have this code."""
    policies = codes.policies.get(code, {})
    return policies.get(device, policies.get(SCOPE))


@dynamo.no_frame
def in_force() -> Code:
    """The code of the policies in force in this thread."""
    return get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1])


@dynamo.no_frame
def write(code: Code) -> None:
    """Put the policies of a code in force in this thread."""
    for slot, dtype in zip(SLOTS, code, strict=True):
        set_autocast_enabled(slot, code != NONE)
        set_autocast_dtype(slot, dtype)


def inside(region: Region, outer: Code) -> Code:
    """The code of the policies inside `region`, entered where `outer` is in force."""
    if region.device in SLOTS and len(codes.policies) > 1:
        raise PolicyError(
            f"autocast({region.device!r}) cannot be used in a process that has used policies: "
            "polymp notes them in the state of that device."
        )
    policies = {d: p for d, p in codes.policies.get(outer, {}).items() if d != region.device}
    if region.policy is not None:
        policies[region.device] = region.policy
    return _code(frozenset(policies.items()))


def of_scope(policy: Policy) -> Code:
    """The code of a policy for all devices, as a module has it."""
    return _code(frozenset({(SCOPE, policy)}))


@cache
def _code(policies: frozenset[tuple[str, Policy]]) -> Code:
    if not policies:
        return NONE
    with codes.lock:
        try:
            code = next(codes.free)
        except StopIteration:
            raise PolicyError(
                f"this process has used {len(codes.policies)} different sets of policies, and "
                "there are no more. Build a policy once and use it again."
            ) from None
        codes.policies[code] = dict(policies)
        return code
