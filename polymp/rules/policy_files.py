"""Reading policies: shipped ones by name, users' own from TOML files or plain data; and editing.

    [rules]
    softmax = "fp32"
    "class:matmul" = { float16 = "lower", bfloat16 = "keep" }
    binary_cross_entropy = { rule = "forbid", instead = "binary_cross_entropy_with_logits" }
    [scopes."*.lm_head"]
    linear = "fp32"

`extends` names a policy whose rows hold where the table does not speak. What comes out is a
`Policy`, or a PolicyError that says where the fault is, what it is and what to write instead.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from polymp.errors import PolicyError
from polymp.rules import scopes
from polymp.rules.policy import LOW, Policy, Row, Rule, member
from polymp.rules.vocabulary import nearest, vocabulary

Source = str | os.PathLike[str] | Mapping[str, Any] | Policy


def load(source: Source) -> Policy:
    """A policy from wherever it is.

    Args:
        source: a policy, returned as it is; plain data (see the module); the path of a TOML file
            (a `Path`, or a string that ends in .toml); or a shipped policy's name.

    Raises:
        PolicyError: no such policy or file, not TOML, or wrong content.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return _policy(source, "unnamed")
    if not isinstance(source, (str, os.PathLike)):
        raise PolicyError(
            f"a policy is a Policy, a name, the path of a TOML file or a dict, not {source!r}."
        )
    if isinstance(source, os.PathLike) or source.endswith(".toml"):
        return _file(Path(source), ())
    return _shipped(source)


def _file(path: Path, above: tuple[Path, ...]) -> Policy:
    if path.resolve() in above:
        raise PolicyError(f"policy file {str(path)!r} extends itself, by way of its base.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"cannot read policy file {str(path)!r}: {error.strerror}.") from None
    except UnicodeError:
        raise PolicyError(f"cannot read policy file {str(path)!r}: it is not UTF-8.") from None
    return _policy(_parse(text, str(path)), path.stem, str(path), (*above, path.resolve()))


@cache
def _shipped(name: str) -> Policy:
    if name not in shipped():
        raise PolicyError(
            f"no policy {name!r}.{nearest(name, shipped())} "
            f"Shipped: {', '.join(shipped())}; a file's name ends in .toml."
        )
    return _policy(_parse(text(name), f"policies/{name}.toml"), name, f"policies/{name}.toml")


def text(name: str) -> str:
    """The file of a shipped policy, as it is."""
    return (resources.files("polymp.policies") / f"{name}.toml").read_text(encoding="utf-8")


def shipped() -> tuple[str, ...]:
    """The names of the policies that come with polymp, sorted."""
    files = resources.files("polymp.policies").iterdir()
    names = {f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")}
    return tuple(sorted(names - {"vocabulary"}))


@cache
def shipped_rows() -> frozenset[Row]:
    """The rows of all shipped policies. Some speak of ops that one framework does not have.

    The vocabulary says why; in a user's policy such a row is an error.
    """
    return frozenset(row for name in shipped() for row in _shipped(name).rows)


def summary(name: str) -> str:
    """What a shipped policy is for, in a sentence."""
    return str(_parse(text(name), name).get("summary", ""))


def override(
    policy: Policy,
    name: str,
    by_rule: Mapping[str, Sequence[str]],
    rules: Mapping[str, Any],
    inside: Mapping[str, Mapping[str, Any]],
) -> Policy:
    """`Policy.override`."""
    where = f"override of policy {policy.name!r}"
    table: dict[str, Any] = {}
    for of, value in [
        *((of, rule) for rule, ops in by_rule.items() for of in _names(ops, rule, where)),
        *_table(rules, "rules", where).items(),
    ]:
        if table.setdefault(of, value) != value:
            raise PolicyError(f"{where} gives {of!r} two rules: {table[of]} and {value}. Keep one.")
    return _policy({"name": name, "rules": table, "scopes": inside}, "", where, base=policy)


def _names(ops: Any, rule: str, where: str) -> Sequence[str]:
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise PolicyError(f"{where}: {rule}={ops!r} is not a list of ops. Write {rule}=[{ops!r}].")
    names = list(ops)
    for op in names:
        if not isinstance(op, str):
            raise PolicyError(f"{where}: {rule} has {op!r}; ops are named by strings.")
    return names


def _parse(content: str, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where} is not TOML: {error}.") from None


_KEYS = ("name", "summary", "extends", "halves", "rules", "scopes")


def _policy(
    data: Mapping[str, Any],
    name: str,
    where: str = "",
    above: tuple[Path, ...] = (),
    base: Policy | None = None,
) -> Policy:
    name = str(data.get("name", name))
    where = where or f"policy {name!r}"
    _only(data, _KEYS, where)
    extends = data.get("extends")
    if extends is not None:
        base = _base(extends, where, above)
    rows = list(_rows(_table(data.get("rules", {}), "rules", where), "", where))
    for scope, inside in _table(data.get("scopes", {}), "scopes", where).items():
        scopes.check(scope, where)
        key = f"scopes.{scope}"
        rows += _rows(_table(inside, key, where), scope, where)
    policy = Policy(name, tuple(rows), str(data.get("halves", base.halves if base else "widen")))
    return policy.over(base) if base else policy


def _base(extends: Any, where: str, above: tuple[Path, ...]) -> Policy:
    if not isinstance(extends, (str, Policy)):
        raise PolicyError(f"{where}: extends = {extends!r} is not the name or path of a policy.")
    try:
        if isinstance(extends, str) and extends.endswith(".toml"):
            return _file(above[-1].parent / extends if above else Path(extends), above)
        return load(extends)
    except PolicyError as error:
        raise PolicyError(f"{where}: extends = {extends!r}: {error}") from None


def _table(value: Any, key: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        what = "from pattern to rules" if key == "scopes" else "from op to rule"
        raise PolicyError(f"{where}: {key} must be a table {what}, got {value!r}.")
    return value


def _rows(table: Mapping[str, Any], scope: str, where: str) -> Iterator[Row]:
    for of, value in table.items():
        if not isinstance(of, str):
            raise PolicyError(f"{where}: ops are named by strings, not {of!r}.")
        if of == "class":
            raise PolicyError(f'{where}: a class is written "class:NAME", as in "class:softmax".')
        vocabulary().check(of, where)
        value, of_op = _told(value, of, where), f"for op {of!r}"
        _only(value, (*_OF_ROW, *LOW), where, of_op)
        if not value.keys() & {"rule", *LOW}:
            raise PolicyError(f"{where}: no rule {of_op}. Write a rule, or one for a format.")
        for low in LOW:
            if low in value:
                own = _told(value[low], of, where)
                _only(own, _OF_ROW, where, f"{of_op} in {low}")
                yield _row(of, own, low, scope, where)
        if "rule" in value:
            yield _row(of, value, "", scope, where)
        elif value.keys() & {"apply", "instead"}:
            raise PolicyError(
                f"{where}: {of_op[4:]} has rules for formats alone; put the rest there."
            )


_OF_ROW = ("rule", "apply", "instead")


def _told(value: Any, of: str, where: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"rule": value}
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: op {of!r} has {value!r}, which is neither a rule nor a table.")
    return value


def _row(of: str, value: Mapping[str, Any], format: str, scope: str, where: str) -> Row:
    rule = member(Rule, value.get("rule"), format or "rule", where, f"for op {of!r}")
    instead = str(value.get("instead", ""))
    return Row(of, rule, format, scope, value.get("apply"), instead, where)


def _only(data: Mapping[str, Any], known: Sequence[str], where: str, of_op: str = "") -> None:
    for key, value in data.items():
        if key in known:
            continue
        if not isinstance(key, str):
            raise PolicyError(f"{where}: keys are strings, not {key!r}.")
        close = difflib.get_close_matches(key, known, cutoff=0.7)
        if of_op and isinstance(value, str) and value in tuple(Rule) and not close:
            op = of_op.removeprefix("for op ").strip("'")  # softmax.int = "fp32" in TOML
            raise PolicyError(
                f'{where}: quote the name of an overload: "aten:{op}.{key}" = "{value}".'
            )
        place = f" {of_op}" if of_op else ""
        raise PolicyError(
            f"{where}: unknown key {key!r}{place}.{nearest(key, known)} Known: {', '.join(known)}."
        )


def to_toml(policy: Policy) -> str:
    """The policy as a TOML file that `load` reads back, equal row by row."""
    lines = [f"name = {_quoted(policy.name)}", f"halves = {_quoted(policy.halves)}"]
    for scope in sorted({row.scope for row in policy.rows}):
        lines += ["", f"[scopes.{_quoted(scope)}]" if scope else "[rules]"]
        of_scope = [row for row in policy.rows if row.scope == scope]
        for of in sorted({row.of for row in of_scope}):
            lines.append(f"{_quoted(of)} = {_value([r for r in of_scope if r.of == of])}")
    return "\n".join(lines) + "\n"


def _value(rows: Sequence[Row]) -> str:
    parts: dict[str, str] = {}
    for row in rows:
        own = {"rule": row.rule.value, "apply": row.apply or "", "instead": row.instead}
        told = {key: _quoted(value) for key, value in own.items() if value}
        if row.format:
            parts[row.format] = _inline(told)
        else:
            parts |= told
    return _inline(parts)


def _inline(told: Mapping[str, str]) -> str:
    if told.keys() == {"rule"}:
        return told["rule"]
    return "{ " + ", ".join(f"{key} = {value}" for key, value in told.items()) + " }"


def _quoted(value: str) -> str:
    """A TOML string: as JSON has it, but that DEL is escaped too."""
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
