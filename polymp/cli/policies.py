"""The data of `polymp policies`, `show` and `diff`: policies and their rules.

torch is imported by `show --device` alone.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import re
import string
import tomllib
from collections.abc import Sequence
from typing import Any

from polymp import backends, progress
from polymp.errors import UsageError
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, vocabulary

Data = dict[str, Any]


def listed(args: argparse.Namespace) -> Data:
    """The shipped policies, for `polymp policies`."""
    entries = []
    for name in policy_files.shipped():
        entry: Data = {"name": name, "summary": policy_files.summary(name)}
        extends = tomllib.loads(policy_files.text(name)).get("extends")
        entries.append(entry | {"rows": len(policy_files.load(name).rows), "extends": extends})
    return {"policies": entries}


def row_data(row: Row | None) -> Data | None:
    """A row as plain data."""
    return None if row is None else dataclasses.asdict(row)


def _answer(row: Row | None, policy: Policy) -> dict[str, str]:
    """The rule for an op as data; ops with equal answers run alike.

    `detail` is, for fp32, how torch applies it; for widest, what happens where float16 and bfloat16
    meet; for forbid, the op to use instead; for lower, up to how many rows a product runs in
    float32; "" for the others.
    """
    if row is None:
        return {"rule": Rule.PARTS, "detail": ""}
    details = {Rule.FP32: row.apply or "", Rule.WIDEST: policy.halves, Rule.FORBID: row.instead}
    if policy.few_rows and row.is_of_products:
        details[Rule.LOWER] = f"few_rows = {policy.few_rows}"
    return {"rule": row.rule, "detail": details.get(row.rule, "")}


def shown(args: argparse.Namespace) -> Data:
    """The rule of every op, or of those asked for, under a policy, for `polymp show`."""
    policy = policy_files.load(args.policy)
    ops = _selected(args.op, policy)
    if args.scope:
        scopes.check(args.scope, "--scope")
    dtypes = [args.dtype] if args.dtype else list(LOW)
    data: Data = {"policy": policy.name, "scope": args.scope, "dtypes": dtypes}
    if args.device:
        return data | _against(policy.at(args.scope), args.device, args.op, ops, dtypes)
    if args.op and not args.op.startswith("class:"):
        return data | _one(policy, args.op, args.scope, dtypes)
    entries = [
        {"op": op.name, "class": op.kind} | _ruled(policy, op.name, args.scope, dtypes)
        for op in ops
    ]
    waiting = [] if args.scope else list(policy.scopes)
    return data | {"halves": policy.halves, "scopes": waiting, "ops": entries}


def _selected(selector: str, policy: Policy) -> list[Op]:
    """Return the ops that `--op` asks for, by class and name; all of them for ""."""
    words = vocabulary()
    kind = selector.removeprefix("class:") if selector.startswith("class:") else ""
    if selector and selector != "default":
        words.check(selector, "--op")
    if selector and not kind:
        op = words.op_of(selector)
        if op is None and (selector == "default" or all(r.of != selector for r in policy.rows)):
            raise UsageError(
                f"--op: neither the vocabulary nor policy {policy.name!r} has {selector!r}. "
                "Write an op, class:NAME, or a spelling as `polymp show POLICY --op OP` lists them."
            )
        return [op] if op else []
    return [op for k in sorted(words.kinds) if kind in ("", k) for op in words.members(k)]


def _ruled(policy: Policy, op: str, scope: str, dtypes: Sequence[str]) -> Data:
    whys = {low: policy.why(op, low, scope) for low in dtypes}
    return {
        "rules": {low: why.rule for low, why in whys.items()},
        "rows": {low: row_data(why.row) for low, why in whys.items()},
    }


def _one(policy: Policy, selector: str, scope: str, dtypes: Sequence[str]) -> Data:
    op = vocabulary().op_of(selector)
    return {
        "op": selector,
        "class": op.kind if op else "",
        "about": vocabulary().kinds[op.kind] if op else "Not in the vocabulary.",
        **_ruled(policy, selector, scope, dtypes),
        "why": {low: str(policy.why(selector, low, scope)) for low in dtypes},
        "aten": list(op.aten) if op else [],
        "jax": list(op.jax) if op else [],
        "functions": list(op.functions) if op else [],
        "traces": list(op.traces) if op else [],
        "note": op.note if op else "",
    }


def _against(
    policy: Policy, device: str, selector: str, ops: Sequence[Op], dtypes: Sequence[str]
) -> Data:
    """The overloads for which a policy differs from the kernels torch has compiled for a device."""
    with progress.line("polymp show") as line:
        line.stage("asking torch")
        backends.get("torch")
        from polymp.backends.torch.autocast import kernel_registry, torch_table

        theirs, differing = torch_table.policy(device), kernel_registry.differing(policy, device)
    names, entries = {op.name for op in ops}, []
    for overload in sorted(differing):
        if all(torch_table.agrees(device, policy, overload, low) for low in dtypes):
            continue
        name = vocabulary().of_aten(overload)
        one = selector.startswith("aten:")
        if selector and (selector != f"aten:{overload}" if one else name not in names):
            continue
        entry: Data = {"aten": overload, "op": name, "torch": {}, "policy": {}, "rows": {}}
        for low in dtypes:
            own = torch_table.table(policy, low, device).get(overload)
            entry["torch"][low] = _answer(torch_table.row(device, overload, low), theirs)
            entry["policy"][low] = _answer(own, policy)
            entry["rows"][low] = row_data(own)
        entries.append(entry)
    return {"device": device, "compiled": len(torch_table.kernels(device)), "differ": entries}


def compared(args: argparse.Namespace) -> Data:
    """Where two policies differ, for `polymp diff`.

    Compares answers outside of scopes, and inside the modules that each scope matches.

    A spelling that differs as its op does gets no entry, nor does an op in a scope that changes
    neither answer.
    """
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
            entries.append(entry | {"rules": answers, "rows": [row_data(row) for row in rows]})
    return {"policies": list(args.policies), "same": not entries, "differences": entries}


def path_inside(pattern: str) -> str:
    """A path that a pattern matches."""

    def letter(group: re.Match[str]) -> str:
        letters = string.ascii_letters + string.digits + group[1]
        return next((c for c in letters if fnmatch.fnmatchcase(c, group[0])), group[0])

    return re.sub(r"\[(!?[^\]]+)\]", letter, pattern)
