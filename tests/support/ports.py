"""Three small models that `tests.support.torch.ports` has, and `tests.support.jax.ports` a port of.

A fault is another number or name in a config, which either side takes. Weights are torch's own
first ones, laid out as each framework has them: kernels of flax are [in, out] and [height, width,
in, out], its images [batch, height, width, channels].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.support.sizes import LONG

RATE = 0.1  # of SGD


class Bert(NamedTuple):
    """An encoder of two layers, in flax linen, that tells the class of a text."""

    name: str = "bert"
    eps: float = 1e-12  # of the norms in the second layer
    tanh: bool = False  # the second layer's gelu
    start: int = 0  # of the positions
    pooled: int = 0  # the token that stands for the text


class ResNet(NamedTuple):
    """A stem and two blocks with batch norms, in flax linen; the second block halves the image."""

    name: str = "resnet"
    momentum: float = 0.1  # of the second block's first norm, as torch counts it
    eps: float = 1e-5  # likewise
    strides: tuple[int, int] = (2, 1)  # of the second block's convolutions
    padding: str = "both sides"  # or "same": of the convolution with a stride
    sample: bool = True  # in JAX: the first norm's running variance is corrected, as in torch
    flat: str = "NCHW"  # the order of the elements that the head reads


class Block(NamedTuple):
    """An attention and an MLP, each behind a norm, in equinox."""

    name: str = "block"
    bias: bool = True  # of the MLP's first layer
    activation: str = "silu"
    scaled: bool = True  # the scores of the attention
    scoped: bool = False  # in JAX: modules are called by their paths


Config = Bert | ResNet | Block

# The faults, and what stands in the path of the module or in the name of the op, on either side.
FAULTS: dict[str, tuple[Config, str]] = {
    "eps of a layer norm": (Bert(eps=1e-5), "layers.1.attention_norm"),
    "gelu by tanh": (Bert(tanh=True), "gelu"),
    "positions from 1 on": (Bert(start=1), "positions"),
    "the last token pooled": (Bert(pooled=-1), "pooler"),
    "momentum of a batch norm": (ResNet(momentum=0.01), "blocks.1.norm1"),
    "eps of a batch norm": (ResNet(eps=1e-3), "blocks.1.norm1"),
    "stride of the second convolution": (ResNet(strides=(1, 2)), "blocks.1.conv1"),
    "padding on one side": (ResNet(padding="same"), "blocks.1"),
    "order of what is flattened": (ResNet(flat="NHWC"), "head"),
    "a bias dropped": (Block(bias=False), "silu"),
    "another activation": (Block(activation="gelu"), "gelu"),
    "scores that are not scaled": (Block(scaled=False), "MultiheadAttention"),
}
# In the port alone.
IN_JAX: dict[str, tuple[Config, str]] = {
    "gelu by tanh": FAULTS["gelu by tanh"],
    "running variance of a batch": (ResNet(sample=False), "blocks.1.norm1"),
    "padding on one side": FAULTS["padding on one side"],
    "another activation": (Block(activation="gelu"), "silu"),
    "a bias dropped in a scoped model": (Block(bias=False, scoped=True), "up"),
}

WIDTH, HEADS, WORDS, LENGTH, BATCH, CLASSES = 24, 3, 50, 8, 6, 4
HIDDEN = 40 if LONG else WIDTH  # of one width, JAX has fewer programs to compile
SIDE, CHANNELS = 8, 6  # of an image, and of the network behind it


def batch(config: Config, seed: int = 0) -> tuple[Any, ...]:
    """Return a batch: texts with their lengths, images or vectors, and the classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, CLASSES, BATCH)
    if isinstance(config, Bert):
        tokens = rng.integers(0, WORDS, (BATCH, LENGTH))
        return tokens, np.arange(LENGTH) < rng.integers(4, LENGTH + 1, (BATCH, 1)), classes
    shape = (3, SIDE, SIDE) if isinstance(config, ResNet) else (LENGTH, WIDTH)
    return rng.standard_normal((BATCH, *shape)).astype(np.float32), classes
