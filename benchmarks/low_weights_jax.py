"""Low weights in JAX: the cost of a step, the bytes of its arguments, and losses of the example.

    cost    Adam on 25 million parameters in 25 matrices, jitted and donated, on float32 weights and
            in every mode, in turn. "update": the optimizer alone. "step": with the gradient of a
            loss in a bfloat16 region, of one product for each matrix. "floor": the step with the
            same arrays, in which weights are cast and added, without the rounding of the mode.
    bytes   of the jitted step's arguments, for each parameter.
    loss    the small model of examples/train_jax.py, 1,000 steps: float32 weights in a bfloat16
            region, bfloat16 weights alone ("naive"), and every mode, over the same seeds, in a
            process for each core; the curves are means of 50 steps, and the picture of
            docs/low-weights.md is drawn from them, of 3 seeds.

`make bench` runs it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from pairing import ROOT, Row, in_processes, machine, measure, row, save, show

from polymp.backends.jax.weights.low_weights import LowLeaf
from polymp.jax import autocast, low_weights

sys.path.insert(0, str(ROOT / "examples"))
import job
import train_jax

MODES = ("master", "split", "stochastic")
BAR_COST, BAR_LOSS, WINDOW = 1.15, 0.005, 50
BYTES = {"master": 16.1, "split": 14.1, "stochastic": 12.1}


@dataclass(frozen=True)
class Bytes:
    """Of the arguments of a step with Adam: parameters, their state and gradients."""

    weights: str
    bytes_a_parameter: float
    bar: float | None


@dataclass(frozen=True)
class Loss:
    """The held-out loss at the end, mean over seeds, in nats.

    `off` is relative to float32 weights; `spread` is the largest distance of a seed of float32
    weights from their mean, relative, too.
    """

    weights: str
    loss: float
    off: float
    spread: float
    bar: float | None


class Training:
    """Steps of a jitted program that reuses the memory of what it is given."""

    def __init__(self, mode: str | None, whole: bool, side: int = 1000, leaves: int = 25) -> None:
        keys = jax.random.split(jax.random.key(0), leaves)
        params = [jax.random.normal(key, (side, side)) / 32 for key in keys]
        self.data: Any = jax.random.normal(jax.random.key(1), (8, side))
        tx: Any = optax.adam(1e-4)
        if mode is not None:
            tx = low_weights(tx, mode)
        state = tx.init(params)
        params = params if mode is None else tx.weights(params)
        if not whole:
            self.data = jax.tree.map(jnp.ones_like, params)

        def loss(params: Any, x: Any) -> Any:
            for weight in params:
                x = jnp.tanh(x @ weight)
            return jnp.mean(x**2)

        def step(params: Any, state: Any, data: Any) -> Any:
            grads = jax.grad(autocast(loss))(params, data) if whole else data
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.step = jitted.lower(params, state, self.data).compile()
        self.state = jax.block_until_ready((params, state))
        self.count = leaves * side**2

    def __call__(self) -> float:
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.step(*self.state, self.data))
        return time.perf_counter() - start

    def bytes_a_parameter(self) -> float:
        return float(self.step.memory_analysis().argument_size_in_bytes) / self.count


def without_rounding() -> Any:
    """In this block, steps are traced in which weights are only cast and added."""

    def loaded(leaf: LowLeaf, low: Any, beside: Any) -> Any:
        wide = low.astype(jnp.float32)
        return wide if beside is None else wide + beside.astype(jnp.float32)

    def stepped(leaf: LowLeaf, low: Any, full: Any, step: Any, number: int) -> Any:
        beside = full.astype(leaf.mode.beside) if leaf.mode.beside else None
        return full - low.astype(jnp.float32), beside

    return patch.multiple(LowLeaf, loaded=loaded, stepped=stepped)


def jax_costs(rounds: int) -> list[Row]:
    """The cost of an update, and of a whole step, in every mode against float32 weights."""
    rows = []
    for what, whole in (("update", False), ("step", True)):
        for mode in MODES:  # few programs at a time, so that memory stays small
            programs: Any = {str(each): Training(each, whole) for each in (None, mode)}
            with without_rounding() if whole else nullcontext():
                programs |= {"floor": Training(mode, whole)} if whole else {}
            times = measure(programs, rounds)
            bar = BAR_COST if whole else None
            name = f"{mode} / float32"
            rows.append(row(f"JAX, {what}: {name}", times["None"], times[mode], bar))
            if whole:
                floor = row(f"JAX, {what}: floor of {name}", times["None"], times["floor"])
                rows.append(floor)
    return rows


def sizes() -> Iterator[Bytes]:
    """Bytes of the arguments of an update."""
    for mode in (None, *MODES):
        size = Training(mode, whole=False, leaves=2).bytes_a_parameter()
        yield Bytes(mode or "float32", round(size, 3), BYTES.get(mode or ""))


def train(weights: str, steps: int, seed: int) -> tuple[float, list[float]]:
    """The held-out loss of the example after its steps, and the losses of all steps."""
    given = ["--steps", str(steps), "--seed", str(seed), "--quiet"]
    args = job.arguments(job.parser("low_weights_jax.py", "", job.SMALL), given)
    text = job.read(args.text, args.context)
    graph, params = nnx.split(train_jax.first_model(text, args))

    @autocast
    def region(params: Any, tokens: Any) -> Any:
        return train_jax.loss_on(nnx.merge(graph, params), tokens)

    exam = jnp.asarray(job.held_out(text, args))
    make: Any = optax.inject_hyperparams(train_jax.optimizer)
    tx = make(rate=0.0)
    if weights in MODES:
        tx = low_weights(tx, weights, keep=(region, params, exam[: args.batch]))
        state, params = tx.init(params), tx.weights(params)
    elif weights == "naive":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        state = tx.init(params)
    else:
        state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, rate: Any) -> Any:
        loss, grads = jax.value_and_grad(region)(params, tokens)
        inner = state.inner if weights in MODES else state
        inner = inner._replace(hyperparams={**inner.hyperparams, "rate": rate})
        state = state._replace(inner=inner) if weights in MODES else inner
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rate_dtype = jnp.bfloat16 if weights == "naive" else jnp.float32
    losses = []
    for number, tokens in enumerate(job.batches(text, args)):
        rate = jnp.asarray(job.learning_rate(number, args), rate_dtype)
        params, state, loss = step(params, state, tokens, rate)
        losses.append(loss)
    held = jax.jit(region)
    parts = np.split(exam, range(args.batch, len(exam), args.batch))
    total = sum(float(held(params, part)) * len(part) for part in parts)
    return total / len(exam), [float(loss) for loss in losses]


def losses(steps: int, seeds: int) -> tuple[list[Loss], dict[str, list[float]]]:
    """The final loss with every kind of weights, and means of the losses of 50 steps each."""
    runs = [(w, steps, seed) for seed in range(seeds) for w in ("float32", "naive", *MODES)]
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for (weights, _, seed), result in zip(runs, in_processes(train, runs), strict=True):
        found.setdefault(weights, []).append(result)
        print(f"seed {seed}, {weights}: {result[0]:.4f}", flush=True)
    base = statistics.mean(loss for loss, _ in found["float32"])
    spread = max(abs(loss - base) / base for loss, _ in found["float32"])
    rows, curves = [], {}
    for weights, runs in found.items():
        mean = statistics.mean(loss for loss, _ in runs)
        bar = BAR_LOSS if weights in MODES else None
        curve = np.mean([np.reshape(each, (-1, WINDOW)).mean(1) for _, each in runs], 0)
        curves[weights] = [round(float(x), 4) for x in curve]
        off = round(mean / base - 1, 5)
        rows.append(Loss(weights, round(mean, 4), off, round(spread, 4), bar))
    return rows, curves


def main() -> int:
    """Measure, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="cost,bytes,loss", help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each program")
    parser.add_argument("--steps", type=int, default=1000, help="of the example")
    parser.add_argument("--seeds", type=int, default=1, help="of the example")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date")
    args = parser.parse_args()
    parts = args.parts.split(",")
    cost = jax_costs(args.rounds) if "cost" in parts else []
    size = list(sizes()) if "bytes" in parts else []
    loss, curves = losses(args.steps, args.seeds) if "loss" in parts else ([], {})
    show(f"Adam on 25 million parameters; jax {jax.__version__}, CPU", cost)
    show("bytes of the arguments of an update", size)
    show(f"examples/train_jax.py, {args.steps} steps: held-out loss", loss)
    missed = [r.what for r in cost if r.met is False]
    missed += [r.weights for r in size if r.bar is not None and r.bytes_a_parameter > r.bar]
    missed += [r.weights for r in loss if r.bar is not None and abs(r.off) > r.bar]
    print(f"Bars missed: {'; '.join(missed) or 'none'}.")
    record = {
        "machine": machine("jax", "optax", "flax"),
        "tables": {"a step on low weights, in JAX": cost},
        "lists": {
            "bytes of low weights, in JAX": size,
            "the example with low weights, in JAX": loss,
        },
        "curves": curves,
    }
    save("low-weights-jax", "cpu", record, args.out)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
