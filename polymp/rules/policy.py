"""A policy: a table that says, op by op, in which float dtype to compute.

    rows -> at(scope) -> winner(op, dtype) -> decide(op, dtypes, region)

Data in, decision out. A row is for an op, a class of ops, or one framework's spelling of an op; the
most specific row for an op wins. `policy_files` reads policies from where they are; nothing here
knows what a tensor is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple, cast

from polymp import dtypes
from polymp.dtypes import FORMATS, FULL, widest
from polymp.dtypes import name as dtype_name
from polymp.errors import PolicyError, brief
from polymp.fp8 import NOT_FLOAT16, RECIPES, REGION_DTYPE, recipe_of
from polymp.rules import scopes
from polymp.rules.row import LOW, Row, Rule, holds_in_scope, holds_instead, without
from polymp.rules.vocabulary import nearest, vocabulary


class Decision(NamedTuple):
    """The answer of `Policy.decide`: the dtypes to cast an op's inputs and results to."""

    rule: Rule  # the rule that decided
    run: str | None = None  # dtype to cast the eligible inputs to; None leaves them alone
    out: str | None = None  # dtype to cast the float results to; None leaves them alone


_PARTS = Decision(Rule.PARTS)


class Why(NamedTuple):
    """The row that won for an op; as text, a sentence."""

    op: str  # as asked
    dtype: str  # of the region, as asked
    scope: str  # as asked
    row: Row | None  # the winner, None if the policy has no row for the op
    policy: str  # the policy's name

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


@dataclass(frozen=True)
class Policy:
    """A named table of rules. Frozen, hashable, equal by value.

    The most specific row wins: one with a scope over one without, for the same op; a spelling over
    its op, an op over its class, a class over "all", that over the rule of `register_op`, and this
    over "default"; among those, one for the region's dtype. A class in a scope does not win over an
    op without; "all" in a scope does.

    Attributes:
        name: what messages call it.
        rows: at most one for each op or class, dtype and scope; the order does not matter.
        halves: what `widest` does when float16 and bfloat16 meet: "widen" computes in float32,
            "raise" forbids the call, as torch.amp does.
        inside: True for what `at` returns: the rows that have a scope hold.
        fp8: name of the recipe of the rows with rule fp8, by default "tensorwise"; "" without such
            rows.
        few_rows: matrix products with rule lower of at most so many rows run in float32 where JAX
            would have to cast a float32 parameter for them; 0 for none.
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
        for row in rows:  # of a pickle, for an op that may not be registered in this process
            vocabulary().check(row.of, f"policy {self.name!r}")
        if self.halves not in ("widen", "raise"):
            raise PolicyError(
                f"policy {self.name!r}: halves = {self.halves!r} is not one of widen, raise."
            )
        few = self.few_rows
        if isinstance(few, bool) or not isinstance(few, int) or few < 0:
            raise PolicyError(
                f"policy {self.name!r}: few_rows = {few!r} is not a number of rows. Write few_rows "
                "= 32, or 0 to run products of any size by their rows."
            )
        if self.fp8:
            recipe_of(self.fp8, f"policy {self.name!r}")
        in_8_bits = any(row.rule is Rule.FP8 for row in rows)
        object.__setattr__(self, "fp8", (self.fp8 or "tensorwise") if in_8_bits else "")
        object.__setattr__(self, "rows", rows)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the hash, which holds for one process.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        return f"Policy({self.name!r}, {len(self.rows)} rows)"

    @cached_property
    def _hash(self) -> int:
        return hash(self.__reduce__()[1])

    @cached_property
    def _in_force(self) -> Mapping[tuple[str, str], Row]:
        """Rows by op, class or spelling, and dtype."""
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
            rows = folded(self.rows, found, f"policy {self.name!r} at {scope!r}")
            self._at[found] = replace(self, rows=rows, inside=True)
        return self._at[found]

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
            self._winners[asked] = _winner(self, *asked)
        return self._winners[asked]

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
        self, op: str, dtypes: Sequence[str], region: "Region", spelling: str = ""
    ) -> Decision:
        """Decide in which dtypes an op and its results are.

            lower      run = region dtype     out = as computed
            fp8        as lower, if the product cannot run in 8 bits
            fp32       run = float32           out = as computed
            fp32_keep  run = float32           out = widest input
            widest     run = widest of region dtype and inputs     out = as computed
            first      run = first input       out = as computed
            keep       nothing is cast, in the op and in what it is made of
            parts, no row, region disabled     nothing is cast

        Args:
            op: its name in the vocabulary; "" for a spelling that it lacks.
            dtypes: of the float inputs on the region's device, in order. float64, but by rule
                `first`, and dtypes that `polymp.dtypes` lacks are passed over.
            region: the region the op is called in.
            spelling: the framework's own name of the op, with its prefix.

        Returns:
            The decision; `forbid` is not raised here.

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
        rule = row.rule
        match rule:
            case Rule.LOWER | Rule.FP8:
                return Decision(rule, dtype)
            case Rule.FP32:
                return Decision(rule, "float32")
            case Rule.FP32_KEEP:
                kept = [f for f in dtypes if f in FORMATS and f != "float64"]
                return Decision(rule, "float32", widest(kept) if kept else None)
            case Rule.WIDEST:
                return self._widest(dtypes, dtype)
            case Rule.FIRST:
                return Decision(rule, dtypes[0] if dtypes and dtypes[0] in FORMATS else None)
            case Rule.KEEP | Rule.FORBID | Rule.PARTS:
                return Decision(rule)

    def _widest(self, dtypes: Sequence[str], run: str) -> Decision:
        for f in dtypes:
            if f == "float64" or run == "float32":
                continue  # once float32, it stays: a third dtype after it changes nothing
            if f not in (run, "float32") and self.halves == "raise":
                return Decision(Rule.FORBID)
            if f in FORMATS:
                run = widest((run, f))
        return Decision(Rule.WIDEST, run)

    def override(
        self,
        *,
        name: str = "",
        rules: Mapping[str, object] | None = None,
        scopes: Mapping[str, Mapping[str, object]] | None = None,
        recipe: str = "",
        **by_rule: Sequence[str],
    ) -> "Policy":
        """Return this policy with some rows replaced.

            policy.override(fp32=["softmax"], lower=["class:fft"],
                            rules={"exp": {"float16": "fp32"}},
                            scopes={"*.lm_head": {"linear": "fp32"}})

        A row for a class replaces the rows of its ops.

        Args:
            name: of the result; this policy's with "*" appended, if left out.
            rules: any rows, as the `[rules]` of a TOML file.
            scopes: rows by pattern of module paths, as `[scopes]` there.
            recipe: of rule fp8: "tensorwise", "rowwise" or "rowwise_gw_hp"; by default as here.
            by_rule: ops, or classes as "class:NAME", by the rule that they get: lower, fp8, fp32,
                fp32_keep, widest, first, keep or parts.

        Returns:
            A new policy.

        Raises:
            PolicyError: an unknown op, class, rule or recipe, or two rules for one op.
            TypeError: there is no such argument.
        """
        known = [rule.value for rule in Rule if rule is not Rule.FORBID]
        if others := [rule for rule in by_rule if rule not in known]:
            raise TypeError(
                f"override() got {', '.join(others)}, and takes ops by rule: {', '.join(known)}; "
                "rules, scopes, name and recipe. For a region's low dtype, write lower=[op]."
            )
        where = f"override of policy {self.name!r}"
        table: dict[str, object] = {}
        for of, value in [
            *((of, r) for r in known for of in _names(by_rule.get(r, ()), r, where)),
            *_table(rules or {}, "rules", where).items(),
        ]:
            if table.setdefault(of, value) != value:
                both = f"{table[of]} and {value}"
                raise PolicyError(f"{where} gives {of!r} two rules: {both}. Keep one.")
        data: dict[str, object] = {"rules": table, "scopes": scopes or {}}
        data |= {"fp8": recipe} if recipe else {}
        return from_data(data, name or self.name.rstrip("*") + "*", where, self)

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
        for path in paths:
            if not isinstance(path, str):
                raise PolicyError(
                    f"without_fp8() takes paths of modules, got {brief(path)}. Write each as an "
                    "argument of its own: without_fp8('embed', 'head')."
                )
        return self.override(name=self.name, scopes=dict.fromkeys(paths, rules))

    def unused(self, report: Iterable[Any]) -> tuple[Row, ...]:
        """Return the rows that decided for no op of a run; a typo in a scope shows up here.

        Args:
            report: of `explain`, of a run under this policy: calls, each with the row that decided.

        Returns:
            The rows, in the policy's order.
        """
        used = set[Row | None]()
        for call in report:
            row = call.row
            while row not in used:
                used.add(row)
                row = None if row is None else row.part_of
        return tuple(row for row in self.rows if row not in used)


def _winner(policy: Policy, op: str, dtype: str, spelling: str) -> Row | None:
    """Find the row that `Policy.winner` returns."""
    in_force = policy._in_force
    known = vocabulary().ops.get(op)
    lows = FULL.get(dtype, dtype), ""

    def of(name: str) -> Row | None:
        return next(filter(None, (in_force.get((name, low)) for low in lows)), None)

    def of_every_op(name: str) -> Row | None:  # "all" or "default"
        kind = known.kind if known else ""
        row = of(name) if known and kind not in vocabulary().moving else None
        if row is None or row.rule not in (Rule.LOWER, Rule.WIDEST):
            return row
        if kind not in vocabulary().traits["wide"]:
            return row
        means = f": what {name} = {row.rule} means where there are no kernels for low dtypes"
        source = f"{row.source}{means}"
        return replace(row, of=f"class:{kind}", rule=Rule.FP32, source=source, part_of=row)

    named = (of(name) for name in (spelling, op, f"class:{known.kind}" if known else "") if name)
    if row := next(filter(None, named), None) or of_every_op("all"):
        return row
    if known and known.rule:
        return Row(op, Rule(known.rule), source="register_op")
    return of_every_op("default")


def folded(rows: Sequence[Row], found: Sequence[tuple[object, str]], where: str) -> tuple[Row, ...]:
    """Return the rows that hold where some scopes match: these before those without a scope."""
    holding = tuple(row for row in rows if not row.scope)
    tied: list[tuple[Row, Row]] = []
    for _, alike in groupby(found, lambda ranked: ranked[0]):
        patterns = [pattern for _, pattern in alike]
        own: dict[tuple[str, str], Row] = {}
        for row in [row for row in rows if row.scope in patterns]:
            other = own.setdefault((row.of, row.dtype), row)
            if other.rule is not row.rule:
                tied.append((other, row))
        holding = (*without(holding, own.values(), holds_in_scope), *own.values())
    for one, other in tied:
        if one in holding:  # else a stronger pattern has settled it
            raise PolicyError(
                f"{where}: {one.scope!r} gives {one.of!r} {one.rule} and {other.scope!r} gives it "
                f"{other.rule}, and neither pattern is the more exact. Make one of them longer."
            )
    return holding


# Reading a policy from plain data, which is what a TOML file or a dict holds. Every error says
# where the fault is, what it is and what to write instead.


def from_data(data: Mapping[str, Any], name: str, where: str, base: Policy | None) -> Policy:
    """The policy that data holds; its rows replace those of `base`, whose other settings it has."""
    rows = list(_rows(_table(data.get("rules", {}), "rules", where), "", where))
    for scope, inside in _table(data.get("scopes", {}), "scopes", where).items():
        scopes.check(scope, where)
        rows += _rows(_table(inside, f"scopes.{scope}", where), scope, where)
    below = base or Policy(name, ())
    halves, few_rows = (data.get(key, getattr(below, key)) for key in ("halves", "few_rows"))
    rows = [*without(below.rows, rows, holds_instead), *rows]
    policy = Policy(name, tuple(rows), halves, fp8=below.fp8, few_rows=few_rows)
    if "fp8" not in data:
        return policy
    recipe = recipe_of(data["fp8"], where).name
    if not policy.fp8:
        raise PolicyError(
            f"{where}: fp8 = {recipe!r} is for rows with rule fp8, and there are none. Write "
            'such a row, as linear = "fp8", or extends = "fp8".'
        )
    return replace(policy, fp8=recipe)


def _names(ops: object, rule: str, where: str) -> Sequence[str]:
    if rule == "fp8" and isinstance(ops, str) and ops in RECIPES:
        raise PolicyError(f"{where}: fp8={ops!r} is a recipe. Write recipe={ops!r}.")
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise PolicyError(f"{where}: {rule}={ops!r} is not a list of ops. Write {rule}=[{ops!r}].")
    names = list(ops)
    for op in names:
        if not isinstance(op, str):
            raise PolicyError(f"{where}: {rule} has {op!r}; ops are named by strings.")
    return names


def _table(value: object, key: str, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        what = "from pattern to rules" if key == "scopes" else "from op to rule"
        raise PolicyError(f"{where}: {key} must be a table {what}, got {value!r}.")
    return value


_OF_ROW = ("rule", "instead")


def _rows(table: Mapping[str, object], scope: str, where: str) -> Iterator[Row]:
    for of, value in table.items():
        if of == "class":
            raise PolicyError(f'{where}: a class is written "class:NAME", as in "class:softmax".')
        vocabulary().check(of, where)  # first: `torch.exp = "fp32"` in TOML is a table for `torch`
        own = dict(_entries(value, of, where))
        of_dtypes = [(low, own.pop(key)) for key in [*own] if (low := _low_dtype(key))]
        check_keys(own, (*_OF_ROW, *LOW), where, of)
        if "rule" in own:
            yield _row(of, own, "", scope, where)
        elif not of_dtypes:
            raise PolicyError(f"{where}: no rule for op {of!r}. Write a rule, or one for a dtype.")
        elif own:
            raise PolicyError(f"{where}: op {of!r} has rules for dtypes alone; put the rest there.")
        for low, value_there in of_dtypes:
            yield _row(of, _entries(value_there, of, where), low, scope, where)


def _low_dtype(key: object) -> str:
    """The full name of the low dtype that a key is, "" for other keys."""
    try:
        return dtypes.name(key, LOW)
    except (TypeError, ValueError):
        return ""


def _entries(value: object, of: str, where: str) -> Mapping[str, object]:
    if isinstance(value, str):
        return {"rule": value}
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: op {of!r} has {value!r}, which is neither a rule nor a table.")
    return value


def _row(of: str, value: Mapping[str, Any], dtype: str, scope: str, where: str) -> Row:
    check_keys(value, _OF_ROW, where, of)
    rule, instead = (value.get(key) for key in _OF_ROW)
    return Row(of, cast(Rule, rule), dtype, scope, instead or "", where)


def check_keys(data: Mapping[str, object], known: Sequence[str], where: str, op: str = "") -> None:
    """Refuse a table, of a policy or of one of its ops, with a key that is not known."""
    for key, value in data.items():
        if key in known:
            continue
        if not isinstance(key, str):
            raise PolicyError(f"{where}: keys are strings, not {key!r}.")
        if vocabulary().of_aten(f"{op}.{key}"):  # softmax.int = "fp32" in TOML
            raise PolicyError(
                f'{where}: quote the name of an overload: "aten:{op}.{key}" = "{value}".'
            )
        place = f" for op {op!r}" if op else ""
        raise PolicyError(
            f"{where}: unknown key {key!r}{place}.{nearest(key, known)} Known: {', '.join(known)}."
        )


# A region: how ops run between entering and leaving it.


@dataclass(frozen=True, slots=True)
class Region:
    """The settings of a region: they hold from entering it to leaving it."""

    backend: str  # "torch" or "jax"
    device: str  # the device type whose ops run by it, such as "cpu" or "cuda"
    enabled: bool  # False for a subregion in which ops run in the dtypes of their inputs
    dtype: str  # the low dtype, by full name; an alias or a dtype object becomes that
    cache: bool  # True if the casts of parameters may be kept until the region ends
    # The table that decides; None for the backend's own table of that device.
    policy: Policy | None = None
    scope: str = ""  # path of the module that the region is in, names joined by dots

    def __post_init__(self) -> None:
        # Only a disabled region has another dtype than a float one, by torch's own name.
        with suppress(ValueError):
            object.__setattr__(self, "dtype", dtypes.name(self.dtype))
        policy, here = self.policy, ("", self.dtype)
        if not self.enabled or policy is None or not policy.fp8 or self.dtype == REGION_DTYPE:
            return
        if any(row.rule is Rule.FP8 and row.dtype in here for row in policy.rows):
            raise PolicyError(
                f"autocast(): policy {policy.name!r} runs products in 8 bits, which needs a region "
                f"of dtype bfloat16, not {self.dtype}: {NOT_FLOAT16}. Write bfloat16, or a policy "
                "without rule fp8."
            )
