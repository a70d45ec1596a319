"""A policy: a table that says, op by op, in which float format to compute.

Data in, decision out. `load` reads a table; `Policy.decide` answers the one question that a
backend asks. Nothing here knows what a tensor is.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from polymp.dtypes import FORMATS, widest
from polymp.errors import PolicyError

if TYPE_CHECKING:
    from polymp.region import Region


E = TypeVar("E", bound=StrEnum)


class Rule(StrEnum):
    """How an op runs in an enabled region. Inputs that are not eligible stay as they are.

    lower      in the region's format
    fp32       in float32
    fp32_keep  in float32, and the result returns to the widest input format
    widest     in the widest of the inputs' formats and the region's
    keep       in whatever comes in
    forbid     not at all: an error that names another op
    """

    LOWER = "lower"
    FP32 = "fp32"
    FP32_KEEP = "fp32_keep"
    WIDEST = "widest"
    KEEP = "keep"
    FORBID = "forbid"


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
    """One line of a table: an op, its rule, and what some rules need besides.

    Attributes:
        op: torch's overload name without "aten::", such as "mm" or "softmax.int".
        rule: how it runs.
        apply: how fp32 is brought about.
        instead: for forbid, the op to use instead.
    """

    op: str
    rule: Rule
    apply: Apply = Apply.CAST
    instead: str = ""

    def __post_init__(self) -> None:
        where, of_op = "a policy's row", f"for op {self.op!r}"
        object.__setattr__(self, "rule", _member(Rule, self.rule, "rule", where, of_op))
        object.__setattr__(self, "apply", _member(Apply, self.apply, "apply", where, of_op))


class Decision(NamedTuple):
    """What `Policy.decide` answers.

    Attributes:
        rule: the rule that decided.
        run: format to cast the eligible inputs to; None leaves them alone.
        out: format to cast the float results to; None leaves them alone.
    """

    rule: Rule
    run: str | None = None
    out: str | None = None


_KEEP = Decision(Rule.KEEP)
_FORBID = Decision(Rule.FORBID)


@dataclass(frozen=True)
class Policy:
    """A named table of rules. Frozen, hashable, equal by value.

    Attributes:
        name: what messages call it.
        rows: at most one for an op; the order does not matter.
        halves: what `widest` does when float16 and bfloat16 meet: "widen" computes in float32,
            "raise" forbids the call, as torch.amp does.
    """

    name: str
    rows: tuple[Row, ...]
    halves: str = "widen"

    def __post_init__(self) -> None:
        rows = tuple(sorted(self.rows))
        for one, other in pairwise(rows):
            if one.op == other.op:
                raise PolicyError(
                    f"policy {self.name!r} gives op {one.op!r} two rules: "
                    f"{one.rule} and {other.rule}. Keep one."
                )
        if self.halves not in ("widen", "raise"):
            raise PolicyError(
                f"policy {self.name!r}: halves = {self.halves!r} is not one of widen, raise."
            )
        object.__setattr__(self, "rows", rows)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.rows, self.halves)  # a hash holds for one process

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.rows, self.halves))

    @cached_property
    def table(self) -> Mapping[str, Row]:
        """The rows by op."""
        return {row.op: row for row in self.rows}

    def decide(self, op: str, formats: Sequence[str], region: "Region") -> Decision:
        """In which format `op` runs, and what comes out.

            lower      run = region format     out = as computed
            fp32       run = float32           out = as computed
            fp32_keep  run = float32           out = widest input
            widest     run = widest input      out = as computed
            keep, no row, region disabled      nothing is cast

        Args:
            op: overload name, as in `Row.op`.
            formats: formats of the inputs that the rule consults, in order: float inputs on the
                region's device. float64 and formats that `dtypes` lacks count for nothing.
            region: the region the op is called in.

        Returns:
            The decision. `forbid` is returned, not raised: the backend knows the caller's words.

        Source:
            torch v2.13 aten/src/ATen/autocast_mode.h: `prioritize` (widest), `is_eligible`.
        """
        row = self.table.get(op)
        if row is None or not region.enabled:
            return _KEEP
        match row.rule:
            case Rule.LOWER:
                return Decision(row.rule, region.format)
            case Rule.FP32:
                return Decision(row.rule, "float32")
            case Rule.FP32_KEEP:
                kept = [f for f in formats if f in FORMATS and f != "float64"]
                return Decision(row.rule, "float32", widest(kept) if kept else None)
            case Rule.WIDEST:
                return self._widest(formats, region)
            case Rule.KEEP:
                return _KEEP
            case Rule.FORBID:
                return _FORBID

    def _widest(self, formats: Sequence[str], region: "Region") -> Decision:
        run = region.format
        for f in formats:
            if f == "float64" or run == "float32":
                continue  # once float32, it stays: a third format after it changes nothing
            if f not in (run, "float32") and self.halves == "raise":
                return Decision(Rule.FORBID)
            if f in FORMATS:
                run = widest((run, f))
        return Decision(Rule.WIDEST, run)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "", where: str = "") -> Self:
        """Build a policy from plain data.

        Args:
            data: `rules` maps an op to a rule, or to a table with `rule`, and `apply` or `instead`;
                `name`, `halves` and `summary` may stand beside it.
            name: used where `data` has no name.
            where: the file that the data came from, for messages.

        Raises:
            PolicyError: an unknown key, rule or way of applying; names file, op and value.
        """
        name = str(data.get("name", name or "unnamed"))
        where = where or f"policy {name!r}"
        _only(data, ("name", "summary", "halves", "rules"), where)
        rules = data.get("rules", {})
        if not isinstance(rules, Mapping):
            raise PolicyError(f"{where}: rules must be a table from op to rule, got {rules!r}.")
        rows = tuple(_row(op, value, where) for op, value in rules.items())
        return cls(name, rows, str(data.get("halves", "widen")))


def load(source: "str | os.PathLike[str] | Mapping[str, Any] | Policy") -> Policy:
    """A policy from wherever it is.

    Args:
        source: a policy, returned as it is; plain data, as `Policy.from_dict` takes; the path of
            a TOML file (a `Path`, or a string that ends in .toml); or a shipped policy's name.

    Raises:
        PolicyError: no such policy or file, not TOML, or wrong content.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return Policy.from_dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise PolicyError(
            f"a policy is a Policy, a name, the path of a TOML file or a dict, not {source!r}."
        )
    if isinstance(source, os.PathLike) or source.endswith(".toml"):
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PolicyError(f"cannot read policy file {str(path)!r}: {error.strerror}.") from None
        except UnicodeError:
            raise PolicyError(f"cannot read policy file {str(path)!r}: it is not UTF-8.") from None
        return _parse(text, path.stem, str(path))
    return _shipped(source)


@cache
def _shipped(source: str) -> Policy:
    if source not in shipped():
        raise PolicyError(
            f"no policy {source!r}.{_nearest(source, shipped())} "
            f"Shipped: {', '.join(shipped())}; a file's name ends in .toml."
        )
    text = (resources.files("polymp.policies") / f"{source}.toml").read_text(encoding="utf-8")
    return _parse(text, source, f"policies/{source}.toml")


def shipped() -> tuple[str, ...]:
    """The names of the policies that come with polymp, sorted."""
    files = resources.files("polymp.policies").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def _parse(text: str, name: str, where: str) -> Policy:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where} is not TOML: {error}.") from None
    return Policy.from_dict(data, name, where)


def _row(op: str, value: Any, where: str) -> Row:
    if isinstance(value, str):
        value = {"rule": value}
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: op {op!r} has {value!r}, which is neither a rule nor a table.")
    of_op = f"for op {op!r}"
    keys = ("rule", "apply", "instead")
    for key, rule in value.items():
        if rule in tuple(Rule) and not difflib.get_close_matches(key, keys, cutoff=0.7):
            # softmax.int = "fp32" is a table in TOML.
            raise PolicyError(f'{where}: quote the name of the op: "{op}.{key}" = "{rule}".')
    _only(value, keys, where, of_op)
    rule = _member(Rule, value.get("rule"), "rule", where, of_op)
    apply = _member(Apply, value.get("apply", Apply.CAST), "apply", where, of_op)
    if apply is not Apply.CAST and rule is not Rule.FP32:
        raise PolicyError(f"{where}: apply {apply!s} {of_op} needs rule fp32, not {rule!s}.")
    return Row(op, rule, apply, str(value.get("instead", "")))


def _member(kind: type[E], value: Any, key: str, where: str, of_op: str) -> E:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind)
        raise PolicyError(f"{where}: {key} {value!r} {of_op} is not one of {names}.") from None


def _only(data: Mapping[str, Any], known: Sequence[str], where: str, of_op: str = "") -> None:
    for key in data:
        if key not in known:
            place = f" {of_op}" if of_op else ""
            raise PolicyError(
                f"{where}: unknown key {key!r}{place}.{_nearest(key, known)} "
                f"Known: {', '.join(known)}."
            )


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {', '.join(close)}?" if close else ""
