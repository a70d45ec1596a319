"""Which products run in 8 bits, and which of their operands is the weight.

A product with rule fp8 runs in 8 bits if it is a `dot_general` that comes down to one product of
two matrices, `[m, k] @ [k, n]`, and nothing in `polymp.fp8.fallback` speaks against it.

The weight is the operand that is a parameter: an argument or a constant of the program, or a layout
of one. If both are, or neither, it is the second one, as in `x @ w`. The formats of weights and
activations are the same in all recipes, so that the choice matters to those alone that treat the
product for the weight's gradient, or the weight in the backward pass, in a way of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.fp8_operands import In8Bits, Operand
from polymp.backends.jax.autocast.frame import Frame
from polymp.backends.jax.autocast.values import Known, Origin
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.fp8 import fallback
from polymp.fp8.recipes import ACTIVATION, RECIPES, WEIGHT
from polymp.rules import decision_log
from polymp.rules.region import Region
from polymp.rules.row import Rule

_ONE = "JAX's {} has no form in 8 bits"
_UNKNOWN = "its sizes are not known before it runs"
_GRADIENT = "it is in the backward rule of a jax.custom_vjp function, whose gradients are not told"


def in_8_bits(
    frame: Frame, eqn: Equation, known: Sequence[Known], op: str, region: Region
) -> In8Bits | str:
    """How a product runs in 8 bits, or why it runs by rule `lower` instead."""
    assert region.policy is not None, "it has a row with rule fp8"
    if eqn.primitive.name != "dot_general":
        return _ONE.format(eqn.primitive.name)
    if frame.gradients:
        return _GRADIENT
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return _UNKNOWN  # a symbol, as in an export
    weight = _weight(known)
    free = [
        prod(shape[d] for d in range(len(shape)) if d not in (*contracted[i], *batch[i]))
        for i, shape in enumerate(shapes)
    ]
    recipe = RECIPES[region.policy.fp8]
    device, capability = compat.device_type()
    product = fallback.Product(
        op,
        free[1 - weight],
        prod(shapes[0][d] for d in contracted[0]),
        free[weight],
        tuple(str(atom.aval.dtype) for atom in eqn.invars),
        device,
        region.dtype,
        prod(shapes[0][d] for d in batch[0]),
        capability=capability,
    )
    if why := fallback.why_not(product, recipe):
        return why
    own = _own(frame)
    parts = [
        Operand(
            WEIGHT if i == weight else ACTIVATION,
            not isinstance(atom, Literal) and atom in own and known[i].origin is Origin.GIVEN,
        )
        for i, atom in enumerate(eqn.invars)
    ]
    return In8Bits(recipe.name, parts[0], parts[1])


def in_trial(
    frame: Frame, eqn: Equation, known: Sequence[Known], op: str, spelled: str, region: Region
) -> In8Bits | None:
    """How a product that runs low would run in 8 bits by the policy that a recorder tries."""
    recorder = decision_log.current()
    policy = None if recorder is None else recorder.tried
    if policy is None or region.dtype != fallback.REGION_DTYPE:
        return None
    row = policy.winner(op, region.dtype, f"jax:{spelled}")
    if row is None or row.rule is not Rule.FP8:
        return None
    how = in_8_bits(frame, eqn, known, op, replace(region, policy=policy))
    return None if isinstance(how, str) else how._replace(trial=True)


def _weight(known: Sequence[Known]) -> int:
    """The place of the weight among the operands."""
    given = [k.origin is Origin.GIVEN for k in known]
    return 0 if given == [True, False] else 1


def _own(frame: Frame) -> set[Atom]:
    """The inputs and constants of a program, which are in memory as they are."""
    constvars, invars = compat.binders(frame.closed)
    return {*constvars, *invars}
