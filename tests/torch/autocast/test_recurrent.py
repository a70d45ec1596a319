"""Recurrent layers on CUDA: their weights stay in one buffer, and torch's kernel keeps its place.

cuDNN is not needed here: what it would be asked for is compared with what torch's own modules ask.
test_gpu.py has the rest.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.autocast import autocast_kernel, torch_table
from polymp.backends.torch.compat import optimizers
from polymp.rules import policy_files
from polymp.rules.row import LOW, Rule
from polymp.torch import autocast
from tests.support.torch.each_op import inside
from tests.support.torch.kernels import all_python
from tests.support.torch.outcomes import fake_mode, on_cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

LAYERS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    "LSTM with projections, no bias": (nn.LSTM, {"proj_size": 3, "bias": False}),
    "GRU, no bias": (nn.GRU, {"bias": False, "num_layers": 2}),
    "GRU": (nn.GRU, {"batch_first": True}),
    "RNN": (nn.RNN, {}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Options of every call that would bring weights into cuDNN's buffer; here into one like it."""
    asked: list[tuple[Any, ...]] = []

    def flatten(weights: list[torch.Tensor], *options: Any) -> None:
        asked.append(options)
        with torch.no_grad():
            flat = torch.cat([w.flatten() for w in weights])
            for w, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
                w.set_(part.view(w.shape))

    monkeypatch.setattr(optimizers, "flatten_rnn_weights", flatten)
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda t: True)
    return asked


def as_called(
    title: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.RNNBase, Any, str, Any]:
    """A layer, the arguments and overload that it calls, and what would prepare them on CUDA."""
    kind, options = LAYERS[title]
    torch.manual_seed(0)
    layer, seen = kind(4, 5, **options), []

    def spy(name: str, *args: Any) -> Any:
        seen.append((name, args))
        return getattr(torch, name)(*args)

    names = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    spies = {name: functools.partial(spy, name) for name in names}
    monkeypatch.setattr(nn.modules.rnn, "_VF", SimpleNamespace(**spies))
    plain = {f"RNN_{kind.upper()}": spies[f"rnn_{kind}"] for kind in ("tanh", "relu")}
    monkeypatch.setattr(nn.modules.rnn, "_rnn_impls", plain)
    x = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(1))
    pack = functools.partial(nn.utils.rnn.pack_padded_sequence, batch_first=layer.batch_first)
    layer(pack(x, torch.tensor([3, 2, 1])) if packed else x)
    ((name, args),) = seen
    overload = f"{name}.{'data' if packed else 'input'}"
    return layer, args, overload, autocast_kernel.recurrent_arguments(overload, "cuda")


def of_torch(layer: nn.RNNBase) -> tuple[Any, ...]:
    """Return the arguments after the weights in the call of the layer's `flatten_parameters`."""
    modes = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
    return (
        (4 if layer.bias else 2) + (layer.proj_size > 0),
        layer.input_size,
        modes[layer.mode],
        layer.hidden_size,
        layer.proj_size,
        layer.num_layers,
        layer.batch_first,
        layer.bidirectional,
    )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("title", LAYERS)
def test_the_weights_are_cast_into_the_buffer_that_the_layer_would_ask_for(
    title: str,
    packed: bool,
    flattened: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, args, _, prepare = as_called(title, packed, monkeypatch)
    prepared = prepare(args, BF16)
    (options,) = flattened
    expected = list(of_torch(layer))
    expected[6] = bool(expected[6]) and not packed  # such sequences lie time by time
    assert options == tuple(expected)

    at = 3 if packed else 2
    weights, lows = args[at], prepared[at]
    assert len({low.untyped_storage().data_ptr() for low in lows}) == 1
    assert [*args[:at], *args[at + 1 :]] == [*prepared[:at], *prepared[at + 1 :]]
    for w, low in zip(weights, lows, strict=True):
        assert low.dtype is BF16
        assert torch.equal(low, w.to(BF16))
        (ours,) = torch.autograd.grad(low.float().square().sum(), w)
        (theirs,) = torch.autograd.grad(w.to(BF16).float().square().sum(), w)
        assert torch.equal(ours, theirs)


def test_what_needs_no_buffer_is_left_alone(flattened, monkeypatch) -> None:
    _, args, overload, prepare = as_called("LSTM", False, monkeypatch)
    assert autocast_kernel.recurrent_arguments(overload, "cpu") is None
    assert autocast_kernel.recurrent_arguments("lstm_cell", "cuda") is None
    assert prepare(args, FP32) is args
    mixed = (*args[:2], [args[2][0].half(), *args[2][1:]], *args[3:])
    assert prepare(mixed, BF16) is mixed
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda t: False)
    assert prepare(args, BF16) is args
    assert flattened == []


def call_below(weights: torch.dtype) -> Any:
    with fake_mode():
        sizes = ((20, 4), (20, 5), (20,), (20,))
        params = [torch.empty(size, dtype=weights, device="cuda") for size in sizes]
        buffer = torch.empty(220, dtype=weights, device="cuda")
        x = torch.empty(3, 2, 4, device="cuda")
        h, c = (torch.empty(1, 2, 5, device="cuda") for _ in range(2))
    rest = (2, 5, 0, 1, False, 0.0, True, False, [], None)
    return lambda: torch.ops.aten._cudnn_rnn(x, params, 4, buffer, h, c, *rest)


@pytest.mark.parametrize(
    ("rule", "weights", "seen"),
    [
        ("fp32", FP32, "float32, float32, float32, float32, float32, float32, float32, float32"),
        ("fp32", FP16, "float32, float32, float32, float32, float32, float32, float32"),
        ("keep", FP16, "float32, float16, float16, float16, float16, float16, float32, float32"),
    ],
)
def test_the_buffer_is_kept_or_made_anew_never_cast(rule, weights, seen) -> None:
    """A cast of it would have cuDNN's old layout, and a kernel told so would read it."""
    policy = policy_files.load({"rules": {"_cudnn_rnn": rule}})
    found = on_cuda(call_below(weights), lambda: inside("cuda", policy=policy))
    assert found.calls == (f"aten::_cudnn_rnn({seen})",)


def test_the_table_knows_which_builds_have_the_kernel() -> None:
    here = {name for name in torch_table.BUILDS if name in torch_table.kernels("cuda")}
    assert here == {name for name, built in torch_table.BUILDS.items() if built}
    row = torch_table.row("cuda", "_cudnn_rnn", "float16")
    assert row.rule is Rule.LOWER


@pytest.mark.parametrize("low", LOW)
def test_policies_that_agree_leave_torch_its_kernel(low: str) -> None:
    for name in ("amp", "torch-cuda", "lean"):
        assert torch_table.agrees("cuda", policy_files.load(name), "_cudnn_rnn", low)
    assert not torch_table.agrees("cuda", policy_files.load({"rules": {}}), "_cudnn_rnn", low)


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_our_kernel_hands_over_to_torch_s() -> None:
    """Also where every op is on ours; weights that are float16 need no buffer made by cuDNN."""
    expected = "float16, float16, float16, float16, float16, float16, float16, float16"
    with all_python("cuda"):
        for low in LOW:
            found = on_cuda(call_below(FP16), lambda low=low: inside("cuda", low))
            assert found.calls == (f"aten::_cudnn_rnn({expected})",)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_of_the_wrong_dtype_it_has_torch_s_own_message(kind: type[nn.RNNBase]) -> None:
    """In regions that do as torch.amp does, for every dtype of the layer and of its input."""

    def outcome(region: Any, layer_dtype: torch.dtype, x_dtype: torch.dtype) -> str:
        layer = kind(4, 4).to(layer_dtype)
        try:
            with region:
                return str(layer(torch.ones(2, 1, 4, dtype=x_dtype))[0].dtype)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    found = set()
    for low in (BF16, FP16):
        for layer_dtype in (BF16, FP16, FP32, torch.float64):
            for x_dtype in (BF16, FP16, FP32, torch.float64):
                pair = layer_dtype, x_dtype
                theirs = outcome(torch.autocast("cpu", low), *pair)
                assert outcome(autocast("cpu", low), *pair) == theirs, pair
                assert outcome(autocast("cpu", low, policy="torch-cpu"), *pair) == theirs, pair
                found.add(theirs.partition(":")[0])
    assert found & {"RuntimeError", "ValueError"}
    assert any(each.startswith("torch.") for each in found)
