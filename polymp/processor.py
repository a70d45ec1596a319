"""This machine's processor, and what of it multiplies low dtypes in hardware."""

import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

# The CPU features, as Linux and macOS name them, that multiply a dtype in hardware. avx512_fp16 is
# not among them: products that add up in float32, as torch's and XLA's do, gain nothing from it.
FAST: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "FEAT_BF16"),
        "float16": ("amx_fp16", "asimdhp", "FEAT_FP16"),
    }
)


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
