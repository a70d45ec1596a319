"""Single steps in JAX that break; those of the same names in `steps_torch` do it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from polymp.jax import audit, autocast, locate


class Step:
    """A step in a float16 region: `forward`, from the input to the loss, and its input."""

    def __init__(self, forward: Callable[[Any], Any], x: Any) -> None:
        self.forward, self.x = forward, x
        self.policy: Any = "amp"

    def step(self, x: Any) -> Any:
        return autocast(self.forward, dtype="float16", policy=self.policy)(x)

    def is_finite(self) -> bool:
        return bool(jnp.isfinite(self.step(self.x)))

    def located(self) -> Any:
        return locate(self.step, self.x)

    def audited(self) -> Any:
        audited = audit(self.step)
        audited(self.x)
        return audited.audit


def looped(x: Any) -> Any:
    """A product in a loop that grows out of range in its third round."""

    def turn(z: Any, _: Any) -> tuple[Any, None]:
        return z * 1e15, None

    z, _ = lax.scan(turn, lax.complex(x, x), None, length=5)
    return jnp.abs(z).sum()


STEPS: dict[str, Callable[[], Step]] = {
    "complex product": lambda: Step(
        lambda x: jnp.abs(lax.complex(x, x) ** 2).sum(), jnp.full(3, 3e38)
    ),
    "complex quotient": lambda: Step(
        lambda x: (lax.complex(x, x) / lax.complex(x - 1, x - 1)).real.sum(), jnp.ones(3)
    ),
    "complex conjugate": lambda: Step(
        lambda x: (lax.complex(x, x).conj() * 3e38).imag.sum(), jnp.full(3, 2.0)
    ),
    "complex loop": lambda: Step(looped, jnp.ones(3)),
    "empty mask": lambda: Step(
        lambda x: (
            (jax.nn.softmax(x).astype("float16")[:, 0] * (x[:, 0] > 9)).sum() / (x[:, 0] > 9).sum()
        ),
        jnp.array([[0.0, 30.0], [1.0, 2.0]]),
    ),
    "transform": lambda: Step(lambda x: jnp.abs(jnp.fft.rfft(x)).sum(), jnp.full(64, 1e38)),
}
