"""The arguments of `autocast`, checked as torch checks them, and classes that inherit from it."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.autocast import regions
from polymp.torch import (
    autocast,
    cpu,
    cuda,
    custom_fwd,
    explain,
    freeze,
    is_autocast_available,
    pin,
)
from tests.support.dtype_spellings import spellings
from tests.support.torch.version_changes import VERSION

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def outcome(amp: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a region, and return its attributes and warnings, or the exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            region = amp(*args, **kwargs)
        except Exception as error:
            return type(error), str(error), [w.category for w in caught]
    attributes = (region.device, region.fast_dtype, region._enabled, region._cache_enabled)
    return attributes, [(w.category, str(w.message), w.filename) for w in caught]


WRONG: tuple[Any, ...] = (
    ((), {}),
    (("cpu", BF16, True, None, "policy"), {}),
    (("cpu",), {"device": "cpu"}),
    *(((no_name,), {}) for no_name in (torch.device("cpu"), None, 5, b"cpu", "")),
    *(((unknown,), {}) for unknown in ("abacus", "CPU", "meta", "privateuseone")),
    *(((unknown, FP16), {}) for unknown in ("abacus", "meta", "hip")),
    (("meta", FP32), {}),
    (("privateuseone",), {"enabled": False}),
)


def _call(value: Any) -> str:
    args, kwargs = value
    return ",".join([*map(repr, args), *(f"{k}={v}" for k, v in kwargs.items())]) or "nothing"


@pytest.mark.parametrize("call", WRONG, ids=_call)
def test_wrong_arguments_raise_what_torch_raises(call: Any) -> None:
    args, kwargs = call
    kind, *said = outcome(autocast, *args, **kwargs)
    assert issubclass(kind, Exception)
    assert (kind, *said) == outcome(torch.autocast, *args, **kwargs)


@pytest.mark.parametrize(
    "enabled", ["amp", {"rules": {}}, 1, 0, None, torch.tensor(True)], ids=repr
)
def test_enabled_is_a_bool(enabled: Any) -> None:
    """torch says so when the region is entered; a policy in its place is never ignored."""
    with pytest.raises(TypeError) as theirs, torch.autocast("cpu", BF16, enabled):
        pass
    with pytest.raises(TypeError, match=r"policy=\.\.\. to name a policy") as ours:
        autocast("cpu", BF16, enabled)
    assert str(ours.value).startswith(str(theirs.value))


RIGHT: tuple[Any, ...] = (
    *(((device,), {}) for device in ("cpu", "cpu:0", "xpu", "hpu", "xla", "mtia", "maia")),
    (("cpu", FP16), {}),
    (("cpu", None, False, False), {}),
    (("cpu",), {"enabled": False, "dtype": FP32}),
    (("cuda",), {"enabled": False}),
    (("cuda",), {"enabled": False, "dtype": BF16}),
    (("mps",), {"dtype": BF16}),
)


@pytest.mark.parametrize("call", RIGHT, ids=_call)
def test_right_arguments_give_what_torch_gives(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has used no policy: others refuse maia, see test_leaving_and_keys.
    for code in set(regions.codes.policies):
        monkeypatch.delitem(regions.codes.policies, code)
    args, kwargs = call
    ours = outcome(autocast, *args, **kwargs)
    assert ours == outcome(torch.autocast, *args, **kwargs)
    assert ours[1] == []


@pytest.mark.parametrize("full", ["float16", "bfloat16"])
def test_dtypes_as_users_write_them(full: str) -> None:
    layer, x, dtype = nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), getattr(torch, full)
    for given in spellings(full)[1::3]:  # each a while
        assert [call.run for call in explain(layer, x, dtype=given)] == [full]
        assert freeze(copy.deepcopy(layer), (x,), dtype=given).dtype == full
    for given in spellings(full):
        region = autocast("cpu", given)
        assert (region.fast_dtype, region._enabled) == (dtype, True)
        with pin(layer, given) as pinning:
            assert pinning.dtype == full
        layer.float()
        if isinstance(given, str):
            cast = custom_fwd(lambda ctx, x: x.dtype, device_type="cpu", cast_inputs=given)
            with autocast("cpu"):
                assert cast(types.SimpleNamespace(), x) is dtype
    with pytest.raises(ValueError, match=r"autocast\(\): dtype 'fp17' is not a float dtype.*bf16"):
        autocast("cpu", "fp17")


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
WARNED: tuple[Any, ...] = (
    *((("cpu", dtype), {}) for dtype in (FP32, torch.float64, torch.int8, torch.complex64)),
    (("cpu", torch.float8_e4m3fn), {}),
    *(((device, FP32), {}) for device in ("xpu", "mps", "hpu")),
    *(pytest.param((("cuda", *low), {}), marks=WITHOUT_GPU) for low in ((), (BF16,), (FP32,))),
)


@pytest.mark.parametrize("call", WARNED, ids=_call)
def test_a_dtype_that_cannot_be_warns_and_disables(call: Any) -> None:
    args, kwargs = call
    attributes, caught = outcome(autocast, *args, **kwargs)
    assert attributes[2] is False
    assert [category for category, *_ in caught] == [UserWarning]
    assert caught[0][2] == __file__  # the caller is blamed
    assert (attributes, caught) == outcome(torch.autocast, *args, **kwargs)


@pytest.mark.parametrize("what", [5, None, "forward", [len]])
def test_decorating_what_cannot_be_called(what: Any) -> None:
    messages = []
    for amp in (autocast, torch.autocast)[: 2 if VERSION >= (2, 12) else 1]:  # 2.11 takes anything
        with pytest.raises(TypeError, match="callable") as caught:
            amp("cpu")(what)
        messages.append(str(caught.value))
    assert len({*messages}) == 1


def test_available_is_what_torch_says() -> None:
    devices = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu", "meta", "vulkan")
    ours = {device: is_autocast_available(device) for device in devices}
    assert ours == {device: torch.amp.is_autocast_available(device) for device in devices}
    assert (ours["cpu"], ours["meta"]) == (True, False)


def test_our_function_may_take_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", is_autocast_available)
    with autocast("cpu"):
        assert torch.is_autocast_enabled("cpu")


def test_the_arguments_are_taken_when_the_object_is_made(x: torch.Tensor, w: torch.Tensor) -> None:
    with autocast("cpu", dtype=FP16, cache_enabled=False):
        made_inside = autocast("cpu")
    made_outside = autocast("cpu")
    assert (made_inside.fast_dtype, made_inside._cache_enabled) == (FP16, False)
    assert (made_outside.fast_dtype, made_outside._cache_enabled) == (BF16, True)
    with made_inside:
        assert torch.mm(x, w).dtype is FP16
        with made_outside:
            assert torch.mm(x, w).dtype is BF16


class Half(autocast):
    def __init__(self, enabled: bool = True) -> None:
        super().__init__("cpu", FP16, enabled)
        self.entries: list[str] = []

    def __enter__(self) -> Half:
        self.entries.append("enter")
        return super().__enter__()

    def __exit__(self, *exc: object) -> Any:
        self.entries.append("exit")
        return super().__exit__(*exc)


def test_a_subclass_that_overrides_enter_and_exit(x: torch.Tensor, w: torch.Tensor) -> None:
    region = Half()
    with region as entered:
        assert entered is region
        assert torch.mm(x, w).dtype is FP16
    decorated = region(lambda: torch.mm(x, w).dtype)
    assert decorated() is FP16
    assert region.entries == ["enter", "exit"] * 2
    with autocast("cpu"), Half(enabled=False):
        assert torch.mm(x, w).dtype is FP32


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_device_spellings_are_subclasses_with_torch_s_arguments(x, w) -> None:
    assert issubclass(cpu.autocast, autocast)
    assert issubclass(cuda.autocast, autocast)
    with cpu.autocast(True, FP16, False):
        assert torch.mm(x, w).dtype is FP16
        assert not torch.is_autocast_cache_enabled()
    with cpu.autocast():
        assert torch.mm(x, w).dtype is BF16
    region = cuda.autocast(enabled=False)
    assert (region.device, region.fast_dtype) == ("cuda", FP16)


SPELLINGS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "cpu.autocast": (cpu.autocast, torch.cpu.amp.autocast, (False,)),
    "cuda.autocast": (cuda.autocast, torch.cuda.amp.autocast, (False,)),
    "cpu.GradScaler": (cpu.GradScaler, torch.cpu.amp.GradScaler, ()),
    "cuda.GradScaler": (cuda.GradScaler, torch.cuda.amp.GradScaler, (1.0, 2.0, 0.5, 1, False)),
    "cuda.custom_fwd": (cuda.custom_fwd, torch.cuda.amp.custom_fwd, (len,)),
    "cuda.custom_bwd": (cuda.custom_bwd, torch.cuda.amp.custom_bwd, (len,)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_device_spellings_warn_as_torch_s_do(name: str) -> None:
    *both, args = SPELLINGS[name]
    found = []
    for spelling in both:
        with pytest.warns(FutureWarning) as caught:
            spelling(*args)
        (warning,) = caught
        found.append((str(warning.message), warning.filename))
    (ours, blamed), (theirs, _) = found
    assert ours.startswith(theirs)
    assert blamed == __file__
