"""Runs matrix products on jax's default device, in float32 and in the low dtypes, and takes time.

On a CPU it is the processor time of all threads, which other programs disturb least; elsewhere the
time on the wall until the result is there.
"""

import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Self

import jax
import numpy as np
from jax import lax

from polymp.backends.jax.autocast.contraction import contraction_p
from polymp.backends.jax.speed.products import Kernel, products_of
from polymp.speed.advice import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, HELD, Product
from polymp.speed.product_times import Run

_NUMBERS = np.random.default_rng(0).standard_normal(2**16, np.float32)


class ProductBench:
    """The device that products run on; see `polymp.speed.product_times.Bench`.

    Attributes:
        framework: "jax".
        device: its platform.
        clock: how the time is taken, in words.
        ways: that it can run, float32 first.
        lacking: dtypes that it cannot run, with the reason.
        least: seconds that a product takes at least, in all ways: it is compiled in each.
    """

    framework = "jax"
    least: float = 0.3

    def __init__(self) -> None:
        self.device: str = jax.default_backend()
        own = self.device == "cpu"
        self.clock = (
            "processor time of all threads"
            if own
            else "time until it has finished, float32 in jax's default precision"
        )
        self.ways: list[str] = [FLOAT32, BFLOAT16, FLOAT16, BFLOAT16 + HELD]
        self.lacking: dict[str, str] = {}
        if own:
            self.lacking[FLOAT8] = "XLA computes float8 products on CPUs in wider dtypes"
            return
        try:
            self.made(self.linear(64, 64, 64), FLOAT8)(1)
        except Exception as error:  # whatever the compiler says
            self.lacking[FLOAT8] = str(error).strip().partition("\n")[0]
        else:
            self.ways.append(FLOAT8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing was changed."""

    def linear(self, m: int, k: int, n: int) -> Product:
        """The product of a low activation [m, k] and a float32 parameter [k, n]."""
        return _linear(m, k, n)

    def able(self, product: Product, way: str) -> bool:
        """True if a product can run in a way: float8 has no convolutions."""
        if way == FLOAT8:
            return product.op == "matmul"
        return product.weights > 0 or not way.endswith(HELD)

    def made(self, product: Product, way: str) -> Run:
        """A product and its casts in a way, compiled, as a function of how often to run it."""
        operands = _operands(product.call, way)
        program = jax.jit(_program(product.call, way)).lower(*operands).compile()
        clock = time.process_time if self.device == "cpu" else time.perf_counter

        def run(times: int) -> float:
            start = clock()
            for _ in range(times):
                made = program(*operands)
            jax.block_until_ready(made)
            return clock() - start

        return run


@cache
def _linear(m: int, k: int, n: int) -> Product:
    shapes = jax.ShapeDtypeStruct((k, n), FLOAT32), jax.ShapeDtypeStruct((m, k), BFLOAT16)
    (product,) = products_of(lambda weight, x: x @ weight, shapes).products
    return product


def _operands(kernel: Kernel, way: str) -> list[jax.Array]:
    low = way.removesuffix(HELD)
    made = []
    for shape, cast, weight in zip(kernel.shapes, kernel.casts, kernel.weights, strict=True):
        comes_low = not cast or (weight and way.endswith(HELD))
        own = (BFLOAT16 if low == FLOAT8 else low) if comes_low else FLOAT32
        # By numpy: jax would compile a program to make numbers for every shape.
        made.append(jax.device_put(np.resize(_NUMBERS, shape).astype(jax.numpy.dtype(own))))
    return made


def _program(kernel: Kernel, way: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    low = way.removesuffix(HELD)
    params = dict(kernel.params)

    def plain(left: jax.Array, right: jax.Array) -> jax.Array:
        made: jax.Array = kernel.of.bind(
            left, right, **params, preferred_element_type=np.dtype(FLOAT32)
        )
        return made

    def float8(left: jax.Array, right: jax.Array) -> jax.Array:
        made = plain(lax.convert_element_type(left, low), lax.convert_element_type(right, low))
        return lax.convert_element_type(made, FLOAT32 if kernel.wide else BFLOAT16)

    def contraction(left: jax.Array, right: jax.Array) -> jax.Array:
        out = FLOAT32 if kernel.wide else low
        made: jax.Array = contraction_p.bind(
            left, right, of=kernel.of, params=kernel.params, run=low, out=out
        )
        return made

    return {FLOAT32: plain, FLOAT8: float8}.get(low, contraction)
