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
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation
from polymp.backends.jax.jaxprs import Inner, inside, interpreted
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
    flow = _Flow()
    flow.outside(_traced(train_step, args, kwargs))
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
    """Facts about a value of the step.

    Attributes:
        constant: its number, if it depends on no argument; NaN where that is not followed. None if
            it does depend.
        given: True if it was given to the step, or is that in another dtype.
        cotangent: True if it depends, through equations that a transposition made, on a constant
            cotangent.
        low: what was the first such equation with a float16 result on the way; None if none was.
        scaled: True if it depends on a multiplication by a scale, likewise.
    """

    constant: float | None = None
    given: bool = False
    cotangent: bool = False
    low: str | None = None
    scaled: bool = False

    def joined(self, other: "_Value") -> "_Value":
        """Join the facts about a value that may be either."""
        same = self.constant == other.constant or (self.constant != 0 and other.constant != 0)
        known = self.constant is not None and other.constant is not None and same
        return _Value(
            (self.constant if self.constant == other.constant else math.nan) if known else None,
            self.given and other.given,
            self.cotangent or other.cotangent,
            self.low or other.low,
            self.scaled or other.scaled,
        )


_PLAIN = _Value()
# What leaves a number the same, whatever its shape and dtype.
_SAME = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "pvary",
    "reduce_precision", "reshape", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip

_TIMES_ONE = ("mul", "select_n")


class _Flow:
    """Follows values through a program.

    Attributes:
        unscaled: the first float16 equation on the way of a gradient that was not scaled.
    """

    def __init__(self) -> None:
        self.unscaled: str | None = None

    def outside(self, closed: ClosedProgram) -> None:
        """Follow a whole program."""
        self.body(closed, [_Value(given=True)] * len(compat.binders(closed)[1]), back=False)

    def body(
        self, closed: ClosedProgram, values: Sequence[_Value], *, back: bool, scope: bool = False
    ) -> list[_Value]:
        """Follow values through a closed jaxpr."""

        def equation(_: int, eqn: Equation, known: list[_Value]) -> list[_Value]:
            stack = eqn.source_info.name_stack
            part = back or compat.in_backward(stack)
            scoped = scope or regions.SCALED in compat.scope_names(stack)
            if not part:
                known = list(map(self.left, known))
            return self.equation(eqn, known, part, scoped)

        out = interpreted(closed, values, equation, _constant)
        return out if back else list(map(self.left, out))

    def left(self, value: _Value) -> _Value:
        """A value that leaves the backward pass: a gradient, if it came from there."""
        if value.low is not None and not value.scaled and self.unscaled is None:
            self.unscaled = value.low
        return value._replace(cotangent=False, low=None, scaled=False)

    def equation(self, eqn: Equation, known: list[_Value], back: bool, scope: bool) -> list[_Value]:
        name = eqn.primitive.name
        programs = [one for one in inside(eqn) or _called(eqn) if one.gives]
        if programs:
            outs = (self.looped(one, one.of(known), back, scope) for one in programs)
            return [_all_joined(values) for values in zip(*outs, strict=True)]
        constant, given = _folded(name, known), _given(name, known)
        if not back:
            return [_Value(constant, given)] * len(eqn.outvars)
        cotangent = any(v.cotangent for v in known) or (constant is not None and constant != 0)
        if name in _TIMES_ONE:  # the loss's own cotangent is 1
            cotangent |= any(v.constant == 1 for v in known)
        scaled = scope or any(v.scaled for v in known) or _by_hand(name, eqn, known)
        low = next((v.low for v in known if v.low), None)
        return [
            _Value(
                constant,
                given,
                cotangent,
                low or (_shown(eqn) if cotangent and _is_low(var) else None),
                scaled,
            )
            for var in eqn.outvars
        ]

    def looped(self, program: Inner, known: list[_Value], back: bool, scope: bool) -> list[_Value]:
        """The results of a program: what may be in a loop's carry grows until it does not."""
        start, end = program.fixed, program.fixed + program.carries
        while True:
            out = self.body(program.closed, known, back=back, scope=scope)
            state, after = known[start:end], out[: program.carries]
            joined = [a.joined(b) for a, b in zip(state, after, strict=True)]
            if list(map(repr, joined)) == list(map(repr, state)):  # NaN != NaN
                return [*joined, *out[program.carries :]]
            known = [*known[:start], *joined, *known[end:]]


def _called(eqn: Equation) -> list[Inner]:
    """The program of an unknown equation, if its inputs and outputs are those of the equation."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        held = eqn.params.get(key)
        if held is not None and hasattr(held, "eqns"):
            closed = compat.close(held)
            inputs, outputs = compat.binders(closed)[1], compat.opened(closed)[0].outvars
            if (len(inputs), len(outputs)) == (len(eqn.invars), len(eqn.outvars)):
                return [Inner(closed, range(len(inputs)))]
    return []


def _all_joined(values: Sequence[_Value]) -> _Value:
    first, *rest = values
    for value in rest:
        first = first.joined(value)
    return first


def _constant(x: jax.typing.ArrayLike) -> _Value:
    """A number in a program; of larger arrays, and of keys, nothing is followed."""
    dtype = getattr(x, "dtype", np.dtype(float))
    if np.size(x) != 1 or not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        return _PLAIN
    return _Value(constant=float(abs(on_host(x).reshape(()).astype(complex))))


def _folded(name: str, known: list[_Value]) -> float | None:
    """The result of an equation on constants; None if an operand is no constant."""
    values = [v.constant for v in known]
    if name == "mul" and 0 in values:
        return 0.0
    if None in values:
        return None
    if values and all(value == 0 for value in values):
        return 0.0
    return values[0] if name in _SAME else math.nan


def _given(name: str, known: list[_Value]) -> bool:
    return name in _SAME and all(v.given for v in known) and bool(known)


def _by_hand(name: str, eqn: Equation, known: list[_Value]) -> bool:
    """True if a loss, as one number, was multiplied by something that can only be a scale."""
    if name != "mul" or math.prod(eqn.outvars[0].aval.shape) != 1:
        return False
    return any(
        (ct.cotangent or ct.constant is not None)
        and not ct.low
        and (by.given or _is_scale(by.constant))
        for ct, by in (known, known[::-1])
    )


def _is_scale(constant: float | None) -> bool:
    known = constant is not None and _LEAST_CONSTANT <= constant < math.inf
    return known and math.frexp(constant)[0] == 0.5  # type: ignore[arg-type]


def _is_low(var: Atom) -> bool:
    return getattr(var.aval, "dtype", None) == np.float16


def _shown(eqn: Equation) -> str:
    return f"{eqn.primitive.name} at {compat.where_written(eqn)}"
