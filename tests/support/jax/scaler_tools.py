"""Tools for the tests of `GradScaler`: values, bits, histories, and equations of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polymp.jax import GradScaler
from polymp.scaling import ScaleState

KINDS = [("float32", ()), *[("int32", ())] * 4]  # of a scaler's leaves


def values(scaler: GradScaler) -> tuple[float, int]:
    """Scale and tracker."""
    return float(scaler.state.scale), int(scaler.state.tracker)


def numbers(state: ScaleState) -> ScaleState:
    """A state as Python numbers."""
    return ScaleState(float(state.scale), *(int(n) for n in state[1:]))


def by_optax(optimizer: Any) -> Callable[[Any, Any, Any], Any]:
    """The update that `GradScaler.step` takes: of parameters, and of an optimizer's state."""

    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def kinds(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(x.dtype), x.shape) for x in jax.tree.leaves(tree)]


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each array of a tree."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in map(_array, jax.tree.leaves(tree))
    ]
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in leaves]


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x)


def flat(jaxpr: Any) -> Iterator[Any]:
    """The equations, those inside of a jit in its place."""
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "jit":
            yield from flat(eqn.params["jaxpr"])
        else:
            yield eqn


def with_shape(jaxpr: Any, shape: tuple[int, ...]) -> list[str]:
    """The primitives that read or write an array of that shape, in order."""
    pairs = ((eqn, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]) for eqn in flat(jaxpr))
    return [eqn.primitive.name for eqn, each in pairs if shape in each]
