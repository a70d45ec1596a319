"""Autograd functions that run in regions and report what they see.

A scenario takes the three names under test (`Amp`) and returns a `Report`: dtypes, autocast state,
every bit of results and gradients. `test_custom_function` compares reports.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

import polymp.torch as ours

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Amp(NamedTuple):
    """The three names under test, from polymp, from torch, or wrong on purpose."""

    autocast: Any
    custom_fwd: Any
    custom_bwd: Any


POLYMP = Amp(ours.autocast, ours.custom_fwd, ours.custom_bwd)
TORCH = Amp(torch.amp.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd)


class Report(list[Any]):
    """A list of observations, in order."""

    def look(self, title: str, *tensors: torch.Tensor) -> None:
        on = torch.is_autocast_enabled("cpu")
        low = torch.get_autocast_dtype("cpu") if on else None
        self.append((title, on, low, *(str(t.dtype) for t in tensors)))

    def bits(self, *tensors: torch.Tensor | None) -> None:
        self.extend(None if t is None else (str(t.dtype), t.float().tolist()) for t in tensors)


def product(amp: Amp, report: Report, cast_inputs: torch.dtype | None = None) -> Any:
    """A function that multiplies matrices, and squares on the way back, and reports."""

    class Product(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            y = torch.mm(a, b)
            report.look("forward", a, b, y)
            return y

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            # No cast by hand: mixed dtypes are an error unless autocast is on.
            one = torch.mm(g, b.mT) if g.dtype is b.dtype or _on() else torch.mm(g.float(), b.mT)
            other = torch.mm(a.mT, g) if g.dtype is a.dtype or _on() else torch.mm(a.mT, g.float())
            report.look("backward", g, one, other)
            return one, other

    return Product.apply


def _on() -> bool:
    return torch.is_autocast_enabled("cpu")


def leaves(dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, generator=made), torch.randn(4, 5, generator=made)
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


# A scenario: where the forward runs, where the backward runs, and cast_inputs. None is outside.
Region = dict[str, Any] | None
AT_BF16, AT_FP16, OFF = {"dtype": BF16}, {"dtype": FP16}, {"enabled": False}
PLACES: dict[str, tuple[Region, Region, torch.dtype | None]] = {
    "bf16, back outside": (AT_BF16, None, None),
    "fp16, back outside": (AT_FP16, None, None),
    "fp16, back in fp16": (AT_FP16, AT_FP16, None),
    "fp16, back in bf16": (AT_FP16, AT_BF16, None),
    "bf16, back in fp16": (AT_BF16, AT_FP16, None),
    "bf16, back disabled": (AT_BF16, OFF, None),
    "outside, back in fp16": (None, AT_FP16, None),
    "disabled, back in bf16": (OFF, AT_BF16, None),
    "outside, back outside": (None, None, None),
    "cast to fp32 in fp16": (AT_FP16, None, FP32),
    "cast to fp32 in fp16, back in bf16": (AT_FP16, AT_BF16, FP32),
    "cast to fp16 in bf16": (AT_BF16, AT_BF16, FP16),
    "cast to fp16, outside": (None, None, FP16),
    "cast to fp16, outside, back in bf16": (None, AT_BF16, FP16),
    "cast to fp16, disabled": (OFF, AT_FP16, FP16),
}
NOTHING_TO_DO = ("outside, back outside", "cast to fp16, outside")


def enter(amp: Amp, region: Region) -> Any:
    return amp.autocast("cpu", **(OFF if region is None else region))


def in_place(name: str, amp: Amp, in_thread: bool = False) -> Report:
    forward, backward, cast_inputs = PLACES[name]
    report = Report()
    a, b = leaves()
    function = product(amp, report, cast_inputs)
    with enter(amp, forward):
        y = function(a, b)

    def back() -> None:
        with enter(amp, backward):
            y.float().square().sum().backward()
            report.look("after backward")

    if in_thread:
        thread = threading.Thread(target=back)
        thread.start()
        thread.join(60)
    else:
        back()
    report.bits(y.detach(), a.grad, b.grad)
    return report


def in_half(amp: Amp) -> Report:
    """Low inputs: with autocast off inside, everything stays in them."""
    report = Report()
    a, b = leaves(BF16)
    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(a, b)
        z = product(amp, report, FP32)(a, b)
        (y.float().sum() + z.sum()).backward()
    report.bits(y.detach(), z.detach(), a.grad, b.grad)
    return report


def chained(amp: Amp) -> Report:
    """Two functions with states of their own, and one that calls the other."""
    report = Report()
    a, b = leaves()

    class Outer(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=FP32)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.a, ctx.b = a.detach().requires_grad_(), b.detach().requires_grad_()
                with amp.autocast("cpu", dtype=BF16):
                    ctx.y = product(amp, report)(ctx.a, ctx.b)
            report.look("outer forward", a)
            return ctx.y.detach().float()

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
            report.look("outer backward", g)
            return torch.autograd.grad(ctx.y, (ctx.a, ctx.b), g.to(BF16))

    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(torch.tanh(a), b)
        z = Outer.apply(a, b)
    with amp.autocast("cpu", dtype=BF16):
        (y.float() * z).sum().backward()
        report.look("after")
    report.bits(a.grad, b.grad)
    return report


def twice_differentiated(amp: Amp) -> Report:
    report = Report()
    a, b = leaves()
    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(a, b)
    (first,) = torch.autograd.grad(y.float().square().sum(), a, create_graph=True)
    report.look("between", first)
    first.square().sum().backward()
    report.bits(first.detach(), a.grad, b.grad)
    return report


def recomputed(amp: Amp, reentrant: bool) -> Report:
    report = Report()
    a, b = leaves()
    with amp.autocast("cpu", dtype=FP16):
        y = checkpoint(product(amp, report), a, b, use_reentrant=reentrant)
    with amp.autocast("cpu", dtype=BF16):
        y.float().square().sum().backward()
    report.bits(y.detach(), a.grad, b.grad)
    return report


def retained(amp: Amp) -> Report:
    """One graph, differentiated in three places."""
    report = Report()
    a, b = leaves()
    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(a, b).float().sum()
        y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    with amp.autocast("cpu", dtype=BF16):
        y.backward()
    report.bits(a.grad, b.grad)
    return report


def other_device(amp: Amp) -> Report:
    """Decorated for CUDA, used on CPU: the CPU's state is none of its business."""
    report = Report()

    class Plain(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type="cuda", cast_inputs=FP16)
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            report.look("forward", a)
            return torch.mm(a, a.mT).float()

        @staticmethod
        @amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            report.look("backward", torch.mm(g, g))
            return torch.ones(3, 4)

    a, _ = leaves()
    with amp.autocast("cpu", dtype=BF16):
        y = Plain.apply(a)
    y.sum().backward()
    with amp.autocast("cpu", dtype=FP16):
        Plain.apply(a).sum().backward()
    report.bits(y.detach(), a.grad)
    return report


SCENARIOS: dict[str, Callable[[Amp], Report]] = {
    **{name: functools.partial(in_place, name) for name in PLACES},
    **{
        f"{name}, in a thread": functools.partial(in_place, name, in_thread=True) for name in PLACES
    },
    "low inputs": in_half,
    "chained": chained,
    "twice differentiated": twice_differentiated,
    "recomputed, reentrant": functools.partial(recomputed, reentrant=True),
    "recomputed": functools.partial(recomputed, reentrant=False),
    "retained": retained,
    "other device": other_device,
}
