"""Whether the losses of a training are finite, and have not jumped; found out on the device."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax import compat

# Of the mean loss, the share that stays at each step; a loss is compared with it from this many on.
_STAYS, _WARM_UP = 0.9, 10


class _Mean(NamedTuple):
    """The mean of the last values of a loss, in which older ones count less.

    Attributes:
        value: float32 []; NaN before the first.
        seen: how many it is of.
    """

    value: Any = math.nan
    seen: int = 0


Means = Mapping[int, _Mean]


class LossChecks:
    """The findings on the losses since the last `now`; some are still on their way to the host.

    Args:
        jump: the factor by which a loss may be above the mean of its last values; None for any.
        means: of the losses so far, by the place of the loss in the step's results.

    Attributes:
        means: likewise.
    """

    def __init__(self, jump: float | None, means: Means | None = None) -> None:
        self.means: Means = means or {}
        self._jump = math.inf if jump is None else jump
        self._arriving: deque[jax.Array] = deque()

    def add(self, losses: Mapping[int, Any]) -> bool:
        """Check the losses of a call; return whether a loss of any call so far is known to be bad.

        Several processes learn of it in `now` alone, so that all of them stop at the same step.
        """
        for at, loss in losses.items():
            self._arriving.append(self._is_bad(at, loss))
        return jax.process_count() == 1 and self._arrived(wait=False)

    def now(self) -> bool:
        """Wait for what is on its way, and return whether a loss was bad."""
        return self._arrived(wait=True)

    def described(self, losses: Mapping[int, Any]) -> str:
        """Check the losses of a call, and say which is bad; "" if none. Waits for the device."""
        for at, loss in losses.items():
            mean = self.means.get(at, _Mean())
            if bool(self._is_bad(at, loss)):
                number = float(loss)
                if math.isfinite(number):
                    mean_now = float(mean.value)
                    return f"the loss is {number:.4g}; the mean of the last ones is {mean_now:.4g}"
                sign = "-" if number == -math.inf else ""
                return f"the loss is {'NaN' if math.isnan(number) else f'{sign}Inf'}"
        return ""

    def _is_bad(self, at: int, loss: Any) -> jax.Array:
        bad: jax.Array
        if self._jump == math.inf:
            bad = _not_finite(loss)
            return bad
        mean = self.means.get(at, _Mean())
        jump = self._jump if mean.seen >= _WARM_UP else math.inf
        bad, value = _checked(loss, mean.value, jump)
        self.means = {**self.means, at: _Mean(value, mean.seen + 1)}
        return bad

    def _arrived(self, *, wait: bool) -> bool:
        found = False
        while self._arriving and (wait or compat.is_ready(self._arriving[0])):
            found = bool(np.asarray(self._arriving.popleft())) or found  # faster than jax's bool
        return found


@jax.jit
def _not_finite(loss: Any) -> jax.Array:
    """Return whether a loss is Inf or NaN, bool []."""
    return ~jnp.isfinite(loss).reshape(())


@jax.jit
def _checked(loss: Any, mean: Any, jump: Any) -> tuple[jax.Array, jax.Array]:
    """Return whether a loss is bad, bool [], and the mean with it, float32 []."""
    loss = jnp.asarray(loss).reshape(()).astype(jnp.float32)
    is_first = jnp.isnan(mean)
    bad = ~jnp.isfinite(loss) | (loss > mean + (jump - 1) * jnp.abs(mean))
    return bad, jnp.where(is_first, loss, mean * _STAYS + loss * (1 - _STAYS))
