"""The command line: policies, show, diff, check and doctor.

    argv -> collect(args) -> plain data -> JSON | text -> exit code

Here are the arguments and the data; how data is drawn is known to `tables`, which is imported if
there is something to draw, and what a machine can do to `doctor`. torch and jax are imported by
`show --device`, `check` and `doctor` alone.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import itertools
import json
import re
import string
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polymp
from polymp import backends
from polymp.cli import doctor, doctor_inputs, measurement
from polymp.errors import BackendMissingError, PolicyError, UsageError
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, vocabulary
from polymp.speed import product_times

Data = dict[str, Any]

EXIT = """\
exit codes:
  0  done; diff: no difference; check: every row can be honoured; doctor: nothing is wrong
  1  diff: there are differences; check: the policy is wrong; doctor: something is wrong
  2  the command could not be carried out: bad arguments, no such policy, a package is missing
"""

DEVICES = tuple(n.removeprefix("torch-") for n in policy_files.shipped() if n.startswith("torch-"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, without the program's name; None for the process's own.

    Returns:
        The exit code, see `EXIT`.

    Raises:
        SystemExit: from argparse, after a message or a help text.
    """
    args = _parser().parse_args(argv)
    try:
        drawn = not args.json and args.command != "check"
        if drawn and importlib.util.find_spec("rich") is None:
            raise UsageError("tables need the rich package: pip install 'polymp[cli]', or --json.")
        data = args.collect(args)
    except (PolicyError, BackendMissingError, UsageError) as error:
        print(f"polymp: {error}", file=sys.stderr)
        return 2
    if drawn:
        from polymp.cli import tables  # which needs rich

        text = tables.drawn(args.command, data)
    else:
        text = json.dumps(data, indent=2) + "\n" if args.json else _plain(data)
    for line in data.get("errors", ()):
        print(f"polymp: {line}", file=sys.stderr)
    with contextlib.suppress(BrokenPipeError):  # a reader such as `head` has seen enough
        sys.stdout.write(text)
        sys.stdout.flush()
    return int(args.code(data))


def _parser() -> argparse.ArgumentParser:
    about = "Mixed precision for PyTorch and JAX: look at policies and at this machine."
    end: Data = {"epilog": EXIT, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="polymp", description=about, **end)
    parser.add_argument("--version", action="version", version=f"polymp {polymp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str,
        text: str,
        collect: Callable[[argparse.Namespace], Data],
        code: Callable[[Data], int] = lambda data: 0,
    ) -> argparse.ArgumentParser:
        sentence = text[0].upper() + text[1:] + "."
        added = commands.add_parser(name, help=text, description=sentence, **end)
        added.add_argument("--json", action="store_true", help="print JSON, without rich")
        added.set_defaults(command=name, collect=collect, code=code)
        return added

    named = "the name of a shipped policy, or the path of a .toml file"
    command("policies", "list the shipped policies", _policies)

    show = command("show", "show the rule of every op under a policy", _show)
    show.add_argument("policy", help=named)
    show.add_argument(
        "--op", default="", help="only this op, class (class:NAME) or spelling (aten:NAME)"
    )
    show.add_argument("--format", choices=LOW, help="only in regions of this format")
    show.add_argument(
        "--scope", default="", metavar="PATH", help="in the module at this path, as blocks.0.attn"
    )
    show.add_argument(
        "--device", choices=DEVICES, help="only the ops that torch runs otherwise on the device"
    )

    diff = command("diff", "show where two policies differ", _diff, lambda d: not d["same"])
    diff.add_argument("policies", nargs=2, metavar="POLICY", help=named)

    check = command(
        "check",
        "read a policy and ask torch and jax if they can honour it",
        _check,
        lambda d: not d["ok"],
    )
    check.add_argument("policy", help=named)
    check.add_argument(
        "--backend", choices=backends.NAMES, help="ask this one; both, as installed, if left out"
    )

    examine = command(
        "doctor",
        "say what this machine, its torch and its jax can do, and which format to use",
        _doctor,
        lambda d: not d["ok"],
    )
    of = examine.add_mutually_exclusive_group()
    of.add_argument(
        "--measure", action="store_true", help="measure some products in every dtype, in 5 s"
    )
    of.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="measure the products of the model that the function returns with example inputs",
    )
    of.add_argument(
        "--shapes",
        type=doctor_inputs.shapes,
        metavar="MxKxN,...",
        help="measure linear layers: rows x inputs x outputs, as 512x512x2048",
    )
    examine.add_argument(
        "--framework",
        action="extend",
        nargs="+",
        default=[],
        choices=backends.NAMES,
        help="measure in this one, or both; torch, if it is installed, if left out",
    )
    examine.add_argument(
        "--seconds",
        type=doctor_inputs.seconds,
        metavar="S",
        help=f"measure for so long; {product_times.BUDGET} if left out",
    )
    return parser


# policies and show


def _policies(args: argparse.Namespace) -> Data:
    entries = []
    for name in policy_files.shipped():
        entry: Data = {"name": name, "summary": policy_files.summary(name)}
        extends = tomllib.loads(policy_files.text(name)).get("extends")
        entries.append(entry | {"rows": len(policy_files.load(name).rows), "extends": extends})
    return {"policies": entries}


def _row(row: Row | None) -> Data | None:
    return None if row is None else dataclasses.asdict(row)


def _answer(row: Row | None, policy: Policy) -> dict[str, str]:
    """What a policy says of an op; equal answers are the same behaviour.

    `detail` is, for fp32, how torch is to bring it about; for widest, what it does where float16
    and bfloat16 meet; for forbid, the op to use instead; "" for the others.
    """
    if row is None:
        return {"rule": Rule.PARTS, "detail": ""}
    details = {Rule.FP32: row.apply or "", Rule.WIDEST: policy.halves, Rule.FORBID: row.instead}
    return {"rule": row.rule, "detail": details.get(row.rule, "")}


def _show(args: argparse.Namespace) -> Data:
    policy = policy_files.load(args.policy)
    ops = _selected(args.op, policy)
    if args.scope:
        scopes.check(args.scope, "--scope")
    formats = [args.format] if args.format else list(LOW)
    data: Data = {"policy": policy.name, "scope": args.scope, "formats": formats}
    if args.device:
        return data | _against(policy.at(args.scope), args.device, args.op, ops, formats)
    if args.op and not args.op.startswith("class:"):
        return data | _one(policy, args.op, args.scope, formats)
    entries = [
        {"op": op.name, "class": op.kind} | _ruled(policy, op.name, args.scope, formats)
        for op in ops
    ]
    waiting = [] if args.scope else list(policy.scopes)
    return data | {"halves": policy.halves, "scopes": waiting, "ops": entries}


def _selected(selector: str, policy: Policy) -> list[Op]:
    """The ops that `--op` asks for, by class and name; all of them for ""."""
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


def _ruled(policy: Policy, op: str, scope: str, formats: Sequence[str]) -> Data:
    whys = {low: policy.why(op, low, scope) for low in formats}
    return {
        "rules": {low: why.rule for low, why in whys.items()},
        "rows": {low: _row(why.row) for low, why in whys.items()},
    }


def _one(policy: Policy, selector: str, scope: str, formats: Sequence[str]) -> Data:
    op = vocabulary().op_of(selector)
    return {
        "op": selector,
        "class": op.kind if op else "",
        "about": vocabulary().kinds[op.kind] if op else "Not in the vocabulary.",
        **_ruled(policy, selector, scope, formats),
        "why": {low: str(policy.why(selector, low, scope)) for low in formats},
        "aten": list(op.aten) if op else [],
        "jax": list(op.jax) if op else [],
        "functions": list(op.functions) if op else [],
        "traces": list(op.traces) if op else [],
        "note": op.note if op else "",
    }


def _against(
    policy: Policy, device: str, selector: str, ops: Sequence[Op], formats: Sequence[str]
) -> Data:
    """The overloads in which a policy differs from what torch has compiled in for a device."""
    backends.get("torch")
    from polymp.backends.torch.autocast import kernels, torch_table

    theirs, names = torch_table.policy(device), {op.name for op in ops}
    entries = []
    for overload in sorted(kernels.differing(policy, device)):
        if all(torch_table.agrees(device, policy, overload, low) for low in formats):
            continue
        name = vocabulary().of_aten(overload)
        one = selector.startswith("aten:")
        if selector and (selector != f"aten:{overload}" if one else name not in names):
            continue
        entry: Data = {"aten": overload, "op": name, "torch": {}, "policy": {}, "rows": {}}
        for low in formats:
            own = torch_table.table(policy, low).get(overload)
            entry["torch"][low] = _answer(torch_table.row(device, overload, low), theirs)
            entry["policy"][low] = _answer(own, policy)
            entry["rows"][low] = _row(own)
        entries.append(entry)
    return {"device": device, "compiled": len(torch_table.kernels(device)), "differ": entries}


# diff


def _diff(args: argparse.Namespace) -> Data:
    """Compares answers outside of scopes, and inside the modules that each scope matches.

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
        rows = [policy.why(of, low, _inside(pattern)).row for policy in (one, other)]
        answers = [_answer(rows[0], one), _answer(rows[1], other)]
        if not pattern:
            outside[of, low] = answers
            op = words.op_of(of) if ":" in of else None
            known = outside[op.name, low] if op else None
        else:
            known = outside[of, low]
        if answers[0] != answers[1] and answers != known:
            entry = {"op": of, "format": low, "scope": pattern}
            entries.append(entry | {"rules": answers, "rows": [_row(row) for row in rows]})
    return {"policies": list(args.policies), "same": not entries, "differences": entries}


def _inside(pattern: str) -> str:
    """A path that a pattern matches."""

    def letter(group: re.Match[str]) -> str:
        letters = string.ascii_letters + string.digits + group[1]
        return next(c for c in letters if fnmatch.fnmatchcase(c, group[0]))

    return re.sub(r"\[(!?[^\]]+)\]", letter, pattern)


# check


def _check(args: argparse.Namespace) -> Data:
    asked = [args.backend] if args.backend else list(backends.NAMES)
    data: Data = {"policy": args.policy, "ok": False, "rows": 0, "backends": {}, "errors": []}
    if args.backend:
        backends.get(args.backend)  # says what to install
    try:
        policy = policy_files.load(args.policy)
    except PolicyError as error:
        return data | {"errors": [str(error)]}
    for name in asked:
        refused: list[Data] | None = None
        if importlib.util.find_spec(name) is not None:
            said = _refusals(name, policy)
            refused = [{"row": _row(row), "why": why} for row, why in said.items()]
            data["errors"] += [f"{why} [{row}]" for row, why in said.items()]
        data["backends"][name] = refused
    return data | {"ok": not data["errors"], "rows": len(policy.rows)}


def _refusals(backend: str, policy: Policy) -> Mapping[Row, str]:
    """The rows that a backend cannot honour, each with the reason."""
    if backend == "jax":
        from polymp.backends.jax.autocast.validate import refusals as in_jax

        return in_jax(policy)
    from polymp.backends.torch.autocast.validate import refusals as in_torch

    refused = in_torch(policy)
    held = [row for row in policy.rows if row not in refused]
    alone = [row for row in held if _no_kernel(row, Policy(policy.name, (row,)))]
    others = tuple(row for row in held if row not in alone)  # may rule what torch lacks
    lacking = {row: _no_kernel(row, Policy(policy.name, (*others, row))) for row in alone}
    return {**refused, **{row: why for row, why in lacking.items() if why}}


def _no_kernel(row: Row, policy: Policy) -> str:
    """Why torch can run what a policy's row asks for on no device; "" if it can on one."""
    from polymp.backends.torch.autocast import torch_table, validate

    if row.rule not in (Rule.LOWER, Rule.WIDEST):
        return ""
    for low in (row.format,) if row.format else LOW:
        said = []
        for device in torch_table.DEVICES:
            try:
                validate.check(policy.at(_inside(row.scope)), device, low)
            except PolicyError as error:
                said.append(str(error))
        if len(said) == len(torch_table.DEVICES):
            return said[0]
    return ""


# doctor


def _doctor(args: argparse.Namespace) -> Data:
    measures = args.measure or args.model or args.shapes
    if not measures and (args.framework or args.seconds):
        given = "--framework" if args.framework else "--seconds"
        raise UsageError(f"{given}: nothing is measured. Add --measure, --model or --shapes.")
    if not measures:
        return doctor.diagnose(doctor.gather())
    found = measurement.measured(
        args.model, args.shapes, list(dict.fromkeys(args.framework)), args.seconds
    )
    return doctor.diagnose(doctor.gather()) | {"measurements": found}


def _plain(data: Data) -> str:
    """What `check` says; the errors themselves go to standard error."""
    if not data["rows"] and data["errors"]:
        return f"{data['policy']}: cannot be read\n"
    lines = [f"{data['policy']}: {data['rows']} rows"]
    for name, refused in data["backends"].items():
        if refused is None:
            lines.append(f"{name}: not installed, not asked")
        else:
            lines.append(f"{name}: {f'refuses {len(refused)}' if refused else 'honours them all'}")
    return "\n".join(lines) + "\n"
