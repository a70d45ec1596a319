"""`polymp check`: whether a policy can be read, and is right for torch, for jax and for a model.

policy -> rows that a backend refuses, and module paths that match no module of a model
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from polymp import backends, progress
from polymp.cli import user_model
from polymp.cli.policies import path_inside, row_data
from polymp.errors import NoPolicyError, PolicyError, UsageError
from polymp.rules import policy_files, scopes
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule

Data = dict[str, Any]


def checked(args: argparse.Namespace) -> Data:
    """Return the faults of a policy: rows that the backends refuse, paths that match no module."""
    asked = [args.backend] if args.backend else list(backends.NAMES)
    data: Data = {"policy": args.policy, "ok": False, "rows": 0, "backends": {}, "errors": []}
    if args.model:
        data |= {"model": args.model, "scopes": []}
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
            with progress.line("polymp check") as line:
                line.stage(f"asking {name}")
                said = _refusals(name, policy)
            refused = [{"row": row_data(row), "why": why} for row, why in said.items()]
            data["errors"] += [f"{why} [{row}]" for row, why in said.items()]
        data["backends"][name] = refused
    if args.model:
        data["scopes"] = _matches(policy, args.model)
        data["errors"] += [found["why"] for found in data["scopes"] if not found["matches"]]
    return data | {"ok": not data["errors"], "rows": len(policy.rows)}


def _matches(policy: Policy, text: str) -> list[Data]:
    """For each path of a policy's rows, how many modules of a model it matches."""
    paths = _paths(text)  # of any policy: a model that cannot be loaded is an error
    entries = []
    for pattern in policy.scopes:
        count = sum(scopes.depth(pattern, path) > 0 for path in paths)
        close = " or ".join(map(repr, scopes.nearest(pattern, paths)))
        some = (
            f"paths are, for example, {', '.join(map(repr, paths[:3]))}."
            if paths
            else "it has none."
        )
        hint = f"did you mean {close}?" if close else some
        why = "" if count else f"{pattern!r} matches no module of {text}: {hint}"
        entries.append({"scope": pattern, "matches": count, "why": why})
    return entries


def _paths(text: str) -> list[str]:
    """The paths of the modules of a model, as rules by path have them."""
    with progress.line("polymp check") as line:
        line.stage("loading the model")
        framework, model, inputs = user_model.example(text)
    if framework == "torch":
        return [path for path, _ in model.named_modules() if path]
    from polymp.backends.jax.diagnostics.explain import explain

    try:
        report = explain(model, *inputs, dtype=LOW[1])
        modules = {call.module for call in report}
    except (Exception, SystemExit) as error:
        raise user_model.failed(text, error) from error
    names = [module.split(".") for module in modules if module]
    return sorted({".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)})


def _refusals(backend: str, policy: Policy) -> Mapping[Row, str]:
    """The rows that a backend cannot run ops by, each with the reason."""
    if backend == "jax":
        from polymp.backends.jax.autocast.api import refusals as in_jax

        return in_jax(policy)
    from polymp.backends.torch.autocast.torch_table import refusals as in_torch

    refused = in_torch(policy)
    held = [row for row in policy.rows if row not in refused]
    alone = [row for row in held if _no_kernel(row, Policy(policy.name, (row,)))]
    others = tuple(row for row in held if row not in alone)  # may decide for ops that torch lacks
    lacking = {row: _no_kernel(row, Policy(policy.name, (*others, row))) for row in alone}
    return {**refused, **{row: why for row, why in lacking.items() if why}}


def _no_kernel(row: Row, policy: Policy) -> str:
    """Why torch has no kernel for a row's ops on any device; "" if it has one on some device."""
    from polymp.backends.torch.autocast import torch_table

    if row.rule not in (Rule.LOWER, Rule.WIDEST):
        return ""
    for low in (row.dtype,) if row.dtype else LOW:
        said = []
        for device in torch_table.DEVICES:
            try:
                torch_table.check(policy.at(path_inside(row.scope)), device, low)
            except PolicyError as error:
                said.append(str(error))
        if len(said) == len(torch_table.DEVICES):
            return said[0]
    return ""


def draw(data: Data, args: argparse.Namespace) -> Iterator[str]:
    """A line for the policy, each backend and the model; errors go to standard error."""
    if not data["rows"] and data["errors"]:
        yield f"{data['policy']}: wrong, so that no row was checked"
        return
    yield f"{data['policy']}: {data['rows']} rows"
    for name, refused in data["backends"].items():
        if refused is None:
            yield f"{name}: not installed, not checked"
        else:
            yield f"{name}: {f'refuses {len(refused)}' if refused else 'accepts all rows'}"
    if "model" in data:
        matches = [entry["matches"] for entry in data["scopes"]]
        lost = matches.count(0)
        said = f"{lost} of {len(matches)} match no module" if lost else "all match modules"
        yield f"{data['model']}: {f'paths of rules: {said}' if matches else 'no rule by path'}"
