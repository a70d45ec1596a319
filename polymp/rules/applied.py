"""The decision that a rule makes for the dtypes of an op's inputs."""

from collections.abc import Sequence

from polymp.dtypes import FORMATS, widest
from polymp.rules.answers import Decision
from polymp.rules.row import Rule

_PARTS = Decision(Rule.PARTS)
_KEEP = Decision(Rule.KEEP)
_FORBID = Decision(Rule.FORBID)


def applied(rule: Rule, dtypes: Sequence[str], dtype: str, halves: str) -> Decision:
    """Decide by a rule; `Policy.decide` has the table."""
    match rule:
        case Rule.LOWER | Rule.FP8:
            return Decision(rule, dtype)
        case Rule.FP32:
            return Decision(rule, "float32")
        case Rule.FP32_KEEP:
            kept = [f for f in dtypes if f in FORMATS and f != "float64"]
            return Decision(rule, "float32", widest(kept) if kept else None)
        case Rule.WIDEST:
            return _widest(dtypes, dtype, halves)
        case Rule.FIRST:
            known = dtypes[0] if dtypes and dtypes[0] in FORMATS else None
            return Decision(rule, known)
        case Rule.KEEP:
            return _KEEP
        case Rule.FORBID:
            return _FORBID
        case Rule.PARTS:
            return _PARTS


def _widest(dtypes: Sequence[str], run: str, halves: str) -> Decision:
    for f in dtypes:
        if f == "float64" or run == "float32":
            continue  # once float32, it stays: a third dtype after it changes nothing
        if f not in (run, "float32") and halves == "raise":
            return _FORBID
        if f in FORMATS:
            run = widest((run, f))
    return Decision(Rule.WIDEST, run)
