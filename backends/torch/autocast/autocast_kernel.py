"""The kernel of an op on torch's autocast key: it runs the op by its rule in the region in force.

If the policy of that region agrees with torch for the op, the kernel passes the call on to the
compiled kernel that it replaced. torch.compile traces through it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import get_kernel

from polymp.backends.torch.autocast import (
    fp8_ops,
    op_facts,
    region_casts,
    regions,
    torch_table,
)
from polymp.backends.torch.autocast.run_op import Function, Ruling, Rulings, dtypes, runner
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.fp8.recipes import RECIPES
from polymp.rules import decision_log
from polymp.rules.answers import Decision
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary


class _Compiled:
    """Whether compiled kernels are used where they agree with the policy."""

    used = True


_compiled = _Compiled()


@contextmanager
def compiled_unused() -> Iterator[None]:
    """Run ops on kernels of ours even where the compiled ones agree with the policy. For tests."""
    _compiled.used = False
    try:
        yield
    finally:
        _compiled.used = True


def make(name: str, device: str, key: str) -> Function | None:
    """Make the kernel of an op; None if torch lacks the op, or it cannot have one of ours."""
    op = dispatcher.overload(name)
    if op is None or name in op_facts.UNTOUCHED:
        return None
    replaced = _compiled_kernel(name, key) if name in torch_table.kernels(device) else None
    return _kernel(op, name, device, key, replaced)


@cache
def _compiled_kernel(name: str, key: str) -> Any:  # torch's own class of kernels is private
    """Return torch's own kernel on the key; read once, before one of ours replaces it."""
    op = dispatcher.overload(name)
    assert op is not None, "torch registers what it has"
    return get_kernel(op, key)


def _kernel(op: torch._ops.OpOverload, name: str, device: str, key: str, replaced: Any) -> Function:
    excluded = dispatcher.keyset(key)
    pass_on, call = dispatcher.passing_on(op, key), dispatcher.calling(op)
    run = runner(op, name, device)
    rulings = Rulings(name, device)
    compiled_only = name in op_facts.COMPILED_ONLY
    writes = op._schema.is_mutable
    if writes:
        region_casts.watch(device)  # first, for this kernel replaces one of those that it puts

    def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        if writes:
            region_casts.writing(args[0])
        ruling = rulings.of(regions.in_force(device))
        if (found := decision_log.current()) is not None:
            entry = entry_of(op, name, device, ruling, args, kwargs)
            return found.around(entry, as_ruled, ruling, keys, args, kwargs)
        return as_ruled(ruling, keys, args, kwargs)

    def as_ruled(ruling: Ruling, keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        row = ruling.row
        unsummed = ruling.mul is not None and not op_facts.adds_up(name, args)
        if ruling.agrees and replaced is not None and not unsummed:
            if compiled_only or _compiled.used:
                return replaced.call_boxed(keys, *args, **kwargs)
        # The op runs as if it had no kernel here; ops inside it have their rules. While a record is
        # made, every op has one, also where torch, which has none, does as the row says; the record
        # has such an op as a whole.
        if row is None:
            return pass_on(keys, args, kwargs)
        if ruling.agrees and replaced is None:
            with decision_log.paused():
                return pass_on(keys, args, kwargs)
        with dispatcher.ExcludeKeys(excluded):
            if row.rule is Rule.KEEP:
                return call(*args, **kwargs)
            if row.rule is Rule.FORBID and ruling.agrees:
                return replaced.call_boxed(keys, *args, **kwargs)  # raises torch's own error
            return run(ruling, region_casts.cast, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


def entry_of(
    op: torch._ops.OpOverload,
    name: str,
    device: str,
    ruling: Ruling,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> decision_log.Entry:
    """Return the entry of a record for a call of an op."""
    asked, region, row = tuple(dtypes(op, device, args)), ruling.region, ruling.row
    parts = Decision(Rule.PARTS)
    decision = parts if row is None else ruling.decided(op, name, device, args)
    at = "torch", vocabulary().of_aten(name), f"aten:{name}", region.dtype, region.scope
    entry = decision_log.Entry(*at, row, asked, decision, ruling.policy.name)
    if decision.rule is not Rule.FP8:
        unsummed = ruling.mul is not None and not op_facts.adds_up(name, args)
        return entry._replace(fallback="it adds nothing up: a multiplication" if unsummed else "")
    recipe = RECIPES[ruling.policy.fp8]
    why = fp8_ops.why_not(name, region, recipe, args, kwargs)
    return entry._replace(recipe="" if why else recipe.name, fallback=why)
