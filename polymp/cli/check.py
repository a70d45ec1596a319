"""`polymp check`: whether a policy can be read, and which of its rows torch and jax refuse."""

import argparse
from collections.abc import Mapping
from typing import Any

from polymp import backends, progress
from polymp.cli.policies import path_inside, row_data
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule

Data = dict[str, Any]


def checked(args: argparse.Namespace) -> Data:
    """The rows of a policy that the backends refuse."""
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
        if name in backends.installed():
            with progress.line("polymp check") as line:
                line.stage(f"asking {name}")
                said = _refusals(name, policy)
            refused = [{"row": row_data(row), "why": why} for row, why in said.items()]
            data["errors"] += [f"{why} [{row}]" for row, why in said.items()]
        data["backends"][name] = refused
    return data | {"ok": not data["errors"], "rows": len(policy.rows)}


def _refusals(backend: str, policy: Policy) -> Mapping[Row, str]:
    """The rows that a backend cannot run ops by, each with the reason."""
    if backend == "jax":
        from polymp.backends.jax.autocast.validate import refusals as in_jax

        return in_jax(policy)
    from polymp.backends.torch.autocast.validate import refusals as in_torch

    refused = in_torch(policy)
    held = [row for row in policy.rows if row not in refused]
    alone = [row for row in held if _no_kernel(row, Policy(policy.name, (row,)))]
    others = tuple(row for row in held if row not in alone)  # may decide for ops that torch lacks
    lacking = {row: _no_kernel(row, Policy(policy.name, (*others, row))) for row in alone}
    return {**refused, **{row: why for row, why in lacking.items() if why}}


def _no_kernel(row: Row, policy: Policy) -> str:
    """Why torch has no kernel for a row's ops on any device; "" if it has one on some device."""
    from polymp.backends.torch.autocast import torch_table, validate

    if row.rule not in (Rule.LOWER, Rule.WIDEST):
        return ""
    for low in (row.dtype,) if row.dtype else LOW:
        said = []
        for device in torch_table.DEVICES:
            try:
                validate.check(policy.at(path_inside(row.scope)), device, low)
            except PolicyError as error:
                said.append(str(error))
        if len(said) == len(torch_table.DEVICES):
            return said[0]
    return ""


def plain(data: Data) -> str:
    """The text that `check` prints; errors go to standard error."""
    if not data["rows"] and data["errors"]:
        return f"{data['policy']}: cannot be read\n"
    lines = [f"{data['policy']}: {data['rows']} rows"]
    for name, refused in data["backends"].items():
        if refused is None:
            lines.append(f"{name}: not installed, not checked")
        else:
            lines.append(f"{name}: {f'refuses {len(refused)}' if refused else 'accepts all rows'}")
    return "\n".join(lines) + "\n"
