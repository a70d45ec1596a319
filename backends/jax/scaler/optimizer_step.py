"""One step of a scaler: look at loss and gradients, and take the step or skip it.

Gradients, two branches, a rule and a state in; the result of one branch and the next state out.
Every helper skips in this one way: eager code by asking, traced code by `lax.cond`, whose branch
alone divides the gradients. A select over all leaves would keep the old state and the new one alive
at once.

GPUs are the exception: there XLA reads the predicate of a conditional on the host, which waits for
the device in every step, while a select becomes part of the optimizer's own loops, which read the
old state anyway. So there the step is always taken, with zeros for gradients if it is skipped, and
the results are selected.

`expect_scaler` checks a step that no scaler takes.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0

from polymp import scaling
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation
from polymp.backends.jax.jaxprs import inside, where_written
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.scaler import tree_math
from polymp.backends.jax.scaler.tree_math import shown_dtype
from polymp.errors import ScalerWarning, UnscaledError, brief
from polymp.scaling import ScaleRule, ScaleState

T = TypeVar("T")

# Where results are selected, not computed under a condition. On an H100 a step takes as long either
# way and its call waits for neither; on rocm it is not measured.
SELECTING = ("cuda", "rocm")


def look(state: ScaleState, grads: object, loss: object) -> tuple[jax.Array, jax.Array]:
    """Look for Inf and NaN in gradients and loss."""
    finite = tree_math.all_finite(grads, factor(state))
    if loss is None:
        return finite, jnp.asarray(True)
    if not any(map(tree_math.is_scalable, jax.tree.leaves(loss))):
        raise TypeError(f"loss must be the loss as it was before scaling, got {loss!r}.")
    loss_finite = tree_math.all_finite(loss, jnp.float32(1))
    # The same as `finite`, but it needs the loss. Otherwise XLA on CPU may take the step before it
    # computes the loss, and copies the parameters first; an optimization barrier is gone by then.
    return finite & (finite | loss_finite), loss_finite


def step(
    rule: ScaleRule | None,
    scaling: ScaleState,
    grads: object,
    new_state: Callable[..., object],
    state: tuple[object, ...],
    loss: object,
) -> tuple[Any, ScaleState, jax.Array]:
    """`GradScaler.step` for a rule and a state; without a rule, gradients are the true ones."""
    of_optax = str(getattr(new_state, "__module__", "")).startswith("optax.")
    if not callable(new_state) or of_optax:
        raise TypeError(
            "step(grads, update, *state) needs for update a function of the true gradients and the "
            f"state that returns the new state, got {brief(new_state)}. {_WITH_OPTAX}"
        )
    kept, together = apart(state, tree_math.is_carried)
    fixed: dict[int, object] = {}  # Python numbers that come back as they are, such as a flag

    def take(grads: object) -> list[jax.Array]:
        # A copy of the containers: what `update` changes in place is its own.
        made = new_state(grads, *together(kept))
        new = (made,) if len(state) == 1 else made
        check_replaces(state, new)
        leaves = apart(new, tree_math.is_carried)[0]
        pairs = enumerate(zip(kept, leaves, strict=True))
        fixed.update((at, x) for at, (o, x) in pairs if o is x and not hasattr(x, "dtype"))
        return leaves

    def apply(grads: object) -> list[jax.Array]:
        # Divided again and not kept from the check: XLA fuses the quotients into their use.
        return take(tree_math.divided(grads, scale))

    if rule is None:
        result, after, finite = take(grads), scaling, jnp.asarray(True)
    else:
        scale, grads = factor(scaling), tree_math.settled(grads)
        finite, loss_finite = look(scaling, grads, loss)
        if isinstance(finite, jax.core.Tracer):
            result = _either(finite, grads, apply, lambda: kept)
        else:
            result = apply(grads) if finite else kept
        after = update(rule, scaling, finite, loss_finite)
    whole = together([fixed.get(at, x) for at, x in enumerate(result)])
    nnx.write_back(state, whole)
    return whole[0] if len(state) == 1 else whole, after, finite


_WITH_OPTAX = (
    "With an optimizer tx of optax, write def update(grads, params, opt_state): updates, opt_state "
    "= tx.update(grads, opt_state, params); return optax.apply_updates(params, updates), opt_state "
    "and scaler.step(grads, update, params, opt_state)."
)


def _either(
    finite: jax.Array, grads: object, apply: Callable[[Any], T], skip: Callable[[], T]
) -> T:
    """`apply(grads)` if finite, else `skip()`, in traced code: see the top of this file."""
    # Each is traced once. What has effects, such as a print, is always a conditional.
    floats, together = apart(grads, tree_math.is_traced_float)
    applied = jax.make_jaxpr(lambda floats: apply(together(floats)), return_shape=True)
    taken, shapes = applied(floats)
    take, keep = core.jaxpr_as_fun(taken), core.jaxpr_as_fun(jax.make_jaxpr(skip)())

    def branch(finite: jax.Array, floats: list[jax.Array]) -> list[jax.Array]:
        return list(lax.cond(finite, lambda: take(*floats), keep))

    def select(finite: jax.Array, floats: list[jax.Array]) -> list[jax.Array]:
        floats = [jnp.where(finite, x, 0) for x in floats]
        pairs = zip(take(*floats), keep(), strict=True)
        return [
            o if getattr(o, "dtype", None) == float0 else jnp.where(finite, n, o) for n, o in pairs
        ]

    if taken.effects:
        result = branch(finite, floats)
    else:
        forms = dict.fromkeys(SELECTING, select)
        result = lax.platform_dependent(finite, floats, default=branch, **forms)
    whole: T = jax.tree.unflatten(jax.tree.structure(shapes), result)
    return whole


def check_replaces(old: tuple[object, ...], new: object) -> None:
    """Raise if the new state is not of the old one's structure, shapes and dtypes."""
    if not isinstance(new, tuple) or len(new) != len(old):
        got = f"a tuple of {len(new)}" if isinstance(new, tuple) else type(new).__name__
        if not old:
            raise TypeError(
                f"step(grads, update) got no state to update, and update returned {got}. Write "
                "step(grads, update, params)."
            )
        raise TypeError(
            f"step(grads, update, *state) got {len(old)} states, so update must return a tuple of "
            f"the {len(old)} new ones, in the same order; it returned {got}."
        )
    given: jax.tree_util.PyTreeDef = jax.tree.structure(old)
    returned: jax.tree_util.PyTreeDef = jax.tree.structure(new)
    if given != returned:
        raise TypeError(
            f"update must return the state in the structure that it came in, {given}; "
            f"it returned {returned}. {_WITH_OPTAX}"
        )
    was = jax.tree_util.tree_leaves_with_path(old)
    for (path, x), y in zip(was, jax.tree.leaves(new), strict=True):
        if tree_math.is_carried(x) and tree_math.is_carried(y):
            before, after = shown_dtype(x), shown_dtype(y)
            same = before == after
        else:
            before, after = x, y
            same = tree_math.is_carried(x) == tree_math.is_carried(y) and (x is y or bool(x == y))
        if not same:
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"update must keep the shapes and dtypes of the state, and what is no array; "
                f"state{where} was {before} and came back as {after}."
            )


class _Factor:
    """A factor that float32 cannot hold: multiplies in float64, as torch does, and rounds once."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __rmul__(self, scale: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return (scale.astype(jnp.float64) * self.value).astype(jnp.float32)


def _exact(factor: float) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(factor))
    return factor if factor == held else _Factor(factor)


def on_device(state: ScaleState) -> ScaleState:
    """A state of numbers as one of arrays."""
    scale, *counts = state
    return ScaleState(jnp.asarray(scale, jnp.float32), *(jnp.asarray(n, jnp.int32) for n in counts))


def factor(state: ScaleState) -> jax.Array:
    """The factor of losses and divisor of gradients: the scale, float32 []."""
    # A first scale beyond the bounds counts as the nearer one: XLA on CPU takes it, or its inverse,
    # for 0.
    scale = state.scale
    if scale.shape != ():
        raise TypeError(
            f"this GradScaler is a batch of shape {scale.shape}; call its methods in jax.vmap."
        )
    return jnp.clip(scale, scaling.SMALLEST, scaling.LARGEST)


def update(
    rule: ScaleRule,
    state: ScaleState,
    finite: jax.typing.ArrayLike,
    loss_finite: jax.typing.ArrayLike,
) -> ScaleState:
    """The state after a step; see `GradScaler.update`."""
    factor(state)
    found = _one_bool("finite", finite), _one_bool("loss_finite", loss_finite)
    after: ScaleState = _advanced(rule, state, *found)
    return after


def _one_bool(name: str, value: jax.typing.ArrayLike) -> jax.Array:
    """The value as an array."""
    try:
        array = jnp.asarray(value)
        good = array.dtype == jnp.bool_ and array.shape == ()
        shown = tree_math.shown_dtype(array)
    except (TypeError, ValueError):
        good, shown = False, reprlib.repr(value)
    if not good:
        raise TypeError(f"{name} must be one bool, got {shown}.")
    return array


@regions.as_written()
@partial(jax.jit, static_argnums=0, inline=True)
def _advanced(
    rule: ScaleRule, state: ScaleState, finite: jax.Array, loss_finite: jax.Array
) -> ScaleState:
    """`scaling.step` with jax arrays."""
    rule = rule._replace(growth=_exact(rule.growth), backoff=_exact(rule.backoff))
    return scaling.step(rule, state, finite, jnp.where, loss_finite=loss_finite)


# A training step without a scaler. It is traced. Among the equations that differentiation made,
# `scale` has a name scope of its own, which the transposed multiplication keeps.


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
    enabled `GradScaler` has multiplied, or the cotangent of one: of several losses, one is enough.
    The scalers of other libraries are not known, nor whether a cotangent is scaled that the step is
    given.

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
    arrays, together = apart((args, kwargs), is_typed)

    def called(*arrays: jax.Array) -> list[jax.Array]:
        args, kwargs = together(arrays)
        return [x for x in jax.tree.leaves(train_step(*args, **kwargs)) if is_typed(x)]

    backward = list(_backward(jax.make_jaxpr(called)(*arrays)))
    low = (eqn for eqn, _ in backward if any(v.aval.dtype == np.float16 for v in eqn.outvars))
    first = next(low, None)
    if first is None or any(scaled for _, scaled in backward):
        return True
    said = (
        f"gradients flow through float16 without a scaler, first at {where_written(first)}: those "
        "below 2**-24 become 0 there. Differentiate scaler.scale(loss) and step with scaler.step, "
        "where scaler is an enabled GradScaler; or compute in bfloat16, which needs none."
    )
    if action == "raise":
        raise UnscaledError(said)
    warnings.warn(said, ScalerWarning, stacklevel=2)
    return False


def _backward(
    closed: ClosedProgram, back: bool = False, scaled: bool = False
) -> Iterator[tuple[Equation, bool]]:
    """Yield the innermost equations of backward passes, and whether each is in `scale`."""
    # Or reads what `scale` made of a cotangent, before the pass.
    made = set[Atom]()  # by `scale`, before the pass
    for eqn in compat.opened(closed)[0].eqns:
        stack, programs = eqn.source_info.name_stack, inside(eqn)
        is_back = back or compat.in_backward(stack)
        reads = any(type(v) is not core.Literal and v in made for v in eqn.invars)
        is_scaled = scaled or regions.SCALED in compat.scope_names(stack) or (is_back and reads)
        if is_scaled and not is_back:
            made.update(eqn.outvars)
        if is_back and not programs:
            yield eqn, is_scaled
        for program in programs:
            yield from _backward(program.closed, is_back, is_scaled)
