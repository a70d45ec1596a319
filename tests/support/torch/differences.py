"""The intended differences between polymp and torch.amp: one small program for each.

`main("torch.amp")` (or "polymp.torch") runs them all under that
package's names and prints what each came to, as JSON. A process imports one of the two only:
once polymp watches writes to parameters, torch.autocast in the same process profits.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import inspect
import json
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.processes import in_thread

Amp = Any
BF16, FP16 = torch.bfloat16, torch.float16
Pair = collections.namedtuple("Pair", ["first", "second"])


def weight() -> torch.Tensor:
    return torch.eye(4).requires_grad_()


X = torch.ones(1, 4)


def name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def on() -> bool:
    return bool(torch.is_autocast_enabled("cpu"))


def after_a_change(amp: Amp, change: Callable[[torch.Tensor], Any]) -> float:
    """Use a weight, change it from 1 to 2, use it again, and return the second result."""
    w = weight()
    with amp.autocast("cpu"):
        torch.mm(X, w)
        change(w)
        return torch.mm(X, w)[0, 0].item()


def two_dtypes_on_one_weight(amp: Amp) -> str:
    w = weight()
    with amp.autocast("cpu", BF16):
        torch.mm(X, w)
        with amp.autocast("cpu", FP16):
            return name(torch.mm(X, w))


def uses_around_a_region_of_another_dtype(amp: Amp) -> float:
    w = weight()
    with amp.autocast("cpu", BF16):
        one = torch.mm(torch.ones(1, 4), w)
        with amp.autocast("cpu", FP16):
            pass
        other = torch.mm(torch.full((1, 4), 2.0**-9), w)
    (one + other).sum().backward()
    return float(w.grad[0, 0])


WRITES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda w: w.add_(torch.eye(4)),
    lambda w: w.copy_(2 * torch.eye(4)),
    lambda w: w.__setitem__((0, 0), 2.0),
)


def weight_written_in_a_region(amp: Amp) -> list[float]:
    return [after_a_change(amp, torch.no_grad()(write)) for write in WRITES]


def optimizer_stepped_in_a_region(amp: Amp) -> list[float]:
    def step(w: torch.Tensor, **kind: bool) -> None:
        w.grad = -torch.eye(4)
        torch.optim.SGD([w], lr=1.0, **kind).step()

    kinds: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    return [after_a_change(amp, partial(step, **kind)) for kind in kinds]


def casts_of_another_thread(amp: Amp) -> float:
    """A weight is written while another thread is in a region and has used it."""
    w, used, done = weight(), threading.Event(), threading.Event()

    def other() -> None:
        with amp.autocast("cpu"):
            torch.mm(X, w)
            used.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    used.wait(60)
    with torch.no_grad():
        w.add_(torch.eye(4))
    with amp.autocast("cpu"):
        second = torch.mm(X, w)[0, 0].item()
    done.set()
    thread.join(60)
    return second


def casts_after_another_thread_left(amp: Amp) -> bool:
    """True if a cast is kept although another thread left a region in between."""
    w = weight()

    def visit() -> None:
        with amp.autocast("cpu"):
            torch.mm(X, weight())

    with amp.autocast("cpu"):
        first = torch.mm(X, w).grad_fn
        in_thread(visit)
        second = torch.mm(X, w).grad_fn
    return bool(first.next_functions[1][0] is second.next_functions[1][0])  # type: ignore[union-attr]


def one_object_entered_twice(amp: Amp) -> bool:
    region = amp.autocast("cpu")
    with region, region:
        pass
    return on()


def recursive_decorated_function(amp: Amp) -> bool:
    @amp.autocast("cpu")
    def down(n: int) -> None:
        if n:
            down(n - 1)

    down(2)
    return on()


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
    return left_on[0]


def decorated_generator(amp: Amp) -> list[str]:
    @amp.autocast("cpu")
    def generate() -> Any:
        yield name(torch.mm(X, X.t()))
        yield name(torch.mm(X, X.t()))

    return list(generate())


def decorated_async_generator(amp: Amp) -> list[str]:
    @amp.autocast("cpu")
    async def generate() -> Any:
        yield name(torch.mm(X, X.t()))
        await asyncio.sleep(0)
        yield name(torch.mm(X, X.t()))

    async def collect() -> list[str]:
        return [dtype async for dtype in generate()]

    return asyncio.run(collect())


def decorated_coroutines_interleaved(amp: Amp) -> list[Any]:
    @amp.autocast("cpu")
    async def work() -> str:
        await asyncio.sleep(0)
        return name(torch.mm(X, X.t()))

    async def both() -> list[str]:
        return list(await asyncio.gather(work(), work()))

    return [*asyncio.run(both()), on()]


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

    @amp.custom_fwd(device_type="cpu", cast_inputs=FP16)
    def forward(ctx: Any, value: Any) -> Any:
        return value

    with amp.autocast("cpu"):
        return forward(SimpleNamespace(), value)


def kinds(value: Any) -> list[str]:
    """The type of a collection, and the dtype of the tensor that is its first value."""
    first = next(iter(value.values() if isinstance(value, dict) else value))
    return [type(value).__name__, name(first)]


def region_inside_a_region_of_torch(amp: Amp) -> str:
    w = weight()
    with torch.autocast("cpu", FP16):
        torch.mm(X, w)
        with amp.autocast("cpu", BF16):
            return name(torch.mm(X, w))


INF = float("inf")


def trained(amp: Amp, start: float = 8.0, **kind: Any) -> Any:
    """A parameter, SGD with a rate of 1, and a scaler."""
    p = torch.zeros(1, requires_grad=True)
    return p, torch.optim.SGD([p], lr=1.0, **kind), amp.GradScaler("cpu", init_scale=start)


def step(scaler: Any, optimizer: Any, loss: torch.Tensor, gradient: float | None = None) -> None:
    """Take a step of a loss, whose gradient is replaced by a given one."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if gradient is not None:
        optimizer.param_groups[0]["params"][0].grad.fill_(gradient)
    scaler.step(optimizer)
    scaler.update()


def scaled(amp: Amp, **arguments: Any) -> Any:
    """A scaler that has taken a good step, and a function that takes one more."""
    p, optimizer, _ = trained(amp)
    scaler = amp.GradScaler("cpu", init_scale=8.0, **arguments)
    step(scaler, optimizer, p.sum())
    return scaler, lambda: step(scaler, optimizer, p.sum())


def lowered_growth_interval(amp: Amp) -> float:
    scaler, again = scaled(amp, growth_interval=100)
    for _ in range(4):
        again()
    scaler.set_growth_interval(3)
    again()
    return float(scaler.get_scale())


def state_without_an_entry(amp: Amp) -> Any:
    """The scale after a load that failed: half of a state, or all of the old one."""
    scaler, _ = scaled(amp)
    saved = scaler.state_dict() | {"scale": 2.0}
    del saved["growth_interval"]
    try:
        scaler.load_state_dict(saved)
    except KeyError:
        return scaler.get_scale()
    return "loaded"


def one_step(
    amp: Amp,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    start: float = 8.0,
    after: int = 1,
    **kind: bool,
) -> tuple[float, float]:
    """A parameter and the scale after steps of SGD from 0, with a rate of 1."""
    p, optimizer, scaler = trained(amp, start, **kind)
    for _ in range(after):
        step(scaler, optimizer, loss_of(p))
    return p.item(), scaler.get_scale()


def backward_after_update_of_losses_in_a_list(amp: Amp) -> Any:
    """Two losses and optimizers; the first one overflows, the second one has a gradient of 1."""
    params = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in params]
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    losses = scaler.scale([(params[0] * INF).sum(), params[1].sum()])
    for loss, optimizer in zip(losses, optimizers, strict=True):
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        scaler.step(optimizer)
        scaler.update()
    return params[1].item()


def overflow(p: torch.Tensor) -> torch.Tensor:
    """Of 0: 0, with a gradient that no scale above 2**-126 keeps finite."""
    return (p * 3e38 * 3e38).sum()


def two_hundred_overflows_and_a_good_step(amp: Amp) -> list[str]:
    """Parameter and scale, for a plain and for a fused optimizer."""
    made = []
    for fused in (False, True):
        p, optimizer, scaler = trained(amp, 2.0**16, fused=fused)
        for _ in range(200):
            step(scaler, optimizer, p.sum(), INF)
        step(scaler, optimizer, p.sum())
        made += [repr(p.item()), repr(scaler.get_scale())]
    return made


def growth_beyond_2_to_126(amp: Amp) -> list[bool]:
    """Whether scale and inverse are normal float32 numbers after a growth."""
    p, optimizer, _ = trained(amp)
    scaler = amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    step(scaler, optimizer, p.sum())
    scale = scaler._scale
    smallest = torch.finfo(torch.float32).smallest_normal
    return [bool(t.isfinite() and t >= smallest) for t in (scale, scale.reciprocal())]


def quotient_that_overflows(amp: Amp) -> list[float]:
    """A gradient of 1e40: finite at a scale of 2**-10, and not when it is divided by that."""

    def loss_of(p: torch.Tensor) -> torch.Tensor:
        return (p * 1e20 * 1e20).sum()

    return [x for fused in (False, True) for x in one_step(amp, loss_of, 2.0**-10, fused=fused)]


def quotient_that_overflows_before_it_is_clipped(amp: Amp) -> list[Any]:
    p = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = amp.GradScaler("cpu", init_scale=2.0**-10)
    scaler.scale((p * torch.tensor([1e20, 1.0]) * torch.tensor([1e20, 1.0])).sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    return [repr(x) for x in p.tolist()]


def fused_momentum_whose_first_step_is_skipped(amp: Amp) -> str:
    """The parameter after a skipped and a good step, where unwritten memory is NaN."""
    p, optimizer, scaler = trained(amp, momentum=0.5, fused=True)
    torch.use_deterministic_algorithms(True)  # fills such memory
    try:
        for gradient in (INF, 4.0):
            step(scaler, optimizer, p.sum(), gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    return repr(p.item())


def optimizer_without_gradients(amp: Amp) -> Any:
    """An idle optimizer beside one with a gradient."""
    p, busy, scaler = trained(amp)
    _, idle, _ = trained(amp)
    scaler.scale(p.sum()).backward()
    said = scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    return [said, scaler.get_scale(), scaler._get_growth_tracker()]


def with_closure(
    amp: Amp, factor: float, make: Callable[[Any], Any], call: Callable[[Any, Any, Any], Any]
) -> list[float]:
    """The result of a step with a closure, and the parameter, which starts at 3."""
    p = torch.full((1,), 3.0, requires_grad=True)
    optimizer, scaler = make([p]), amp.GradScaler("cpu", init_scale=8.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = factor * p.square().sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    loss = call(scaler, optimizer, closure)
    scaler.update()
    return [float(loss), p.item()]


def with_gradients_of(amp: Amp, dtype: torch.dtype) -> list[Any]:
    """The parameter after a good step and after one that overflows, and the scale."""
    p = torch.zeros(1, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    known = "allow_fp16" in inspect.signature(amp.GradScaler).parameters  # not to torch
    scaler = amp.GradScaler("cpu", init_scale=8.0, **({"allow_fp16": True} if known else {}))
    made: list[Any] = []
    for value in (8.0, INF):
        scaler.scale(torch.ones(()))
        p.grad = torch.full_like(p, value)
        scaler.step(optimizer)
        scaler.update()
        made.append(torch.view_as_real(p).tolist() if p.is_complex() else p.tolist())
    return [*made, scaler.get_scale()]


def gradients_in_compressed_rows(amp: Amp) -> list[float]:
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    rows = torch.ones(2, 2).to_sparse_csr()
    matrix = torch.nn.Parameter(rows)
    matrix.grad = rows * 16
    scaler.unscale_(torch.optim.SGD([matrix], lr=1.0))
    return [float(x) for x in matrix.grad.values()]


def step_that_tells_it_was_skipped(amp: Amp) -> list[Any]:
    p, optimizer, scaler = trained(amp)
    told: list[Any] = []
    for factor in (1.0, 3e38, 1.0):
        step(scaler, optimizer, (p * factor * factor).sum())
        told.append(bool(scaler.step_skipped(optimizer)))
    return [*told, int(scaler.skipped_steps)]


def warned_of(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [w.category.__name__ for w in caught]


def then(amp: Amp, run: Callable[[Any], Any], look: Callable[[Any], Any]) -> str:
    """Run with a scaler; the exception if there was one, and what `look` returns afterwards."""
    scaler, _ = scaled(amp)
    try:
        run(scaler)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}, {look(scaler)!r}"
    return repr(look(scaler))


def state_that_had_lost_its_scale(amp: Amp) -> list[str]:
    def load(scaler: Any, lost: float) -> None:
        scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 7, "scale": lost})

    return [
        then(amp, lambda s, x=x: load(s, x), lambda s: (s.get_scale(), s.get_growth_interval()))
        for x in (0.0, INF, float("nan"))
    ]


def arguments_of_a_new_scaler(amp: Amp) -> list[str]:
    def scales(name: str, value: object, made: list[float]) -> str:
        def make(_: Any) -> None:
            made.append(amp.GradScaler(**{"device": "cpu"} | {name: value}).get_scale())

        return then(amp, make, lambda _: made)

    given = [("init_scale", first) for first in (0.0, -8.0, INF, "1024")]
    given += [("growth_interval", 0), ("growth_interval", 2.5), ("device", None)]
    return [scales(*each, []) for each in given]


def first_scale_without_an_inverse(amp: Amp) -> list[str]:
    """float32 holds 1e-40, and not 1e40. Another scale beyond the bounds is as in torch.amp."""
    made = [one_step(amp, lambda p: p.sum() * 0.125, first) for first in (1e-40, 1e38)]
    return [repr(x) for pair in made for x in pair]


def constants_set_out_of_range(amp: Amp) -> list[str]:
    def after(name: str, value: float) -> str:
        run, look = (methodcaller(f"set_{name}", value), methodcaller(f"get_{name}"))
        return then(amp, run, look)

    constants = {"growth_factor": 0.5, "backoff_factor": 2.0, "growth_interval": 0}
    return [after(*constant) for constant in constants.items()]


def updated(amp: Amp, *news: Any) -> list[str]:
    """Of each new scale: the exception, and the scale after it."""
    return [then(amp, methodcaller("update", new), methodcaller("get_scale")) for new in news]


SGD = partial(torch.optim.SGD, lr=0.5)
LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=1)

FUNCTIONS: tuple[Callable[[Amp], Any], ...] = (
    two_dtypes_on_one_weight, uses_around_a_region_of_another_dtype, weight_written_in_a_region,
    optimizer_stepped_in_a_region, casts_of_another_thread, casts_after_another_thread_left,
    one_object_entered_twice, recursive_decorated_function, decorated_function_in_two_threads,
    decorated_generator, decorated_async_generator, decorated_coroutines_interleaved,
    with_blocks_interleaved, region_inside_a_region_of_torch, lowered_growth_interval,
    state_without_an_entry, backward_after_update_of_losses_in_a_list,
    two_hundred_overflows_and_a_good_step, growth_beyond_2_to_126, quotient_that_overflows,
    quotient_that_overflows_before_it_is_clipped, fused_momentum_whose_first_step_is_skipped,
    optimizer_without_gradients, gradients_in_compressed_rows, step_that_tells_it_was_skipped,
    state_that_had_lost_its_scale,
    arguments_of_a_new_scaler, first_scale_without_an_inverse, constants_set_out_of_range,
)  # fmt: skip
PROGRAMS: dict[str, Callable[[Amp], Any]] = {
    **{function.__name__.replace("_", "-"): function for function in FUNCTIONS},
    "cast-inputs-in-a-named-tuple": lambda amp: kinds(inside_forward(amp, Pair(X, X))),
    "scale-a-named-tuple": lambda amp: (
        type(amp.GradScaler("cpu").scale(Pair(torch.ones(1), torch.ones(1)))).__name__
    ),
    "closure": lambda amp: with_closure(amp, 1.0, SGD, lambda s, o, it: s.step(o, closure=it)),
    "closure-by-position": lambda amp: with_closure(amp, 1.0, SGD, lambda s, o, it: s.step(o, it)),
    "lbfgs": lambda amp: with_closure(amp, 0.125, LBFGS, lambda s, o, it: s.step(o, closure=it)),
    "complex-gradients": lambda amp: [
        with_gradients_of(amp, dtype) for dtype in (torch.complex64, torch.complex128)
    ],
    "float16-gradients-when-allowed": lambda amp: with_gradients_of(amp, FP16),
    "entries-of-a-state": lambda amp: list(amp.GradScaler("cpu").state_dict()),
    "fifty-skips-in-a-row": lambda amp: warned_of(lambda: one_step(amp, overflow, after=60)),
    "update-with-an-int": lambda amp: float(*updated(amp, 4)),
    "update-with-a-tensor-of-one-dimension": lambda amp: float(*updated(amp, torch.tensor([4.0]))),
    "update-out-of-the-bounds": lambda amp: updated(amp, 0.0, INF, 2.0**127),
    "update-with-a-tensor-out-of-the-bounds": lambda amp: updated(
        amp, *map(torch.tensor, (0.0, INF, float("nan")))
    ),
}


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
