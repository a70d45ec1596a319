"""A decoder, twelve layers deep, and the faults that are planted in one place of it.

The same model, its weights and its tokens are made by `tests.support.torch.decoder` and
`tests.support.jax.decoder` of what is here. A fault has a name, and is in one layer alone:

    dtype     its layer computes in bfloat16 or, in a region, in float32
    softmax   in a region: the softmax of its layer has no float32 row
    norm      in a region: the layer norms of its layer have none
    adam      Adam adds 1e-6 and not 1e-8
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import polymp

# In one operation each. The first is a weight that was loaded the wrong way round.
FAULTS = "transposed gelu eps scale bias rope mask dropout residual dtype softmax norm adam".split()
IN_REGIONS = ("softmax", "norm")  # there is no such fault without a region
EPS, OTHER_EPS = 1e-5, 1e-6  # of the norms
ADAM_EPS, OTHER_ADAM_EPS, RATE = 1e-8, 1e-6, 1e-3


class Config(NamedTuple):
    layers: int = 12
    width: int = 48
    heads: int = 4
    hidden: int = 96
    words: int = 64
    length: int = 16
    batch: int = 5
    mask: float = -np.inf  # what scores of later tokens are
    fault: str = ""
    layer: int = 7  # that has the fault
    low: str = ""  # dtype of a region

    def fault_of(self, layer: int) -> str:
        """The fault of a layer; "" without."""
        return self.fault if layer == self.layer else ""

    def policy(self, blocks: str) -> polymp.Policy:
        """Return the policy of the region; `blocks` is how the layers' module paths begin."""
        op = {"softmax": "softmax", "norm": "layer_norm"}.get(self.fault)
        if op is None:
            return polymp.policy("amp")
        return polymp.policy("amp").override(scopes={f"{blocks}{self.layer}": {op: "lower"}})

    @property
    def adam_eps(self) -> float:
        return OTHER_ADAM_EPS if self.fault == "adam" else ADAM_EPS


def weights(config: Config, seed: int = 0) -> dict[str, Any]:
    """Weights in float32, by the paths that they have in torch."""
    rng = np.random.default_rng(seed)
    width, hidden = config.width, config.hidden
    made: dict[str, Any] = {}

    def linear(path: str, rows: int, columns: int, gain: float = 1.0) -> None:
        made[f"{path}.weight"] = gain * columns**-0.5 * rng.standard_normal((rows, columns))
        made[f"{path}.bias"] = 0.1 * gain * rng.standard_normal(rows)

    def norm(path: str, bias: bool = True) -> None:
        made[f"{path}.weight"] = 1 + 0.1 * rng.standard_normal(width)
        if bias:
            made[f"{path}.bias"] = 0.1 * rng.standard_normal(width)

    made["table.weight"] = 0.1 * rng.standard_normal((config.words, width))
    for at in range(config.layers):
        block = f"blocks.{at}"
        norm(f"{block}.before")
        for part in ("query", "key", "value", "out"):
            linear(f"{block}.attention.{part}", width, width, 0.1 if part == "out" else 1.0)
        norm(f"{block}.after")
        linear(f"{block}.feed.up", hidden, width)
        linear(f"{block}.feed.down", width, hidden, 0.1)
    norm("norm", bias=False)
    linear("head", config.words, width)
    if config.fault == "transposed":
        path = f"blocks.{config.layer}.attention.value.weight"
        made[path] = made[path].T
    if config.fault == "bias":
        del made[f"blocks.{config.layer}.feed.up.bias"]
    return {path: np.ascontiguousarray(x, np.float32) for path, x in made.items()}


def tokens(config: Config, seed: int = 0) -> Any:
    """Random tokens [batch, length + 1]: each is the target of the one before it."""
    rng = np.random.default_rng(seed + 1000)
    return rng.integers(0, config.words, (config.batch, config.length + 1))


def rotation(config: Config, shift: int = 0) -> tuple[Any, Any]:
    """The cosines and sines of the rotary embedding, [length, half a head] each."""
    half = config.width // config.heads // 2
    places = np.arange(config.length)[:, None] + shift
    angles = places / 10_000 ** (np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def seen(config: Config, fault: str) -> Any:
    """Which tokens each token sees: bool [length, length]."""
    return np.tri(config.length, k=1 if fault == "mask" else 0, dtype=bool)
