"""One op's kernel on torch's autocast key: it asks the policy in force and does what it says.

The kernel asks the region in force and, if that region's policy agrees with torch after all, hands
the call to the compiled kernel that it replaced. torch.compile traces through it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import get_kernel

from polymp.backends.torch.autocast import op_facts, region_casts, regions, torch_table
from polymp.backends.torch.autocast.held_casts import held
from polymp.backends.torch.autocast.run_op import Function, Ruling, Rulings, dtypes, runner
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.rules import decision_log
from polymp.rules.policy import Decision
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary


class _Compiled:
    """Whether compiled kernels are used where they agree with the policy."""

    used = True


_compiled = _Compiled()


@contextmanager
def compiled_unused() -> Iterator[None]:
    """Run ops on kernels of ours, the compiled ones unused even where they agree. For tests."""
    _compiled.used = False
    try:
        yield
    finally:
        _compiled.used = True


def make(name: str, device: str, key: str) -> Function | None:
    """The kernel for an op; None if torch does not have the op, or it is not to be touched."""
    op = dispatcher.overload(name)
    if op is None or name in op_facts.UNTOUCHED:
        return None
    replaced = _compiled_kernel(name, key) if name in torch_table.kernels(device) else None
    return _kernel(op, name, device, key, replaced)


@cache
def _compiled_kernel(name: str, key: str) -> Any:
    """torch's own kernel on the key; read once, before there is one of ours."""
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
        region_casts.watch(device)  # puts kernels on such ops, whose work ours does as well

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if writes:
            region_casts.writing(args[0])
        ruling = rulings.of(regions.in_force(device))
        if (found := decision_log.current()) is not None:
            entry = entry_of(op, name, device, ruling, args)
            return found.around(entry, as_ruled, ruling, keys, args, kwargs)
        return as_ruled(ruling, keys, args, kwargs)

    def as_ruled(ruling: Ruling, keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        row = ruling.row
        holds = held.by_id and row is not None and row.rule is Rule.LOWER
        if (
            ruling.agrees
            and replaced is not None
            and (
                compiled_only
                or (
                    _compiled.used
                    and not (holds and not region_casts.kept_by_torch((*args, *kwargs.values())))
                )
            )
        ):
            return replaced.call_boxed(keys, *args, **kwargs)
        if row is None:  # as if autocast had not heard of the op; ops inside it count
            return pass_on(keys, args, kwargs)
        with dispatcher.ExcludeKeys(excluded):
            if row.rule is Rule.KEEP:
                return call(*args, **kwargs)
            if row.rule is Rule.FORBID and ruling.agrees:
                return replaced.call_boxed(keys, *args, **kwargs)  # raises in torch's words
            return run(ruling, region_casts.cast, call, args, kwargs)

    return dynamo.no_frame(kernel, inside=True)


def entry_of(
    op: torch._ops.OpOverload, name: str, device: str, ruling: Ruling, args: Sequence[Any]
) -> decision_log.Entry:
    """What a record says of a call of an op."""
    asked, region, row = tuple(dtypes(op, device, args)), ruling.region, ruling.row
    parts = Decision(Rule.PARTS)
    decision = parts if row is None else ruling.policy.apply(row, asked, region.dtype)
    at = "torch", vocabulary().of_aten(name), f"aten:{name}", region.dtype, region.scope
    return decision_log.Entry(*at, row, asked, decision, ruling.policy.name)
