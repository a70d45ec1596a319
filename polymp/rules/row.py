"""A row: one line of a policy's table, and which rows replace which.

A row is for an op, a class of ops, or one framework's spelling of an op; for one low dtype or both;
everywhere or in a scope. Nothing here knows where a table was read from, or what a policy is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self, TypeVar

from polymp import dtypes
from polymp.errors import PolicyError
from polymp.rules import scopes
from polymp.rules.vocabulary import vocabulary

E = TypeVar("E", bound=StrEnum)

# The low dtypes; a row may be for one of them alone.
LOW = ("float16", "bfloat16")


class Rule(StrEnum):
    """How an op runs in an enabled region; `phrase` says it in words.

    Inputs that are not eligible, such as integers and float64, stay as they are.
    """

    LOWER = "lower", "runs in the region's dtype"
    FP8 = "fp8", "runs its product in 8 bits, or as lower where that is not possible"
    FP32 = "fp32", "runs in float32"
    FP32_KEEP = "fp32_keep", "runs in float32, and returns the widest input dtype"
    WIDEST = "widest", "runs in the widest of its inputs' dtypes and the region's"
    FIRST = "first", "runs in the dtype of its first input, such as the tensor that it writes into"
    KEEP = "keep", "runs in its inputs' dtypes, and so do the ops inside it"
    FORBID = "forbid", "raises an error that says which op to use instead"
    PARTS = "parts", "is not cast; the ops inside it follow their own rows"

    phrase: str  # the rule in words, as a predicate

    def __new__(cls, value: str, phrase: str = "") -> Self:
        made = str.__new__(cls, value)
        made._value_, made.phrase = value, phrase
        return made


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One line of a policy's table: an op or a class of ops, and the rule for it."""

    # An op of the vocabulary ("softmax"), a class ("class:softmax"), one framework's spelling
    # ("aten:softmax.int", "jax:exp"), "all" for every op that computes, or "default" for those that
    # have no other row. "all" replaces the rows outside of its scope, and those of the policy that
    # is extended.
    of: str
    rule: Rule  # how it runs
    dtype: str = ""  # the region dtype it is for, "" for any
    scope: str = ""  # a pattern of the module paths that it holds in, "" for everywhere
    instead: str = ""  # for forbid, the op to use instead
    # The policy or file that the row was written in; rows are equal without it.
    source: str = field(default="", compare=False)
    part_of: "Row | None" = field(default=None, compare=False, repr=False)  # that it was made from

    def __post_init__(self) -> None:
        where, of_op = self.source or "a policy's row", f"for op {self.of!r}"
        vocabulary().check(self.of, where)
        if self.scope:
            scopes.check(self.scope, where)
        key = self.dtype or "rule"
        object.__setattr__(self, "rule", member(Rule, self.rule, key, where, of_op))
        if self.instead:
            if self.rule is not Rule.FORBID:
                raise PolicyError(
                    f"{where}: instead {self.instead!r} {of_op} needs rule forbid, not "
                    f"{self.rule!s}."
                )
            vocabulary().check(self.instead, f"{where}: instead {of_op}")
        if self.dtype:
            try:
                object.__setattr__(self, "dtype", dtypes.name(self.dtype, LOW))
            except (TypeError, ValueError) as error:
                raise PolicyError(f"{where}: {of_op[4:]}: {error}") from None
        if self.rule is Rule.FP8 and self.dtype == "float16":
            raise PolicyError(
                f"{where}: rule fp8 {of_op} is for bfloat16 regions, not for float16. Write "
                f'bfloat16 = "fp8".'
            )
        if self.rule is Rule.FP8 and not self.is_of_products:
            raise PolicyError(
                f"{where}: rule fp8 {of_op} is for matrix products alone: linear, matmul, mm, "
                "addmm and others of class:matmul. Write lower."
            )

    @property
    def is_of_products(self) -> bool:
        """True if the row is for matrix products alone."""
        op = vocabulary().op_of(self.of)
        return self.of == "class:matmul" or (op is not None and op.kind == "matmul")

    @property
    def key(self) -> tuple[str, str, str]:
        """Scope, op and dtype: no two rows of a policy have the same."""
        return self.scope, self.of, self.dtype

    def left_by(self, others: Iterable["Row"]) -> tuple["Row", ...]:
        """This row for the dtypes that no other row is for; nothing if they cover both."""
        mine = {self.dtype} if self.dtype else set(LOW)
        taken = {low for row in others for low in ((row.dtype,) if row.dtype else LOW)}
        if not mine & taken:
            return (self,)
        return tuple(replace(self, dtype=low, part_of=self) for low in sorted(mine - taken))

    @property
    def where(self) -> str:
        """The dtype and the scope that the row is for, as words."""
        at = f" in {self.scope!r}" if self.scope else ""
        return f"{f' ({self.dtype})' if self.dtype else ''}{at}"

    def __str__(self) -> str:
        by = f", {self.source}" if self.source else ""
        return f"{self.of}{self.where} = {self.rule}{by}"


def without(
    rows: Sequence[Row], own: Iterable[Row], replaces: Callable[[Row, Row], bool]
) -> tuple[Row, ...]:
    """Rows without those that other rows replace, wholly or for one dtype."""
    keys = {row.key for row in rows}
    return tuple(
        left
        for row in rows
        for left in row.left_by([one for one in own if replaces(one, row)])
        if left is row or left.key not in keys
    )


def holds_instead(own: Row, other: Row) -> bool:
    """True if a row replaces one that it inherits."""
    return own.scope == other.scope and vocabulary().within(other.of, own.of)


def holds_in_scope(own: Row, other: Row) -> bool:
    """True if a row with a scope replaces another in it; a class does not replace an op."""
    if own.of in (other.of, "all"):
        return True
    return not own.of.startswith("class:") and vocabulary().within(other.of, own.of)


def member(kind: type[E], value: object, key: str, where: str, of_op: str) -> E:
    """Return the member of an enumeration that has a value."""
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        names = ", ".join(kind)
        raise PolicyError(f"{where}: {key} {value!r} {of_op} is not one of {names}.") from None
