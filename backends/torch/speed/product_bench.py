"""Measures the time of matrix products on a torch device, in float32 and in the low dtypes.

On a CPU it is the processor time of one thread, which other programs disturb least; elsewhere the
wall-clock time until the device has finished.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn import functional as F

from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.speed.products import MATMULS, Kernel, Operand
from polymp.speed.advice import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, HELD, Product
from polymp.speed.product_times import Run

# Called instead of the ops, whose Python takes time of its own.
_FUNCTIONS = dict(zip(MATMULS, (torch.mm, torch.addmm, torch.bmm, torch.baddbmm), strict=True))


class ProductBench:
    """A device that products run on; see `polymp.speed.product_times.Bench`.

    Args:
        device: the device type.

    Attributes:
        framework: "torch".
        device: likewise.
        clock: how the time is taken, in words.
        ways: the dtypes, with or without held casts, that it can run; float32 first.
        lacking: the dtypes that it cannot run, with the reason.
        least: how many seconds a product is measured at least, in each way.
    """

    framework = "torch"
    least: float = 0.1

    def __init__(self, device: str) -> None:
        self.device = device
        self._threads = 1 if device == "cpu" else torch.get_num_threads()
        self._left: list[Callable[[], None]] = []
        precision = torch.get_float32_matmul_precision()
        self.clock: str = (
            "processor time of one thread"
            if device == "cpu"
            else f"time until it has finished, float32 in precision {precision!r}"
        )
        self.ways: list[str] = [FLOAT32]
        self.lacking: dict[str, str] = {}
        tiny = self.linear(16, 16, 16)
        for way in (BFLOAT16, FLOAT16, BFLOAT16 + HELD, FLOAT8):
            if way.removesuffix(HELD) in self.lacking:
                continue
            try:
                self.made(tiny, way)(1)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                self.lacking[way] = str(error).partition("\n")[0]
            else:
                self.ways.append(way)

    def __enter__(self) -> Self:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._left.append(lambda: torch.set_num_threads(threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.pop()()

    def linear(self, m: int, k: int, n: int) -> Product:
        """Return the product of a linear layer: low activation [m, k], float32 weight [n, k]."""
        operands = Operand((m, k), (k, 1)), Operand((n, k), (k, 1), cast=True, weight=True)
        kernel = Kernel(F.linear, operands)
        sizes = m * k + k * n + m * n
        return Product("matmul", 1, m, k, n, 2 * m * k * n, sizes, n * k, n * k, call=kernel)

    def able(self, product: Product, way: str) -> bool:
        """Return whether a product can run in a way.

        float8 has no batches, and on GPUs only sizes that are multiples of 16.
        """
        if way == FLOAT8:
            fits = self.device == "cpu" or product.k % 16 == product.n % 16 == 0
            return product.op == "matmul" and product.batch == 1 and fits
        return product.weights > 0 or not way.endswith(HELD)

    def made(self, product: Product, way: str) -> Run:
        """Return a function that runs a product, and its casts, a number of times."""
        make = _float8 if way == FLOAT8 else _program
        program = make(product, way, self.device)
        if self.device == "cpu":
            clock, finish = time.process_time, _nothing
        else:
            clock, finish = time.perf_counter, torch.accelerator.synchronize

        def run(times: int) -> float:
            with torch.no_grad():
                finish()
                start = clock()
                for _ in range(times):
                    program()
                finish()
                return clock() - start

        return run


def default() -> str:
    """Return the type of this machine's accelerator, or "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def _nothing() -> None:
    """Do nothing: a CPU has finished when the call returns."""


def _program(product: Product, way: str, device: str) -> Callable[[], Any]:
    kernel: Kernel = product.call
    low = DTYPES[way.removesuffix(HELD)]
    cast = set()

    def given(at: Any, x: Any) -> Any:
        if not isinstance(x, Operand):
            return x
        casts = x.cast and way != FLOAT32 and not (x.weight and way.endswith(HELD))
        if casts:
            cast.add(at)
        return _tensor(x, torch.float32 if casts else low, device)

    args = [given(i, x) for i, x in enumerate(kernel.args)]
    kwargs = {name: given(name, x) for name, x in kernel.kwargs}
    func = _FUNCTIONS.get(kernel.func, kernel.func)
    widened = () if way == FLOAT32 else kernel.widened

    def run() -> None:
        own = [x.to(low) if i in cast else x for i, x in enumerate(args)]
        made = func(*own, **kwargs)
        for at in widened:
            (made[at] if isinstance(made, tuple) else made).to(torch.float32)

    return run


def _float8(product: Product, way: str, device: str) -> Callable[[], Any]:
    """Make the product on operands that are cast to float8 at each call, with given scales."""
    m, k, n = product.m, product.k, product.n
    low = DTYPES[way]
    left = _tensor(Operand((m, k), (k, 1)), torch.bfloat16, device)
    wide = torch.float32 if product.weights else torch.bfloat16
    right = _tensor(Operand((n, k), (k, 1)), wide, device)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        left.to(low), right.to(low).t(), one, one, out_dtype=torch.bfloat16
    )


def _tensor(of: Operand, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Make a tensor of random numbers with the layout of an operand."""
    reach = 1 + sum((n - 1) * s for n, s in zip(of.shape, of.stride, strict=True))
    return (
        torch.empty(reach, device=device).uniform_(-1, 1).to(dtype).as_strided(of.shape, of.stride)
    )
