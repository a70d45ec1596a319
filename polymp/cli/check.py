"""`polymp check`: whether a policy can be read, and is right for torch and for jax.

policy -> rows that a backend refuses
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from polymp import backends, progress
from polymp.cli.policies import path_inside, row_data
from polymp.errors import NoPolicyError, PolicyError, UsageError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule

Data = dict[str, Any]


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
