"""The answers of a policy: how an op runs, and the row that says so."""

from typing import NamedTuple

from polymp.rules.row import Row, Rule


class Decision(NamedTuple):
    """The answer of `Policy.decide`: the dtypes to cast an op's inputs and results to.

    Attributes:
        rule: the rule that decided.
        run: dtype to cast the eligible inputs to; None leaves them alone.
        out: dtype to cast the float results to; None leaves them alone.
    """

    rule: Rule
    run: str | None = None
    out: str | None = None


class Why(NamedTuple):
    """The row that won for an op; as text, a sentence.

    Attributes:
        op: as asked.
        dtype: of the region, as asked.
        scope: as asked.
        row: the winner, None if the policy has no row for the op.
        policy: the policy's name.
    """

    op: str
    dtype: str
    scope: str
    row: Row | None
    policy: str

    @property
    def rule(self) -> Rule:
        """The rule that the op runs by."""
        return self.row.rule if self.row else Rule.PARTS

    def __str__(self) -> str:
        at = f" at {self.scope!r}" if self.scope else ""
        if self.row is None:
            return (
                f"{self.op} in {self.dtype}{at}: policy {self.policy!r} has no row for it, so it "
                "runs in its inputs' dtypes, and the ops inside it by their own rows"
            )
        rule = self.row.rule
        return f"{self.op} in {self.dtype}{at}: {rule} ({rule.phrase}), by the row {self.row}"
