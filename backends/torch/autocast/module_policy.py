"""The scope of a module: its policy in force while it runs, whatever the device."""

import functools

import torch
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import policy_code, region_casts, regions
from polymp.backends.torch.autocast.compiled_region import OpenInGraphs
from polymp.backends.torch.autocast.policy_code import NONE, SCOPE, Code, codes
from polymp.backends.torch.compat import dynamo, export, modes
from polymp.errors import PolicyError

_open = OpenInGraphs()


@dynamo.no_frame
def enter(code: Code) -> None:
    """Put a module's policy in force in this thread, whatever the device.

    It holds in every enabled region, the one around and those entered inside that have no policy of
    their own. Region, dtype and cache stay as they are.

    Args:
        code: of the policy, from `policy_code.of_scope`.

    Raises:
        PolicyError: the call is being exported.
    """
    if is_dynamo_compiling():
        _allow()
        _put(True, *code)
        return
    if modes.are_functions_watched():
        _refuse_export(code)
    policy_code.write(code)


@dynamo.no_frame
def leave(outer: Code) -> None:
    """Put the policies of a code back in force: those from before a scope was entered."""
    if is_dynamo_compiling():
        _put(False, *outer)
        return
    policy_code.write(outer)
    if outer == NONE and not regions.stack.frames:
        region_casts.end()  # the end of a region of torch's own is not seen


def _put(entering: bool, *code: torch.dtype) -> None:
    """Enter or leave a scope, as a call in a graph."""
    if entering:
        _refuse_export(code)
        before = policy_code.in_force()
        if before == NONE:  # nothing is open: these are of a graph that raised
            _open.leaving.clear()
        _open.enter(functools.partial(policy_code.write, before))
    else:
        _open.leave()
    policy_code.write(code)


def _refuse_export(code: Code) -> None:
    if export.export_modes():
        name = codes.policies[code][SCOPE].name
        raise PolicyError(
            f"torch.export cannot record the scopes of policy {name!r}. Export with "
            "polymp.torch.bake(model, inputs), which writes the casts out; or without the scopes, "
            "after remove() of the handle that scoped() returned."
        )


@dynamo.at_trace_time
def _allow() -> None:
    dynamo.in_graph(_put)
