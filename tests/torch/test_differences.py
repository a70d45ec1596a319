"""The deliberate differences from torch.amp: each shown on both, and listed in the docs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polymp.torch
from tests.torch import programs
from tests.torch.differences import PROGRAMS, after_a_change

ROOT = Path(__file__).parent.parent.parent
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
RAISES = re.compile(r"(RuntimeError|AttributeError|TypeError): .+")

# What each program comes to: under torch.amp 2.13, and under polymp.
DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "two-formats-on-one-weight": (RAISES, "float16"),
    "weight-written-in-a-region": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
    "optimizer-stepped-in-a-region": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
    "casts-of-another-thread": (1.0, 2.0),
    "casts-after-another-thread-left": (False, True),
    "one-object-entered-twice": (True, False),
    "recursive-decorated-function": (True, False),
    "decorated-function-in-two-threads": (True, False),
    "decorated-generator": (["float32"] * 2, ["bfloat16"] * 2),
    "decorated-async-generator": (["float32"] * 2, ["bfloat16"] * 2),
    "decorated-coroutines-interleaved": (
        ["float32", "float32", False],
        ["bfloat16", "bfloat16", False],
    ),
    "with-blocks-interleaved": (True, False),
    "lowered-growth-interval": (8.0, 16.0),
    "state-without-an-entry": (2.0, 8.0),
    "update-with-an-int": (RAISES, 4.0),
    "scale-a-named-tuple": (RAISES, "Pair"),
    "cast-inputs-in-a-named-tuple": (RAISES, ["Pair", "float16"]),
    "cast-inputs-in-a-mapping": (["dict", "float16"], ["OrderedDict", "float16"]),
    "vmap-of-a-linear": ("float32", "bfloat16"),
    "region-inside-a-region-of-torch": (RAISES, "bfloat16"),
}


def outcomes(package: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.torch.differences", package],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def torchs() -> dict[str, Any]:
    return outcomes("torch.amp")


@pytest.fixture(scope="module")
def polymps() -> dict[str, Any]:
    return outcomes("polymp.torch")


def is_as(expected: Any, found: Any) -> bool:
    if isinstance(expected, re.Pattern):
        return isinstance(found, str) and expected.fullmatch(found) is not None
    return bool(found == expected)


@pytest.mark.parametrize("key", DIFFERENCES)
def test_polymp_does_what_is_right(key: str, polymps: dict[str, Any]) -> None:
    assert polymps[key] == DIFFERENCES[key][1]


@pytest.mark.skipif(VERSION != (2, 13), reason="the column of torch.amp was read from torch 2.13")
@pytest.mark.parametrize("key", DIFFERENCES)
def test_torch_does_something_else(key: str, torchs: dict[str, Any]) -> None:
    expected = DIFFERENCES[key][0]
    assert is_as(expected, torchs[key])
    assert not is_as(expected, DIFFERENCES[key][1]), "this is no difference"


def test_every_program_has_a_row() -> None:
    assert list(PROGRAMS) == list(DIFFERENCES)


def test_the_docs_list_the_same_differences_in_the_same_order() -> None:
    text = (ROOT / "docs/differences.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE) == list(DIFFERENCES)


def in_a_disabled_subregion(w: torch.Tensor) -> None:
    with polymp.torch.autocast("cpu", enabled=False):
        w.mul_(2)


FIRST = torch.zeros(1, 4, dtype=torch.int64)

# Writes that change a weight from 1 to 2 and that polymp does not see, as the docs say.
UNSEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "p.data.copy_": lambda w: w.data.copy_(2 * w),
    "p.detach().copy_": lambda w: w.detach().copy_(2 * w),
    "p.data = t": lambda w: setattr(w, "data", 2 * w),
    "out=": lambda w: torch.mul(w, 2, out=w),
    "op that is not watched": lambda w: w.scatter_reduce_(0, FIRST, torch.ones(1, 4), "sum"),
    "disabled subregion": in_a_disabled_subregion,
    "thread in no region": lambda w: programs.in_thread(lambda: in_no_region(w)),
}


def in_no_region(w: torch.Tensor) -> None:
    with torch.no_grad():
        w.mul_(2)


@pytest.mark.parametrize("way", UNSEEN)
def test_what_polymp_does_not_see(way: str) -> None:
    def change(w: torch.Tensor) -> None:
        with torch.no_grad():
            UNSEEN[way](w)

    def change_and_clear(w: torch.Tensor) -> None:
        change(w)
        torch.clear_autocast_cache()

    assert after_a_change(polymp.torch, change) == 1.0
    assert after_a_change(polymp.torch, change_and_clear) == 2.0
