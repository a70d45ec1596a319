"""Products in 8 bits beside those in bfloat16: time, and memory saved for the backward pass.

    layers     Linears as in a Llama, forward and backward, in a bfloat16 region: under torch.amp's
               rules (JAX: `amp`), and under policy `fp8` with every recipe, in turn; processor
               time. Beside them float32: a CPU without instructions for bfloat16 is slow in it.
    saved      bytes that a forward pass leaves to the backward pass, parameters aside: of a block
               as in a Llama, and of examples/train_torch.py and train_jax.py.
    compiled   on a GPU alone: the block 4096 wide, a forward and a backward pass under
               torch.compile, beside torchao's layers and bfloat16; `make gpu` runs it.

`make bench` runs the first two.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from pairing import ROOT, Row, machine, measure, missed, row, save, show, timed

import polymp
import polymp.jax
import polymp.torch
from polymp.fp8 import RECIPES

sys.path.insert(0, str(ROOT / "examples"))
import job
import train_jax
import train_torch

from tests.support.jax import fp8_models as in_jax
from tests.support.jax.hlo import residual_bytes
from tests.support.torch import fp8_models as in_torch

LOW, WIDE = "bfloat16", "float32"
SAVED_BAR = 0.65  # of the recipes that save activations in 8 bits
SPEED_BAR = 1.05  # beside torchao, on a GPU
TORCHAO = {name: name.replace("gw_hp", "with_gw_hp") for name in RECIPES}
REASONS = {
    "torch, example: tensorwise / bfloat16": (
        "Of what bfloat16 saves there, more than half is not of products, and is saved in bfloat16 "
        "in both: queries, keys, values and the result of attention, and the inputs of gelu and of "
        "normalisations."
    ),
}
REASONS["torch, example: rowwise / bfloat16"] = REASONS["torch, example: tensorwise / bfloat16"]


class Size(NamedTuple):
    """Sizes of the layers and of the block.

    Attributes:
        rows: of a layer's input.
        layers: inputs and outputs of each.
        width: of the block.
        inner: of its gated network.
        heads: of its attention.
        tokens: of its input.
    """

    rows: int = 512
    layers: tuple[tuple[int, int], ...] = ((1024, 1024), (1024, 2816), (2816, 1024))
    width: int = 256
    inner: int = 704
    heads: int = 8
    tokens: int = 256


SMALL = Size(32, ((32, 32), (32, 64)), 32, 64, 2, 32)
LARGE = Size(width=4096, inner=11008, heads=32, tokens=4096)


def policies() -> dict[str, Any]:
    """The policies, by name: of bfloat16, and of every recipe."""
    return {LOW: None, **{name: in_torch.policy(name) for name in RECIPES}}


# --- time -----------------------------------------------------------------------------------------


def torch_layer(
    policy: Any, rows: int, inputs: int, outputs: int, dtype: str = LOW
) -> Callable[[], Any]:
    """Forward and backward of a Linear in torch; its input has a gradient, too."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    kind = getattr(torch, dtype)
    x = torch.randn(rows, inputs).to(kind).requires_grad_()
    gradient = torch.randn(rows, outputs).to(kind)

    def step() -> None:
        layer.weight.grad = x.grad = None
        with polymp.torch.autocast("cpu", torch.bfloat16, dtype == LOW, policy=policy):
            y = layer(x)
        y.backward(gradient)

    return step


def jax_layer(
    policy: Any, rows: int, inputs: int, outputs: int, dtype: str = LOW
) -> Callable[[], Any]:
    """The same in JAX, compiled."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
    x, w, gradient = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    x, gradient = x.astype(dtype), gradient.astype(dtype)
    layer = polymp.jax.autocast(jnp.matmul, enabled=dtype == LOW, policy=policy)

    @jax.jit
    def step(x: Any, w: Any, gradient: Any) -> Any:
        y, pull = jax.vjp(layer, x, w)
        return y, pull(gradient)

    return lambda: jax.block_until_ready(step(x, w, gradient))


def layers(framework: str, size: Size, rounds: int) -> Iterator[Row]:
    """Rows for each layer: every recipe beside bfloat16, and bfloat16 beside float32."""
    make = {"torch": torch_layer, "JAX": jax_layer}[framework]
    for inputs, outputs in size.layers:
        programs = {
            name: timed(make(policy, size.rows, inputs, outputs), clock=time.process_time)
            for name, policy in policies().items()
        }
        wide = make(None, size.rows, inputs, outputs, WIDE)
        programs[WIDE] = timed(wide, clock=time.process_time)
        times = measure(programs, rounds, warm=1)
        layer = f"{framework}, {size.rows} x {inputs} x {outputs}"
        for name in RECIPES:
            yield row(f"{layer}: {name} / {LOW}", times[LOW], times[name])
        yield row(f"{layer}: {LOW} / {WIDE}", times[WIDE], times[LOW])


# --- memory ---------------------------------------------------------------------------------------


def torch_saved(size: Size) -> dict[str, Callable[[Any], int]]:
    """Functions of a policy: the bytes that the block and the example save in torch."""
    args, text = _example()
    block = in_torch.Llama(size.width, size.heads, size.inner)
    x = torch.randn(1, size.tokens, size.width, requires_grad=True)
    example = train_torch.first_model(text, args)
    tokens = torch.from_numpy(next(iter(job.batches(text, args))))[:, :-1]
    return {
        "block": partial(in_torch.saved_bytes, block, x),
        "example": partial(in_torch.saved_bytes, example, tokens),
    }


def jax_saved(size: Size) -> dict[str, Callable[[Any], int]]:
    """The same in JAX; there the example's loss counts, too."""
    args, text = _example()
    graph, params = nnx.split(in_jax.Llama(size.width, size.inner, size.heads))
    inputs = params, jnp.ones((1, size.tokens, size.width))
    graph_of_example, example = nnx.split(train_jax.first_model(text, args))
    tokens = next(iter(job.batches(text, args)))

    def block(inputs: Any) -> Any:
        return nnx.merge(graph, inputs[0])(polymp.jax.lower(inputs[1]))

    def loss(params: Any, tokens: Any) -> Any:
        return train_jax.loss_on(nnx.merge(graph_of_example, params), tokens)

    def saved(fn: Any, params: Any, *rest: Any, policy: Any) -> int:
        return residual_bytes(polymp.jax.autocast(fn, policy=policy), params, *rest)

    return {
        "block": lambda policy: saved(block, inputs, policy=policy),
        "example": lambda policy: saved(loss, example, tokens, policy=policy),
    }


def _example() -> Any:
    args = job.arguments(job.parser("fp8.py", "", job.SMALL), ["--quiet"])
    return args, job.read(args.text, args.context)


def saved(framework: str, size: Size) -> Iterator[Row]:
    """A row for each model and recipe, beside bfloat16; megabytes."""
    for model, count in {"torch": torch_saved, "JAX": jax_saved}[framework](size).items():
        counts = {name: count(policy) / 1e6 for name, policy in policies().items()}
        for name, recipe in RECIPES.items():
            bar = None if recipe.weight_gradient_high else SAVED_BAR
            what = f"{framework}, {model}: {name} / {LOW}"
            yield row(what, [counts[LOW]], [counts[name]], bar, "MB")


# --- compiled, beside torchao ---------------------------------------------------------------------


def compiled(device: str, size: Size, rounds: int) -> dict[str, Any]:
    """The block under torch.compile: bfloat16, polymp and torchao, by recipe; tables and missing.

    Args:
        device: "cuda"; or "cpu", to see that it runs.
        size: of the block.
        rounds: figures of each way.

    Returns:
        "tables" and "missing" of a record.
    """
    torch.manual_seed(0)
    with torch.device(device):
        block = in_torch.Llama(size.width, size.heads, size.inner)
        x = torch.randn(1, size.tokens, size.width, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn_like(x)

    def program(model: torch.nn.Module, policy: Any) -> Callable[[], Any]:
        run = torch.compile(model, fullgraph=True)

        def step() -> None:
            model.zero_grad()
            x.grad = None
            with polymp.torch.autocast(device, torch.bfloat16, policy=policy):
                y = run(x)
            y.backward(gradient.to(y.dtype))

        return step

    found: list[Row] = []
    missing: dict[str, str] = {}
    finish = torch.cuda.synchronize if device == "cuda" else None
    for name in RECIPES:
        torch.compiler.reset()
        ways = {LOW: program(copy.deepcopy(block), None)}
        ways["polymp"] = program(copy.deepcopy(block), in_torch.policy(name))
        try:
            ways["torchao"] = program(_with_torchao(block, name), None)
        except ImportError as error:
            missing["torchao"] = str(error)
        times = measure({way: timed(p, finish=finish) for way, p in ways.items()}, rounds)
        found.append(row(f"{name}: polymp / {LOW}", times[LOW], times["polymp"]))
        if "torchao" in times:
            found.append(row(f"{name}: torchao / {LOW}", times[LOW], times["torchao"]))
            found.append(
                row(f"{name}: polymp / torchao", times["torchao"], times["polymp"], SPEED_BAR)
            )
    title = f"A block as in a Llama, {size.width} wide, {size.tokens} tokens, compiled"
    return {"tables": {title: found}, "missing": missing}


def _with_torchao(block: torch.nn.Module, recipe: str) -> torch.nn.Module:
    """A copy of a block with torchao's layers in place of Linears."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(TORCHAO[recipe])
    made: torch.nn.Module = convert_to_float8_training(copy.deepcopy(block), config=config)
    return made


# --- the program ----------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables, save them as JSON; 1 if a bar is missed without a reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="figures of each program")
    parser.add_argument("--small", action="store_true", help="tiny sizes; give --out")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date")
    args = parser.parse_args(argv)
    if args.small and args.out is None:
        parser.error("--small: give --out, as its figures are not to be kept with the others")
    torch.set_num_threads(1)
    size = SMALL if args.small else Size()
    times, memory = (
        [r for framework in ("torch", "JAX") for r in rows(framework)]
        for rows in (lambda f: layers(f, size, args.rounds), lambda f: saved(f, size))
    )
    show(f"Linears, forward and backward; torch {torch.__version__}, jax {jax.__version__}", times)
    show("saved for the backward pass", memory)
    unmet = missed([*times, *memory])
    reasons = {what: why for what, why in REASONS.items() if what in unmet}
    record = {
        "machine": machine("torch", "jax", "jaxlib"),
        "threads": 1,
        "size": size._asdict(),
        "tables": {
            "Linears in 8 bits, forward and backward": times,
            "Saved for the backward pass, in 8 bits": memory,
        },
        "notes": [
            "Times are processor time, rows x inputs x outputs. torch runs on one thread.",
            f"The block is as in a Llama, {size.width} wide, {size.tokens} tokens.",
        ],
        "missing": {
            "the block 4096 wide, compiled, beside torchao": "it needs a GPU",
        },
        "reasons": reasons,
    }
    save("fp8-layers", "cpu", record, args.out)
    return int(bool(set(unmet) - set(reasons)))


if __name__ == "__main__":
    sys.exit(main())
