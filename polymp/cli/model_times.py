"""The time of a model's own step in float32, bfloat16 and float16, for `polymp doctor --model`.

model, inputs -> a step in each dtype -> rounds that run all of them -> the dtype to use
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polymp import backends, progress, text_table
from polymp.cli.user_model import error_line, example, failed, leave_memory

Data = dict[str, Any]
Step = Callable[[str], object]  # runs a step in a dtype and waits until it has finished

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
BUDGET = 5.0  # seconds of rounds
ROUNDS = 3, 200  # at least and at most
SHORTEST = 5e-3  # seconds of a figure: a shorter step runs several times
GAIN = 0.95  # a low dtype that takes a larger part of float32's time gains nothing beyond noise
WORTH_A_SCALER = 0.8  # float16 is advised if it takes a smaller part of bfloat16's time


def timed(text: str, budget: float = BUDGET) -> Data:
    """Time the step of the model that `MODULE:FUNCTION` returns, and choose its dtype."""
    leave_memory()
    with progress.line("polymp doctor") as line:
        line.stage("loading the model")
        framework, model, inputs = example(text)
        backends.get(framework)
        line.stage("running it in each dtype")
        step, device, passes = (_torch if framework == "torch" else _jax)(model, inputs)
        start = time.perf_counter()
        lacking = dict[str, str]()
        for dtype in (FLOAT32, BFLOAT16, FLOAT16):
            try:
                step(dtype)
            except (Exception, SystemExit) as error:
                if dtype == FLOAT32:
                    raise failed(text, error) from error
                lacking[dtype] = error_line(error)
        dtypes = [d for d in (FLOAT32, BFLOAT16, FLOAT16) if d not in lacking]
        rounds = _rounds(step, dtypes, budget)
    ratios = {dtype: _ratio(rounds[dtype], rounds[FLOAT32]) for dtype in dtypes[1:]}
    use, why = advised(ratios)
    return {
        "framework": framework,
        "device": device,
        "model": text,
        "passes": passes,
        "took": time.perf_counter() - start,
        "rounds": len(rounds[FLOAT32]),
        "seconds": {dtype: statistics.median(rounds[dtype]) for dtype in dtypes},
        "ratio": ratios,
        "use": use,
        "why": why,
        "lacking": lacking,
    }


def _torch(model: Any, inputs: tuple[Any, ...]) -> tuple[Step, str, str]:
    import torch
    from torch.utils._pytree import tree_leaves

    from polymp.torch import autocast

    device = next((p.device.type for p in model.parameters()), "cpu")
    trains = model.training and any(p.requires_grad for p in model.parameters())

    def step(dtype: str) -> None:
        low = None if dtype == FLOAT32 else dtype
        with torch.set_grad_enabled(trains):
            with autocast(device, low, enabled=low is not None):
                results = tree_leaves(model(*inputs))
            ends = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            if trains and ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
                model.zero_grad()
        if device != "cpu":
            torch.accelerator.synchronize()

    return step, device, "forward and backward" if trains else "forward"


def _jax(function: Any, inputs: tuple[Any, ...]) -> tuple[Step, str, str]:
    import jax

    from polymp.backends.jax.modules import nnx
    from polymp.jax import autocast

    function, inputs = nnx.owned(function, inputs)
    jit: Callable[[Any], Any] = jax.jit
    if nnx.among(inputs):
        from flax import nnx as flax_nnx

        jit = flax_nnx.jit
    compiled = {dtype: jit(autocast(function, dtype=dtype)) for dtype in (BFLOAT16, FLOAT16)}
    compiled[FLOAT32] = jit(function)

    def step(dtype: str) -> None:
        jax.block_until_ready(compiled[dtype](*inputs))

    return step, jax.default_backend(), "one call, compiled"


def _rounds(step: Step, dtypes: list[str], budget: float) -> Mapping[str, list[float]]:
    """Seconds of a step by dtype; a round runs all dtypes, each round another one first."""

    def seconds(dtype: str, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            step(dtype)
        return (time.perf_counter() - start) / times

    times = {dtype: max(1, round(SHORTEST / seconds(dtype, 1))) for dtype in dtypes}
    end = time.perf_counter() + budget
    found: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for at in range(ROUNDS[1]):
        if at >= ROUNDS[0] and time.perf_counter() >= end:
            break
        first = at % len(dtypes)
        for dtype in dtypes[first:] + dtypes[:first]:
            found[dtype].append(seconds(dtype, times[dtype]))
    return found


def _ratio(low: list[float], wide: list[float]) -> Data:
    """The median of times over that of float32's, and the quartiles of the rounds' ratios."""
    quartiles = statistics.quantiles([a / b for a, b in zip(low, wide, strict=True)])
    ratio = statistics.median(low) / statistics.median(wide)
    return {"ratio": ratio, "low": quartiles[0], "high": quartiles[2]}


def advised(ratios: Mapping[str, Data]) -> tuple[str, str]:
    """The dtype to use, by the ratios of the low dtypes to float32, and the reason."""
    times = ", ".join(f"{dtype} {r['ratio']:.2f}" for dtype, r in ratios.items())
    fast = {d: r["ratio"] for d, r in ratios.items() if r["ratio"] <= GAIN and r["high"] < 1}
    if not fast:
        return FLOAT32, f"no low dtype gains, as multiples of float32's time: {times or 'none ran'}"
    if fast.get(FLOAT16, 1.0) < WORTH_A_SCALER * fast.get(BFLOAT16, 1 / WORTH_A_SCALER):
        return FLOAT16, f"{times} of float32's time; it needs a GradScaler in training"
    return BFLOAT16, f"{times} of float32's time; it needs no GradScaler"


def draw(data: Data) -> Iterator[str | list[str]]:
    """The times, and the dtype to use."""
    yield (
        f"{data['model']} in {data['framework']} on {data['device']}, {data['passes']}: "
        f"{data['rounds']} rounds in {data['took']:.1f} s"
    )
    ratios = {
        dtype: f"{r['ratio']:.2f}  ({r['low']:.2f} to {r['high']:.2f})"
        for dtype, r in data["ratio"].items()
    }
    rows = [(dtype, _time(s), ratios.get(dtype, "1")) for dtype, s in data["seconds"].items()]
    yield ["", *text_table.columns(("dtype", "time", "of float32's"), rows), ""]
    yield f"use {data['use']}: {data['why']}"
    yield from (f"{dtype} does not run: {why}" for dtype, why in data["lacking"].items())


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
