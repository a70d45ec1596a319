"""A corpus of small JAX programs: what autocast is tried on, whole, one after another.

A program is a `Program`: a function of float32 arrays (and whatever else), the arguments, the
dtypes in which torch's documented rules let its results come out, and what it exercises. The
programs stand in the files `corpus_*`: in plain JAX, and built from installed packages.
Everything is deterministic, tiny and needs no file.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOW = "low"  # stands for the region's dtype
F32 = "float32"

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Make = Callable[["Draw"], Made]


@dataclass(frozen=True)
class Program:
    """One program and what is known of it."""

    name: str  # the name of the function that makes it
    make: Make  # gives the function and its arguments; float32 leaves are differentiated
    out: tuple[str, ...]  # the dtype of each result under autocast, `LOW` for the region's
    tags: frozenset[str]  # the transformations, ops and kinds of model in it
    needs: str = "jax"  # the package that it is built from
    x64: bool = False  # it runs with 64-bit types enabled
    scale: float = 1.0  # what fp16 gradients are multiplied by on their way, as a loss scaler does
    lowers: bool = True  # whether it holds a contraction that autocast lowers
    # rule of the walker -> why this program may break it in its gradient
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> Made:
        """The function and its arguments, the same ones every time."""
        return self.make(Draw(zlib.crc32(self.name.encode())))

    def missing(self) -> bool:
        return importlib.util.find_spec(self.needs) is None

    def dtypes(self, run: str) -> tuple[str, ...]:
        return tuple(run if fmt == LOW else fmt for fmt in self.out)


@dataclass
class Draw:
    """Arrays from one seeded stream."""

    seed: int

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape) * scale, jnp.float32)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> jax.Array:
        return jnp.asarray(self._rng.uniform(low, high, shape), jnp.float32)

    def integers(self, high: int, *shape: int) -> jax.Array:
        return jnp.asarray(self._rng.integers(0, high, shape), jnp.int32)

    def weight(self, *shape: int) -> jax.Array:
        """A weight that keeps the size of what it is applied to."""
        return self.normal(*shape, scale=float(np.prod(shape[:-1])) ** -0.5)

    def fill(self, shapes: Any) -> Any:
        """Values for a pytree of shapes: weights, biases near 0, scales and variances near 1."""
        return jax.tree_util.tree_map_with_path(self._leaf, shapes)

    def _leaf(self, path: Any, leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(shape, leaf.dtype)
        if len(shape) > 1:
            return self.weight(*shape)
        near_one = any(word in jax.tree_util.keystr(path).lower() for word in ("scale", "var"))
        return self.normal(*shape, scale=0.1) + (1.0 if near_one else 0.0)


class Lazy:
    """A module that is imported when something of it is used: its package may be missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


PROGRAMS: dict[str, Program] = {}


def program(*out: str, tags: str = "", **known: Any) -> Callable[[Make], Make]:
    """Enter the decorated maker into the corpus under its own name."""

    def enter(make: Make) -> Make:
        name = make.__name__
        assert name not in PROGRAMS, f"two programs are named {name}"
        PROGRAMS[name] = Program(name, make, out, frozenset(tags.split()), **known)
        return make

    return enter


def corpus() -> tuple[Program, ...]:
    """All programs, in the order in which they are written down."""
    for part in ("networks", "control", "numbers", "libraries"):
        importlib.import_module(f"tests.support.jax.corpus_{part}")
    return tuple(PROGRAMS.values())


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The usual loss, for programs that need one."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


def shapes(init: Callable[..., Any], *args: Any) -> Any:
    """The shapes of a model's parameters, with nothing compiled or run."""
    return jax.eval_shape(init, jax.random.key(0), *args)
