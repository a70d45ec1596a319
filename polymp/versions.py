"""polymp's own version, and those of other libraries that it is tested with; a warning beyond."""

import importlib
import importlib.util
import re
import warnings
from functools import cache
from typing import Any

from polymp.code_origin import outside
from polymp.errors import BackendMissingError, VersionWarning

__version__ = "0.1.0"

# The versions that polymp is tested with, as pip takes them: of frameworks, and of the libraries of
# adapters.
SUPPORTED = {"torch": ">=2.11,<2.16", "jax": ">=0.10.2,<0.12"}
TESTED = {
    "lightning": ">=2.5,<2.7",
    "accelerate": ">=1.6,<1.16",
    "transformers": ">=5.0,<5.24",
    "keras": ">=3.15,<3.16",
}


def parts(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, or as many as it has."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def within(version: str, bounds: str) -> bool:
    """True if a version is within bounds such as ">=2.11,<2.16"."""
    first, end = map(parts, bounds.split(","))
    return first <= parts(version) < end


def require(name: str) -> Any:
    """Import a framework or the library of an adapter, before anything else imports it."""
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"polymp.{name} needs the {name} package: pip install 'polymp[{name}]'."
        )
    library = importlib.import_module(name)
    _warn_untested(name, library.__version__)
    return library


@cache
def _warn_untested(name: str, version: str) -> None:
    bounds = (SUPPORTED | TESTED)[name]
    if not within(version, bounds):
        warnings.warn(
            f"polymp is tested with {name}{bounds}, and this is {name} {version}. Update polymp, "
            f"or install a tested version: pip install '{name}{bounds}'.",
            VersionWarning,
            stacklevel=outside(),
        )
