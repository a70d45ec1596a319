"""A training in 8 bits that can be saved and loaded; its twin is in tests/support/torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax

from polymp.jax import GradScaler, autocast
from tests.support.jax.fp8_models import layers, loss

PARTS = ("model", "optimizer", "scaler")
OPTIMIZER = optax.adamw(0.01)


class Run:
    """Parameters with an optimizer's state and a scaler, whose scale doubles every two steps.

    Args:
        policy: of the region of every step.
        seed: of the parameters.
    """

    def __init__(self, policy: Any, seed: int = 0) -> None:
        self.model = jax.tree.map(lambda w: w * (1 + seed), layers())
        self.optimizer = OPTIMIZER.init(self.model)
        self.scaler = GradScaler(init_scale=8.0, growth_interval=2)
        self.policy = policy

    @property
    def policy(self) -> Any:
        return self._policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        fn = autocast(loss, policy=policy)

        @jax.jit
        def step(params: Any, state: Any, scaler: Any, x: Any) -> Any:
            def scaled(params: Any) -> Any:
                found = fn(params, x)
                return scaler.scale(found), found

            def update(grads: Any, params: Any, state: Any) -> Any:
                updates, state = OPTIMIZER.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            grads, found = jax.grad(scaled, has_aux=True)(params)
            (params, state), scaler, _ = scaler.step(grads, update, params, state)
            return found, params, state, scaler

        self._policy, self._step = policy, step

    def step(self, number: int) -> Any:
        """Train on the batch of that number; the bits of the loss and of all that is left."""
        x = jax.random.normal(jax.random.key(number), (2, 32, 64))
        found, self.model, self.optimizer, self.scaler = self._step(
            self.model, self.optimizer, self.scaler, x
        )
        return float(found), self.bits()

    def bits(self) -> Any:
        """The bits of weights and of the optimizer's state, and the numbers of the scaler."""
        arrays = jax.tree.leaves((self.model, self.optimizer))
        return [np.asarray(x).tobytes() for x in arrays], self.scaler.state_dict()

    def save(self, path: Path) -> None:
        path.write_bytes(flax.serialization.to_bytes({part: getattr(self, part) for part in PARTS}))

    def load(self, path: Path, without: str = "") -> None:
        """Go on from a file; one of `PARTS` may be left as it is."""
        own = {part: getattr(self, part) for part in PARTS}
        for part, state in flax.serialization.from_bytes(own, path.read_bytes()).items():
            if part != without:
                setattr(self, part, state)
