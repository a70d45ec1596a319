"""The intended differences between polymp and torch.amp: one small program for each.

`main("torch.amp")` (or "polymp.torch") runs them all under that
package's names and prints what each came to, as JSON. A process imports one of the two only:
once polymp watches writes to parameters, torch.autocast in the same process profits.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import json
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.support.torch import scaler_differences

Amp = Any
BF16, FP16 = torch.bfloat16, torch.float16
Pair = collections.namedtuple("Pair", ["first", "second"])

PROGRAMS: dict[str, Callable[[Amp], Any]] = {}  # those of scalers are added below


def program(function: Callable[[Amp], Any]) -> Callable[[Amp], Any]:
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


def weight() -> torch.Tensor:
    return torch.eye(4).requires_grad_()


X = torch.ones(1, 4)


def name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def on() -> bool:
    return bool(torch.is_autocast_enabled("cpu"))


def after_a_change(amp: Amp, change: Callable[[torch.Tensor], None]) -> float:
    """Use a weight, change it from 1 to 2, use it again, and return the second result."""
    w = weight()
    with amp.autocast("cpu"):
        torch.mm(X, w)
        change(w)
        return torch.mm(X, w)[0, 0].item()


@program
def two_dtypes_on_one_weight(amp: Amp) -> str:
    w = weight()
    with amp.autocast("cpu", BF16):
        torch.mm(X, w)
        with amp.autocast("cpu", FP16):
            return name(torch.mm(X, w))


@program
def weight_written_in_a_region(amp: Amp) -> list[float]:
    def add(w: torch.Tensor) -> None:
        with torch.no_grad():
            w.add_(torch.eye(4))

    def copy(w: torch.Tensor) -> None:
        with torch.no_grad():
            w.copy_(2 * torch.eye(4))

    def one_entry(w: torch.Tensor) -> None:
        with torch.no_grad():
            w[0, 0] = 2.0

    return [after_a_change(amp, change) for change in (add, copy, one_entry)]


@program
def optimizer_stepped_in_a_region(amp: Amp) -> list[float]:
    def step(**kind: bool) -> Callable[[torch.Tensor], None]:
        def change(w: torch.Tensor) -> None:
            w.grad = -torch.eye(4)
            torch.optim.SGD([w], lr=1.0, **kind).step()

        return change

    kinds: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    return [after_a_change(amp, step(**kind)) for kind in kinds]


def with_a_region_open_elsewhere(amp: Amp, w: torch.Tensor, meanwhile: Callable[[], Any]) -> Any:
    """Call `meanwhile` while another thread is in a region and has used the weight."""
    used, done = threading.Event(), threading.Event()

    def other() -> None:
        with amp.autocast("cpu"):
            torch.mm(X, w)
            used.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    used.wait(60)
    try:
        return meanwhile()
    finally:
        done.set()
        thread.join(60)


@program
def casts_of_another_thread(amp: Amp) -> float:
    w = weight()

    def meanwhile() -> float:
        with torch.no_grad():
            w.add_(torch.eye(4))
        with amp.autocast("cpu"):
            return float(torch.mm(X, w)[0, 0])

    return float(with_a_region_open_elsewhere(amp, w, meanwhile))


@program
def casts_after_another_thread_left(amp: Amp) -> bool:
    """True if a cast is kept although another thread left a region in between."""
    w = weight()

    def visit() -> None:
        with amp.autocast("cpu"):
            torch.mm(X, weight())

    with amp.autocast("cpu"):
        first = torch.mm(X, w).grad_fn
        thread = threading.Thread(target=visit)
        thread.start()
        thread.join(60)
        second = torch.mm(X, w).grad_fn
    return bool(first.next_functions[1][0] is second.next_functions[1][0])  # type: ignore[union-attr]


@program
def one_object_entered_twice(amp: Amp) -> bool:
    region = amp.autocast("cpu")
    with region, region:
        pass
    return on()


@program
def recursive_decorated_function(amp: Amp) -> bool:
    @amp.autocast("cpu")
    def down(n: int) -> None:
        if n:
            down(n - 1)

    down(2)
    return on()


@program
def decorated_function_in_two_threads(amp: Amp) -> bool:
    """True if a thread is left in a region although it has returned from all its calls."""
    inside, leave = threading.Event(), threading.Event()
    left_on = []

    @amp.autocast("cpu")
    def shared(wait: bool) -> None:
        if wait:
            inside.set()
            leave.wait(60)

    def other() -> None:
        shared(True)
        left_on.append(on())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with amp.autocast("cpu"):
        shared(False)
    leave.set()
    thread.join(60)
    del thread
    return left_on[0]


@program
def decorated_generator(amp: Amp) -> list[str]:
    @amp.autocast("cpu")
    def generate() -> Any:
        yield name(torch.mm(X, X.t()))
        yield name(torch.mm(X, X.t()))

    return list(generate())


@program
def decorated_async_generator(amp: Amp) -> list[str]:
    @amp.autocast("cpu")
    async def generate() -> Any:
        yield name(torch.mm(X, X.t()))
        await asyncio.sleep(0)
        yield name(torch.mm(X, X.t()))

    async def collect() -> list[str]:
        return [dtype async for dtype in generate()]

    return asyncio.run(collect())


@program
def decorated_coroutines_interleaved(amp: Amp) -> list[Any]:
    @amp.autocast("cpu")
    async def work() -> str:
        await asyncio.sleep(0)
        return name(torch.mm(X, X.t()))

    async def both() -> list[str]:
        return list(await asyncio.gather(work(), work()))

    return [*asyncio.run(both()), on()]


@program
def with_blocks_interleaved(amp: Amp) -> bool:
    """True if two tasks that wait inside their regions leave autocast on."""

    async def work(delay: int) -> None:
        with amp.autocast("cpu"):
            for _ in range(delay):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(1), work(3))

    asyncio.run(both())
    return on()


def inside_forward(amp: Amp, value: Any) -> Any:
    """Return the value that the forward of an autograd function with cast_inputs gets."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=FP16)
        def forward(ctx: Any, x: torch.Tensor, value: Any) -> torch.Tensor:
            seen.append(value)
            return x.clone()

    with amp.autocast("cpu"):
        Look.apply(X, value)
    return seen[0]


@program
def cast_inputs_in_a_named_tuple(amp: Amp) -> list[str]:
    pair = inside_forward(amp, Pair(X, X))
    return [type(pair).__name__, name(pair.first)]


@program
def cast_inputs_in_a_mapping(amp: Amp) -> list[str]:
    found = inside_forward(amp, collections.OrderedDict(a=X))
    return [type(found).__name__, name(found["a"])]


@program
def region_inside_a_region_of_torch(amp: Amp) -> str:
    w = weight()
    with torch.autocast("cpu", FP16):
        torch.mm(X, w)
        with amp.autocast("cpu", BF16):
            return name(torch.mm(X, w))


PROGRAMS |= scaler_differences.PROGRAMS


def main(package: str) -> None:
    amp = importlib.import_module(package)
    assert (package == "torch.amp") == ("polymp" not in sys.modules)
    outcomes: dict[str, Any] = {}
    for key, function in PROGRAMS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[key] = function(amp)
        except Exception as error:
            outcomes[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        torch.set_autocast_enabled("cpu", False)  # what one left on must not reach the next
        torch.set_autocast_dtype("cpu", BF16)
        torch.clear_autocast_cache()
    print(json.dumps(outcomes))
