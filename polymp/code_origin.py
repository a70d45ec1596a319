"""Whose code a file is: the user's, polymp's, or a library's.

Read off the file's path. Reports name the user's line with it, and warnings point there.
"""

import os
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_TYPED = ("<stdin>", "<ipython", "<python-input")  # at a prompt

# Of the backends' folder, behind its link, too.
_OURS = (str(_HERE) + os.sep, str((_HERE / "backends").resolve()) + os.sep)

# Libraries whose code calls polymp's.
_AROUND = ("torch", "torchvision", "jax", "jaxlib", "flax", "optax")


@cache
def folders(*names: str) -> tuple[str, ...]:
    """The folders of those of these packages that are installed, with a separator at the end."""
    specs = [find_spec(name) for name in names]
    return tuple(str(Path(s.origin).parent) + os.sep for s in specs if s and s.origin)


def is_ours(filename: str) -> bool:
    """True for polymp's own code."""
    return filename.startswith(_OURS)


@cache
def is_library(filename: str, *names: str) -> bool:
    """True for code that is not the user's: of polymp, of Python, of no file, or of a library."""
    if filename.startswith("<"):
        return not filename.startswith(_TYPED)
    if filename.startswith((*_OURS, *folders(*names))):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename


def outside() -> int:
    """The `stacklevel` of the caller's warning that shows the user's line, not one of a library."""
    level, frame = 1, sys._getframe(1)
    around = (*_OURS, *folders(*_AROUND))
    while frame.f_back is not None:
        filename = frame.f_code.co_filename
        if "importlib" in filename and "_bootstrap" in filename:
            level -= 1  # `warnings` leaves out what imports
        elif not filename.startswith(around):
            break
        level, frame = level + 1, frame.f_back
    return level
