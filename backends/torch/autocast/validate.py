"""Checks of policies against torch: rows that it cannot follow are found before anything runs."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from polymp.backends.torch.autocast import op_facts, torch_table
from polymp.backends.torch.compat import dispatcher
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Apply, Row, Rule
from polymp.rules.vocabulary import vocabulary


def check(policy: Policy, device: str, dtype: str = "") -> None:
    """Refuse a policy with a row that torch cannot follow."""
    for why in refusals(policy).values():
        raise PolicyError(why)
    for name, row in torch_table.table(policy, dtype, device).items() if dtype else ():
        if row.rule in (Rule.LOWER, Rule.WIDEST) and not op_facts.has_low(name, device, dtype):
            raise PolicyError(
                f"policy {policy.name!r}: torch has no {dtype} kernel of {name!r} on {device}, "
                f"which the row {row.of} = {row.rule} asks for. Leave the row out, or write fp32."
            )


@lru_cache(maxsize=torch_table.POLICIES)
def refusals(policy: Policy) -> Mapping[Row, str]:
    """Return the rows that torch cannot follow on any device, each with the reason."""
    refused: dict[Row, str] = {}
    words, shipped = vocabulary(), policy_files.shipped_rows()
    for row in policy.rows:
        spelled = row.of.removeprefix("aten:")
        if spelled != row.of and dispatcher.overload(spelled) is None:
            why = f"has a rule for {spelled!r}, which is no op of torch{_hint(spelled)}."
            refused[row] = f"policy {policy.name!r} {why}"
        if spelled in op_facts.UNTOUCHED:
            refused[row] = (
                f"policy {policy.name!r} has a rule for {spelled!r}, which can have none: torch "
                "makes parameters of its result. Leave the row out."
            )
        op = words.ops.get(row.of)
        if op is not None and not op.aten and not op.rule and replace(row, dtype="") not in shipped:
            why = f"has a rule for {row.of!r}, which torch lacks. {op.note}"
            refused[row] = f"policy {policy.name!r} {why}"
    patterns = {row.scope for row in policy.rows}
    for scope in patterns:
        rows = {replace(row, scope=""): row for row in policy.rows if row.scope == scope}
        scoped = patterns != {""}
        alone = Policy(policy.name, tuple(rows), policy.halves) if scoped else policy
        for low in LOW:
            for name, row in torch_table.table(alone, low).items():
                for why in _faults(row, name):
                    refused.setdefault(rows.get(row, row), f"policy {policy.name!r} {why}")
    return refused


def _faults(row: Row, name: str) -> Iterator[str]:
    op = dispatcher.overload(name)
    assert op is not None, "a table holds what torch has"
    fault = schema_fault(op, name, row.rule)
    if fault:
        yield f"has a rule for {name!r}, {fault}"
    if row.apply is Apply.DTYPE_ARGUMENT and dtype_at(op) is None:
        schema = op._schema
        yield f"applies fp32 to {name!r} by its dtype argument, which it does not have: {schema}"
    if row.apply is Apply.APPEND_DTYPE and name not in APPENDED:
        only = ", ".join(APPENDED)
        yield f"applies fp32 to {name!r} by an appended dtype, which only {only} can have."


def schema_fault(op: torch._ops.OpOverload, name: str, rule: str = "") -> str:
    """Return why no policy may have a row for an op: the end of a sentence, or nothing."""
    if op._schema.is_mutable and not (rule == Rule.FIRST and _writes_its_first(op)):
        return (
            "which writes into an argument: the dtype of its result is given. Give the rule to "
            "the op without '_' or out=."
        )
    if not any("Tensor" in str(a.type) for a in op._schema.arguments):
        return f"which takes no tensor{_hint(name)}."
    return ""


def _writes_its_first(op: torch._ops.OpOverload) -> bool:
    """Return whether an op writes into its first argument, a tensor, and into no other."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return written[0] and not any(written[1:]) and str(op._schema.arguments[0].type) == "Tensor"


def _hint(name: str) -> str:
    """Return the names that may have been meant by an op's name, as the end of a sentence."""
    base = name.partition(".")[0]
    packet = getattr(torch.ops.aten, base, None)
    if packet is not None:
        names = [base if o == "default" else f"{base}.{o}" for o in packet.overloads()]
        return f"; its overloads are {', '.join(names)}"
    known = (o for op in vocabulary().ops.values() for o in op.aten if "::" not in o)
    close = difflib.get_close_matches(base.removeprefix("aten::"), sorted(known), n=3)
    return f"; did you mean {', '.join(close)}" if close else ""


# Overloads with the same meaning and a dtype at the end, for Apply.APPEND_DTYPE.
APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}


def dtype_at(op: torch._ops.OpOverload) -> int | None:
    """Return the place of an op's dtype argument, None if it has none."""
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == "dtype":
            return at
    return None
