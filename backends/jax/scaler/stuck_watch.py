"""`StuckWatch`: warns of a scaler that skips step after step, without waiting for the device.

A jitted step cannot warn: what a step found is a number on the device. The watch runs on the host,
after each step. It sends a small copy of the scaler's state on its way and reads it at a later
call, when it has arrived.
"""

from collections import deque
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.backends.jax.scaler.gradient_stats import Counts, counted
from polymp.scaling.gradient_report import GradientReport, OnStuck, checked_on_stuck, tell
from polymp.scaling.scale_rule import ScaleRule, ScaleState


class _Sent(NamedTuple):
    """A copy of a state on its way to the host, and what belongs to it.

    Attributes:
        rule: of the scaler.
        copy: int32 [5]; the first are the bits of the scale.
        counts: of the gradients, if they were given.
    """

    rule: ScaleRule
    copy: jax.Array
    counts: Counts | None

    def arrived(self) -> bool:
        return compat.is_ready(self.copy) and (
            self.counts is None or compat.is_ready(self.counts.table)
        )

    def state(self) -> ScaleState:
        values = np.asarray(self.copy)
        return ScaleState(float(values[:1].view(np.float32)[0]), *values[1:].tolist())


class StuckWatch:
    """Warns, raises or calls when a scaler has skipped many steps in a row.

        watch = StuckWatch()
        for batch in batches:
            params, opt_state, scaler = train_step(params, opt_state, scaler, batch)  # jitted
            watch.watch(scaler)
        watch.finish()

    It never waits for the device but in `finish`: it learns of a step one or more calls later. It
    keeps copies, so the scaler may be donated to the next step.

    Args:
        on_stuck: what happens after `stuck_after` skips in a row, once for each row: "warn",
            "raise", or a function of a `GradientReport`.
        stuck_after: see `on_stuck`.

    Attributes:
        state: the latest state that has arrived, as Python numbers; None before the first.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(self, on_stuck: OnStuck = "warn", stuck_after: int = 50) -> None:
        checked_on_stuck(on_stuck, stuck_after)
        self.state: ScaleState | None = None
        self._on_stuck = on_stuck
        self._stuck_after = stuck_after
        self._on_their_way: deque[_Sent] = deque()  # oldest first
        self._told = False  # of this row of skips

    def watch(self, scaler: GradScaler, grads: object = None, names: object = None) -> None:
        """Look at what has arrived, and send the state of `scaler` on its way.

        Call it on the host after each step; under several processes, in each of them.

        Args:
            scaler: what the step returned, replicated or on one device. A disabled one is not
                looked at.
            grads: the scaled gradients that the step returned, to name those with Inf and NaN.
                They are counted only when the row of skips may have become long enough.
            names: see `GradScaler.report`.

        Raises:
            TypeError: `scaler` is none, is traced, or is a batch.
            StuckError: `on_stuck` is "raise", and a row of skips has become too long.

        Warns:
            ScalerWarning: `on_stuck` is "warn", and the same.
        """
        _check(scaler)
        if not scaler.enabled:
            return
        stuck = self._arrived(wait=False)
        # No state on its way, this one included, has more skips than one for each since `state`.
        most = (0 if self.state is None else self.state.skips) + len(self._on_their_way) + 1
        counts, may_be = None, self.state is None or most >= self._stuck_after
        if grads is not None and may_be and not self._told:
            counts = counted(grads, names, jnp.float32(1))
        copy = _packed(ScaleState(*map(_here, scaler.state)))
        copy.copy_to_host_async()
        self._on_their_way.append(_Sent(scaler.rule, copy, counts))
        for report in stuck:
            tell(self._on_stuck, report)

    def finish(self) -> ScaleState | None:
        """Wait for the states on their way, and look at them.

        Returns:
            The last state, as Python numbers; None if `watch` was never called.

        Raises:
            StuckError: as in `watch`.

        Warns:
            ScalerWarning: as in `watch`.
        """
        for report in self._arrived(wait=True):
            tell(self._on_stuck, report)
        return self.state

    def _arrived(self, *, wait: bool) -> list[GradientReport]:
        """Take in the states that have arrived, in order; a report for each long row of skips."""
        stuck = []
        while self._on_their_way and (wait or self._on_their_way[0].arrived()):
            sent = self._on_their_way.popleft()
            self.state = sent.state()
            long = self.state.skips >= self._stuck_after
            if long and not self._told:
                rows = () if sent.counts is None else sent.counts.rows()
                stuck.append(GradientReport(sent.rule, self.state, rows))
            self._told = long
        return stuck


def _check(scaler: object) -> None:
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"watch takes the scaler that a step returned, got {scaler!r}.")
    shape = np.shape(scaler.state.scale)
    if any(isinstance(x, jax.core.Tracer) for x in scaler.state):
        raise TypeError(
            "watch runs on the host: call it after the jitted step, with the scaler that the step "
            "returned. Traced code has no values to look at."
        )
    if shape != ():
        raise TypeError(
            f"this GradScaler is a batch of shape {shape}, and watch takes one scaler. Give each "
            "its own StuckWatch: jax.tree.map(lambda x: x[i], scaler)."
        )


def _here(x: jax.Array) -> jax.Array:
    """This process's copy of what is the same on all devices."""
    return x.addressable_data(0) if isinstance(x, jax.Array) else x


@jax.jit
def _packed(state: ScaleState) -> jax.Array:
    scale, *counts = state
    bits = lax.bitcast_convert_type(jnp.asarray(scale, jnp.float32), jnp.int32)
    return jnp.stack([bits, *(jnp.asarray(n, jnp.int32) for n in counts)])
