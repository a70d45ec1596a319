"""The worked example of parity: one transformer in torch and in flax, and one that is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from polymp.testing import ParityError, assert_parity
from tests.conftest import FRAMEWORKS, need
from tests.support.decisions import recording
from tests.support.examples import modules
from tests.support.sizes import size

SIZES = argparse.Namespace(
    batch=1, context=4, width=8, layers=1, heads=2, seed=0, steps=size(3, 10), lr=0.1
)  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    for name in FRAMEWORKS:
        need(name)
    with modules("compare_models", "train_torch", "train_jax", "job") as found, recording():
        yield SimpleNamespace(it=found.compare_models, job=found.job)


@pytest.mark.sized
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_models_are_the_same_forward_backward_and_in_training(example: Any, name: str) -> None:
    text = example.job.read(None, SIZES.context)
    once, trained = example.it.compare(name, text, SIZES)
    weights = example.job.first_weights(text.alphabet, SIZES)
    assert [gap.what for gap in once.gaps] == [
        "result",
        *(f"gradient of input[0][{weight!r}]" for weight in sorted(weights)),
    ]
    low = [gap.tolerance for gap in (once.gaps[0], trained.gaps[0])]
    print(f"\n{name}: loss within {low[0]:.2g}, {SIZES.steps} steps within {low[1]:.2g}; "
          f"tolerance / error {once.margin:.1f} and {trained.margin:.1f}")  # fmt: skip
    assert 1 < once.margin
    assert 1 < trained.margin
    assert max(low) < {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}[name]


@pytest.mark.long  # tests/shared/test_parity_cases.py plants as much into smaller models
def test_a_model_that_differs_in_one_weight_is_noticed(example: Any) -> None:
    text = example.job.read(None, SIZES.context)
    weights = example.job.first_weights(text.alphabet, SIZES)
    tokens = next(example.job.batches(text, SIZES))
    ours = example.it.torch_loss(SIZES, text.alphabet)
    theirs = example.it.jax_loss(SIZES, text.alphabet)

    def off(weights: Any, tokens: Any) -> Any:
        return theirs({**weights, "norm.weight": weights["norm.weight"] * 1.1}, tokens)

    with pytest.raises(ParityError) as caught:
        assert_parity(ours, off, [weights, tokens], dtype="bfloat16", probes=2)
    assert caught.value.op == "layer_norm"
