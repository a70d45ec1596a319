"""The backends, one folder each, imported only when asked for."""

import importlib
import importlib.util
from types import ModuleType

from polymp import versions
from polymp.errors import BackendMissingError

NAMES = ("torch", "jax")


def installed() -> tuple[str, ...]:
    """The frameworks that are installed, of torch and JAX."""
    return tuple(name for name in NAMES if importlib.util.find_spec(name) is not None)


def get(name: str) -> ModuleType:
    """The backend of that name. Warns once if its framework is newer than polymp knows.

    Raises:
        ValueError: there is no such backend.
        BackendMissingError: its framework is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"no backend {name!r}; there are {', '.join(NAMES)}")
    require(name)
    return importlib.import_module(f"polymp.backends.{name}")


def require(name: str) -> None:
    """Look for the framework of a backend, before anything imports it.

    Raises:
        BackendMissingError: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"backend {name!r} needs the {name} package: pip install 'polymp[{name}]'."
        )
    versions.warn_beyond(name, importlib.import_module(name).__version__)
