"""The backends, one folder each, imported only when they are needed; and this machine's CPU."""

import importlib
import importlib.util
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

NAMES = ("torch", "jax")


def installed() -> tuple[str, ...]:
    """Return the names of the frameworks that are installed: "torch", "jax"."""
    return tuple(name for name in NAMES if importlib.util.find_spec(name) is not None)


def get(name: str) -> ModuleType:
    """Return a backend, which says what to install if its framework is missing."""
    if name not in NAMES:
        raise ValueError(f"no backend {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"polymp.backends.{name}")


# The CPU features, as Linux and macOS name them, that multiply bfloat16 in hardware.
MULTIPLY_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "FEAT_BF16")


@cache
def processor() -> tuple[str, frozenset[str] | None]:
    """The CPU's name, and its features as the system lists them; None if it lists none."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        first, _, _ = listed.read_text(encoding="utf-8").partition("\n\n")
        name = re.search(r"^model name\s*: (.*)$", first, re.MULTILINE)
        features = re.search(r"^(?:flags|Features)\s*: (.*)$", first, re.MULTILINE)
        found = frozenset(features[1].split()) if features else None
        return name[1] if name else platform.machine(), found
    if sys.platform == "darwin":
        said = subprocess.run(["sysctl", "-a"], capture_output=True, text=True, check=True).stdout
        name = re.search(r"^machdep\.cpu\.brand_string: (.*)$", said, re.MULTILINE)
        has = re.findall(r"^hw\.optional\.arm\.(FEAT_\w+): 1$", said, re.MULTILINE)
        return name[1] if name else platform.machine(), frozenset(has)
    return platform.processor() or platform.machine(), None
