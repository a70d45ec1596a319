"""The scaling rule on arrays, bit for bit torch's.

A rule and a state in, the next state out. The rule is `polymp.scaling.scale_rule.step`; what is
added here is how float32 arrays multiply by a factor that float32 cannot hold.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.autocast import regions
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import ScaleRule, ScaleState


class _Factor:
    """A factor that float32 cannot hold: multiplies in float64, as torch does, and rounds once."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __rmul__(self, scale: Any) -> Any:
        with jax.enable_x64(True):
            return (scale.astype(jnp.float64) * self.value).astype(jnp.float32)


def _exact(factor: float) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(factor))
    return factor if factor == held else _Factor(factor)


@regions.as_written()
@partial(jax.jit, static_argnums=0, inline=True)
def advance(rule: ScaleRule, state: ScaleState, finite: Any, loss_finite: Any) -> ScaleState:
    """`scale_rule.step` with jax arrays."""
    rule = rule._replace(growth=_exact(rule.growth), backoff=_exact(rule.backoff))
    return scale_rule.step(rule, state, finite, jnp.where, loss_finite=loss_finite)
