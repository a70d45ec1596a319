"""Recurrent layers on CUDA: the buffer of their weights, and torch's kernel, which keeps its place.

test_gpu.py has what needs cuDNN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.autocast import torch_table
from polymp.rules import policy_files
from polymp.rules.row import LOW, Rule
from polymp.torch import autocast
from tests.support.torch.each_op import inside
from tests.support.torch.kernels import all_python
from tests.support.torch.outcomes import fake_mode, on_cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
