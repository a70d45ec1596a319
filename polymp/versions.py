"""polymp's own version, and those of other libraries that it is tested with; a warning beyond."""

import importlib
import importlib.util
import re
import warnings
from functools import cache
from types import ModuleType
from typing import Any

from polymp.code_origin import outside
from polymp.errors import BackendMissingError, VersionWarning

__version__ = "0.1.0"

# By framework: the versions that polymp is tested with, as pip takes them.
SUPPORTED = {"torch": ">=2.11,<2.16", "jax": ">=0.10.2,<0.12"}


def parts(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, or as many as it has."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def within(version: str, bounds: str) -> bool:
    """True if a version is within bounds such as ">=2.11,<2.16"."""
    first, end = map(parts, bounds.split(","))
    return first <= parts(version) < end


def supported(name: str) -> str:
    """The supported versions of a framework, in words: "torch 2.11 to 2.15"."""
    first, end = SUPPORTED[name].split(",")
    major, minor = parts(end)
    return f"{name} {first.removeprefix('>=')} to {major}.{minor - 1}"


@cache
def warn_beyond(name: str, version: str) -> None:
    """Warn, once, of a framework that is newer than the last version polymp is tested with."""
    if parts(version) < parts(SUPPORTED[name].partition(",")[2]):
        return
    warnings.warn(
        f"polymp is tested with {supported(name)}, and this is {name} {version}, whose changes it "
        f"does not know. Update polymp, or install a tested version: "
        f"pip install '{name}{SUPPORTED[name]}'.",
        VersionWarning,
        stacklevel=outside(),
    )


# The libraries of the adapters, checked before anything is changed.

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
