"""`UpdateWatch`: warns of low weights that rounding keeps where they are, without waiting.

    bits of a sample before a step, bits after it  ->  counts on the device  ->  host, when they are
                                                                                 there

The watch runs on the host, after each step. In most steps it only counts; in one of `every` it
keeps a sample of each low array, and compares it with the next step's.
"""

import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax.arrays import AsyncCopy, is_array, is_typed, leaf_path
from polymp.backends.jax.autocast.frame import LOW_DTYPES
from polymp.backends.jax.diagnostics.instrument import few
from polymp.backends.jax.weights.low_weights import LowWeightsState
from polymp.errors import brief
from polymp.weights import LostUpdates, LostUpdatesWatch

# The first step that is looked at, counted from 0, unless there are more.
FIRST = 10


class UpdateWatch(LostUpdatesWatch):
    """Warns when steps leave most low weights as they are.

        watch = UpdateWatch()
        for batch in batches:
            params, opt_state = train_step(params, opt_state, batch)  # jitted
            watch.watch(params, opt_state)
        watch.finish()

    It is for training on bfloat16 or float16 parameters without `low_weights`, and does nothing
    with it. It never waits for the device but in `finish`, and parameters may be donated to the
    next step.

    Args:
        every: one step in so many is looked at, the first of them the 10th or before.

    Attributes:
        records: of the last step that was looked at and has arrived, one for each low array; from
            up to 2,048 values of each, spread evenly.

    Raises:
        TypeError: `every` is no whole number.
        ValueError: `every` is too small.
    """

    def __init__(self, every: int = 1000) -> None:
        if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
            raise TypeError(
                f"UpdateWatch({reprlib.repr(every)}) is no whole number of steps. Give the "
                "parameters to its method: watch.watch(params, opt_state)."
            )
        if every < 1:
            raise ValueError(f"UpdateWatch(every={every}) must be 1 or more.")
        super().__init__("polymp.jax.low_weights(optimizer)")
        self._every, self._first = every, min(FIRST, every)
        self._step = 0
        self._before: list[jax.Array] | None = None

    def watch(self, params: object, opt_state: object = None, grads: object = None) -> None:
        """Look at the parameters that a step returned.

        Args:
            params: a pytree of arrays, the same in each call.
            opt_state: of the optimizer; where `low_weights` made it, nothing is looked at.
            grads: those of the step, in the structure of `params`: weights whose gradient is 0 are
                then not counted. None to count all, also rows of a table that no batch has read.

        Raises:
            TypeError: the parameters are traced, or there is no array in them.

        Warns:
            LowWeightsWarning: a tenth of the updates or more were lost; once.
        """
        if self._step == 0 and not any(map(is_typed, jax.tree.leaves(params))):
            raise TypeError(
                f"watch(params, opt_state) needs the parameters, a pytree of arrays, got "
                f"{brief(params)}. Give it what the training step returned."
            )
        step, self._step = self._step, self._step + 1
        self._arrive()
        since = (step - self._first) % self._every
        if since not in (0, self._every - 1) or _is_kept(opt_state):
            return
        paths = jax.tree_util.tree_leaves_with_path(params)
        if any(isinstance(x, jax.core.Tracer) for _, x in paths):
            raise TypeError(
                "watch runs on the host: call it after the jitted step, with the parameters that "
                "the step returned. Traced code has no values to look at."
            )
        at = [i for i, (_, x) in enumerate(paths) if is_array(x) and x.dtype.name in LOW_DTYPES]
        low = [paths[i][1] for i in at]
        if since == 0 and self._before is not None and low:
            names = [(leaf_path(paths[i][0]), paths[i][1].dtype.name) for i in at]
            tree: Any = jax.tree.structure(params)
            given = [] if grads is None else [tree.flatten_up_to(grads)[i] for i in at]
            counts = AsyncCopy(_counted(self._before, low, given))
            self._send(names, counts, gradients=bool(given))
        self._before = _sampled(low) if (step + 1 - self._first) % self._every == 0 else None

    def finish(self) -> tuple[LostUpdates, ...]:
        """Wait for what is on its way, and return the last records.

        Returns:
            `records`.

        Warns:
            LowWeightsWarning: as in `watch`.
        """
        self._arrive(wait=True)
        return self.records


def _is_kept(opt_state: object) -> bool:
    """True where `low_weights` keeps the updates: its state is in the tree."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LowWeightsState))
    return any(isinstance(x, LowWeightsState) for x in leaves)


@jax.jit
def _sampled(low: Sequence[jax.Array]) -> list[jax.Array]:
    """The bits of a sample of each; never the array itself, which may be donated."""
    return [lax.bitcast_convert_type(few(x), jnp.int16) for x in low]


@jax.jit
def _counted(
    before: Sequence[jax.Array], low: Sequence[jax.Array], grads: Sequence[jax.Array]
) -> jax.Array:
    """Updates, and those that left the bits as they were; int32 [arrays, 2]."""
    rows = []
    for i, (old, new) in enumerate(zip(before, _sampled(low), strict=True)):
        moves = few(grads[i]) != 0 if grads else jnp.ones(old.shape, bool)
        rows.append(jnp.stack([moves.sum(), (moves & (old == new)).sum()]))
    return jnp.stack(rows).astype(jnp.int32)
