"""A language model that breaks in six ways: `catch` names the step and the op, in both frameworks.

In the shapes of the example and of Llama, in float16 and bfloat16, with a scaler and without.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from polymp.errors import BadStepError
from tests.conftest import need

BREAKS_AT = 3


class Way(NamedTuple):
    """How a training breaks, and what is to be named.

    Attributes:
        step: that is to be named.
        ops: one of which is to be named.
        module: in which the op is called; "" for any.
        batch: what is changed in the batch.
        weights: layers that are multiplied before the step, by factors for float16 and bfloat16.
        remedy: words of it.
    """

    step: int
    ops: tuple[str, ...]
    module: str = ""
    batch: tuple[tuple[str, float], ...] = ()
    weights: tuple[tuple[str, float, float], ...] = ()
    remedy: str = ""


WAYS = {
    "a weight": Way(BREAKS_AT, ("linear",), "blocks.1.feed.down",
                    weights=(("blocks.1.feed.down", 1e7, 3e38), ("blocks.1.feed.down", 1.0, 4.0))),
    "a bad batch": Way(BREAKS_AT, ("mul",), "", (("sizes", 3e38),), remedy="look at the data"),
    "the learning rate": Way(BREAKS_AT + 1, ("layer_norm", "linear", "mul"), "",
                             (("rate", 1e30),), remedy="lower the learning rate"),
    "attention": Way(BREAKS_AT, ("matmul", "bmm", "einsum"), "blocks.0.attention",
                     weights=(("blocks.0.attention.q", 1e3, 1e19),
                              ("blocks.0.attention.k", 1e3, 1e20))),
    "a logarithm": Way(BREAKS_AT, ("log",), "", (("gap", 0.0),)),
    "the data": Way(BREAKS_AT, ("mul",), "", (("sizes", math.nan),)),
}  # fmt: skip

CASES = list(
    itertools.product(
        WAYS, ("float16", "bfloat16"), ("scaled", "plain"), ("example", "llama"), ("torch", "jax")
    )
)


def batch(at: int) -> dict[str, Any]:
    numbers = np.random.default_rng(at)
    return {
        "tokens": numbers.integers(0, 11, (2, 9)),
        "sizes": np.ones((2, 9), np.float32),
        "gap": np.ones((), np.float32),
        "rate": 1e-2,
    }


def caught(training: Any, catch: Any, name: str, dtype: str) -> Any:
    """Train until the training breaks in one of the ways; check what the error says, and return it.

    Args:
        training: a `Broken`.
        catch: of the framework.
        name: of the way.
        dtype: of the region; float32 if there is none.

    Returns:
        The report.
    """
    way = WAYS[name]
    step = catch(training.step, every=4)
    with pytest.raises(BadStepError) as raised:  # noqa: PT012
        for at in range(BREAKS_AT + 3):
            given = batch(at)
            if at == BREAKS_AT:
                for key, value in way.batch:
                    given[key] = np.full_like(given[key], value) if key != "rate" else value
                for path, low, high in way.weights:
                    training.multiply(path, low if dtype == "float16" else high)
            training.run(step, given)
    report: Any = raised.value.report
    fault, text = report.fault, str(raised.value)
    assert report.step == way.step
    assert fault is not None
    print(f"{name}, {dtype}: {fault.op} in {fault.module!r}, {fault.direction}, {fault.kind}")
    print(text)
    assert fault.op in way.ops
    assert fault.direction == "forward"
    assert fault.module.startswith(way.module)
    lines = text.splitlines()
    assert lines[0].startswith(f"step {way.step}: ")
    module = f" in module {fault.module!r}" if fault.module else ""
    line = rf"{re.escape(module)} at \S*language_(torch|jax)\.py:\d+, {fault.direction}, "
    assert re.search(line, lines[1]), "the line of the op"
    assert report.remedy
    assert way.remedy in report.remedy
    assert lines[-1] == f"  {report.remedy}"
    return report


@pytest.mark.filterwarnings("ignore::polymp.errors.ScalerWarning")  # of bfloat16
@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_step_and_the_op_are_named(case: tuple[str, ...]) -> None:
    name, dtype, scaler, shape, framework = case
    need(framework)
    made = importlib.import_module(f"tests.support.faults.language_{framework}").Broken
    training = made(shape == "llama", dtype, scaler == "scaled")
    caught(training, importlib.import_module(f"polymp.{framework}").catch, name, dtype)


@pytest.mark.parametrize(
    ("by", "name", "dtype", "scaler", "table"),
    [
        ("torch.amp", "attention", "float16", "scaled", "policies/torch-cpu.toml"),
        ("torch.amp", "a weight", "bfloat16", "plain", "policies/torch-cpu.toml"),
        ("", "attention", "float32", "plain", ""),
    ],
)
def test_in_torchs_own_regions_and_without_any(
    by: str, name: str, dtype: str, scaler: str, table: str
) -> None:
    need("torch")
    from polymp.torch import catch
    from tests.support.faults.language_torch import Broken

    report = caught(Broken(True, dtype, scaler == "scaled", by), catch, name, dtype)
    assert report.fault.run == dtype
    row = report.fault.row
    assert (row.source if row else "") == table, "of torch, not of policy amp"
