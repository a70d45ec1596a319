"""Audits made by hand, from numpy arrays: what a backend measures, counted here one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, Operand
from polymp.diagnostics.magnitudes import BINS, SHIFT, Magnitudes
from polymp.rules.row import Row, Rule

MATMUL = Row("class:matmul", Rule.LOWER, source="policies/amp.toml")


def magnitudes(values: Any, **given: Any) -> Magnitudes:
    """Make the magnitudes of an array, from float32's own bits without the sign."""
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
        row=MATMUL,
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


def transformer(depth: int, faulty: bool = True) -> Audit:
    """A network whose activations grow and whose gradients shrink with the depth: 60 modules long
    or more, as is asked. One module overflows, one has no gradient, one is zero.
    """
    random = np.random.default_rng(0)
    results, gradients = [], []
    for i in range(depth):
        part = ("attn.q_proj", "attn.out_proj", "norm", "mlp.up", "mlp.down")[i % 5]
        module = f"encoder.blocks.{i // 5}.{part}"
        forward = random.lognormal(-1 + 5 * i / depth, 1.5, 4000)
        backward = random.lognormal(-20 + 9 * i / depth, 2.0, 4000)
        if faulty and i == depth // 2:
            forward[:3] = np.inf
            backward[:3] = np.nan
            backward[4] = np.inf
        if i == depth - 2:
            backward[:] = 0
        results.append(measured("linear", module, forward, source=f"model.py:{i}"))
        if i % 3:
            back = {"direction": "backward", "source": f"model.py:{i}"}
            results.append(measured("matmul", module, backward * 4, **back))
        if i != 2:
            gradients.append(gradient(f"{module}.weight", backward))
    results.append(measured("cross_entropy", "", [2.5], source="train.py:9", run="float32"))
    made = audit(results, gradients, scale=65536.0)
    made.fault = fault() if faulty else None
    return made
