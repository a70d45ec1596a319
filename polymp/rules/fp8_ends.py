"""The first and the last product of a model, kept out of 8 bits by rows with a scope."""

import glob
from collections.abc import Iterable

from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.row import Rule


def kept_lower(policy: Policy, paths: Iterable[str], where: str) -> Policy:
    """Return a policy whose products in some modules run by rule `lower` instead of `fp8`."""
    rules = {row.of: "lower" for row in policy.rows if row.rule is Rule.FP8}
    if not rules:
        raise PolicyError(
            f"{where}: policy {policy.name!r} runs no product in 8 bits. Give policy 'fp8', or one "
            "with rows of rule fp8."
        )
    paths = list(dict.fromkeys(paths))
    if "" in paths:
        raise PolicyError(
            f"{where}: the first or the last product is called outside of all submodules, so that "
            "no module path is for it alone. Write Policy.override(scopes={...}) for the modules "
            "that are to stay in bfloat16."
        )
    scopes = {glob.escape(path): rules for path in paths}
    return policy.override(name=policy.name, scopes=scopes)
