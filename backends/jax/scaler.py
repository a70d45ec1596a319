"""`GradScaler`: dynamic loss scaling as a value that JAX transforms.

Scale the loss, unscale and check the gradients, step or skip, go on with the next scaler. Arrays
in, arrays out; nothing is changed in place. The rule is `polymp.scaling.step`, given
`jax.numpy.where`; the dictionaries are torch.amp's.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp import scaling
from polymp.backends.jax import nnx, scaled
from polymp.dtypes import FORMATS
from polymp.scaling import ScaleRule, ScaleState

_FLOAT32 = FORMATS["float32"]
_LONGEST = 2**31 - 1  # the tracker is int32


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

    A pytree: the two arrays of `state` are its leaves, the rest is static. So it goes through jit,
    scan, vmap (a batch of scalers), shard_map and donation as it is. XLA on CPU flushes subnormal
    numbers: a scale below 2**-126 becomes 0 there, and every later step is skipped.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without a skip.
        backoff_factor: multiplies the scale after a skip.
        growth_interval: see `growth_factor`. A count already past a lowered interval grows the
            scale at the next good step.
        enabled: False makes every method pass through: `step` steps, `scale` returns its argument.
            The other arguments are then not looked at.

    Attributes:
        state: `scale`, float32 [], and `tracker`, int32 [].
        rule: the factors and the interval.
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
    ) -> None:
        if enabled:
            rule = _checked(ScaleRule(growth_factor, backoff_factor, growth_interval))
            init_scale = _number("init_scale", init_scale)
            if not _FLOAT32.smallest_normal <= init_scale <= _FLOAT32.max:
                raise ValueError(
                    f"init_scale must be a normal float32, from {_FLOAT32.smallest_normal} to "
                    f"{_FLOAT32.max}; got {init_scale!r}."
                )
        else:
            rule, init_scale = ScaleRule(), 1.0
        _set(self, _on_device(ScaleState(init_scale, 0)), rule, bool(enabled))

    def scale(self, tree: Any) -> Any:
        """Multiply a loss, or every float of a pytree, by the scale.

        Products are float32, or wider where the factor is: a float16 loss cannot overflow here.
        Complex numbers are multiplied part by part. What is not a float array or number passes.

        Raises:
            TypeError: `tree` is a function.
        """
        if callable(tree) and jax.tree.leaves(tree) == [tree]:
            raise TypeError(
                f"scale takes the loss, not the function that computes it, got {tree!r}. Write "
                "jax.grad(lambda params: scaler.scale(loss(params)))."
            )
        if not self.enabled:
            return tree
        return scaled.multiplied(tree, self._one_scale())

    def unscale(
        self, grads: Any, *, axis_names: str | Sequence[str] | None = None
    ) -> tuple[Any, Any]:
        """Divide gradients by the scale and say whether all of them are finite.

        Args:
            grads: a pytree, multiplied by the scale; what is not a float passes.
            axis_names: axes of a shard_map or pmap over which one Inf or NaN counts for all. None
                takes every axis over which the finding can differ; () takes none.

        Returns:
            The quotients, in float32 or wider, and bool []: True if all of them are finite. One
            that overflows is found as much as one that came in as Inf. An empty tree is finite.
        """
        if not self.enabled:
            return grads, jnp.asarray(True)
        scale = self._one_scale()
        return scaled.divided(grads, scale), scaled.all_finite(grads, scale, axis_names)

    def update(self, finite: Any) -> "GradScaler":
        """The scaler for the next step: grown after a good streak, backed off after a skip.

        Args:
            finite: bool []; what `unscale` found. With several gradients, True if all were finite.

        Raises:
            TypeError: `finite` is not one bool.
        """
        if not self.enabled:
            return self
        self._one_scale()
        finite = jnp.asarray(finite)
        if finite.dtype != jnp.bool_ or finite.shape != ():
            raise TypeError(f"finite must be one bool, got {_format(finite)}.")
        return _make(_advance(self.rule, self.state, finite), self.rule, self.enabled)

    def step(
        self,
        grads: Any,
        update: Callable[..., Any],
        *state: Any,
        axis_names: str | Sequence[str] | None = None,
    ) -> tuple[Any, "GradScaler", Any]:
        """Unscale and check, `update` or skip, and the scaler for the next step; in that order.

        A skipped step leaves every bit of the state as it was.

        Args:
            grads: a pytree, multiplied by the scale.
            update: called as `update(true_grads, *state)`; returns what replaces the state, with
                the same structure, shapes and dtypes: one tree for one, a tuple for several.
                Clipping belongs into it. Traced code calls it in a branch of `lax.cond`.
            state: pytrees, such as parameters and optimizer state. Leaves that are no arrays, such
                as activation functions, stay as they are. Flax nnx modules among them get the new
                state, too, as nnx has it.
            axis_names: see `unscale`.

        Returns:
            The new state (one tree, or a tuple as given), the next scaler, and bool []: False if
            the step was skipped.

        Raises:
            TypeError: `update` is no function, or changed the structure, a shape, a dtype, or what
                is no array.
        """
        if not callable(update):
            raise TypeError(
                f"step(grads, update, *state) needs a function for update, got {type(update)}."
            )
        leaves, structure = jax.tree.flatten(state)

        def replaced(grads: Any) -> list[Any]:
            # A copy of the containers: what `update` changes in place is its own.
            new = update(grads, *jax.tree.unflatten(structure, leaves))
            new = (new,) if len(state) == 1 else new
            _check_replaces(state, new)
            return [x for x in jax.tree.leaves(new) if scaled.is_array(x)]

        def apply() -> list[Any]:
            # Divided again and not kept from the check: XLA fuses the quotients into their use.
            return replaced(scaled.divided(grads, scale))

        def skip() -> list[Any]:
            return [x for x in leaves if scaled.is_array(x)]

        if not self.enabled:
            finite, arrays = jnp.asarray(True), replaced(grads)
        else:
            scale = self._one_scale()
            finite = scaled.all_finite(grads, scale, axis_names)
            if isinstance(finite, jax.core.Tracer):
                # A select over all leaves would keep the old state and the new one alive at once.
                arrays = lax.cond(finite, apply, skip)
            else:
                arrays = apply() if finite else skip()
        new = iter(arrays)
        after = [next(new) if scaled.is_array(x) else x for x in leaves]
        after = jax.tree.unflatten(structure, after)
        nnx.write_back(state, after)
        return after[0] if len(state) == 1 else after, self.update(finite), finite

    def state_dict(self) -> dict[str, Any]:
        """The state as five Python numbers, under the names that torch.amp gives them.

        They are scale, growth_factor, backoff_factor, growth_interval and _growth_tracker; a
        scaler for torch loads them, too. Empty if disabled. Not for traced code: waits for the
        device.
        """
        if not self.enabled:
            return {}
        self._one_scale()
        return scaling.to_state_dict(self.rule, self.state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> "GradScaler":
        """The scaler that goes on from what `state_dict` here or in torch saved.

        Itself if disabled.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler's is.
            KeyError: an entry is missing.
            TypeError: an entry is not a number.
            ValueError: an entry is out of its range.
        """
        if not self.enabled:
            return self
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict needs a dictionary, got {state_dict!r}.")
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        rule, state = scaling.from_state_dict(state_dict)
        rule = _checked(rule)
        if not 0 <= state.scale <= _FLOAT32.max:
            raise ValueError(
                f"scale must be from 0 to {_FLOAT32.max}, the largest float32; got {state.scale!r}."
            )
        if not 0 <= state.tracker <= _LONGEST:
            raise ValueError(f"_growth_tracker must be from 0 to {_LONGEST}; got {state.tracker}.")
        return _make(_on_device(state), rule, self.enabled)

    def __repr__(self) -> str:
        # The state is something else in trees of shardings, of markers and the like.
        known = isinstance(self.state, ScaleState)
        shown = self.state._asdict() if known else {"state": self.state}
        shown |= self.rule._asdict() | {"enabled": self.enabled}
        return f"GradScaler({', '.join(f'{k}={_shown(v)}' for k, v in shown.items())})"

    def _one_scale(self) -> Any:
        scale = self.state.scale
        if scale.shape != ():
            raise TypeError(
                f"this GradScaler is a batch of shape {scale.shape}; call its methods in jax.vmap."
            )
        return scale


_FIELDS = tuple(field.name for field in dataclasses.fields(GradScaler))


def _set(scaler: GradScaler, *values: Any) -> None:
    for name, value in zip(_FIELDS, values, strict=True):
        object.__setattr__(scaler, name, value)


def _make(*values: Any) -> GradScaler:
    """A scaler from its fields, unchecked: JAX puts markers in the place of arrays."""
    scaler = object.__new__(GradScaler)
    _set(scaler, *values)
    return scaler


def _flatten(scaler: GradScaler) -> tuple[tuple[Any], tuple[Any, ...]]:
    first, *rest = (getattr(scaler, name) for name in _FIELDS)
    return (first,), tuple(rest)


def _flatten_with_keys(scaler: GradScaler) -> tuple[tuple[tuple[Any, Any]], tuple[Any, ...]]:
    (first,), rest = _flatten(scaler)
    return ((jax.tree_util.GetAttrKey(_FIELDS[0]), first),), rest


jax.tree_util.register_pytree_with_keys(
    GradScaler, _flatten_with_keys, lambda rest, first: _make(*first, *rest), _flatten
)


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


@partial(jax.jit, static_argnums=0, inline=True)
def _advance(rule: ScaleRule, state: ScaleState, finite: Any) -> ScaleState:
    rule = rule._replace(growth=_exact(rule.growth), backoff=_exact(rule.backoff))
    return scaling.step(rule, state, finite, jnp.where)


def _check_replaces(old: Any, new: Any) -> None:
    """Raise if the new state is not of the old one's structure, shapes and dtypes."""
    given: Any = jax.tree.structure(old)
    returned: Any = jax.tree.structure(new)
    if not isinstance(new, tuple) or len(new) != len(old):
        got = f"a tuple of {len(new)}" if isinstance(new, tuple) else f"{type(new)}"
        raise TypeError(
            f"update must return a tuple of what replaces the {len(old)} parts of the state, in "
            f"their order; it returned {got}."
        )
    if given != returned:
        raise TypeError(
            f"update must return the state in the structure that it came in, {given}; "
            f"it returned {returned}."
        )
    was = jax.tree_util.tree_leaves_with_path(old)
    for (path, x), y in zip(was, jax.tree.leaves(new), strict=True):
        if scaled.is_array(x) and scaled.is_array(y):
            before, after = _format(x), _format(y)
            same = before == after
        else:
            before, after = x, y
            same = scaled.is_array(x) == scaled.is_array(y) and (x is y or bool(x == y))
        if not same:
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"update must keep the shapes and dtypes of the state, and what is no array; "
                f"state{where} was {before} and came back as {after}."
            )


def _checked(rule: ScaleRule) -> ScaleRule:
    growth = _number("growth_factor", rule.growth)
    backoff = _number("backoff_factor", rule.backoff)
    interval = _number("growth_interval", rule.interval)
    if not 1 < growth < math.inf:
        raise ValueError(f"growth_factor must be finite and above 1, got {rule.growth!r}.")
    if not 0 < backoff < 1:
        raise ValueError(f"backoff_factor must be between 0 and 1, got {rule.backoff!r}.")
    if not interval.is_integer():
        raise TypeError(f"growth_interval must be a whole number, got {rule.interval!r}.")
    if not 1 <= interval <= _LONGEST:
        raise ValueError(f"growth_interval must be from 1 to {_LONGEST}, got {rule.interval!r}.")
    return ScaleRule(growth, backoff, int(interval))


def _number(name: str, value: Any) -> float:
    if (
        isinstance(value, jax.Array)
        and value.shape == ()
        and not isinstance(value, jax.core.Tracer)
    ):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    return float(value)


def _on_device(state: ScaleState) -> ScaleState:
    return ScaleState(jnp.asarray(state.scale, jnp.float32), jnp.asarray(state.tracker, jnp.int32))


def _format(x: Any) -> str:
    kind = jax.typeof(x)
    return f"{kind.dtype}{list(kind.shape)}"


def _shown(value: Any) -> str:
    """An array's value, or its format where it has none yet."""
    if isinstance(value, jax.core.Tracer):
        return _format(value)
    return str(value.tolist()) if isinstance(value, (jax.Array, np.ndarray)) else repr(value)
