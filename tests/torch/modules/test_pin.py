"""Pinned parameters: never rounded, whatever the model is cast to, and movable all the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polymp import PolicyError
from polymp.torch import autocast, pin, scoped
from tests.support.torch.models import same

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Block(nn.Module):
    """Weights that bfloat16 cannot hold, statistics, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.rnn = nn.LSTM(4, 4)
        self.lm_head = nn.Linear(4, 5)
        with torch.no_grad():
            for t in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                t.normal_()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """All but batch norm's counter, an integer that `type` casts, too."""
    saved = model.state_dict()
    return {name: saved[name].detach().clone() for name in saved if not name.endswith("tracked")}


def floats(module: nn.Module) -> set[torch.dtype]:
    return {t.dtype for t in module.state_dict().values() if t.is_floating_point()}


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "to(bfloat16)": lambda m: m.to(BF16),
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "double()": lambda m: m.double(),
    "type": lambda m: m.type(torch.HalfTensor),
    "to(device, dtype)": lambda m: m.to("cpu", BF16, non_blocking=True),
    "to(tensor)": lambda m: m.to(torch.ones(1, dtype=FP16)),
    "channels_last": lambda m: m.to(dtype=BF16, memory_format=torch.channels_last),
    "twice": lambda m: m.to(BF16).half(),
    "there and back": lambda m: m.to(BF16).to(FP32),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("part", ["", "conv", "norm", "rnn", "lm_head"])
@pytest.mark.parametrize("future", ["data", "overwrite", "swap"])
def test_values_are_not_rounded(cast: str, part: str, future: str, monkeypatch: Any) -> None:
    model, unpinned = Block(), Block()
    before = values(model.get_submodule(part))
    CASTS[cast](unpinned)
    assert not same(values(unpinned.get_submodule(part)), before) or cast == "double()", "no oracle"
    if future == "overwrite":
        monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    if future == "swap":
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    pin(model.get_submodule(part), "float32")
    CASTS[cast](model)
    assert same(values(model.get_submodule(part)), before)
    others = [n for n in ("conv", "norm", "rnn", "lm_head") if part and n != part]
    for name in others:
        assert floats(model.get_submodule(name)) == floats(unpinned.get_submodule(name)), name


def test_layouts_follow() -> None:
    model = Block()
    pin(model.conv, "float32")
    model.conv.to(dtype=BF16, memory_format=torch.channels_last)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.dtype is FP32


def test_gradients_are_kept_as_well() -> None:
    linear = nn.Linear(4, 4)
    linear.weight.grad = torch.randn(4, 4)
    before, parameter = linear.weight.grad.clone(), linear.weight
    pin(linear, "float32")
    linear.to(BF16)
    assert linear.weight is parameter, "an optimizer holds it"
    assert torch.equal(linear.weight.grad, before)


def test_what_is_not_float_is_left_alone() -> None:
    model = Block()
    model.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
    pin(model, "float32")
    model.half()
    assert model.norm.num_batches_tracked.dtype is torch.int64
    assert model.phase.dtype is torch.complex64


def test_now_in_the_dtype() -> None:
    linear = nn.Linear(4, 4).double()
    rounded = linear.weight.float()
    parameter = linear.weight
    pin(linear, torch.float32)
    assert torch.equal(linear.weight, rounded)
    assert linear.weight is parameter
    pin(low := nn.Linear(4, 4), "bfloat16")
    assert low.float().weight.dtype is BF16


def test_devices() -> None:
    model = Block()
    pin(model.norm, "float32")
    model.to("meta", BF16)
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    assert (floats(model.norm), floats(model.conv)) == ({FP32}, {BF16})
    model.to_empty(device="cpu")
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert (floats(model.norm), floats(model.conv)) == ({FP32}, {BF16})


def test_patterns() -> None:
    model = nn.ModuleDict({"a": Block(), "b": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))})
    before = values(model)
    handle = pin(model, "float32", paths=["*.norm*", "b.0"])
    assert repr(handle) == "Pinning('float32', 2 modules)"
    model["a"].lm_head.to(BF16)
    model.to(BF16)
    after = model.state_dict()
    kept = {n for n, t in after.items() if t.dtype is FP32}
    assert kept == {
        *(f"a.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")),
        "b.0.weight",
        "b.0.bias",
    }
    assert all(torch.equal(after[n], before[n]) for n in kept)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_parameter_is_pinned_in_every_module(head_first: bool) -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    head.weight = embedding.weight
    pairs = [("head", head), ("embedding", embedding), ("other", nn.Linear(4, 4))]
    model = nn.ModuleDict(dict(pairs if head_first else pairs[1:] + pairs[:1]))
    before = embedding.weight.detach().clone()
    handle = pin(model, "float32", paths=["head"])
    model.to(BF16)
    assert head.weight is embedding.weight
    assert torch.equal(embedding.weight, before)
    assert head.bias.dtype is FP32
    assert model["other"].weight.dtype is BF16
    handle.remove()
    assert model.to(BF16)["embedding"].weight.dtype is BF16
    assert type(embedding) is nn.Embedding


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("swap", [True, False])
def test_load_state_dict(assign: bool, swap: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    model, other = Block(), Block().double()
    if swap:  # which torch cannot do with its own LSTM
        model.rnn, other.rnn = nn.Linear(4, 4), nn.Linear(4, 4).double()
    pin(model.lm_head, "float32")
    pin(model.norm, "float32")
    pin(model.rnn, "float32")
    model.lm_head.bias.requires_grad_(False)
    saved = other.state_dict()
    saved["lm_head.weight"] = nn.Parameter(saved["lm_head.weight"])
    objects = {name: (t, t.dtype) for name, t in saved.items()}
    model.load_state_dict(saved, assign=assign)
    assert floats(model.lm_head) == floats(model.norm) == floats(model.rnn) == {FP32}
    assert floats(model.conv) == {FP64 if assign else FP32}
    for name, t in model.state_dict().items():
        assert torch.equal(t.double(), saved[name].float().double()), name
    assert isinstance(model.lm_head.weight, nn.Parameter)
    assert [p.requires_grad for p in model.lm_head.parameters()] == [True, False]
    assert all(t is saved[n] and t.dtype is d for n, (t, d) in objects.items()), "the caller's"
    assert model.rnn(torch.ones(2, 4))[0].dtype is FP32, "torch's LSTM keeps lists of its weights"
    model.half()
    assert floats(model.lm_head) == floats(model.norm) == {FP32}


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_pinned(twin: Callable[[Any], Any]) -> None:
    model = Block()
    keys = list(model.state_dict())
    before = values(model.lm_head)
    copied, handle = twin((model, pin(model, "float32", paths=["lm_head"])))
    assert list(copied.state_dict()) == keys
    assert same(values(copied.to(BF16).lm_head), before)
    assert copied.conv.weight.dtype is BF16
    handle.remove()
    handle.remove()
    assert type(copied.lm_head) is nn.Linear
    assert floats(copied.to(BF16).lm_head) == {BF16}
    assert same(values(model.to(BF16).lm_head), before), "the copy's handle is the copy's"


@pytest.mark.parametrize("pin_first", [True, False])
@pytest.mark.parametrize("unpin_first", [True, False])
def test_together_with_scopes(pin_first: bool, unpin_first: bool) -> None:
    """Pinning is of what is stored, scopes of what is computed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = {"rules": {"linear": "lower"}, "scopes": {"1": {"linear": "fp32"}}}
    made: dict[str, Any] = {}
    for what in ("pin", "scope") if pin_first else ("scope", "pin"):
        made[what] = pin(model, "float32") if what == "pin" else scoped(model, policy)
    x = torch.ones(2, 4)
    model.half()
    with autocast("cpu", BF16):
        assert (model[0](x).dtype, model(x).dtype) == (BF16, FP32)
    twin = copy.deepcopy(model).half()
    with autocast("cpu", BF16):
        assert (twin[0](x).dtype, twin(x).dtype) == (BF16, FP32)
    assert floats(twin) == {FP32}
    (made["pin"] if unpin_first else made["scope"]).remove()
    with autocast("cpu", BF16):
        assert model(x).dtype is (FP32 if unpin_first else BF16)
    assert floats(model.half()) == {FP16 if unpin_first else FP32}
    (made["scope"] if unpin_first else made["pin"]).remove()
    assert [type(m) for m in model.modules()] == [nn.Sequential, nn.Linear, nn.Linear]


def test_a_pinned_norm_trains_in_a_low_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    pin(model, "float32", paths=["1"])
    model.to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = model[1].weight.detach().clone()
    for _ in range(3):
        with autocast("cpu", BF16):
            loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    assert model[1].weight.grad.dtype is FP32
    moved = (model[1].weight - before).abs().max()
    assert 0 < moved < 2**-9, "a step that bfloat16 would have lost"


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a module": (lambda: pin(nn.Parameter(torch.ones(1)).data, "float32"), TypeError,
        "pin() takes a torch.nn.Module and a dtype, not tensor([1.])."),
    "no dtype": (lambda: pin(nn.Linear(2, 2), "fp3"), PolicyError,
        "pin(): dtype 'fp3' is not a float dtype that polymp knows. Write "),
    "not a float": (lambda: pin(nn.Linear(2, 2), torch.int8), PolicyError,
        "pin(): dtype int8 is not a float dtype that polymp knows. Write "),
    "a string for a list": (lambda: pin(nn.Linear(2, 2), "float32", paths="*.norm"), PolicyError,
        "pin(): paths='*.norm' is not a list. Write paths=['*.norm']."),
    "no pattern": (lambda: pin(nn.Linear(2, 2), "float32", paths=["a/b"]), PolicyError,
        "pin(): 'a/b' is no pattern of module paths. Write names joined by dots, such as "
        '"*.lm_head" or "blocks.*.attn"; * stands for any characters.'),
    "no match": (lambda: pin(nn.Sequential(nn.ReLU(), nn.ReLU()), "float32", paths=["0", "norm"]),
        PolicyError, "pin(): 'norm' matches no module: paths are, for example, '0', '1'."),
    "a second path": (lambda: pin(nn.Sequential(*[nn.ReLU()] * 2), "float32", paths=["1"]),
        PolicyError,
        "pin(): '1' matches no module: '1' is also '0', and a module's first path counts."),
    "lazy": (lambda: pin(nn.LazyLinear(2), "float32"), TypeError,
        "pin(): LazyLinear is lazy, and changes its class in its first call. "
        "Call the model once before pin()."),
    "the handle called": (lambda: pin(nn.Linear(2, 2), "float32")(torch.ones(2)), TypeError,
        "pin() changes the model in place and returns a handle with remove(). "
        "Write pin(model, dtype), and call the model itself."),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    function, kind, text = WRONG[case]
    with pytest.raises(kind) as error:
        function()
    said = str(error.value)
    assert said.startswith(text) if text.endswith(" ") else said == text


def test_pinned_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pin(model, "float32", paths=["1"])
    with pytest.raises(PolicyError) as error:
        pin(model, "bfloat16")
    assert str(error.value) == (
        "pin(): Linear at '1' is pinned already, to float32. "
        "Take that off first, by remove() of the handle that pin() returned."
    )
    assert type(model[0]) is nn.Linear
    assert floats(model) == {FP32}


class Metric(nn.Module):
    """As torchmetrics' Metric: states that are no buffers, and stay what they are in a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.total, self.applied = torch.zeros(2), None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], exclude: str = "") -> Any:
        super()._apply(fn)
        self.applied = fn
        kinds = ("type", "half", "float", "double", "bfloat16")
        if not any(f"Module.{kind}" in str(fn) for kind in kinds):
            self.total = fn(self.total)
        return self


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "type"])
def test_a_module_sees_the_function_that_torch_applies(cast: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Metric())
    pin(model, "float32")
    arguments = [torch.float16] if cast == "type" else []
    getattr(model, cast)(*arguments)
    assert model[1].total.dtype is FP32
    assert floats(model) == {FP32}
    sentinel: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.half()  # noqa: E731
    model._apply(sentinel)
    assert model[1].applied is sentinel
    assert model[1].total.dtype is FP16, "not a parameter, nor a buffer"
    assert floats(model) == {FP32}
    assert model.to("meta")[1].total.device.type == "meta"
