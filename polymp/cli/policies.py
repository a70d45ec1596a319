"""`polymp policies`, `show`, `diff` and `check`: policies and their rules, as data and as text.

All that is drawn is in the data, which is what `--json` prints; a `Row` as an object.
"""

import argparse
import fnmatch
import itertools
import re
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polymp import backends, text_table
from polymp.diagnostics.call_record import by
from polymp.errors import NoPolicyError, PolicyError, UsageError
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, vocabulary

Data = dict[str, Any]
Lines = Iterator[str | list[str]]  # lists are lines of tables


def listed(args: argparse.Namespace) -> Data:
    """The shipped policies, for `polymp policies`."""
    entries = []
    for name in policy_files.shipped():
        entry: Data = {"name": name, "summary": policy_files.summary(name)}
        extends = tomllib.loads(policy_files.text(name)).get("extends")
        entries.append(entry | {"rows": len(policy_files.load(name).rows), "extends": extends})
    return {"policies": entries}


def _answer(row: Row | None, policy: Policy) -> dict[str, str]:
    """The rule for an op as data, with its detail; ops with equal answers run alike."""
    if row is None:
        return {"rule": Rule.PARTS, "detail": ""}
    details = {Rule.WIDEST: policy.halves, Rule.FORBID: row.instead}
    if policy.few_rows and row.is_of_products:
        details[Rule.LOWER] = f"few_rows = {policy.few_rows}"
    return {"rule": row.rule, "detail": details.get(row.rule, "")}


def shown(args: argparse.Namespace) -> Data:
    """The rule of every op, or of those asked for, under a policy, for `polymp show`."""
    policy, words = policy_files.load(args.policy), vocabulary()
    if args.op:
        words.check(args.op, "--op")
    if args.scope:
        scopes.check(args.scope, "--scope")
    data: Data = {"policy": policy.name, "scope": args.scope, "dtypes": list(LOW)}
    only = args.op.removeprefix("class:")
    if args.op and args.op == only:
        return data | _one(policy, args.op, args.scope)
    entries = [
        {"op": op.name, "class": kind} | _ruled(policy, op.name, args.scope)
        for kind in sorted(words.kinds)
        for op in words.members(kind)
        if only in ("", kind)
    ]
    waiting = [] if args.scope else list(policy.scopes)
    return data | {"halves": policy.halves, "scopes": waiting, "ops": entries}


def _one(policy: Policy, selector: str, scope: str) -> Data:
    op = vocabulary().op_of(selector)
    if op is None and (selector == "default" or all(r.of != selector for r in policy.rows)):
        raise UsageError(
            f"--op: neither the vocabulary nor policy {policy.name!r} has {selector!r}. "
            "Write an op, class:NAME, or a spelling as `polymp show POLICY --op OP` lists them."
        )
    op = op or Op(selector, "")
    return {
        "op": selector,
        "class": op.kind,
        "about": vocabulary().kinds.get(op.kind, "Not in the vocabulary."),
        **_ruled(policy, selector, scope),
        "why": {low: str(policy.why(selector, low, scope)) for low in LOW},
        **{side: list(getattr(op, side)) for side in ("aten", "jax", "functions", "traces")},
        "note": op.note,
    }


def _ruled(policy: Policy, op: str, scope: str) -> Data:
    whys = {low: policy.why(op, low, scope) for low in LOW}
    return {
        "rules": {low: why.rule for low, why in whys.items()},
        "rows": {low: why.row for low, why in whys.items()},
    }


def compared(args: argparse.Namespace) -> Data:
    """Where two policies differ outside of scopes, and inside the modules that each matches."""
    # A spelling that differs as its op does gets no entry, nor does an op in a scope that changes
    # neither answer.
    one, other = map(policy_files.load, args.policies)
    words = vocabulary()
    spelled = {row.of for row in (*one.rows, *other.rows)} - {"default"}
    asked = [*words.ops, *sorted(s for s in spelled if ":" in s and not s.startswith("class:"))]
    outside: dict[tuple[str, str], Any] = {}
    entries = []
    patterns = "", *sorted({*one.scopes, *other.scopes})  # scopes are compared with ""
    for pattern, low, of in itertools.product(patterns, LOW, asked):
        rows = [policy.why(of, low, path_inside(pattern)).row for policy in (one, other)]
        answers = [_answer(rows[0], one), _answer(rows[1], other)]
        if not pattern:
            outside[of, low] = answers
            op = words.op_of(of) if ":" in of else None
            known = outside[op.name, low] if op else None
        else:
            known = outside[of, low]
        if answers[0] != answers[1] and answers != known:
            entry = {"op": of, "dtype": low, "scope": pattern}
            entries.append(entry | {"rules": answers, "rows": rows})
    return {"policies": list(args.policies), "same": not entries, "differences": entries}


def path_inside(pattern: str) -> str:
    """A path that a pattern matches."""

    def letter(group: re.Match[str]) -> str:
        letters = string.ascii_letters + string.digits + group[1]
        return next((c for c in letters if fnmatch.fnmatchcase(c, group[0])), group[0])

    return re.sub(r"\[(!?[^\]]+)\]", letter, pattern)


# What is drawn.


def draw_list(data: Data) -> Lines:
    """A row for each policy."""
    rows = [(p["name"], str(p["rows"]), p["extends"] or "", p["summary"]) for p in data["policies"]]
    yield text_table.columns(("name", "rows", "extends", "summary"), rows, ("rows",))


def draw_rules(data: Data) -> Lines:
    """The rules of all ops, or of one op."""
    at = f" in {data['scope']}" if data["scope"] else ""
    title = f"policy {data['policy']}{at}, {' and '.join(data['dtypes'])}"
    yield from (_draw_op if "op" in data else _draw_ops)(data, title)


def _draw_ops(data: Data, title: str) -> Lines:
    rows, silent = list[str | Sequence[str]](), dict[str, list[str]]()
    kind = ""
    for entry in data["ops"]:
        if not any(entry["rows"].values()):
            silent.setdefault(entry["class"], []).append(entry["op"])
            continue
        if entry["class"] != kind:
            kind = entry["class"]
            rows.append(f"class:{kind}")
        sources = {low: by(row, entry["op"]) for low, row in entry["rows"].items()}
        rows.append((f"  {entry['op']}", _merged(entry["rules"]), _merged(sources)))
    without = sum(map(len, silent.values()))
    yield f"{title}: {len(data['ops']) - without} of {len(data['ops'])} ops have a row"
    if rows:
        yield ["", *text_table.columns(("op", "rule", "from"), rows), ""]
        used = {rule for entry in data["ops"] for rule in entry["rules"].values()}
        yield from (f"{rule}: {rule.phrase}" for rule in Rule if rule in used - {Rule.PARTS})
    if silent:
        yield ""
        yield "no row: these run in their inputs' dtypes, the ops inside them by their own rows"
        table = [(kind, ", ".join(ops)) for kind, ops in silent.items()]
        yield ["", *text_table.columns(("class", "ops"), table)]
    if data["scopes"]:
        yield ""
        yield f"--scope PATH shows the rows for modules: {', '.join(data['scopes'])}"


def _draw_op(data: Data, title: str) -> Lines:
    jax = {"primitives": data["jax"], "functions": data["functions"], "becomes": data["traces"]}
    in_jax = "\n".join(f"{what} {', '.join(names)}" for what, names in jax.items() if names)
    rows = [
        *((low, why.partition(": ")[2]) for low, why in data["why"].items()),
        ("class", ": ".join(filter(None, (data["class"], data["about"])))),
        ("torch", ", ".join(data["aten"]) or "no op"),
        ("jax", in_jax or "no op"),
        *([("note", data["note"])] if data["note"] else []),
    ]
    yield f"{data['op']}: {title}"
    yield ["", *text_table.columns(("", ""), rows)[2:]]


def draw_differences(data: Data) -> Lines:
    """A row for each op that differs, or for many that differ alike."""
    one, other = data["policies"]
    if data["same"]:
        yield f"{one} and {other}: no difference"
        return
    lines: dict[tuple[str, ...], list[str]] = {}
    for entry in data["differences"]:
        rules, rows = entry["rules"], entry["rows"]
        left = _rule(rules[0], rules[1]), by(rows[0], entry["op"], one)
        right = _rule(rules[1], rules[0]), by(rows[1], entry["op"], other)
        sides = (", ".join(filter(None, side)) for side in (left, right))
        lines.setdefault((*sides, entry["scope"], entry["op"]), []).append(entry["dtype"])
    alike: dict[tuple[str, ...], list[str]] = {}  # ops, by all in which they agree
    for (*agree, op), dtypes in lines.items():
        only = f" ({dtypes[0]})" if len(dtypes) < len(LOW) else ""
        alike.setdefault((*agree, only), []).append(op)
    table = [(", ".join(ops) + only, *rest) for (*rest, only), ops in alike.items()]
    count = len({(scope, op) for *_, scope, op in lines})
    yield f"{one} and {other}, ops that differ: {count}"
    yield ["", *text_table.columns(("op", one, other, "scope"), table)]
    if any("(widen)" in cell for row in table for cell in row):
        yield ""
        yield ("widest where float16 meets bfloat16: (widen) runs in float32, (raise) is an error")


def _rule(answer: Data, other: Data) -> str:
    """A rule, with its detail where another answer differs in nothing else."""
    detail = answer["detail"] if answer["rule"] == other["rule"] else ""
    return f"{answer['rule']} ({detail})" if detail else str(answer["rule"])


def _merged(by_dtype: Mapping[str, Any]) -> str:
    """One text for all dtypes, if they agree, or one for each."""
    texts = {low: str(value) for low, value in by_dtype.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{low}: {text}" for low, text in texts.items())


# `polymp check`: whether a policy can be read, and which of its rows a backend refuses.


def checked(args: argparse.Namespace) -> Data:
    """Return the faults of a policy: rows that the backends refuse."""
    asked = [args.backend] if args.backend else list(backends.NAMES)
    data: Data = {"policy": args.policy, "ok": False, "rows": 0, "backends": {}, "errors": []}
    if args.backend:
        backends.get(args.backend)  # says what to install
    try:
        policy = policy_files.load(args.policy)
    except NoPolicyError as error:
        raise UsageError(str(error)) from None
    except PolicyError as error:
        return data | {"errors": [str(error)]}
    if not policy.rows:
        why = f'{args.policy} has no rows. Write rows below [rules], or extends = "amp".'
        return data | {"errors": [why]}
    for name in asked:
        refused: list[Data] | None = None
        if name in backends.installed():
            said = _refusals(name, policy)
            refused = [{"row": row, "why": why} for row, why in said.items()]
            data["errors"] += [f"{why} [{row}]" for row, why in said.items()]
        data["backends"][name] = refused
    return data | {"ok": not data["errors"], "rows": len(policy.rows)}


def _refusals(backend: str, policy: Policy) -> Mapping[Row, str]:
    """The rows that a backend cannot run ops by, each with the reason."""
    if backend == "jax":
        from polymp.backends.jax.autocast.api import refusals as in_jax

        return in_jax(policy)
    from polymp.backends.torch.autocast.torch_table import DEVICES, lacking
    from polymp.backends.torch.autocast.torch_table import refusals as in_torch

    nowhere: dict[Row, str] = {}  # rows without a low kernel on any device
    for scope, low in itertools.product({row.scope for row in policy.rows}, LOW):
        inside = policy.at(path_inside(scope))
        first, *others = (lacking(inside, device, low) for device in DEVICES)
        for row, why in first.items():
            if all(row in other for other in others):
                nowhere.setdefault(row, why)
    return nowhere | dict(in_torch(policy))


def draw_faults(data: Data) -> Iterator[str]:
    """A line for the policy and each backend; errors go to standard error."""
    if not data["rows"] and data["errors"]:
        yield f"{data['policy']}: wrong, so that no row was checked"
        return
    yield f"{data['policy']}: {data['rows']} rows"
    for name, refused in data["backends"].items():
        if refused is None:
            yield f"{name}: not installed, not checked"
        else:
            yield f"{name}: {f'refuses {len(refused)}' if refused else 'accepts all rows'}"
