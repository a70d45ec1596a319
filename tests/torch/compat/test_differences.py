"""The deliberate differences from torch.amp: each shown on both, and listed in the docs."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polymp.torch
from polymp.scaling import as_float32
from tests.support import forks
from tests.support.processes import in_thread
from tests.support.torch.differences import PROGRAMS, after_a_change
from tests.support.torch.training import ENTRIES

ROOT = Path(__file__).parents[3]
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
RAISES = re.compile(r"[A-Za-z]+Error: .+")
INF = math.inf

# What each program comes to: under torch.amp 2.13, and under polymp.
DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "two-dtypes-on-one-weight": (RAISES, "float16"),
    "uses-around-a-region-of-another-dtype": (1.0, 1.0 + 2.0**-9),
    "weight-written-in-a-region": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
    "optimizer-stepped-in-a-region": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
    "casts-of-another-thread": (1.0, 2.0),
    "casts-after-another-thread-left": (False, True),
    "one-object-entered-twice": (True, False),
    "recursive-decorated-function": (True, False),
    "decorated-function-in-two-threads": (True, False),
    "decorated-generator": (["float32"] * 2, ["bfloat16"] * 2),
    "decorated-async-generator": (
        ["float32"] * 2,
        "TypeError: autocast()(func) cannot wrap the async generator "
        "'decorated_async_generator.<locals>.generate'. Write `with autocast(...):` in it, around "
        "what computes.",
    ),
    "decorated-coroutines-interleaved": (
        ["float32", "float32", False],
        ["bfloat16", "bfloat16", False],
    ),
    "with-blocks-interleaved": (True, False),
    "cast-inputs-in-a-named-tuple": (RAISES, ["Pair", "float16"]),
    "region-inside-a-region-of-torch": (RAISES, "bfloat16"),
    # of scalers
    "lowered-growth-interval": (8.0, 16.0),
    "state-without-an-entry": (2.0, 8.0),
    "update-with-an-int": (RAISES, 4.0),
    "scale-a-named-tuple": (RAISES, "Pair"),
    "backward-after-update-of-losses-in-a-list": (-2.0, True),
    "two-hundred-overflows-and-a-good-step": (
        ["nan", "0.0", "nan", "0.0"],
        ["-1.0", repr(2.0**-126)] * 2,
    ),
    "growth-beyond-2-to-126": ([True, False], [True, True]),
    "quotient-that-overflows": ([-INF, 2.0**-10] * 2, [0.0, 2.0**-11] * 2),
    "quotient-that-overflows-before-it-is-clipped": (["nan", "0.0"], ["0.0", "0.0"]),
    "fused-momentum-whose-first-step-is-skipped": ("nan", "-1.0"),
    "optimizer-without-gradients": (RAISES, [None, 8.0, 1]),
    "closure": (RAISES, [9.0, 0.0]),
    "closure-by-position": ([9.0, -21.0], [9.0, 0.0]),
    "lbfgs": (RAISES, [1.125, 2.625]),
    "complex-gradients": (RAISES, [[[[-1.0, 0.0]], [[-1.0, 0.0]], 4.0]] * 2),
    "float16-gradients-when-allowed": (RAISES, [[-1.0], [-1.0], 4.0]),
    "gradients-in-compressed-rows": (RAISES, [2.0] * 4),
    "step-that-tells-it-was-skipped": (RAISES, [False, True, False, 1]),
    "fifty-skips-in-a-row": ([], ["ScalerWarning"]),
    "entries-of-a-state": (
        list(ENTRIES),
        [*ENTRIES, "min_scale", "max_scale", "hysteresis", "skips", "spoiled", "skipped"],
    ),
    "state-that-had-lost-its-scale": (
        ["(0.0, 7)", "(inf, 7)", "(nan, 7)"],
        ["ValueError, (8.0, 2000)"] * 3,
    ),
    "update-out-of-the-bounds": (["0.0", "inf", repr(2.0**127)], ["ValueError, 8.0"] * 3),
    "update-with-a-tensor-out-of-the-bounds": (
        ["0.0", "inf", "nan"],
        [repr(2.0**-126), repr(2.0**126), "8.0"],
    ),
    "update-with-a-tensor-of-one-dimension": (RAISES, 4.0),
    "arguments-of-a-new-scaler": (
        ["[0.0]", "[-8.0]", "[inf]", "['1024']", *["[65536.0]"] * 3],
        [f"{e}Error, []" for e in ("Value", "Value", "Value", "Type", "Value", "Type", "Type")],
    ),
    "first-scale-without-an-inverse": (
        ["-inf", repr(as_float32(1e-40)), "-0.125", repr(as_float32(1e38))],
        ["0.0", repr(2.0**-126), "-0.125", repr(as_float32(1e38))],
    ),
    "constants-set-out-of-range": (
        ["0.5", "2.0", "0"],
        ["ValueError, 2.0", "ValueError, 0.5", "ValueError, 2000"],
    ),
}


def outcomes(package: str) -> dict[str, Any]:
    program = f"from tests.support.torch import differences; differences.main({package!r})"
    return json.loads(forks.program(program))


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
    assert PROGRAMS.keys() == DIFFERENCES.keys()


def test_the_docs_list_the_same_differences_in_the_same_order() -> None:
    text = (ROOT / "docs/differences.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE) == list(DIFFERENCES)


def in_a_disabled_subregion(w: torch.Tensor) -> None:
    with polymp.torch.autocast("cpu", enabled=False):
        w.mul_(2)


# Writes that change a weight from 1 to 2 and that polymp does not see, as the docs say.
UNSEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "p.data.copy_": lambda w: w.data.copy_(2 * w),
    "p.detach().copy_": lambda w: w.detach().copy_(2 * w),
    "p.data = t": lambda w: setattr(w, "data", 2 * w),
    "out=": lambda w: torch.mul(w, 2, out=w),
    "op that is not watched": lambda w: w.hypot_(w * 3**0.5),
    "disabled subregion": in_a_disabled_subregion,
    "thread in no region": lambda w: in_thread(lambda: in_no_region(w)),
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
