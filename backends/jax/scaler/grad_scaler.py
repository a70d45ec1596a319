"""`GradScaler`: dynamic loss scaling as a value that JAX transforms.

Arrays in, arrays out; nothing is changed in place. The rule is `polymp.scaling.step`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp import scaling
from polymp.backends.jax.arrays import leaf_path
from polymp.backends.jax.scaler import optimizer_step, tree_math
from polymp.backends.jax.scaler.optimizer_step import factor, look
from polymp.backends.jax.scaler.tree_math import is_scalable, parts_of
from polymp.errors import brief
from polymp.scaling import (
    SMALLEST_NORMAL,
    Gradient,
    GradientReport,
    ScaleRule,
    ScaleState,
    from_state_dict,
    to_state_dict,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class GradScaler:
    """Keeps small float16 gradients from vanishing.

        loss_fn = autocast(model_loss, dtype=jnp.float16)
        scaler = GradScaler()

        @jax.jit
        def train_step(scaler, params, opt_state, batch):
            def scaled_loss(params):
                return scaler.scale(loss_fn(params, batch))

            def update(grads, params, opt_state):
                updates, opt_state = optimizer.update(grads, opt_state, params)
                return optax.apply_updates(params, updates), opt_state

            grads = jax.grad(scaled_loss)(params)  # come out multiplied by the scale
            (params, opt_state), scaler, finite = scaler.step(grads, update, params, opt_state)
            return scaler, params, opt_state

    A pytree: the arrays of `state` are its leaves, the rest is static. So it goes through jit,
    scan, vmap (a batch of scalers), shard_map and donation as it is.

    Args:
        init_scale: the first scale; from `min_scale` to `max_scale` where these are given.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without a skip.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: see `growth_factor`.
        enabled: False makes every method pass through: `step` steps, `scale` returns its argument.
        min_scale: no overflow brings the scale below it; from 2**-126, the default.
        max_scale: no growth brings the scale above it; up to 2**126, the default.
        hysteresis: overflows in a row that do not lower the scale yet.

    Attributes:
        state: `scale`, float32 []; `tracker`, `skips`, `spoiled` and `skipped`, int32 [].
        rule: the factors, the interval, the bounds and the hysteresis.
        enabled: as given.

    Raises:
        TypeError: an argument is not a number, or the interval is not whole.
        ValueError: an argument is out of its range.

    Source:
        torch.amp, "Automatic Mixed Precision package", `torch.amp.GradScaler`.
    """

    state: ScaleState
    rule: ScaleRule
    enabled: bool

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = scaling.SMALLEST,
        max_scale: float = scaling.LARGEST,
        hysteresis: int = 0,
    ) -> None:
        if isinstance(init_scale, str) and init_scale in ("cpu", "cuda", "gpu", "tpu"):
            raise TypeError(f"GradScaler({init_scale!r}): in JAX it takes no device. Leave it out.")
        if enabled:
            rule = scaling.checked(
                ScaleRule(
                    growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
                )
            )
            init_scale = scaling.checked_scale("init_scale", init_scale, rule, first=True)
        else:
            rule, init_scale = ScaleRule(), 1.0
        _set(self, optimizer_step.on_device(ScaleState(init_scale)), rule, bool(enabled))

    def scale(self, tree: T) -> T:
        """Multiply a loss, or every float of a pytree, by the scale.

        Products are float32 or wider. The cotangent of a float16 loss is float16, which holds no
        scale above 2**15: the scaler backs off to it. It need not if the loss itself is float32.

        Args:
            tree: a loss, float [], or a pytree, of which what is no float array or number passes.

        Returns:
            The products, in the structure of `tree`.

        Raises:
            TypeError: `tree` is no pytree and no float, such as a function or an int.
        """
        if jax.tree_util.all_leaves([tree]) and not is_scalable(tree):
            raise TypeError(
                f"scale takes the loss, a float, or a pytree, got {brief(tree)}. Write "
                "jax.grad(lambda params: scaler.scale(loss(params))), where loss returns a float."
            )
        if not self.enabled:
            return tree
        return tree_math.multiplied(tree, factor(self.state))

    def unscale(self, grads: T) -> tuple[T, jax.Array]:
        """Divide gradients by the scale and say whether all of them are finite.

        In a shard_map or pmap, one Inf or NaN counts for all devices along every axis along which
        the finding can differ.

        Args:
            grads: a pytree, multiplied by the scale; what is not a float passes.

        Returns:
            The quotients, in float32 or wider, and bool []: True if all of them are finite.
        """
        if not self.enabled:
            return grads, jnp.asarray(True)
        scale, grads = factor(self.state), tree_math.settled(grads)
        return tree_math.divided(grads, scale), tree_math.all_finite(grads, scale)

    def update(
        self, finite: jax.typing.ArrayLike, *, loss_finite: jax.typing.ArrayLike = True
    ) -> GradScaler:
        """Return the next scaler: grown after a good streak, lowered after an overflow.

        Args:
            finite: bool []; what `unscale` found. With several gradients, True if all were finite.
            loss_finite: bool []; `jnp.isfinite(loss)`, for reports of skipped steps.

        Returns:
            The next scaler.

        Raises:
            TypeError: one of them is not one bool.
        """
        if not self.enabled:
            return self
        return self._with(optimizer_step.update(self.rule, self.state, finite, loss_finite))

    def step(
        self,
        grads: object,
        update: Callable[..., object],
        *state: object,
        loss: object = None,
    ) -> tuple[Any, GradScaler, jax.Array]:
        """Unscale and check gradients, update or skip, and return the scaler for the next step.

        A skipped step leaves every bit of the state as it was.

        Args:
            grads: a pytree, multiplied by the scale.
            update: called as `update(true_grads, *state)`; returns what replaces the state, with
                the same structure, shapes and dtypes: one tree for one, a tuple for several.
                Clipping belongs into it. Traced code calls it in a branch of `lax.cond`; on GPUs,
                where a condition is read by the host, in every step, and selects.
            state: pytrees, such as parameters and optimizer state. Leaves that are no arrays stay
                as they are. Flax nnx modules among them get the new state, too, as nnx has it.
            loss: the loss as it was before scaling, for reports: those of a skipped step say
                whether it was finite. None not to look at it.

        Returns:
            The new state (one tree, or a tuple as given), the next scaler, and bool []: False if
            the step was skipped.

        Raises:
            TypeError: `update` is no function, or changed the structure, a shape, a dtype, or what
                is no array.
        """
        rule = self.rule if self.enabled else None
        result, after, finite = optimizer_step.step(rule, self.state, grads, update, state, loss)
        return result, self._with(after), finite

    def value_and_grad(
        self,
        fun: Callable[..., object],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        *,
        allow_int: bool = False,
    ) -> Callable[..., tuple[tuple[Any, Any], GradScaler, jax.Array]]:
        """`jax.value_and_grad` with the loss scaled on the way, and checked.

            (loss, grads), scaler, finite = scaler.value_and_grad(loss_fn)(params, batch)

        The caller skips: nothing of `grads` may be used where `finite` is False. `step` divides
        only where it steps, which is cheaper. Only what was found crosses devices: where every
        device has its own gradients, average them afterwards.

        Args:
            fun: returns the loss, one float, not scaled; or (loss, aux).
            argnums: positions of the arguments to differentiate by.
            has_aux: whether `fun` returns a pair.
            allow_int: lets the arguments be integers, whose gradients are float0.

        Returns:
            A function of the arguments of `fun` that returns ((value, grads), scaler, finite).
            Value is what `fun` returned. The gradients are true, in float32 or wider. The scaler is
            that for the next step. Finite, bool [], is True if all gradients are.

        Raises:
            TypeError: `fun` is not callable; or as `jax.value_and_grad` raises it, at the call.
        """
        if not callable(fun):
            raise TypeError(
                f"value_and_grad needs the function that computes the loss, got {brief(fun)}."
            )

        def scaled(*args: object, **kwargs: object) -> tuple[jax.Array, tuple[Any, Any]]:
            # The scaled loss divided by the scale may differ from the loss in its last bits.
            out: Any = fun(*args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    "value_and_grad(has_aux=True) needs a function that returns (loss, aux), got "
                    f"{brief(out)}."
                )
            loss, aux = out if has_aux else (out, None)
            return self.scale(loss), (loss, aux)

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True, allow_int=allow_int)

        def call(*args: object, **kwargs: object) -> tuple[tuple[Any, Any], GradScaler, jax.Array]:
            (_, (loss, aux)), grads = differentiated(*args, **kwargs)
            loss = jnp.asarray(loss)
            value = (loss, aux) if has_aux else loss
            if not self.enabled:
                return (value, grads), self, jnp.asarray(True)
            scale, grads = factor(self.state), tree_math.settled(grads)
            finite, loss_finite = look(self.state, grads, loss)
            after = self.update(finite, loss_finite=loss_finite)
            return (value, tree_math.divided(grads, scale)), after, finite

        return call

    def report(self, grads: object, *, scaled: bool = True) -> GradientReport:
        """Report how many values of each gradient are Inf, NaN, 0 and too small, by path.

        The host waits for the counts. Where arrays are spread over processes, each has to call it.

        Args:
            grads: a pytree; what is not a float is left out.
            scaled: True if they are multiplied by the scale, as they come from jax.grad. False for
                what `unscale` returned: their products with the scale are counted.

        Returns:
            The report; print it, or read its rows.

        Raises:
            TypeError: something is traced.
        """
        pairs = jax.tree_util.tree_leaves_with_path(grads)
        if any(isinstance(x, jax.core.Tracer) for x in (*self.state, *(x for _, x in pairs))):
            raise TypeError(
                "a report needs values, and traced code has none yet. Return the gradients from "
                "the jitted function, and call scaler.report(grads) on what it returns."
            )
        scale = factor(self.state)
        by = jnp.float32(1) if scaled else on_host(scale)
        rows = [(leaf_path(path) or "gradient", x) for path, x in pairs if is_scalable(x)]
        table = on_host(_table([x for _, x in rows], by)).tolist()
        counted = [
            Gradient(path, tuple(np.shape(x)), *numbers)
            for (path, x), numbers in zip(rows, table, strict=True)
        ]
        state = ScaleState(*(on_host(x).item() for x in self.state))
        return GradientReport(self.rule, state, tuple(counted))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers, under the names that torch.amp uses.

        Returns:
            The numbers, by name; polymp's scalers for torch load them, too. Empty if disabled.

        Raises:
            TypeError: the scaler is traced.
        """
        if not self.enabled:
            return {}
        if isinstance(factor(self.state), jax.core.Tracer):
            raise TypeError(
                "state_dict() gives Python numbers, which traced code does not have: return the "
                "scaler from the function, and call state_dict() outside."
            )
        return to_state_dict(self.rule, self.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> GradScaler:
        """Return the scaler that goes on from a saved state.

        Args:
            state_dict: what `state_dict` returned, here or in torch.

        Returns:
            The scaler; this one if it is disabled.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler's is.
            KeyError: an entry is missing.
            TypeError: an entry is not a number.
            ValueError: an entry is out of its range.
        """
        if not self.enabled:
            return self
        rule, state = from_state_dict(state_dict, self.rule)
        return _make(optimizer_step.on_device(state), rule, self.enabled)

    def __repr__(self) -> str:
        # The state is something else in trees of shardings, of markers and the like.
        known = isinstance(self.state, ScaleState)
        shown = self.state._asdict() if known else {"state": self.state}
        shown |= self.rule._asdict() | {"enabled": self.enabled}
        return f"GradScaler({', '.join(f'{k}={tree_math.shown(v)}' for k, v in shown.items())})"

    def _with(self, state: ScaleState) -> GradScaler:
        return self if state is self.state else _make(state, self.rule, self.enabled)


def _set(scaler: GradScaler, state: object, rule: ScaleRule, enabled: bool) -> None:
    for name, value in (("state", state), ("rule", rule), ("enabled", enabled)):
        object.__setattr__(scaler, name, value)


def _make(*fields: Any) -> GradScaler:
    """A scaler from its fields, unchecked: JAX puts markers in the place of arrays."""
    scaler = object.__new__(GradScaler)
    _set(scaler, *fields)
    return scaler


jax.tree_util.register_pytree_with_keys(
    GradScaler,
    lambda it: (((jax.tree_util.GetAttrKey("state"), it.state),), (it.rule, it.enabled)),
    lambda rest, first: _make(*first, *rest),
    lambda it: ((it.state,), (it.rule, it.enabled)),
)


# Counts of what a tree of gradients holds, by one program for all leaves, in one array.


def on_host(x: jax.typing.ArrayLike) -> np.ndarray[Any, Any]:
    """An array's values; of one over several processes, which is the same on all, its copy here."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)


@jax.jit
def _table(leaves: list[jax.typing.ArrayLike], factor: jax.Array) -> jax.Array:
    with jax.enable_x64(True):  # a leaf may have more values than int32 counts
        rows = [
            jnp.stack([kind.sum(dtype=jnp.int64) for kind in _kinds(jnp.asarray(x), factor)])
            for x in leaves
        ]
        return jnp.stack(rows) if rows else jnp.zeros((0, 4), jnp.int64)


def _kinds(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, ...]:
    """Where x is Inf, NaN, zero and subnormal, no value in two kinds; bool of its shape."""
    # What is subnormal in float32 counts as zero: XLA on CPU takes it for 0, if not everywhere.
    parts = parts_of(x)
    inf = reduce(operator.or_, map(jnp.isinf, parts))
    nan = reduce(operator.or_, map(jnp.isnan, parts)) & ~inf
    zero = reduce(operator.and_, (abs(part) < np.finfo(part.dtype).tiny for part in parts))
    size = jnp.abs(lax.complex(*parts) if len(parts) == 2 else parts[0])
    tiny = size * factor.astype(size.dtype) < SMALLEST_NORMAL
    return inf, nan, zero, tiny & ~zero
