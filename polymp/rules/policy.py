"""A policy: a table that says, op by op, in which float dtype to compute.

    rows -> at(scope) -> winner(op, dtype) -> decide(op, dtypes, region)

Data in, decision out. A row is for an op, a class of ops, or one framework's spelling of an op; the
most specific row for an op wins. `parse` reads rows, `policy_files` policies; nothing here knows
what a tensor is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

from polymp.dtypes import FULL
from polymp.dtypes import name as dtype_name
from polymp.errors import PolicyError
from polymp.fp8.recipes import recipe_of
from polymp.rules import parse, scoped_rows, scopes
from polymp.rules.answers import Decision, Why
from polymp.rules.applied import applied
from polymp.rules.few_rows import check_few_rows
from polymp.rules.row import LOW, Row, Rule, holds_instead, without
from polymp.rules.vocabulary import vocabulary


class Asking(Protocol):
    """The part of a `region.Region` that a decision depends on."""

    @property
    def enabled(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scope(self) -> str: ...


class RowsUsed(Protocol):
    """A record of a run, such as a report of `explain`, that knows which rows won in it."""

    def rows(self) -> set[Row]: ...


# Rows by op, class or spelling, and dtype.
_InForce = Mapping[tuple[str, str], Row]

_PARTS = Decision(Rule.PARTS)


@dataclass(frozen=True)
class Policy:
    """A named table of rules. Frozen, hashable, equal by value.

    The most specific row wins: one with a scope over one without, for the same op; a spelling over
    its op, an op over its class, a class over "all" and that over "default"; among those, one for
    the region's dtype. A class in a scope does not win over an op without; "all" in a scope does.

    Attributes:
        name: what messages call it.
        rows: at most one for each op or class, dtype and scope; the order does not matter.
        halves: what `widest` does when float16 and bfloat16 meet: "widen" computes in float32,
            "raise" forbids the call, as torch.amp does.
        inside: True for what `at` returns: the rows that have a scope hold.
        fp8: the recipe of the rows with rule fp8, by name, see `polymp.fp8.recipes`; "tensorwise"
            if there are such rows and none is given, "" if there are no such rows.
        few_rows: matrix products with rule lower of at most so many rows run in float32 where JAX
            would have to cast a float32 parameter for them, see `few_rows`; 0 for none.
    """

    name: str
    rows: tuple[Row, ...]
    halves: str = "widen"
    inside: bool = False
    fp8: str = ""
    few_rows: int = 0

    def __post_init__(self) -> None:
        rows = tuple(sorted(self.rows, key=lambda row: row.key))
        for other, row in pairwise(rows):
            if other.key == row.key:
                raise PolicyError(
                    f"policy {self.name!r} gives {row.of!r}{row.where} two rules: "
                    f"{other.rule} and {row.rule}. Keep one."
                )
        for row in rows:
            vocabulary().check(row.of, f"policy {self.name!r}")
            if row.scope:
                scopes.check(row.scope, f"policy {self.name!r}")
        if self.halves not in ("widen", "raise"):
            raise PolicyError(
                f"policy {self.name!r}: halves = {self.halves!r} is not one of widen, raise."
            )
        check_few_rows(self.few_rows, f"policy {self.name!r}")
        if self.fp8:
            recipe_of(self.fp8, f"policy {self.name!r}")
        in_8_bits = any(row.rule is Rule.FP8 for row in rows)
        object.__setattr__(self, "fp8", (self.fp8 or "tensorwise") if in_8_bits else "")
        object.__setattr__(self, "rows", rows)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.name, self.rows, self.halves, self.inside, self.fp8, self.few_rows
        return type(self), fields  # a hash holds for one process

    def __repr__(self) -> str:
        return f"Policy({self.name!r}, {len(self.rows)} rows)"

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.rows, self.halves, self.inside, self.fp8, self.few_rows))

    @cached_property
    def _in_force(self) -> _InForce:
        return self._rows_in_force()

    def _rows_in_force(self) -> _InForce:
        return {(row.of, row.dtype): row for row in self.rows if self.inside or not row.scope}

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """The patterns of module paths that rows have, sorted; () in what `at` returns."""
        return tuple(sorted({row.scope for row in self.rows if row.scope and not self.inside}))

    @cached_property
    def _at(self) -> dict[tuple[Any, ...], "Policy"]:
        return {}

    def at(self, scope: str) -> "Policy":
        """Return the policy inside the module at a path, where rows with a matching pattern hold.

        Args:
            scope: names of modules from the outermost inwards, joined by dots.

        Returns:
            A policy without scopes: this one, if no row has a scope.

        Raises:
            PolicyError: two patterns match the same module, neither is the more exact, and their
                rules differ.
        """
        if not self.scopes:
            return self
        found = scopes.ranked(self.scopes, scope)
        if found not in self._at:
            self._at[found] = self._folded(found, scope)
        return self._at[found]

    def _folded(self, found: Sequence[tuple[object, str]], scope: str) -> "Policy":
        rows = scoped_rows.folded(self.rows, found, f"policy {self.name!r} at {scope!r}")
        return replace(self, rows=rows, inside=True)

    @cached_property
    def _winners(self) -> dict[tuple[str, str, str], Row | None]:
        return {}

    def winner(self, op: str, dtype: str, spelling: str = "") -> Row | None:
        """Return the row that decides for an op, outside of scopes (see `at`).

        Args:
            op: its name in the vocabulary; "" for a spelling that it lacks.
            dtype: of the region.
            spelling: the framework's own name, with its prefix: "aten:softmax.int", "jax:exp".

        Returns:
            The row, also one with the rule "parts"; None if there is none for the op.
        """
        asked = op, dtype, spelling
        if asked not in self._winners:
            self._winners[asked] = _winner(self._in_force, *asked)
        return self._winners[asked]

    def winners(self, asked: Iterable[tuple[str, str, str]]) -> Iterator[Row | None]:
        """Yield what `winner` returns, and keep nothing: for all ops at once.

        Args:
            asked: the arguments of `winner` for each op.

        Yields:
            The row for each op, or None.
        """
        in_force = self._rows_in_force()
        for each in asked:
            yield _winner(in_force, *each)

    def why(self, op: str, dtype: object, scope: str = "") -> Why:
        """Find the row that decides for an op, and so in which dtype the op runs.

            print(polymp.policy("amp").why("softmax", "fp16"))

        Args:
            op: its name in the vocabulary, or a spelling: "softmax", "aten:softmax.int".
            dtype: of the region: float16 or bfloat16, by name, alias or as a dtype object.
            scope: the path of the module that the op is called in.

        Returns:
            The row and what was asked; `print` it for a sentence.

        Raises:
            PolicyError: no such op or dtype; the message has the nearest names.
        """
        try:
            low = dtype_name(dtype, LOW)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"why(): {error}") from None
        known = vocabulary().op_of(op)
        if known is None:
            vocabulary().check(op, "why()")
        spelling = op if known is None or ":" in op else ""
        row = self.at(scope).winner(known.name if known else "", low, spelling)
        return Why(op, low, scope, row, self.name)

    def decide(
        self, op: str, dtypes: Sequence[str], region: Asking, spelling: str = ""
    ) -> Decision:
        """Decide in which dtype an op runs, and which dtype its results get.

            lower      run = region dtype     out = as computed
            fp8        as lower, if the product cannot run in 8 bits
            fp32       run = float32           out = as computed
            fp32_keep  run = float32           out = widest input
            widest     run = widest input      out = as computed
            first      run = first input       out = as computed
            keep       nothing is cast, in the op and in what it is made of
            parts, no row, region disabled     nothing is cast

        Args:
            op: its name in the vocabulary; "" for a spelling that it lacks.
            dtypes: dtypes of the inputs that the rule depends on, in order: float inputs on the
                region's device. float64 and dtypes that `polymp.dtypes` lacks are passed over.
            region: the region the op is called in.
            spelling: the framework's own name of the op, with its prefix.

        Returns:
            The decision. `forbid` is returned, not raised: the backend knows the name that the
            caller used.

        Source:
            torch v2.13 aten/src/ATen/autocast_mode.h: `prioritize` (widest), `is_eligible`.
        """
        if not region.enabled:
            return _PARTS
        row = self.at(region.scope).winner(op, region.dtype, spelling)
        if row is None:
            return _PARTS
        return self.apply(row, [FULL.get(given, given) for given in dtypes], region.dtype)

    def apply(self, row: Row, dtypes: Sequence[str], dtype: str) -> Decision:
        """Decide by a row.

        Args:
            row: that won.
            dtypes: full names of the inputs' dtypes, as in `decide`.
            dtype: of the region.

        Returns:
            The decision, as in `decide`.
        """
        return applied(row.rule, dtypes, dtype, self.halves)

    def override(
        self,
        *,
        name: str = "",
        lower: Sequence[str] = (),
        fp8: Sequence[str] = (),
        fp32: Sequence[str] = (),
        fp32_keep: Sequence[str] = (),
        widest: Sequence[str] = (),
        first: Sequence[str] = (),
        keep: Sequence[str] = (),
        parts: Sequence[str] = (),
        rules: Mapping[str, object] | None = None,
        scopes: Mapping[str, Mapping[str, object]] | None = None,
        recipe: str = "",
    ) -> "Policy":
        """Return this policy with some rows replaced.

            policy.override(fp32=["softmax"], lower=["class:fft"],
                            rules={"exp": {"float16": "fp32"}},
                            scopes={"*.lm_head": {"linear": "fp32"}})

        A row for a class replaces the rows of its ops.

        Args:
            name: of the result; this policy's with "*" appended, if left out.
            lower: ops, or classes as "class:NAME", that are to have this rule.
            fp8: as `lower`; for matrix products.
            fp32: as `lower`.
            fp32_keep: as `lower`.
            widest: as `lower`.
            first: as `lower`.
            keep: as `lower`.
            parts: as `lower`.
            rules: any rows, as the `[rules]` of a TOML file has them.
            scopes: rows by pattern of module paths, as `[scopes]` has them.
            recipe: of the rows with rule fp8: "tensorwise", "rowwise" or "rowwise_gw_hp"; this
                policy's, if left out.

        Returns:
            A new policy.

        Raises:
            PolicyError: an unknown op, class, rule or recipe, or two rules for one op.
        """
        lists = {"lower": lower, "fp8": fp8, "fp32": fp32, "fp32_keep": fp32_keep, "widest": widest}
        lists |= {"first": first, "keep": keep, "parts": parts}
        where = f"override of policy {self.name!r}"
        rows = parse.overriding(lists, rules or {}, scopes or {}, where)
        name = name or self.name.rstrip("*") + "*"
        changed = replace(self, name=name, rows=rows, inside=False).over(self)
        return changed.with_recipe(recipe, where) if recipe else changed

    def with_recipe(self, recipe: str, where: str) -> "Policy":
        """Return this policy with another recipe for its rows with rule fp8.

        Args:
            recipe: its name.
            where: it was given, for messages.

        Returns:
            A policy with the same name and rows.

        Raises:
            PolicyError: there is no such recipe, or no such row.
        """
        recipe_of(recipe, where)
        if not self.fp8:
            raise PolicyError(
                f"{where}: fp8 = {recipe!r} is for rows with rule fp8, and there are none. Write "
                'such a row, as linear = "fp8", or extends = "fp8".'
            )
        return replace(self, fp8=recipe)

    def without_fp8(self, *paths: str) -> "Policy":
        """Return this policy with the products of some modules by rule `lower` instead of `fp8`.

            policy = polymp.policy("fp8").without_fp8("embed", "head")

        Args:
            paths: of modules, or patterns as those of scopes.

        Returns:
            A new policy of the same name, with a scope for each path.

        Raises:
            PolicyError: no row has rule fp8, or a path is none.
        """
        rules = {row.of: "lower" for row in self.rows if row.rule is Rule.FP8}
        if not rules:
            raise PolicyError(
                f"without_fp8(): policy {self.name!r} runs no product in 8 bits. Take policy "
                "'fp8', or one with rows of rule fp8."
            )
        return self.override(name=self.name, scopes=dict.fromkeys(paths, rules))

    def over(self, base: "Policy") -> "Policy":
        """Return this policy with the rows of another that it does not replace.

        A row replaces, in its scope, all rows of the other for the same ops: a row for a class
        also those for the ops of the class.

        Args:
            base: the policy whose rows are added.

        Returns:
            A new policy with this one's name.
        """
        kept = without(base.rows, self.rows, holds_instead)
        return replace(self, rows=(*kept, *self.rows), fp8=self.fp8 or base.fp8)

    def unused(self, record: RowsUsed) -> tuple[Row, ...]:
        """Return the rows that decided for no op of a run; a typo in a scope shows up here.

        Args:
            record: of a run under this policy: the report of `explain`.

        Returns:
            The rows, in the policy's order.
        """
        used = record.rows()
        return tuple(row for row in self.rows if row not in used)


def _winner(in_force: _InForce, op: str, dtype: str, spelling: str) -> Row | None:
    """The row that decides for an op; see `Policy.winner`."""
    known = vocabulary().ops.get(op)
    computes = known is not None and known.kind not in vocabulary().moving
    names = [spelling, op, f"class:{known.kind}" if known else "", "all" if computes else ""]
    dtype = FULL.get(dtype, dtype)
    for name in filter(None, names):
        for low in (dtype, ""):
            if row := in_force.get((name, low)):
                return row
    if known and known.rule:
        return Row(op, Rule(known.rule), source="register_op")
    for low in (dtype, "") if computes else ():
        if row := in_force.get(("default", low)):
            return row
    return None
