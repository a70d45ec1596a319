"""The backends, one folder each, imported only when they are needed."""

import importlib
import importlib.util
from types import ModuleType

from polymp import versions
from polymp.errors import BackendMissingError

NAMES = ("torch", "jax")


def installed() -> tuple[str, ...]:
    """Return the names of the frameworks that are installed: "torch", "jax"."""
    return tuple(name for name in NAMES if importlib.util.find_spec(name) is not None)


def get(name: str) -> ModuleType:
    """Return a backend. Warns once if its framework is newer than the tested versions."""
    if name not in NAMES:
        raise ValueError(f"no backend {name!r}; there are {', '.join(NAMES)}")
    require(name)
    return importlib.import_module(f"polymp.backends.{name}")


def require(name: str) -> None:
    """Check that the framework of a backend is installed, before anything imports it."""
    if importlib.util.find_spec(name) is None:
        raise BackendMissingError(
            f"backend {name!r} needs the {name} package: pip install 'polymp[{name}]'."
        )
    versions.warn_beyond(name, importlib.import_module(name).__version__)
