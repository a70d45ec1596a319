"""Reports made by hand: a small model in both frameworks, and one as long as is asked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, Operand
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, Call
from polymp.diagnostics.magnitudes import BINS, SHIFT, Magnitudes
from polymp.diagnostics.report import Report
from polymp.rules.row import Row, Rule

IN_AMP = Row("class:matmul", Rule.LOWER, source="policies/amp.toml")


def operand(x: Any, name: str = "") -> Operand:
    """The `Operand` that an array in CPU memory has to have; numpy counts its values."""
    import numpy as np
    import pytest

    values = np.asarray(x).astype(np.float64)
    sizes = np.abs(values)
    finite = sizes[np.isfinite(sizes)]
    kinds = sizes == 0, np.isinf(sizes), np.isnan(sizes), values < 0
    zeros, inf, nan, negative = (pytest.approx(kind.mean()) for kind in kinds)
    smallest, largest = finite[finite > 0].min(initial=math.inf), finite.max(initial=0.0)
    smallest = smallest if math.isfinite(smallest) else 0.0
    shape, dtype = sizes.shape, np.asarray(x).dtype.name
    return Operand(dtype, shape, smallest, largest, zeros, inf, nan, name, negative)


def magnitudes(values: Any, **given: Any) -> Magnitudes:
    """Make the magnitudes of an array, from float32's own bits without the sign."""
    import numpy as np  # which a report needs not

    array = np.asarray(values, np.float32).ravel()
    bits = (array.view(np.uint32) & 0x7FFFFFFF) >> SHIFT
    counts = np.bincount(bits, minlength=BINS)
    finite = np.abs(array[np.isfinite(array)])
    return Magnitudes(
        values=array.size,
        counted=array.size,
        bins=tuple(map(int, counts)),
        largest=float(finite.max(initial=0.0)),
        inf=bool(np.isinf(array).any()),
        nan=bool(np.isnan(array).any()),
    )._replace(**given)


def measured(op: str, module: str, values: Any, **given: Any) -> Measured:
    """A float16 result of torch, unless something else is given."""
    known: dict[str, Any] = {
        "spelling": f"aten:{op}",
        "source": "model.py:1",
        "direction": "forward",
        "region": "float16",
        "row": None,
        "run": "float16",
    }
    found = values if isinstance(values, Magnitudes) else magnitudes(values)
    return Measured(op=op, module=module, magnitudes=found, **(known | given))


def gradient(name: str, values: Any) -> Measured:
    return measured("gradient", name, values, spelling="", source="", direction="backward")


def fault() -> Fault:
    return Fault(
        op="matmul",
        spelling="aten:matmul",
        module="blocks.0.attn",
        source="model.py:22",
        direction="forward",
        kind="overflow",
        run="float16",
        row=IN_AMP,
        inputs=(Operand("float16", (4, 8), 0.5, 900.0, 0.0, 0.0, 0.0, name="q"),),
        found="Inf",
        why="sums reach 1.2e+05, and float16 ends at 65504.",
        region="float16",
    )


def audit(
    results: list[Measured], gradients: list[Measured], scale: float = 1.0, steps: int = 3
) -> Audit:
    made = Audit()
    made.results, made.gradients, made.scale, made.steps = results, gradients, scale, steps
    return made


FP32, FP16, BF16 = "float32", "float16", "bfloat16"
MATMUL = Row("class:matmul", Rule.LOWER, source="policies/torch-cuda.toml")
SOFTMAX = Row("softmax", Rule.FP32, source="policies/torch-cuda.toml")
ADD = Row("add", Rule.WIDEST, scope="*.head", source="mine")
KIB = 1024


def call(op: str, module: str, **given: Any) -> Call:
    """A call in a bfloat16 region of torch, unless something else is given."""
    known: dict[str, Any] = {
        "backend": "torch",
        "spelling": f"aten:{op}",
        "source": "model.py:1",
        "direction": FORWARD,
        "region": BF16,
        "row": None,
        "inputs": (BF16,),
        "run": BF16,
        "outputs": (BF16,),
    }
    return Call(op=op, module=module, **(known | given))


def linear(module: str, source: str, **given: Any) -> Call:
    known: dict[str, Any] = {
        "row": MATMUL,
        "inputs": (FP32, FP32, FP32),
        "casts": 3,
        "cast_bytes": 72 * KIB,
        "flops": 2_000_000,
    }
    return call("linear", module, source=source, **(known | given))


def in_torch() -> Report:
    """Three modules and one call outside; a linear that ran three times; both directions."""
    embed, attn, head = "embed", "blocks.0.attn", "head"
    return Report(
        [
            call("embedding", embed, source="model.py:9", inputs=(FP32,), run="", outputs=(FP32,)),
            linear(attn, "model.py:20"),
            linear(attn, "model.py:20"),
            linear(attn, "model.py:20", casts=1, cast_bytes=24 * KIB, saved=(("cached", 2),)),
            call(
                "softmax",
                attn,
                spelling="aten:softmax.int",
                source="model.py:22",
                row=SOFTMAX,
                run=FP32,
                outputs=(FP32,),
                casts=1,
                cast_bytes=600 * KIB,
                kept=3 * KIB * KIB // 2,
            ),
            linear(head, "model.py:31", flops=9_000_000),
            call("add", head, source="model.py:32", inputs=(BF16, FP32), run=FP32, outputs=(FP32,)),
            call(
                "sum",
                "",
                source="train.py:7",
                inputs=(FP32,),
                region="",
                run=FP32,
                outputs=(FP16,),
                flops=80_000,
            ),
            call("matmul", head, source="model.py:31", direction=BACKWARD, flops=18_000_000),
            call("matmul", attn, source="model.py:20", direction=BACKWARD, flops=4_000_000),
            call("relu", attn, source="model.py:21", direction=RECOMPUTE),
        ],
        title="Net",
        low=BF16,
        policy="amp",
    )


def in_jax() -> Report:
    """The same model as flax would name it: another add, no sum, and a softmax in two."""
    embed, attn, head = "Net.embed", "Net.blocks.layers.0.attn", "Net.head"
    given = {"backend": "jax"}
    return Report(
        [
            call(
                "embedding", embed, source="net.py:4", inputs=(FP32,), run="", outputs=(FP32,)
            )._replace(**given),
            *(linear(attn, "net.py:8", inputs=(FP32, FP32))._replace(**given) for _ in range(3)),
            call("exp", attn, source="net.py:9", row=SOFTMAX)._replace(**given),
            linear(head, "net.py:12", inputs=(FP32, FP32), flops=9_000_000)._replace(**given),
            call("add", head, source="net.py:12", inputs=(BF16, BF16), row=ADD)._replace(**given),
        ],
        title="net",
        low=BF16,
        policy="amp",
    )


def long(sites: int) -> Report:
    """As many call sites as asked, no two alike, in a hundred modules."""
    return Report(
        [
            linear(
                f"blocks.{i % 100}.mlp",
                f"model.py:{i}",
                cast_bytes=(i * 7919) % 10_007 * KIB,
                direction=BACKWARD if i % 3 == 2 else FORWARD,
                flops=i * 1000,
            )
            for i in range(sites)
        ],
        title="a long program",
        low=BF16,
        policy="amp",
    )


def line_of(fn: Callable[..., Any], text: str) -> str:
    """The place of the one line of a function that has a text in it."""
    lines, first = inspect.getsourcelines(fn)
    (at,) = (number for number, line in enumerate(lines, first) if text in line)
    return f"{Path(inspect.getfile(fn)).name}:{at}"


def only(report: Report, op: str, direction: str) -> Call:
    """The one call of an op in a direction."""
    (call,) = (c for c in report.of(op) if c.direction == direction)
    return call
