"""polymp's own version, and those of torch and jax that it is tested with; a warning beyond."""

import re
import warnings
from functools import cache

from polymp.code_origin import outside
from polymp.errors import VersionWarning

__version__ = "0.1.0"

# By framework: the first version, and the first that is not tested any more.
SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 16)),
    "jax": ((0, 10, 2), (0, 12)),
}


def parts(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, or as many as it has."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def supported(name: str) -> str:
    """The supported versions of a framework, in words: "torch 2.11 to 2.15"."""
    first, (major, end) = SUPPORTED[name]
    return f"{name} {_dotted(first)} to {major}.{end - 1}"


def is_supported(name: str, version: str) -> bool:
    """True if polymp is tested with the version of the framework."""
    first, end = SUPPORTED[name]
    return first <= parts(version) < end


@cache
def warn_beyond(name: str, version: str) -> None:
    """Warn, once, of a framework that is newer than the last version polymp is tested with."""
    if parts(version) < SUPPORTED[name][1]:
        return
    warnings.warn(
        f"polymp is tested with {supported(name)}, and this is {name} {version}, whose changes it "
        f"does not know. Update polymp, or install a tested version: "
        f"pip install '{name}{bounds(name)}'.",
        VersionWarning,
        stacklevel=outside(),
    )


def bounds(name: str) -> str:
    """The supported versions of a framework, as pip takes them: ">=2.11,<2.16"."""
    first, end = SUPPORTED[name]
    return f">={_dotted(first)},<{_dotted(end)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
