"""Checks at the start of an adapter of a training framework: its library and version, the scaler.

Nothing has changed when one of these raises. Nothing here imports torch or jax.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from polymp import integrations
from polymp.code_origin import outside
from polymp.errors import BackendMissingError, VersionWarning
from polymp.integrations import Integration


def require(name: str) -> Any:
    """Import the library of an adapter."""
    row = integrations.of(name)
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"{row.adapter} needs the {name} package: pip install 'polymp[{name}]'."
        )
    found: ModuleType = importlib.import_module(name)
    _warn_untested(row, found.__version__)
    return found


@cache
def _warn_untested(row: Integration, version: str) -> None:
    if not row.is_supported(version):
        warnings.warn(
            f"{row.adapter} is tested with {row.name}{row.bounds}, and this is {row.name} "
            f"{version}. Install a tested version: pip install '{row.name}{row.bounds}'.",
            VersionWarning,
            stacklevel=outside(),
        )


def check_scaler(
    scaler: object,
    made: str,
    kind: type,
    enabled: Callable[[Any], bool],
    *,
    asked: str,
    half: bool,
    write: str,
) -> None:
    """Raise if a loss scaler that a user gave does not scale, or is for bfloat16."""
    if scaler is None:
        return
    if not half:
        raise ValueError(
            f"{asked} takes no scaler: loss scaling is for float16. Leave it out, or write {write}."
        )
    if not isinstance(scaler, kind):
        given = f"{type(scaler).__module__}.{type(scaler).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{asked} takes a {made.partition('(')[0]}, got {given}. Leave scaler out, or write "
            f"scaler={made}."
        )
    if not enabled(scaler):
        raise ValueError(
            f"{asked} needs a loss scaler, and the one given is disabled, so that small gradients "
            f"would become zero. Leave scaler out, or write scaler={made}."
        )
