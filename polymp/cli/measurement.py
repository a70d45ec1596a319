"""The measurement of `polymp doctor`: products in every dtype, and the dtype to use for them.

shapes | a model's products -> product_times -> advice -> plain data
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from polymp import backends, progress
from polymp.cli.doctor import leave_memory
from polymp.cli.doctor_inputs import example, failed
from polymp.errors import UsageError
from polymp.speed import product_times
from polymp.speed.advice import FLOAT32, Found, Timed, advise, ratio, ways

Data = dict[str, Any]

# Of --measure: one token, few rows, small, and products of a transformer 512 and 1024 wide.
SHAPES = (
    (1, 1024, 4096),
    (16, 1024, 1024),
    (64, 64, 64),
    (128, 512, 512),
    (512, 512, 2048),
    (1024, 1024, 1024),
)

OF_SHAPES = "activations are in the low dtype; the weight is cast from float32 at each call"
OF_A_MODEL = "those that a bfloat16 region makes in one call of the model"


def measured(
    model: str | None,
    shapes: Sequence[tuple[int, int, int]] | None,
    frameworks: Sequence[str],
    seconds: float | None = None,
) -> list[Data]:
    """Measure products and choose the dtype to use for them."""
    leave_memory()
    budget = product_times.BUDGET if seconds is None else seconds
    if model is not None:
        return [_of_model(model, frameworks, budget)]
    asked = list(shapes or SHAPES)
    return [_of_shapes(name, asked, budget) for name in frameworks or _installed()]


def _installed() -> list[str]:
    """The first framework that is installed; torch if none is, for its error."""
    return [*backends.installed(), *backends.NAMES][:1]


def _of_model(text: str, frameworks: Sequence[str], budget: float) -> Data:
    with progress.line("polymp doctor") as line:
        line.stage("loading the model")
        framework, model, inputs = example(text)
    if frameworks and list(frameworks) != [framework]:
        what = {"torch": "a torch module", "jax": "a JAX function"}[framework]
        raise UsageError(
            f"--framework {' '.join(frameworks)}: the model of --model {text} is {what}. Leave "
            "--framework out."
        )
    backends.get(framework)
    try:
        found, device = _products(framework, model, inputs)
    except (Exception, SystemExit) as error:
        raise failed(text, error) from error
    if not found.products:
        raise UsageError(
            f"--model {text}: no matrix product or convolution of the model runs in bfloat16, or "
            "they are inside of fused layers, such as nn.LSTM, and cannot be seen."
        )
    return _data(framework, text, found, _bench(framework, device), budget, OF_A_MODEL)


def _products(framework: str, model: Any, inputs: tuple[Any, ...]) -> tuple[Found, str]:
    """The products of a model, and the type of the device that it is on."""
    if framework == "jax":
        from polymp.backends.jax.speed.products import products_of as of_function

        return of_function(model, inputs), ""
    from polymp.backends.torch.speed.products import device_of, products_of

    return products_of(model, inputs), device_of(model)


def _of_shapes(framework: str, shapes: Sequence[tuple[int, int, int]], budget: float) -> Data:
    with progress.line("polymp doctor") as line:
        line.stage(f"asking {framework}")
        backends.get(framework)
        bench = _bench(framework, "")
        found = Found([bench.linear(*shape) for shape in shapes], {})
    return _data(framework, "", found, bench, budget, OF_SHAPES)


def _bench(framework: str, device: str) -> Any:
    """The bench of a framework, on a device of this type, or "" for its default one."""
    if framework == "jax":
        from polymp.backends.jax.speed.product_bench import ProductBench as InJax

        return InJax()
    from polymp.backends.torch.speed.product_bench import ProductBench, default

    return ProductBench(device or default())


def _data(framework: str, model: str, found: Found, bench: Any, budget: float, casts: str) -> Data:
    start = time.perf_counter()
    rows, left = product_times.timed(found.products, bench, budget)
    took = time.perf_counter() - start
    advised = advise(rows)
    return {
        "framework": framework,
        "device": bench.device,
        "model": model,
        "clock": bench.clock,
        "took": took,
        "casts": casts,
        "products": [_row(row) for row in rows],
        "ratio": {way: ratio(rows, way)._asdict() for way in ways(rows)},
        "use": advised.use,
        "why": advised.why,
        "more": list(advised.more),
        "left_out": dict(found.left_out),
        "flops": sum(row.product.flops * row.product.times for row in rows),
        "lacking": {**bench.lacking, **left},
    }


def _row(row: Timed) -> Data:
    product = row.product._asdict()
    del product["call"]
    return product | {
        "shape": row.product.shape,
        "measured": row.measured,
        "seconds": dict(row.seconds),
        "ratio": _ratios(row.seconds),
        "spread": {way: list(ends) for way, ends in row.spread.items()},
        "use": advise([row]).use,
    }


def _ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    return {way: took / seconds[FLOAT32] for way, took in seconds.items()}
