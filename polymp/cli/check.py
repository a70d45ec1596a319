"""`polymp check`: whether a policy can be read, and is right for torch and for jax.

policy -> rows that a backend refuses
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from polymp import backends
from polymp.cli.policies import path_inside
from polymp.errors import NoPolicyError, PolicyError, UsageError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row

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


def draw(data: Data) -> Iterator[str]:
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
