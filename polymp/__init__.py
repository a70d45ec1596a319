"""polymp: mixed precision, written once, for PyTorch and JAX.

This module imports neither framework. The users' entry points are `polymp.torch` and
`polymp.jax`. `polymp.policy` reads a policy from wherever it is, `polymp.register_op` makes an op
of the user's own follow policies, `polymp.explain` says which op ran in which dtype, and why.
"""

import importlib
import typing

from polymp import dtypes
from polymp._api import explain, register_op
from polymp.errors import BackendMissingError, ForbiddenOpError, PolicyError, PolympError
from polymp.rules.policy import Policy
from polymp.rules.policy_files import load as policy
from polymp.scaling import ScaleRule, ScaleState
from polymp.versions import __version__

if typing.TYPE_CHECKING:
    from polymp.diagnostics.compare import compare
    from polymp.diagnostics.report import Report

__all__ = [
    "BackendMissingError", "ForbiddenOpError", "Policy", "PolicyError",
    "PolympError", "Report", "ScaleRule", "ScaleState", "__version__", "compare", "dtypes",
    "explain", "policy", "register_op",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names, and those of `polymp.torch`, `.jax` and `.testing` that are imported."""
    return [*__all__, *(door for door in ("jax", "testing", "torch") if door in globals())]


# The modules of what is imported late.
_LATE = {"Report": "report", "compare": "compare"}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"polymp.diagnostics.{_LATE[name]}")
    globals()[name] = getattr(module, name)  # the next use does not come here
    return globals()[name]
