"""`BadStep`, with the change that may help, and the copies that `catch` keeps of numpy batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polymp.diagnostics.audit_records import Fault, Operand
from polymp.diagnostics.bad_step import BadStep, BatchCopies
from polymp.diagnostics.remedy import tried
from polymp.rules import policy_files


@pytest.mark.parametrize("fill", [1.0, np.nan])
def test_an_array_that_is_given_again_as_it_was_has_one_copy(fill: float) -> None:
    copies, data = BatchCopies(), np.full((600, 3), fill)
    first = copies.of(0, data)
    assert first is not data
    assert copies.of(0, data) is first
    assert copies.of(1, data) is not first
    np.testing.assert_array_equal(copies.of(0, data.copy()), data)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (50, 40)])
def test_a_buffer_that_is_filled_again_is_copied_again(shape: tuple[int, ...]) -> None:
    copies, buffer = BatchCopies(), np.zeros(shape)
    kept = []
    for number in range(3):
        buffer[...] = number
        kept.append(copies.of(0, buffer))
    for number, copy in enumerate(kept):
        assert copy.shape == shape
        assert (copy == number).all()


def fault(kind: str, run: str = "float16", module: str = "", why: str = "", **more: Any) -> Fault:
    place = (more.pop("op", "exp"), "aten:exp", module, "net.py:7", "forward")
    return Fault(*place, kind, run, None, more.pop("inputs", ()), "Inf", why, **more)


ONE, LARGE = (Operand.of_ends("float32", (2,), (0.0, end), "") for end in (1.0, 2e18))
UNTRIED = " That was not tried."
RATE = f"ower the learning rate, or clip the gradients.{UNTRIED}"
GREW = (2.0, 1.0, 10.5), f"The loss grew from 1 to 10.5 in the steps before: l{RATE}"
SIZE = f"is as large as 2e+18: lower the learning rate, clip the gradients, or look at the data.{UNTRIED}"  # noqa: E501
CODE = "Change the code: of these inputs exp has no finite result in float32 either."
FP32 = f"Give exp the rule fp32.{UNTRIED}"
EPS = "Give it eps=1."
GRAD = "Call zero_grad() before the backward pass, which adds to what is there."
HEAD = "the rule fp32 in module 'head'"
IN_HEAD: dict[str, Any] = {"module": "head", "region": "float16"}
REMEDIES: list[tuple[Fault | None, tuple[float, ...], str]] = [
    (None, (1.0, 10.0), f"L{RATE}"),
    (None, *GREW),
    (fault("overflow"), *GREW),
    (fault("number", remedy=EPS)._replace(direction="update"), (), EPS),
    (fault("number", remedy=EPS), *GREW),
    (fault("input", why="w.grad is not finite before any op runs"), (), GRAD),
    (fault("input", why="x is NaN"), (), "Look at the data or the parameters."),
    (fault("index", why="i is 9"), (), "Look at the data."),
    (fault("overflow", inputs=(LARGE._replace(name="w"),)), (), f"w {SIZE}"),
    (fault("overflow", inputs=(ONE, LARGE)), (), f"input 1 of exp {SIZE}"),
    (fault("number", **IN_HEAD), (), f"Use another constant, or give exp {HEAD}.{UNTRIED}"),
    (fault("operation"), (), CODE),
    (fault("overflow", "float32"), (), CODE),
    (fault("operation", "bfloat16", region="bfloat16"), (), f"Look at its inputs, or g{FP32[1:]}"),
    (fault("saturation", region="float16"), (), FP32),
    (fault("saturation"), (), f"Run exp in float32.{UNTRIED}"),
    (fault("overflow", op="to"), (), f"Leave this cast out, or use bfloat16.{UNTRIED}"),
    (fault("overflow", **IN_HEAD), (), f"Give exp {HEAD}, or use bfloat16.{UNTRIED}"),
]  # fmt: skip


@pytest.mark.parametrize(("broke", "losses", "remedy"), REMEDIES)
def test_the_remedy(broke: Fault | None, losses: tuple[float, ...], remedy: str) -> None:
    report = BadStep(3, "the loss is NaN", broke, losses)
    assert report.remedy == remedy
    assert str(report).endswith(f"  {remedy}")
    assert str(report).count(remedy) == 1
    assert "learning rate" not in BadStep(0, "the loss is NaN").remedy, "nothing was updated"
    assert BadStep(3, "the loss is NaN", undone=0).remedy == "", "no step could be repeated"
    assert BadStep(3, "the loss is NaN", note="It was not looked for.").remedy == ""


def test_where_no_few_ops_help_the_row_that_was_tried_is_named() -> None:
    broke, asked = fault("overflow", region="float16"), policy_files.load("amp")

    def repeat(change: Any = None, scale: float = 1.0) -> Fault | None:
        rows = () if change is None else change(asked).rows
        return None if any(row.of == "all" and row.rule == "fp32" for row in rows) else broke

    found = tried(broke, ["linear", "conv1d", "mul", "cumsum", "exp"], repeat, scaled=False)
    assert found.remedy == (
        "Give all ops the rule fp32, with which this step was tried and is finite. Which of them "
        f"need it was not found. Or use bfloat16.{UNTRIED}"
    )
