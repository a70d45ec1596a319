"""Rules by module path whose pattern matches nothing in a program: a warning that helps."""

import warnings

import jax.extend.core as core

from polymp.backends.jax.autocast.regions import NameStacks
from polymp.backends.jax.compat.programs import ClosedProgram, OpenProgram
from polymp.backends.jax.modules.scoped import called_paths
from polymp.code_origin import outside
from polymp.errors import PolicyWarning
from polymp.rules import scopes
from polymp.rules.policy import Policy
from polymp.rules.region import Region


def warn_of_unmatched(closed: ClosedProgram, region: Region, fn: object) -> None:
    """Warn of patterns that match no module path: of no op, and in no model that was named."""
    stacks = NameStacks()
    paths = {"", *called_paths()}
    policies = [region.policy]

    def walk(jaxpr: OpenProgram, outer: str) -> None:
        for eqn in jaxpr.eqns:
            stack = eqn.source_info.name_stack
            inside, _ = stacks.place(stack, region)
            policies.append(inside.policy)
            path = ".".join(filter(None, (outer, stacks.path(stack))))
            paths.add(path)
            for inner in core.jaxprs_in_params(eqn.params):
                walk(getattr(inner, "jaxpr", inner), path)

    walk(closed.jaxpr, "")
    for policy in filter(None, dict.fromkeys(policies)):
        matched = {p for p in policy.scopes if any(scopes.depth(p, path) for path in paths)}
        if unmatched := [p for p in policy.scopes if p not in matched]:
            message = _said_of(policy, unmatched, paths, getattr(fn, "__name__", repr(fn)))
            warnings.warn(message, PolicyWarning, stacklevel=outside())


def _said_of(policy: Policy, unmatched: list[str], found: set[str], name: str) -> str:
    """A warning that names the patterns that match nothing, and what may have been meant."""
    names = [path.split(".") for path in found if path]
    paths = {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}
    first = sorted(paths, key=lambda path: (path.count("."), path))[:3]
    some = f"paths are, for example, {', '.join(map(repr, first))}."
    said = []
    for pattern in unmatched:
        close = [repr(one) for one in scopes.nearest(pattern, paths)]
        hint = f"did you mean {' or '.join(close)}?" if close else some if paths else _NONE
        said.append(f"{pattern!r}: {hint}")
    return (
        f"autocast(): policy {policy.name!r} has rules for paths that no module of {name} has. "
        f"{' '.join(said)}"
    )


_NONE = (
    "it calls no module that has a name. Modules of linen and haiku have names, and so have models "
    "of nnx and equinox that are called in it; for all else there is jax.named_scope(name)."
)
