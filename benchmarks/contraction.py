"""The contraction in each form in which polymp could lower it: how fast, and how exact.

Shapes of a transformer: forward, and both gradients, of one operand that is an activation and of
one that is a parameter where there is one. The forms are those of contraction.py in
backends/jax/autocast, where `FORMS` says which one a platform gets; whether rightly, is what this
shows. Beside them float32 operands. Programs run in turn; the ratio of the medians is what counts,
and the middle half of the paired ratios stands beside it.

    python benchmarks/contraction.py              # about 2 minutes on two cores
    python benchmarks/contraction.py --rounds 3 --shapes attention
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pairing import Row, machine, measure, row, save, show, timed

from polymp.backends.jax.autocast import contraction

PLAIN = "float32 operands"
FORMS: dict[str, Callable[..., Any]] = {
    "row by row": contraction.row_by_row,
    "as asked": contraction.result_as_asked,
    "float32 result": partial(contraction.result_as_asked, accumulator="float32"),
    "widened": contraction.widened,
}
PARTS = ("forward", "gradient of the left", "gradient of the right")
LOW = "bfloat16"
TITLE = "Matrix products of bfloat16 operands"


@dataclass(frozen=True)
class Shape:
    """A contraction: an activation times a parameter, or two activations.

    Attributes:
        lhs: shape of the left operand, an activation.
        rhs: shape of the right one.
        dims: as `lax.dot_general` has them.
        weight: whether the right one is a float32 parameter, whose gradient is not rounded.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dims: Any
    weight: bool = True


def shapes(scale: float = 1) -> dict[str, Shape]:
    """Products of a transformer with four sequences of 256 tokens; all lengths times `scale`."""

    def to(*lengths: int) -> tuple[int, ...]:
        return tuple(max(round(n * scale), 1) for n in lengths)

    def linear(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[str, Shape]:
        sizes = " . ".join(" x ".join(map(str, shape)) for shape in (left, right))
        dims = (((len(left) - 1,), (0,)), ((), ()))
        return f"{name}, {sizes}", Shape(left, right, dims)

    return {
        **dict([
            linear("up", to(4, 256, 512), to(512, 2048)),
            linear("down", to(4, 256, 2048), to(2048, 512)),
            linear("matrix", to(1024, 512), to(512, 2048)),
            linear("head", to(4, 256, 512), to(512, 4096)),
        ]),
        "attention, queries . keys": Shape(
            to(4, 8, 256, 64), to(4, 8, 256, 64), (((3,), (3,)), ((0, 1), (0, 1))), False
        ),
        "attention, weights . values": Shape(
            to(4, 8, 256, 256), to(4, 8, 256, 64), (((3,), (2,)), ((0, 1), (0, 1))), False
        ),
        **dict([linear("one token", (1, *to(768)), to(768, 3072))]),
    }  # fmt: skip


def operands(shape: Shape) -> tuple[Any, Any, Any]:
    """The two operands as a program has them, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, rhs = jax.random.normal(keys[0], shape.lhs), jax.random.normal(keys[1], shape.rhs)
    out = jax.eval_shape(lambda a, b: lax.dot_general(a, b, shape.dims), lhs, rhs)
    ct = jax.random.normal(keys[2], out.shape).astype(LOW)
    return lhs.astype(LOW), rhs if shape.weight else rhs.astype(LOW), ct


def program(shape: Shape, part: str, plain: bool = False) -> Callable[..., Any]:
    """A new function of both operands and a cotangent."""
    numbers = {"dimension_numbers": shape.dims, "out_sharding": None, "precision": None}
    spec = contraction.spec_of(lax.dot_general_p, numbers, LOW, LOW)

    def product(lhs: Any, rhs: Any) -> Any:
        if plain:
            return lax.dot_general(lhs, rhs, shape.dims)
        return contraction.contraction_p.bind(lhs, rhs, spec=spec)

    def run(lhs: Any, rhs: Any, ct: Any) -> Any:
        if part == "forward":
            return product(lhs, rhs)
        left = part == PARTS[1]
        given = (lambda x: product(x, rhs)) if left else (lambda x: product(lhs, x))
        (grad,) = jax.linear_transpose(given, lhs if left else rhs)(ct)
        return grad

    return run


@contextmanager
def lowered_as(form: Callable[..., Any]) -> Iterator[None]:
    """Every platform lowers the contraction in this form; afterwards, in its own again."""
    for platform in contraction.FORMS:
        contraction.lower_as(form, platform)
    try:
        yield
    finally:
        for platform, own in contraction.FORMS.items():
            contraction.lower_as(own, platform)


def compiled(shape: Shape, part: str, form: Callable[..., Any] | None) -> Callable[[], Any]:
    """The program in a form, compiled, on its arguments; None for float32 operands."""
    args: tuple[Any, ...] = operands(shape)
    if form is None:
        args = tuple(x.astype(jnp.float32) for x in args)
        made = jax.jit(program(shape, part, plain=True)).lower(*args).compile()
    else:
        with lowered_as(form):
            made = jax.jit(program(shape, part)).lower(*args).compile()
    return lambda: jax.block_until_ready(made(*args))


def exact(shape: Shape, part: str) -> Any:
    """The result in float64, of operands that have been rounded as a contraction rounds them."""
    low = [np.asarray(x.astype(LOW), np.float64) for x in operands(shape)]
    with jax.enable_x64(True):
        return np.asarray(program(shape, part, plain=True)(*map(jnp.asarray, low)))


def error(got: Any, right: Any) -> float:
    """Relative l2 distance, in percent."""
    return float(100 * np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right))


class Bench:
    """The findings.

    Attributes:
        rows: ratios of times.
        errors: shape and part -> form -> distance from the exact result, in percent.
        missing: what could not be measured -> why.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.rows: list[Row] = []
        self.errors: dict[str, dict[str, float]] = {}
        self.missing: dict[str, str] = {}

    def run(self, name: str, shape: Shape, part: str) -> None:
        what = f"{name}: {part}"
        right = exact(shape, part)
        once, errors = {}, {}
        for form, how in {PLAIN: None, **FORMS}.items():
            try:
                call = compiled(shape, part, how)
                errors[form] = error(call(), right)
                once[form] = timed(call, repeats(call))
            except Exception as reason:  # XLA compiles some that it cannot run
                self.missing[f"{what}, {form}"] = str(reason).strip().splitlines()[0][:200]
        times = measure(once, self.rounds)
        self.errors[what] = errors
        forms = [form for form in FORMS if form in times]
        pairs = [(form, PLAIN) for form in forms]
        pairs += [(a, b) for i, b in enumerate(forms) for a in forms[:i]]
        self.rows += [row(f"{what}: {a} / {b}", times[b], times[a]) for a, b in pairs]

    def record(self) -> dict[str, Any]:
        """The findings as pairing.py has them."""
        names = {form: name for name, form in FORMS.items()}
        names[contraction.convolutions_low] = "as asked, but convolutions low"
        names[contraction.of_this_processor] = "that of this processor"
        return {
            "rounds": self.rounds,
            "chosen": {platform: names[form] for platform, form in contraction.FORMS.items()},
            "tables": {TITLE: self.rows},
            "errors": self.errors,
            "missing": self.missing,
        }


def repeats(call: Callable[[], Any], least: float = 4e-3) -> int:
    """How often to run a program for one figure, so that it takes some milliseconds."""
    start = time.perf_counter()
    call()
    return max(1, round(least / (time.perf_counter() - start)))


@dataclass(frozen=True)
class Error:
    """Distances from the exact product of rounded operands, in percent, by form."""

    what: str
    error: dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables, save them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds")
    parser.add_argument("--shapes", default="", help="those whose name holds this")
    parser.add_argument("--scale", type=float, default=1, help="of all lengths; below 1: a try-out")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    chosen = {name: s for name, s in shapes(args.scale).items() if args.shapes in name}
    if not chosen:
        parser.error(f"--shapes {args.shapes}: none of {'; '.join(shapes())} holds that")
    device = jax.default_backend()
    bench = Bench(args.rounds)
    for name, shape in chosen.items():
        for part in PARTS:
            bench.run(name, shape, part)
    show(TITLE, bench.rows)
    show(
        "Error, %",
        [Error(w, {k: f"{v:.2g}" for k, v in e.items()}) for w, e in bench.errors.items()],
    )
    for what, why in bench.missing.items():
        print(f"Not measured: {what}: {why}")
    record = {"machine": machine("jax", "jaxlib", device=device), **bench.record()}
    path = save("contraction", device, record, args.out)
    print(f"Saved {path}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
