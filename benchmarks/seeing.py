"""The cost of `explain` and `audit` of a training step, beside the step.

In JAX nothing runs for `explain`: it traces the example's loss and gradient, and reads what it
finds off the trace; the base is `jax.make_jaxpr` of the same function. In torch the step runs; the
base is the step without anybody looking.

`audit` is of the example's whole training steps, with its optimizer and scaler, in processor time
on one core: of a step inside the block in torch, of a call in JAX, with its twin compiled. What it
takes to enter the block, and to read all when it ends, is a row of its own. `make bench` runs it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from pairing import Row, Timed, machine, measure, missed, row, save, show, timed

import polymp
import polymp.jax
import polymp.torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import job
import train_jax
import train_torch

BAR = 2.0  # explain in JAX, against make_jaxpr
AUDIT_BAR = 3.0
STEPS = 4  # in a block
DTYPES = ("fp32", "bf16", "fp16")
ALPHABET = 100

Program = Callable[[], Any]


def sizes() -> argparse.Namespace:
    """The example's own sizes."""
    return job.arguments(job.parser("train.py", ""), [])


def in_jax(layers: int) -> dict[str, Program]:
    """The example's loss and gradient: traced, and explained to the last row."""
    args = sizes()
    model = train_jax.Transformer(
        ALPHABET, args.context, args.width, layers, args.heads, nnx.Rngs(0)
    )
    graph, params = nnx.split(model)
    tokens = jnp.zeros((args.batch, args.context + 1), "int32")

    def step() -> Any:
        """A new function each time: what was traced before is kept by the function."""

        def loss(params: Any, tokens: Any) -> Any:
            return train_jax.loss_on(nnx.merge(graph, params), tokens)

        return jax.value_and_grad(polymp.jax.autocast(loss, dtype=jnp.bfloat16))

    return {
        "make_jaxpr": lambda: jax.make_jaxpr(step())(params, tokens),
        "explain": lambda: polymp.explain(step(), params, tokens).calls,
    }


def in_torch(dtype: torch.dtype) -> dict[str, Program]:
    """The example's training step, without an optimizer: alone, and explained."""
    args = sizes()
    torch.manual_seed(args.seed)
    model = train_torch.Transformer(ALPHABET, args.context, args.width, args.layers, args.heads)
    tokens = torch.randint(ALPHABET, (args.batch, args.context + 1))

    def step() -> None:
        model.zero_grad()
        with polymp.torch.autocast("cpu", dtype):
            loss = train_torch.loss_on(model, tokens)
        loss.backward()

    def explained() -> Any:
        with polymp.torch.explain(model=model) as report:
            step()
        return report.calls

    return {"step": step, "explain": explained}


def audited_in_torch(name: str) -> dict[str, Timed]:
    """A step of the example's training: alone, in an audit of several, and by the whole of it."""
    args = sizes()
    torch.manual_seed(args.seed)
    model = train_torch.Transformer(ALPHABET, args.context, args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    scaler = polymp.torch.GradScaler("cpu", enabled=name == "fp16")
    tokens = torch.randint(ALPHABET, (args.batch, args.context + 1))

    def steps() -> float:
        start = time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            with polymp.torch.autocast("cpu", train_torch.DTYPES[name], enabled=name != "fp32"):
                loss = train_torch.loss_on(model, tokens)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return (time.process_time() - start) / STEPS

    def inside() -> float:
        with polymp.torch.audit(model, scaler):
            return steps()

    def whole() -> float:
        return timed(inside, clock=time.process_time)() / STEPS

    return {"step": steps, "inside": inside, "whole": whole}


def audited_in_jax(name: str) -> dict[str, Timed]:
    """The example's training step: alone, and audited."""
    args = sizes()
    shape = args.context, args.width, args.layers, args.heads
    graph, params = nnx.split(train_jax.Transformer(ALPHABET, *shape, nnx.Rngs(0)))
    scaler = polymp.jax.GradScaler(enabled=name == "fp16")
    adamw = train_jax.optimizer(1e-3)
    tokens = jnp.zeros((args.batch, args.context + 1), "int32")

    @polymp.jax.autocast(dtype=train_jax.DTYPES[name], enabled=name != "fp32")
    def region(params: Any, tokens: Any) -> Any:
        return train_jax.loss_on(nnx.merge(graph, params), tokens)

    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, state = adamw.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(params: Any, state: Any, scaler: Any, tokens: Any) -> Any:
        grads = jax.grad(lambda params: scaler.scale(region(params, tokens)))(params)
        return scaler.step(grads, update, params, state)

    given = params, adamw.init(params), scaler, tokens
    audited = polymp.jax.audit(step)
    programs: dict[str, Program] = {
        "step": lambda: jax.block_until_ready(step(*given)),
        "call": lambda: jax.block_until_ready((audited(*given), audited._measured.pop()[1])),
    }
    return {name: timed(run, clock=time.process_time) for name, run in programs.items()}


def audits(rounds: int) -> Iterator[Row]:
    """Audited steps beside plain ones, in each dtype."""
    for name in DTYPES:
        base, inside, whole = measure(audited_in_torch(name), rounds).values()
        yield row(f"audit, torch, {name}: step / plain step", base, inside, AUDIT_BAR)
        yield row(f"audit, torch, {name}: {STEPS} steps, entered and read / plain", base, whole)
    for name in DTYPES:
        base, inside = measure(audited_in_jax(name), rounds).values()
        yield row(f"audit, JAX, {name}: call / plain step", base, inside, AUDIT_BAR)


def compared(what: str, programs: dict[str, Program], rounds: int, bar: float | None = None) -> Row:
    """The second program against the first."""
    times = measure({name: timed(run) for name, run in programs.items()}, rounds)
    base, ours = times.values()
    return row(what, base, ours, bar)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons, print the table, save it as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8], help="of JAX's model")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [
        compared(f"explain, JAX, {layers} layers: explain / make_jaxpr",
                 in_jax(layers), args.rounds, BAR)
        for layers in args.layers
    ]  # fmt: skip
    rows += [
        compared(f"explain, torch, {dtype}: explain / step", in_torch(dtype), args.rounds)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    rows += audits(args.rounds)
    title = "Looking at a training step, compared with the step itself"
    show(title, rows)
    print(f"Bars missed: {', '.join(missed(rows)) or 'none'}.")
    record = {
        "machine": machine("torch", "jax", "jaxlib", "flax"),
        "rounds": args.rounds,
        "tables": {title: rows},
        "notes": [
            "In JAX the time of `explain` includes making all rows of the report.",
            "Audits are in processor time, on one core.",
        ],
    }
    save("seeing", "cpu", record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
