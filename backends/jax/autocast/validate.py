"""Checks of a policy for jax: rows that jax cannot follow are found before anything is traced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from polymp.backends.jax.autocast import op_facts
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, nearest, vocabulary


def check(policy: Policy) -> None:
    """Refuse a policy with a row that jax cannot follow."""
    for why in refusals(policy).values():
        raise PolicyError(why)


@cache
def refusals(policy: Policy) -> Mapping[Row, str]:
    """The rows that jax cannot follow, each with the reason.

    A row for an op that jax does not have may stay if all that the op becomes in a trace has the
    same rule, or if a shipped policy has it too: the vocabulary says why it is not met.
    """
    words, shipped = vocabulary(), policy_files.shipped_rows()
    refused: dict[Row, str] = {}
    for row in policy.rows:
        prefix, _, name = row.of.partition(":")
        why = ""
        if prefix == "jax":
            why = _no_primitive(name)
        elif replace(row, dtype="", scope="") not in shipped:
            is_class = prefix == "class"
            known = words.ops.get(row.of)
            ops = words.members(name) if is_class else (known,) if known else ()
            if ops and not any(_can(op, row.rule) for op in ops):
                why = "" if not is_class and _by_traces(policy, ops[0], row) else _why(row, ops)
        if why:
            refused[row] = f"policy {policy.name!r}: {why}"
    return refused


def _can(op: Op, rule: Rule) -> bool:
    """True if jax has the op, in a form that the rule can be applied to."""
    if not op.jax and not op.functions:
        return False
    if rule not in (Rule.LOWER, Rule.FP8, Rule.WIDEST) or op.rule:
        return True
    return op.kind not in op_facts.AS_WRITTEN


def _by_traces(policy: Policy, op: Op, row: Row) -> bool:
    """True if all that the op becomes in a trace has the row's rule."""
    inside = policy.at(row.scope)
    for low in (row.dtype,) if row.dtype else LOW:
        winners = [inside.winner(part, low) for part in op.traces]
        if not winners or any(w is None or w.rule is not row.rule for w in winners):
            return False
    return True


def _why(row: Row, ops: Sequence[Op]) -> str:
    op = ops[0]
    if op.jax or op.functions:
        return (
            f"jax cannot run {row.of!r} by rule {row.rule}: it has no low form of it. Leave the "
            "row out, or say fp32."
        )
    if op.rule:
        return f"op {row.of!r} is registered for torch alone. Register it for jax, too."
    if not op.traces:
        return f"jax has no {row.of!r}. {op.note}"
    return (
        f"jax runs {row.of!r} as {', '.join(op.traces)}, by the rules for those: give {row.rule} "
        f"to them. {op.note}"
    )


def _no_primitive(name: str) -> str:
    known = op_facts.FREE - op_facts.INDEPENDENT
    base = name.partition(":")[0]
    if base in known or vocabulary().of_jax(base) in vocabulary().registered:
        return ""
    return f"jax has no primitive {name!r} whose dtype a policy may choose.{nearest(base, known)}"
