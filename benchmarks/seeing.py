"""What it costs to look: `explain` of a training step beside the step, or beside its trace.

In JAX nothing runs: `explain` traces the example's loss and gradient, and reads what it finds off
the trace; the base is `jax.make_jaxpr` of the same function. In torch the step runs; the base is
the step without anybody looking. `make bench` runs it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from pairing import Row, machine, measure, missed, row, save, show, timed

import polymp
import polymp.jax
import polymp.torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import job
import train_jax
import train_torch

BAR = 2.0  # explain in JAX, against make_jaxpr
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
    rows = [
        compared(f"explain, JAX, {layers} layers: explain / make_jaxpr",
                 in_jax(layers), args.rounds, BAR)
        for layers in args.layers
    ]  # fmt: skip
    rows += [
        compared(f"explain, torch, {dtype}: explain / step", in_torch(dtype), args.rounds)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    title = "Looking at a training step beside the step itself"
    show(title, rows)
    print(f"Bars missed: {', '.join(missed(rows)) or 'none'}.")
    record = {
        "machine": machine("torch", "jax", "jaxlib", "flax"),
        "rounds": args.rounds,
        "tables": {title: rows},
        "notes": ["In JAX the report is made to its last row, which takes a part of the time."],
    }
    save("seeing", "cpu", record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
