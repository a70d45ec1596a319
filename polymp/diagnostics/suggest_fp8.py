"""Which products should stay in bfloat16 under a policy with products in 8 bits, and why.

    what products would lose in 8 bits -> Suggestion: rows with rule lower, each in a scope

A product stays in bfloat16 if one of its errors, of an operand or of a result, is more than `limit`
times that of rounding alone: then its numbers do not fit into the range that one scale gives them.
"""

import os

from polymp import text_table
from polymp.diagnostics.audit_records import AuditRecord
from polymp.diagnostics.fp8_loss import Fp8Loss
from polymp.diagnostics.suggest import scope_of
from polymp.diagnostics.suggestion import Suggestion
from polymp.errors import PolicyError
from polymp.fp8.recipes import ACTIVATION, GRADIENT, INPUT_GRADIENT, RESULT, WEIGHT, WEIGHT_GRADIENT
from polymp.rules import policy_files
from polymp.rules.row import Rule

# In sentences and tables.
NAMES = {
    ACTIVATION: "activation",
    WEIGHT: "weight",
    GRADIENT: "gradient",
    RESULT: "result",
    INPUT_GRADIENT: "gradient of the activation",
    WEIGHT_GRADIENT: "gradient of the weight",
}


def suggest_fp8(audit: AuditRecord, base: policy_files.Source, limit: float) -> Suggestion:
    """Suggest which products stay in bfloat16."""
    if not audit.fp8:
        raise ValueError(
            "suggest(fp8=True) needs an audit with the losses of a recipe: write "
            "audit(..., fp8='tensorwise')."
        )
    if not audit.fp8_losses:
        raise ValueError(
            "suggest(fp8=True): no product was measured. Audit steps in a bfloat16 region whose "
            "policy has no rule fp8; `explain` under policy 'fp8' says which products cannot run "
            "in 8 bits, and why."
        )
    if not limit > 0:
        raise ValueError(f"suggest(fp8=True, limit={limit!r}): write a number above 0, such as 2.")
    policy = policy_files.load(base)
    if not any(row.rule is Rule.FP8 for row in policy.rows):
        raise PolicyError(
            f"suggest(fp8=True): policy {policy.name!r} runs no product in 8 bits. Give "
            "base='fp8', or a policy with rows of rule fp8."
        )
    over = [one for one in audit.fp8_losses if one.worst.times > limit]
    inside: dict[str, dict[str, str]] = {}
    reasons = []
    for one in over:
        scope, why = scope_of(one.module), _why(one)
        if scope:
            inside.setdefault(scope, {})[one.op] = Rule.LOWER.value
        else:
            why += " " + _NOWHERE
        reasons.append(why)
    for one in audit.fp8_losses:  # a row holds for the modules inside of its own, too
        if one not in over and any(_is_inside(one, other) for other in over):
            inside.setdefault(scope_of(one.module), {}).setdefault(one.op, Rule.FP8.value)
    head = {"fp8": audit.fp8}
    if isinstance(base, (str, os.PathLike)):
        head = {"extends": os.fspath(base), **head}
    return Suggestion(scopes=inside, reasons=tuple(reasons), head=head)


_NOWHERE = (
    "No row can be for it alone, because it is called outside of all modules; in JAX, "
    "jax.named_scope('name') names a part of a function."
)


def _is_inside(one: Fp8Loss, other: Fp8Loss) -> bool:
    return bool(other.module) and one.op == other.op and one.module.startswith(f"{other.module}.")


def _why(one: Fp8Loss) -> str:
    """The error that is too large, and what becomes zero."""
    worst = one.worst
    at = " ".join(filter(None, (one.op, one.module and f"in {one.module}", one.source)))
    why = (
        f"{at}: its {NAMES[worst.of]} would be off by {text_table.share(worst.error)}, "
        f"{worst.times:.3g} times as much as by rounding alone, {text_table.share(worst.expected)}"
    )
    operand = one.operands.get(worst.of)
    if operand is not None and operand.zero:
        why += f"; {text_table.share(operand.zero)} of its values would become zero"
    return f"{why}."
