"""Reading the rows of a policy from plain data, which is what a TOML file or a dict holds.

    data -> check keys -> rows, and the other entries of the table

Every PolicyError says where the fault is, what it is and what to write instead. Nothing here knows
what a policy does with its rows.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from polymp import dtypes
from polymp.errors import PolicyError
from polymp.fp8.recipes import RECIPES
from polymp.rules import scopes
from polymp.rules.row import LOW, Apply, Row, Rule, member
from polymp.rules.vocabulary import nearest, vocabulary

_KEYS = ("name", "summary", "extends", "halves", "fp8", "few_rows", "rules", "scopes")


def toml(content: str, where: str) -> Mapping[str, object]:
    """Return the data of a TOML file."""
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where} is not TOML: {error}.") from None
    except RecursionError:
        raise PolicyError(f"cannot read {where}: its brackets are nested too deeply.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise PolicyError(f"cannot read {where}: {str(error).partition(';')[0]}.") from None


def check_keys(data: Mapping[str, object], where: str) -> None:
    """Refuse a policy's table with a key that no policy has."""
    _only(data, _KEYS, where)


def rows(data: Mapping[str, object], where: str) -> tuple[Row, ...]:
    """Return the rows of a table: those in "rules", then those in "scopes"."""
    found = list(_rows(_table(data.get("rules", {}), "rules", where), "", where))
    for scope, inside in _table(data.get("scopes", {}), "scopes", where).items():
        scopes.check(scope, where)
        key = f"scopes.{scope}"
        found += _rows(_table(inside, key, where), scope, where)
    return tuple(found)


def overriding(
    by_rule: Mapping[str, Sequence[str]],
    rules: Mapping[str, object],
    inside: Mapping[str, Mapping[str, object]],
    where: str,
) -> tuple[Row, ...]:
    """Return the rows that `Policy.override` is given."""
    table: dict[str, object] = {}
    for of, value in [
        *((of, rule) for rule, ops in by_rule.items() for of in _names(ops, rule, where)),
        *_table(rules, "rules", where).items(),
    ]:
        if table.setdefault(of, value) != value:
            raise PolicyError(f"{where} gives {of!r} two rules: {table[of]} and {value}. Keep one.")
    return rows({"rules": table, "scopes": inside}, where)


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


def _rows(table: Mapping[str, object], scope: str, where: str) -> Iterator[Row]:
    for of, value in table.items():
        if not isinstance(of, str):
            raise PolicyError(f"{where}: ops are named by strings, not {of!r}.")
        if of == "class":
            raise PolicyError(f'{where}: a class is written "class:NAME", as in "class:softmax".')
        vocabulary().check(of, where)
        of_op = f"for op {of!r}"
        value = _full_names(_told(value, of, where), where, of_op)
        _only(value, (*_OF_ROW, *LOW), where, of_op)
        if not value.keys() & {"rule", *LOW}:
            raise PolicyError(f"{where}: no rule {of_op}. Write a rule, or one for a dtype.")
        for low in LOW:
            if low in value:
                own = _told(value[low], of, where)
                _only(own, _OF_ROW, where, f"{of_op} in {low}")
                yield _row(of, own, low, scope, where)
        if "rule" in value:
            yield _row(of, value, "", scope, where)
        elif value.keys() & {"apply", "instead"}:
            raise PolicyError(
                f"{where}: {of_op[4:]} has rules for dtypes alone; put the rest there."
            )


_OF_ROW = ("rule", "apply", "instead")


def _full_names(value: Mapping[str, object], where: str, of_op: str) -> Mapping[str, object]:
    """A row's table with the full names of dtypes as keys: "float16" for "fp16"."""
    found: dict[str, object] = {}
    for given, own in value.items():
        try:
            key = dtypes.name(given, LOW)
        except (TypeError, ValueError):
            key = given
        if key in found:
            raise PolicyError(f"{where}: {of_op[4:]} has two rules for {key}. Keep one.")
        found[key] = own
    return found


def _told(value: object, of: str, where: str) -> Mapping[str, object]:
    if isinstance(value, str):
        return {"rule": value}
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: op {of!r} has {value!r}, which is neither a rule nor a table.")
    return value


def _row(of: str, value: Mapping[str, object], dtype: str, scope: str, where: str) -> Row:
    rule = member(Rule, value.get("rule"), dtype or "rule", where, f"for op {of!r}")
    instead = str(value.get("instead", ""))
    return Row(of, rule, dtype, scope, cast("Apply | None", value.get("apply")), instead, where)


def _only(data: Mapping[str, object], known: Sequence[str], where: str, of_op: str = "") -> None:
    for key, value in data.items():
        if key in known:
            continue
        if not isinstance(key, str):
            raise PolicyError(f"{where}: keys are strings, not {key!r}.")
        op = of_op.removeprefix("for op ").strip("'")
        if vocabulary().of_aten(f"{op}.{key}"):  # softmax.int = "fp32" in TOML
            raise PolicyError(
                f'{where}: quote the name of an overload: "aten:{op}.{key}" = "{value}".'
            )
        place = f" {of_op}" if of_op else ""
        raise PolicyError(
            f"{where}: unknown key {key!r}{place}.{nearest(key, known)} Known: {', '.join(known)}."
        )
