"""`expect_scaler`: finds gradients that flow through float16 without having been scaled.

The step is traced. Among the equations that differentiation made, `scale` has a name scope of its
own, which the transposed multiplication keeps.
"""

import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import inside
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
    gradients in bfloat16 or float32, are fine, and so is a step that differentiates a loss which an
    enabled `GradScaler` has multiplied: of several losses, one is enough. The scalers of other
    libraries are not known.

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
    backward = list(_backward(_traced(train_step, args, kwargs)))
    low = (eqn for eqn, _ in backward if any(v.aval.dtype == np.float16 for v in eqn.outvars))
    first = next(low, None)
    if first is None or any(scaled for _, scaled in backward):
        return True
    where = f"{first.primitive.name} at {compat.where_written(first)}"
    said = (
        f"gradients flow through float16 without a scaler, first in {where}: those below "
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


def _backward(
    closed: ClosedProgram, back: bool = False, scaled: bool = False
) -> Iterator[tuple[Equation, bool]]:
    """Yield the equations of backward passes, innermost ones, and whether each is in `scale`."""
    for eqn in compat.opened(closed)[0].eqns:
        stack = eqn.source_info.name_stack
        here = (
            back or compat.in_backward(stack),
            scaled or regions.SCALED in compat.scope_names(stack),
        )
        programs = inside(eqn)
        if here[0] and not programs:
            yield eqn, here[1]
        for program in programs:
            yield from _backward(program.closed, *here)
