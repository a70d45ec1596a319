"""`custom_fwd` and `custom_bwd`: which dtypes and which state forward and backward see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import polymp.torch as ours
from polymp.torch import autocast, custom_bwd, custom_fwd
from tests.support import processes
from tests.support.torch.each_op import inside

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Amp(NamedTuple):
    """The three names under test, from polymp, from torch, or wrong on purpose."""

    autocast: Any
    custom_fwd: Any
    custom_bwd: Any


POLYMP = Amp(ours.autocast, ours.custom_fwd, ours.custom_bwd)
TORCH = Amp(torch.amp.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd)


class Report(list[Any]):
    def look(self, title: str, *tensors: torch.Tensor) -> None:
        on = torch.is_autocast_enabled("cpu")
        low = torch.get_autocast_dtype("cpu") if on else None
        self.append((title, on, low, *(str(t.dtype) for t in tensors)))

    def bits(self, *tensors: torch.Tensor | None) -> None:
        self.extend(None if t is None else (str(t.dtype), t.float().tolist()) for t in tensors)


def product(amp: Amp, report: Report, cast_inputs: torch.dtype | None = None) -> Any:
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
            if g.dtype is not a.dtype and not torch.is_autocast_enabled("cpu"):
                g = g.float()  # mixed dtypes are an error unless autocast is on
            one, other = torch.mm(g, b.mT), torch.mm(a.mT, g)
            report.look("backward", g, one, other)
            return one, other

    return Product.apply


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


def enter(amp: Amp, region: Region) -> Any:
    return amp.autocast("cpu", **(OFF if region is None else region))


Body = Callable[[Amp, Report, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def reported(body: Body, amp: Amp, dtype: torch.dtype = FP32) -> Report:
    report, (a, b) = Report(), leaves(dtype)
    results = body(amp, report, a, b)
    report.bits(*(y.detach() for y in results), a.grad, b.grad)
    return report


def in_place(name: str, amp: Amp, in_thread: bool = False) -> Report:
    forward, backward, cast_inputs = PLACES[name]

    def body(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
        with enter(amp, forward):
            y = product(amp, report, cast_inputs)(a, b)

        def back() -> None:
            with enter(amp, backward):
                y.float().square().sum().backward()
                report.look("after backward")

        if in_thread:
            processes.in_thread(back)
        else:
            back()
        return (y,)

    return reported(body, amp)


def in_half(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Low inputs: with autocast off inside, everything stays in them."""
    with amp.autocast("cpu", dtype=FP16):
        y, z = product(amp, report)(a, b), product(amp, report, FP32)(a, b)
        (y.float().sum() + z.sum()).backward()
    return y, z


def chained(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
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
        y, z = product(amp, report)(torch.tanh(a), b), Outer.apply(a, b)
    with amp.autocast("cpu", dtype=BF16):
        (y.float() * z).sum().backward()
        report.look("after")
    return ()


def twice_differentiated(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(a, b)
    (first,) = torch.autograd.grad(y.float().square().sum(), a, create_graph=True)
    report.look("between", first)
    first.square().sum().backward()
    return (first,)


def recomputed(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor, **how: bool) -> Any:
    with amp.autocast("cpu", dtype=FP16):
        y = checkpoint(product(amp, report), a, b, **how)
    with amp.autocast("cpu", dtype=BF16):
        y.float().square().sum().backward()
    return (y,)


def retained(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
    with amp.autocast("cpu", dtype=FP16):
        y = product(amp, report)(a, b).float().sum()
        y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    with amp.autocast("cpu", dtype=BF16):
        y.backward()
    return ()


def other_device(amp: Amp, report: Report, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decorated for CUDA, used on CPU: the CPU's state is none of its business."""

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

    with amp.autocast("cpu", dtype=BF16):
        y = Plain.apply(a)
    y.sum().backward()
    with amp.autocast("cpu", dtype=FP16):
        Plain.apply(a).sum().backward()
    return (y,)


SCENARIOS: dict[str, Callable[[Amp], Report]] = {
    **{name: partial(in_place, name) for name in PLACES},
    **{f"{name}, in a thread": partial(in_place, name, in_thread=True) for name in PLACES},
    "low inputs": partial(reported, in_half, dtype=BF16),
    "chained": partial(reported, chained),
    "twice differentiated": partial(reported, twice_differentiated),
    "recomputed, reentrant": partial(reported, partial(recomputed, use_reentrant=True)),
    "recomputed": partial(reported, partial(recomputed, use_reentrant=False)),
    "retained": partial(reported, retained),
    "other device": partial(reported, other_device),
}


pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_report_equals_torch_s(scenario: str) -> None:
    report = SCENARIOS[scenario](POLYMP)
    assert len(report) > 3
    assert report == SCENARIOS[scenario](TORCH)


def nothing(function: Any = None, **_: Any) -> Any:
    return nothing if function is None else function


def never_casts(*args: Any, cast_inputs: Any = None, **kwargs: Any) -> Any:
    return custom_fwd(*args, **kwargs)


MUTANTS = {
    "both do nothing": Amp(autocast, nothing, nothing),
    "custom_bwd does nothing": Amp(autocast, custom_fwd, nothing),
    "cast_inputs is ignored": Amp(autocast, never_casts, custom_bwd),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_decorators_are_seen(mutant: str) -> None:
    """The first of them wherever there is something to do, and nowhere else."""
    seen = set()
    for name in PLACES:
        try:
            same = SCENARIOS[name](MUTANTS[mutant]) == SCENARIOS[name](TORCH)
        except Exception:
            same = False
        if not same:
            seen.add(name)
    assert seen
    if mutant == "both do nothing":
        at_work = {n for n, (f, b, c) in PLACES.items() if f != b or (c and f not in (None, OFF))}
        assert at_work <= seen
        assert not seen & {"outside, back outside", "cast to fp16, outside"}


def test_backward_keeps_the_policy_of_forward() -> None:
    report = Report()
    with autocast("cpu", dtype=FP16, policy={"name": "none", "rules": {"mm": "fp32"}}):
        y = product(POLYMP, report)(*leaves())
    with autocast("cpu", dtype=FP16):
        y.sum().backward()
    seen = [(title, True, FP16, *["torch.float32"] * 3) for title in ("forward", "backward")]
    assert report == seen


def received(fwd: Any, region: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the arguments that the body of a decorated forward gets, called with a bare ctx."""

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    with region:
        return fwd(device_type="cpu", cast_inputs=FP16)(forward)(SimpleNamespace(), *args, **kwargs)


def test_only_floats_below_float64_are_cast() -> None:
    dtypes = (FP32, BF16, FP16, torch.float64, torch.int32, torch.bool, torch.complex64)
    tensors = [torch.ones(2).to(dtype) for dtype in dtypes]
    expected = [FP16] * 3 + [torch.float64, torch.int32, torch.bool, torch.complex64]
    for amp in (POLYMP, TORCH):
        args, _ = received(amp.custom_fwd, amp.autocast("cpu", dtype=BF16), *tensors)
        assert [t.dtype for t in args] == expected
        same = [got is given for got, given in zip(args, tensors, strict=True)]
        assert same == [False, False, True, True, True, True, True]
        args, _ = received(amp.custom_fwd, amp.autocast("cpu", enabled=False), *tensors)
        assert all(got is given for got, given in zip(args, tensors, strict=True))


def dtypes_in(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.dtype
        case dict():
            pairs = [(dtypes_in(k), dtypes_in(v)) for k, v in value.items()]
            return type(value).__name__, pairs
        case list() | tuple():
            return type(value).__name__, [dtypes_in(v) for v in value]
        case _:
            return value


ONE = torch.ones(2)
NESTED: dict[str, Any] = {
    "list": [ONE, [ONE, "text", 5, None]],
    "tuple": (ONE, (ONE.double(), b"bytes", 2.5)),
    "dict": {"a": ONE, "b": {"c": [ONE]}, 3: True},
    "tensor as key": {ONE: "value"},
    "string": "text",
    "nothing": None,
    "empty": [(), {}, []],
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_inputs_are_cast_as_torch_casts_them(name: str) -> None:
    results = []
    for amp in (POLYMP, TORCH):
        args, kwargs = received(
            amp.custom_fwd, amp.autocast("cpu", dtype=BF16), NESTED[name], keyword=NESTED[name]
        )
        assert dtypes_in(args[0]) == dtypes_in(kwargs["keyword"])
        results.append(dtypes_in(args[0]))
    assert results[0] == results[1]


def test_arrays_pass_and_other_iterables_become_iterators() -> None:
    array = np.ones(2, np.float32)
    for amp in (POLYMP, TORCH):
        args, _ = received(amp.custom_fwd, amp.autocast("cpu"), array, {ONE}, iter([ONE]))
        assert args[0] is array
        assert [t.dtype for t in args[1]] == [FP16]
        assert [t.dtype for t in args[2]] == [FP16]


def test_tensors_of_another_device_are_not_cast() -> None:
    def forward(ctx: Any, *args: torch.Tensor) -> Any:
        return [arg.dtype for arg in args], torch.is_autocast_enabled("cuda")

    decorated = custom_fwd(forward, device_type="cuda", cast_inputs=BF16)
    with FakeTensorMode():
        both = torch.empty(2), torch.empty(2, device="cuda")
        with inside("cuda", "float16"):
            assert decorated(SimpleNamespace(), *both) == ([FP32, BF16], False)
            assert torch.is_autocast_enabled("cuda")
        with autocast("cpu"):
            assert decorated(SimpleNamespace(), *both) == ([FP32, FP32], False)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_plain_and_with_arguments_and_through_the_device_spellings() -> None:
    def forward(ctx: Any) -> str:
        """Its own words."""
        return "ran"

    def backward(ctx: Any) -> str:
        return "ran back"

    for decorate in (
        lambda f: custom_fwd(f, device_type="cuda"),
        custom_fwd(device_type="cuda"),
        ours.cuda.custom_fwd,
        ours.cuda.custom_fwd(cast_inputs=FP32),
    ):
        ctx = SimpleNamespace()
        decorated = decorate(forward)
        assert (decorated.__name__, decorated.__doc__) == ("forward", "Its own words.")
        assert decorated(ctx) == "ran"
        assert (ctx._dtype, ctx._fwd_used_autocast) == (FP16, False)  # torch's names
        for back in (
            lambda f: custom_bwd(f, device_type="cuda"),
            custom_bwd(device_type="cuda"),
            ours.cuda.custom_bwd,
        ):
            assert back(backward).__name__ == "backward"
            assert back(backward)(ctx) == "ran back"


@pytest.mark.parametrize("device", [None, 5, torch.device("cpu"), ONE])
@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_a_device_type_that_is_no_string(name: str, device: Any) -> None:
    messages = []
    for amp in (POLYMP, TORCH):
        with pytest.raises(ValueError, match="Expected `device_type` of type `str`") as caught:
            getattr(amp, name)(len, device_type=device)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_a_device_type_is_required(name: str) -> None:
    for amp in (POLYMP, TORCH):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
            getattr(amp, name)(len)


def test_an_unknown_device_type_fails_when_forward_runs() -> None:
    for amp in (POLYMP, TORCH):
        decorated = amp.custom_fwd(lambda ctx: None, device_type="abacus")
        with pytest.raises(RuntimeError, match="device type at start of device string: abacus"):
            decorated(SimpleNamespace())


def test_an_exception_in_forward_and_backward_restores_the_region() -> None:
    def fails(ctx: Any) -> None:
        raise ArithmeticError("on purpose")

    ctx = SimpleNamespace()
    with autocast("cpu", dtype=BF16):
        with pytest.raises(ArithmeticError):
            custom_fwd(fails, device_type="cpu", cast_inputs=FP32)(ctx)
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(ArithmeticError):
            custom_bwd(fails, device_type="cpu")(ctx)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BF16
