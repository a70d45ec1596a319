"""`expect_scaler`: finds gradients that flow through float16 without having been scaled.

A training step in, a bool out; nothing is run. The step is traced, and the equations that
differentiation made are followed from the loss's own cotangent, 1, to the gradients. `scale`
multiplies in a name scope, which the transposed multiplication keeps.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import Walk
from polymp.backends.jax.scaler.gradient_stats import on_host
from polymp.errors import ScalerWarning, UnscaledError

# A loss multiplied by such a constant is scaled by hand. The least power of two
# that has been found useful: Micikevicius et al., arXiv:1710.03740, section 3.2.
_LEAST_CONSTANT = 8.0


def expect_scaler(
    train_step: Callable[..., object],
    *args: object,
    action: Literal["warn", "raise"] = "warn",
    **kwargs: object,
) -> bool:
    """Check that no gradient of a training step flows through float16 unscaled.

        expect_scaler(train_step, params, opt_state, scaler, batch)

    The step is traced and not run, so it costs no more than compiling it; a jitted one may have
    run before. Steps without gradients, and gradients in bfloat16 or float32, are fine.

    A gradient is scaled if it depends on a loss multiplied by an enabled `GradScaler`, or by hand:
    the loss as one number, times a number that the step was given (flax's DynamicScale and jmp's
    DynamicLossScale multiply by such a one) or times a constant power of two from 8 up. So a loss
    that is weighted by an argument passes. Cotangents that the step is given, such as those of
    `jax.vjp`, are not followed.

    Args:
        train_step: a function, jitted or not.
        args: of a call of it; jax.ShapeDtypeStruct may stand for arrays.
        action: what to do if there is such a gradient: "warn", or "raise".
        kwargs: likewise.

    Returns:
        True if there is none.

    Raises:
        TypeError: `train_step` is no function.
        ValueError: `action` is another word.
        UnscaledError: `action` is "raise", and there is such a gradient.

    Warns:
        ScalerWarning: `action` is "warn", and there is such a gradient.
    """
    if not callable(train_step):
        raise TypeError(f"expect_scaler needs the function of a training step, got {train_step!r}.")
    if action not in ("warn", "raise"):
        raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
    flow, closed = _Flow(), _traced(train_step, args, kwargs)
    flow.program(closed, [_Value(given=True)] * len(compat.binders(closed)[1]), (False, False))
    if flow.unscaled is None:
        return True
    said = (
        f"gradients flow through float16 without a scaler, first in {flow.unscaled}: those below "
        "2**-24 become 0 there. Differentiate scaler.scale(loss) and step with scaler.step, where "
        "scaler is an enabled GradScaler; or compute in bfloat16, which needs none."
    )
    if action == "raise":
        raise UnscaledError(said)
    warnings.warn(said, ScalerWarning, stacklevel=2)
    return False


def _traced(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> ClosedProgram:
    """The closed jaxpr of a call; jitted functions know which arguments are static."""
    if hasattr(fn, "trace"):
        return compat.traced_jaxpr(fn.trace(*args, **kwargs))
    arrays, together = apart((args, kwargs), is_typed)

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        args, kwargs = together(arrays)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(flat)(*arrays)


class _Value(NamedTuple):
    """Facts about a value of the step."""

    constant: float | None = None  # its number, if it depends on no argument, or `_SOME`
    given: bool = False  # it was given to the step, or is that in another dtype
    cotangent: bool = False  # it depends, by equations of a transposition, on a constant cotangent
    low: str | None = None  # the first such equation with a float16 result on the way
    scaled: bool = False  # it depends on a multiplication by a scale, likewise


_SOME = -1.0  # for a constant that is not 0 and that is not followed; all others are sizes
# What leaves a number the same, whatever its shape and dtype.
_SAME = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "pvary",
    "reduce_precision", "reshape", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip


class _Flow(Walk[_Value, tuple[bool, bool]]):
    """Follows values; a place is in the backward pass or not, and in `scale` or not."""

    # The first float16 equation on the way of a gradient that was not scaled.
    unscaled: str | None = None

    def program(
        self, closed: ClosedProgram, values: Sequence[_Value], around: tuple[bool, bool]
    ) -> list[_Value]:
        outs = super().program(closed, values, around)
        return outs if around[0] else list(map(self.left, outs))

    def equation(
        self, at: int, eqn: Equation, values: list[_Value], around: tuple[bool, bool]
    ) -> Sequence[_Value]:
        stack = eqn.source_info.name_stack
        back = around[0] or compat.in_backward(stack)
        scope = around[1] or regions.SCALED in compat.scope_names(stack)
        return super().equation(
            at, eqn, values if back else list(map(self.left, values)), (back, scope)
        )

    def left(self, value: _Value) -> _Value:
        """A value that leaves the backward pass: a gradient, if it came from there."""
        if value.low is not None and not value.scaled and self.unscaled is None:
            self.unscaled = value.low
        return _Value(value.constant, value.given)

    def leaf(
        self, eqn: Equation, values: list[_Value], around: tuple[bool, bool]
    ) -> Sequence[_Value]:
        name, numbers = eqn.primitive.name, [v.constant for v in values]
        constant: float | None = None
        if (name == "mul" and 0 in numbers) or (numbers and not any(n != 0 for n in numbers)):
            constant = 0.0
        elif None not in numbers:
            constant = numbers[0] if name in _SAME else _SOME
        given = name in _SAME and bool(values) and all(v.given for v in values)
        if not around[0]:
            return [_Value(constant, given)] * len(eqn.outvars)
        cotangent = any(v.cotangent for v in values) or bool(constant)
        if name in ("mul", "select_n"):  # the loss's own cotangent is 1
            cotangent |= 1 in numbers
        scaled = around[1] or any(v.scaled for v in values) or _by_hand(name, eqn, values)
        low = next((v.low for v in values if v.low), None)
        is_low = [getattr(var.aval, "dtype", None) == np.float16 for var in eqn.outvars]
        here = f"{name} at {compat.where_written(eqn)}" if cotangent and any(is_low) else None
        firsts = (low or (here if one else None) for one in is_low)
        return [_Value(constant, given, cotangent, first, scaled) for first in firsts]

    def number(self, value: jax.typing.ArrayLike) -> _Value:
        """The facts about a number; of larger arrays, and of keys, nothing is followed."""
        dtype = getattr(value, "dtype", np.dtype(float))
        if np.size(value) != 1 or not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
            return _Value()
        size = float(abs(on_host(value).reshape(()).astype(complex)))
        return _Value(_SOME if math.isnan(size) else size)

    def join(self, one: _Value, other: _Value) -> _Value:
        constant = one.constant
        if constant != other.constant:
            constant = _SOME if one.constant and other.constant else None
        return _Value(
            constant,
            one.given and other.given,
            one.cotangent or other.cotangent,
            one.low or other.low,
            one.scaled or other.scaled,
        )


def _by_hand(name: str, eqn: Equation, values: list[_Value]) -> bool:
    """True if a loss, as one number, was multiplied by something that can only be a scale."""
    if name != "mul" or math.prod(eqn.outvars[0].aval.shape) != 1:
        return False
    return any(
        (ct.cotangent or ct.constant is not None)
        and not ct.low
        and (by.given or _is_scale(by.constant or 0.0))
        for ct, by in (values, values[::-1])
    )


def _is_scale(constant: float) -> bool:
    return constant >= _LEAST_CONSTANT and math.frexp(constant)[0] == 0.5
