"""`lean` in torch: what it saves for backward, which dtypes meet in attention, what it learns.

It is measured against torch's own list for CUDA, here on a CPU.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polymp.torch import autocast
from tests.conftest import need
from tests.support.examples import TINY, modules
from tests.support.torch import saved_dtypes


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


low_dtypes = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
STEPS = 120


def size(found: list[saved_dtypes.Saved]) -> int:
    return sum(one.bytes for one in found)


def in_float32(found: list[saved_dtypes.Saved]) -> list[saved_dtypes.Saved]:
    """Activations among it that are float32; means and sums of rows are smaller."""
    least = 4 * saved_dtypes.ACTIVATION
    return [one for one in found if one.dtype == "float32" and one.bytes >= least]


# At most so much of the bytes under torch's list for GPUs. Where attention is one kernel, there is
# less float32 to save: all that it saves is low under that list, too.
ATTENTION = {"written out": (saved_dtypes.written_out, 0.75), "fused": (None, 0.85)}
attentions = pytest.mark.parametrize(("how", "limit"), ATTENTION.values(), ids=[*ATTENTION])


@low_dtypes
@attentions
def test_the_example_saves_less_than_under_torchs_list_and_amp(how, limit, low):
    with modules("job", "train_torch") as parts, saved_dtypes.attention(parts.train_torch, how):
        theirs, amp, lean = (
            size(saved_dtypes.of_model(parts.train_torch, low, policy))
            for policy in ("torch-cuda", "amp", "lean")
        )
    print(f"{low}: {lean / theirs:.3f} of torch-cuda, {lean / amp:.3f} of amp")
    assert theirs > 1_000_000
    assert lean / amp <= 0.92, f"{lean} of {amp} bytes"
    assert lean / theirs <= limit, f"{lean} of {theirs} bytes"


@low_dtypes
@attentions
def test_a_block_saves_no_float32_activation(how, limit, low):
    """Where its input is low; under the others it does, so this can fail."""
    with modules("job", "train_torch") as parts, saved_dtypes.attention(parts.train_torch, how):
        lean, amp, theirs = (
            saved_dtypes.of_block(parts.train_torch, low, policy)
            for policy in ("lean", "amp", "torch-cuda")
        )
    assert in_float32(lean) == []
    assert in_float32(amp) != []
    assert len(in_float32(theirs)) >= 2
    assert size(lean) < size(amp)


@low_dtypes
def test_a_language_model_saves_less_than_under_amp(low):
    need("transformers")
    model, ids = gemma(), torch.ones(4, 32, dtype=torch.int64)

    def loss() -> Any:
        return F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())

    def bytes_under(policy: str) -> int:
        with autocast("cpu", low, policy=policy):
            return size(saved_dtypes.saved(loss, [*model.parameters(), *model.buffers()]))

    share = bytes_under("lean") / bytes_under("amp")
    print(f"{low}: lean saves {share:.3f} of amp's bytes")
    assert share <= 0.92


# With float32 weights, torch says once that it cannot use its fused kernel of RMSNorm.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@low_dtypes
def test_queries_keys_and_values_have_one_dtype(low):
    """Of which two are normalised. flash-attention's kernels and torch's list refuse others."""
    x, w = torch.randn(2, 4, 8), torch.ones(8)
    for policy, normed in (("lean", low), ("torch-cuda", torch.float32)):
        with autocast("cpu", low, policy=policy):
            v = F.linear(x, torch.randn(8, 8))
            q, k = F.layer_norm(v, (8,), w, w), F.rms_norm(v, (8,), w)
        assert (q.dtype, k.dtype, v.dtype) == (normed, normed, low)


def losses(parts: Any, policy: str | None, options: list[str]) -> tuple[float, float]:
    args = parts.job.arguments(
        parts.job.parser("train_torch.py", "", parts.job.SMALL), [*options, "--quiet"]
    )
    region = torch.autocast if policy is None else partial(autocast, policy=policy)
    parts.train_torch.autocast = region
    text = parts.job.read(None, args.context)
    run = parts.train_torch.train("bf16", text, args, torch.device("cpu"))
    return run.held_out[0][1], run.loss


@pytest.mark.long
def test_training_ends_within_half_a_percent_of_torchs():
    """With attention written out."""
    with modules("job", "train_torch") as parts:
        with saved_dtypes.attention(parts.train_torch, saved_dtypes.written_out):
            (before, theirs), (_, amp), (_, lean) = (
                losses(parts, policy, [*TINY, "--steps", str(STEPS)])
                for policy in (None, "amp", "lean")
            )
    assert theirs < 0.8 * before
    assert lean != amp, "nothing of lean's own has run"
    assert math.isclose(lean, theirs, rel_tol=0.005)
    assert math.isclose(lean, amp, rel_tol=0.005)
