"""The cost of `explain`, `audit` and `catch` of a training step, beside the step.

In JAX nothing runs for `explain`: it traces the example's loss and gradient, and reads what it
finds off the trace; the base is `jax.make_jaxpr` of the same function. In torch the step runs; the
base is the step without anybody looking.

`audit` is of the example's whole training steps, with its optimizer and scaler, in processor time
on one core: of a step inside the block in torch, of a call in JAX, with its twin compiled. What it
takes to enter the block, and to read all when it ends, is a row of its own. The sizes are those
that the example has on this machine; the record has them. `make bench` runs it.
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
CATCH_BAR = 1.03
EVERY = 100  # steps from one copy of `catch` to the next
STEPS = 4  # in a block
DTYPES = ("fp32", "bf16", "fp16")
ALPHABET = 100

Program = Callable[[], Any]


def sizes() -> argparse.Namespace:
    """The example's sizes on this machine."""
    return job.arguments(job.parser("train.py", "", job.default_sizes()), [])


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


Training = tuple[torch.nn.Module, polymp.torch.GradScaler, Callable[[], torch.Tensor]]


def training_in_torch(name: str) -> Training:
    """The example's model, its scaler, and its training step."""
    args = sizes()
    torch.manual_seed(args.seed)
    model = train_torch.Transformer(ALPHABET, args.context, args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    scaler = polymp.torch.GradScaler("cpu", enabled=name == "fp16")
    tokens = torch.randint(ALPHABET, (args.batch, args.context + 1))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with polymp.torch.autocast("cpu", train_torch.DTYPES[name], enabled=name != "fp32"):
            loss = train_torch.loss_on(model, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, scaler, step


def audited_in_torch(name: str) -> dict[str, Timed]:
    """A step of the example's training: alone, in an audit of several, and by the whole of it."""
    model, scaler, step = training_in_torch(name)

    def steps() -> float:
        start = time.process_time()
        for _ in range(STEPS):
            step()
        return (time.process_time() - start) / STEPS

    def inside() -> float:
        with polymp.torch.audit(model, scaler):
            return steps()

    def whole() -> float:
        return timed(inside, clock=time.process_time)() / STEPS

    return {"step": steps, "inside": inside, "whole": whole}


def caught_in_torch(name: str) -> dict[str, Timed]:
    """As many steps as from one copy of the state to the next: alone, and with `catch`."""
    _, _, step = training_in_torch(name)
    caught = polymp.torch.catch(step, every=EVERY)

    def many(step: Program) -> Timed:
        return timed(lambda: [step() for _ in range(EVERY)], clock=time.process_time)

    return {"step": many(step), "caught": many(caught)}


def training_in_jax(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The example's training step, and its arguments."""
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
        def scaled(params: Any) -> Any:
            loss = region(params, tokens)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        (params, state), scaler, _ = scaler.step(grads, update, params, state)
        return params, state, scaler, loss

    return step, (params, adamw.init(params), scaler, tokens)


def caught_in_jax(name: str) -> dict[str, Timed]:
    """As many steps as from one copy of the state to the next: alone, and with `catch`."""
    step, given = training_in_jax(name)
    caught = polymp.jax.catch(step, every=EVERY)

    def many(step: Any) -> Timed:
        def steps() -> None:
            *state, tokens = given
            for _ in range(EVERY):
                *state, _ = step(*state, tokens)
            jax.block_until_ready(state)

        return timed(steps, clock=time.process_time)

    return {"step": many(step), "caught": many(caught)}


def audited_in_jax(name: str) -> dict[str, Timed]:
    """The example's training step: alone, and audited."""
    step, given = training_in_jax(name)
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


def catches(rounds: int) -> Iterator[Row]:
    """Steps with `catch` beside plain ones, in each dtype."""
    for framework, programs in (("torch", caught_in_torch), ("JAX", caught_in_jax)):
        for name in DTYPES:
            base, caught = measure(programs(name), rounds, warm=1).values()
            yield row(f"catch, {framework}, {name}: step / plain step", base, caught, CATCH_BAR)


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
    rows += catches(max(args.rounds // 5, 1))
    title = "explain, audit and catch, compared with the training step that they examine"
    show(title, rows)
    print(f"Bars missed: {', '.join(missed(rows)) or 'none'}.")
    record = {
        "machine": machine("torch", "jax", "jaxlib", "flax"),
        "rounds": args.rounds,
        "sizes": job.default_sizes()._asdict(),
        "tables": {title: rows},
        "notes": [
            "In JAX, the time of `explain` includes making all rows of the report.",
            "The times of audits are processor time on one core.",
        ],
    }
    save("seeing", "cpu", record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
