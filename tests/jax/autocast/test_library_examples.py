"""The libraries' published examples, small: with one line more every contraction is low in HLO.

Flax's MNIST, its language model on LM1B, its ResNet on ImageNet with batch statistics, its seq2seq,
and decoding as in its Gemma; a classifier of Keras, the recurrent networks of equinox and haiku,
a regression of numpyro, and losses of optax. `test_corpus` holds the same programs to a
bound derived from their roundings. Here a step is lowered to the HLO for GPUs, which needs none:
that for CPUs, and what XLA makes of small products there, has float32 operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from polymp.jax import autocast
from tests.conftest import need
from tests.support.jax.corpus import PROGRAMS, corpus
from tests.support.jax.corpus_runs import problem

corpus()

# By example: program of the corpus, and how many contractions its step has.
EXAMPLES = {
    "mnist": ("linen_cnn", 12),
    "lm1b": ("nnx_transformer_lm", 27),
    "imagenet": ("linen_batch_norm", 6),
    "seq2seq": ("linen_seq2seq", 51),
    "gemma": ("nnx_decode", 27),
    "keras": ("keras_classifier", 6),
    "equinox rnn": ("equinox_gru", 9),
    "haiku rnn": ("haiku_lstm", 6),
    "numpyro logistic regression": ("numpyro_logistic_regression", 3),
    "optax losses": ("optax_losses", 3),
}
_OPERAND = r"tensor<[0-9x]*x(\w+)>"
_CONTRACTION = re.compile(rf"stablehlo\.(dot_general|convolution).*: \({_OPERAND}, {_OPERAND}\) ->")


def contractions(name: str, wrap: Callable[[Any], Any]) -> list[tuple[str, str, str]]:
    """Kind and operands' dtypes of those of results and gradients, lowered for GPUs."""
    it = problem(name)
    step = jax.jit(it.graded(wrap(it.fn))).trace(*it.inputs())
    return _CONTRACTION.findall(step.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_contraction_is_low(example: str) -> None:
    name, count = EXAMPLES[example]
    need(PROGRAMS[name].needs)
    found = contractions(name, autocast)
    assert len(found) == count
    assert {dtype for _, *both in found for dtype in both} == {"bf16"}


def test_without_the_line_none_is() -> None:
    name, count = EXAMPLES["mnist"]
    found = contractions(name, lambda fn: fn)
    assert len(found) == count
    assert {dtype for _, *both in found for dtype in both} == {"f32"}


def test_only_what_the_policy_asks_for_is() -> None:
    name, _ = EXAMPLES["mnist"]
    policy = {"name": "mine", "rules": {"class:convolution": "lower"}}
    found = contractions(name, lambda fn: autocast(fn, policy=policy))
    assert {(kind, dtype) for kind, *both in found for dtype in both} == {
        ("convolution", "bf16"),
        ("dot_general", "f32"),
    }
