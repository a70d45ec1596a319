"""`expect_scaler`: finds gradients that flow through float16 without having been scaled.

The step is traced, and the equations that differentiation made are followed from the loss's own
cotangent, 1, to the gradients. `scale` multiplies in a name scope, which the transposed
multiplication keeps.
"""

import reprlib
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


def expect_scaler(
    train_step: Callable[..., object],
    *args: object,
    action: Literal["warn", "raise"] = "warn",
    **kwargs: object,
) -> bool:
    """Check that no gradient of a training step flows through float16 unscaled.

        expect_scaler(train_step, params, opt_state, scaler, batch)

    The step is traced and not run; a jitted one may have run before. Steps without gradients, and
    gradients in bfloat16 or float32, are fine. A gradient is scaled if it depends on a loss
    multiplied by an enabled `GradScaler`; the scalers of other libraries are not known. Cotangents
    that the step is given, such as those of `jax.vjp`, are not followed.

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
        raise TypeError(
            f"expect_scaler needs the function of a training step, got {reprlib.repr(train_step)}."
        )
    if action not in ("warn", "raise"):
        raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
    flow, closed = _Flow(), _traced(train_step, args, kwargs)
    flow.program(closed, [_Value()] * len(compat.binders(closed)[1]), (False, False))
    if not flow.unscaled:
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


_UNSCALED, _LOW, _SCALED = 1, 2, 3  # cotangents; of several operands, the largest decides
# Ops that no transposition makes: a 1 among their operands is no cotangent.
_NOT_LINEAR = frozenset({"add", "max", "min", "pow", "sub"})


class _Value(NamedTuple):
    """Facts about a value of the step."""

    one: bool = False  # a constant 1, as the loss's own cotangent is, or made of such alone
    cotangent: int = 0  # `_UNSCALED`, `_LOW` if float16 was on the way, `_SCALED`; 0 for no one
    where: str = ""  # the first equation on the way with a float16 result


class _Flow(Walk[_Value, tuple[bool, bool]]):
    """Follows values; a place is in the backward pass or not, and in `scale` or not."""

    unscaled = ""  # where the first gradient that is not scaled was in float16

    def program(
        self,
        closed: ClosedProgram,
        values: Sequence[_Value],
        around: tuple[bool, bool],
        consts: Sequence[_Value] | None = None,
    ) -> list[_Value]:
        outs = super().program(closed, values, around, consts)
        return outs if around[0] else list(map(self.left, outs))

    def equation(
        self, at: int, eqn: Equation, values: list[_Value], around: tuple[bool, bool]
    ) -> Sequence[_Value]:
        stack = eqn.source_info.name_stack
        back = around[0] or compat.in_backward(stack)
        scope = around[1] or regions.SCALED in compat.scope_names(stack)
        values = values if back else list(map(self.left, values))
        return super().equation(at, eqn, values, (back, scope))

    def left(self, value: _Value) -> _Value:
        """A value that leaves the backward pass: a gradient, if it came from there."""
        if value.cotangent == _LOW:
            self.unscaled = self.unscaled or value.where
        return _Value(value.one)

    def leaf(
        self, eqn: Equation, values: list[_Value], around: tuple[bool, bool]
    ) -> Sequence[_Value]:
        name = eqn.primitive.name
        ones = [v.one for v in values if name not in _NOT_LINEAR]
        one = bool(ones) and all(ones)
        if not around[0]:
            return [_Value(one)] * len(eqn.outvars)
        cotangent = max(values, key=lambda v: v.cotangent, default=_Value())._replace(one=one)
        if not cotangent.cotangent and any(ones):
            cotangent = _Value(one, _UNSCALED)
        if around[1]:
            cotangent = _Value(one, _SCALED)
        low = _Value(one, _LOW, f"{name} at {compat.where_written(eqn)}")
        unscaled = cotangent.cotangent == _UNSCALED
        return [
            low if unscaled and var.aval.dtype == np.float16 else cotangent for var in eqn.outvars
        ]

    def number(self, value: jax.typing.ArrayLike) -> _Value:
        """The facts about a number; of larger arrays, and of keys, nothing is followed."""
        if np.size(value) != 1 or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
            return _Value()
        return _Value(on_host(value).reshape(()).item() == 1)

    def join(self, one: _Value, other: _Value) -> _Value:
        return max(one, other, key=lambda v: v.cotangent)._replace(one=one.one and other.one)
