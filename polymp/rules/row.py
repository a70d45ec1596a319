"""A row: one line of a policy's table, and how rows stand in for each other.

A row speaks of an op, of a class of ops, or of one spelling of a framework, for one low dtype or
both, everywhere or in a scope. Nothing here knows where a table was read from, or what a policy is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from polymp import dtypes
from polymp.errors import PolicyError
from polymp.rules.vocabulary import vocabulary

E = TypeVar("E", bound=StrEnum)

# The low dtypes, for which a row may speak alone.
LOW = ("float16", "bfloat16")


class Rule(StrEnum):
    """How an op runs in an enabled region. Inputs that are not eligible stay as they are.

    lower      in the region's dtype
    fp32       in float32
    fp32_keep  in float32, and the result returns to the widest input dtype
    widest     in the widest of the inputs' dtypes and the region's
    first      in the dtype of the first input, such as the tensor that others are written into
    keep       in whatever comes in, with all that it is made of
    forbid     not at all: an error that names another op
    parts      has no rule of its own: what it is made of follows its own rules
    """

    LOWER = "lower"
    FP32 = "fp32"
    FP32_KEEP = "fp32_keep"
    WIDEST = "widest"
    FIRST = "first"
    KEEP = "keep"
    FORBID = "forbid"
    PARTS = "parts"


class Apply(StrEnum):
    """How the torch backend makes an op run in float32, where casting its inputs is not the way.

    cast            cast the inputs (every rule but fp32 always does)
    dtype_argument  fill in the op's own dtype argument, if the caller left it out
    append_dtype    call the overload of the op that takes a dtype
    """

    CAST = "cast"
    DTYPE_ARGUMENT = "dtype_argument"
    APPEND_DTYPE = "append_dtype"


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One line of a table: what it speaks of, its rule, and what some rules need besides.

    Attributes:
        of: an op of the vocabulary ("softmax"), a class ("class:softmax"), one framework's
            spelling ("aten:softmax.int", "jax:exp"), "all" for every op that computes, or "default"
            for those that no other row speaks of. "all" replaces what holds outside of its scope,
            or in the policy that is extended.
        rule: how it runs.
        dtype: the region dtype it is for, "" for any.
        scope: a pattern of module paths it speaks for, "" for everywhere.
        apply: how torch brings fp32 about; None for the way of the device's own table.
        instead: for forbid, the op to use instead.
        source: the policy or file that the row was written in; rows are equal without it.
    """

    of: str
    rule: Rule
    dtype: str = ""
    scope: str = ""
    apply: Apply | None = None
    instead: str = ""
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where, of_op = self.source or "a policy's row", f"for op {self.of!r}"
        object.__setattr__(self, "rule", member(Rule, self.rule, "rule", where, of_op))
        if self.apply is not None:
            object.__setattr__(self, "apply", member(Apply, self.apply, "apply", where, of_op))
        if self.apply not in (None, Apply.CAST) and self.rule is not Rule.FP32:
            raise PolicyError(
                f"{where}: apply {self.apply!s} {of_op} needs rule fp32, not {self.rule!s}."
            )
        if self.instead and self.rule is not Rule.FORBID:
            raise PolicyError(
                f"{where}: instead {self.instead!r} {of_op} needs rule forbid, not {self.rule!s}."
            )
        if self.dtype:
            try:
                object.__setattr__(self, "dtype", dtypes.name(self.dtype, LOW))
            except (TypeError, ValueError) as error:
                raise PolicyError(f"{where}: {of_op[4:]}: {error}") from None

    @property
    def key(self) -> tuple[str, str, str]:
        """What no two rows of a policy share."""
        return self.scope, self.of, self.dtype

    def left_by(self, others: Iterable["Row"]) -> tuple["Row", ...]:
        """What remains of this row where others speak instead: for a dtype, or nothing."""
        mine = {self.dtype} if self.dtype else set(LOW)
        taken = {low for row in others for low in ((row.dtype,) if row.dtype else LOW)}
        if not mine & taken:
            return (self,)
        return tuple(replace(self, dtype=low) for low in sorted(mine - taken))

    @property
    def where(self) -> str:
        """The dtype and the scope that the row speaks for, as words."""
        at = f" in {self.scope!r}" if self.scope else ""
        return f"{f' ({self.dtype})' if self.dtype else ''}{at}"

    def __str__(self) -> str:
        by = f", {self.source}" if self.source else ""
        return f"{self.of}{self.where} = {self.rule}{by}"


def without(
    rows: Sequence[Row], own: Iterable[Row], speaks: Callable[[Row, Row], bool]
) -> tuple[Row, ...]:
    """What remains of rows where others of one's own speak instead."""
    keys = {row.key for row in rows}
    return tuple(
        left
        for row in rows
        for left in row.left_by([one for one in own if speaks(one, row)])
        if left is row or left.key not in keys
    )


def holds_instead(own: Row, other: Row) -> bool:
    """True if a row replaces one that it inherits."""
    return own.scope == other.scope and vocabulary().within(other.of, own.of)


def holds_in_scope(own: Row, other: Row) -> bool:
    """True if a row with a scope speaks where `other` does; a class does not win over an op."""
    if own.of in (other.of, "all"):
        return True
    return not own.of.startswith("class:") and vocabulary().within(other.of, own.of)


def member(kind: type[E], value: Any, key: str, where: str, of_op: str) -> E:
    """The member of an enumeration that has a value.

    Raises:
        PolicyError: none has; the message says where, and which there are.
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind)
        raise PolicyError(f"{where}: {key} {value!r} {of_op} is not one of {names}.") from None
