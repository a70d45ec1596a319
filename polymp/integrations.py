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

from polymp.code_origin import outside
from polymp.errors import BackendMissingError, VersionWarning
from polymp.versions import within

# By library, as pip installs it: the versions that its adapter is tested with, as pip takes them.
TESTED = {
    "lightning": ">=2.5,<2.7",
    "accelerate": ">=1.6,<1.16",
    "transformers": ">=5.0,<5.24",
    "keras": ">=3.15,<3.16",
}


def require(name: str) -> Any:
    """Import the library of an adapter."""
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"polymp.{name} needs the {name} package: pip install 'polymp[{name}]'."
        )
    found: ModuleType = importlib.import_module(name)
    _warn_untested(name, found.__version__)
    return found


@cache
def _warn_untested(name: str, version: str) -> None:
    if not within(version, TESTED[name]):
        warnings.warn(
            f"polymp.{name} is tested with {name}{TESTED[name]}, and this is {name} {version}. "
            f"Install a tested version: pip install '{name}{TESTED[name]}'.",
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
