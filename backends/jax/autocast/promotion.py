"""Operands of different dtypes in one op: which decide its dtype, and which follow.

    numbers, masks, integers follow
    scalar arguments         follow arrays
    a bias                   follows the contraction's result that it is added to

Everything else decides, and the widest dtype wins. Nothing here makes a step.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.known_functions import op_of
from polymp.backends.jax.autocast.values import LOW, Known, Origin, declared, fits, fixed
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.dtypes import FORMATS, widest
from polymp.rules.vocabulary import vocabulary


def deciding(eqn: Equation, op: str, known: Sequence[Known]) -> tuple[str, ...]:
    """The dtypes that decide: those of the operands that do not follow the others."""
    if any(map(fixed, eqn.invars)):
        return ()
    pairs = zip(known, eqn.invars, strict=True)
    hard = [k.dtype for k, a in pairs if k.dtype and not _soft(k, a, eqn, op)]
    return tuple(hard or [k.dtype for k in known if k.dtype])


def alike(eqn: Equation, op: str, known: Sequence[Known], fold: bool) -> dict[str, str]:
    """Operands declared alike stay alike: for each declared dtype, the widest actual one."""
    atoms = eqn.invars
    groups: dict[str, str] = {}
    dtypes = [declared(atom) for atom in atoms]
    for one in {f for f in dtypes if f}:
        members = [
            (k, a) for k, a, f in zip(known, atoms, dtypes, strict=True) if f == one and k.dtype
        ]
        hard = [k for k, a in members if not _soft(k, a, eqn, op)]
        if fold and op_of(op) == "add" and _is_bias(hard):
            hard = [k for k in hard if k.product]
        run = widest(k.dtype for k in hard or [k for k, _ in members] if k.dtype)
        for k, _ in members:
            if run in LOW and not all(fits(n, run) for n in k.numbers):
                too_large = k.number is not None and abs(float(k.number)) > FORMATS[run].max
                if not (too_large and vocabulary().chooses(op_of(op))):
                    run = "float32"
        groups[one] = run
    return groups


def converted(atom: Atom, known: Known) -> tuple[Origin, tuple[float, ...]]:
    """Where the result of a cast comes from, and the few numbers that its elements are."""
    dtype = getattr(atom.aval, "dtype", None)
    if known.origin is Origin.LITERAL:
        return Origin.LITERAL, known.numbers
    if dtype == np.bool_:
        return Origin.MASK, (0.0, 1.0)
    whole = dtype is not None and jax.numpy.issubdtype(dtype, np.integer)
    if not atom.aval.shape and (whole or known.origin is Origin.GIVEN):
        return Origin.GIVEN, ()  # of unknown size
    if whole:
        return Origin.INTEGER, (0.0, 1.0)
    return Origin.COMPUTED, ()


def origin(
    eqn: Equation, op: str, known: Iterable[Known], ruled: bool
) -> tuple[Origin, tuple[float, ...]]:
    """Where a result comes from, and the few numbers that its elements are."""
    floats = [k for k in known if k.dtype]
    if op in op_facts.LAYOUT:
        (first, *_) = floats
        spread = not eqn.invars[0].aval.shape and eqn.outvars[0].aval.shape
        if first.origin is Origin.GIVEN and spread:
            return Origin.LITERAL, ()  # what jnp.where makes of a scalar
        return first.origin, first.numbers
    scalar = not any(v.aval.shape for v in eqn.outvars)
    if scalar and all(k.origin is not Origin.COMPUTED for k in floats):
        return Origin.GIVEN, ()  # of unknown size
    if not ruled and all(k.is_chosen and k.numbers for k in floats):
        return _made_of_numbers(op, floats)
    return Origin.COMPUTED, ()


# Of whole numbers, these make whole numbers.
_EXACT: dict[str, Callable[..., float]] = {
    "add": operator.add, "max": max, "min": min, "mul": operator.mul, "neg": operator.neg,
    "sub": operator.sub,
}  # fmt: skip
# Of more numbers than these, nothing is known.
_FEW = 8


def _made_of_numbers(op: str, floats: Sequence[Known]) -> tuple[Origin, tuple[float, ...]]:
    """The same, of what an op makes of bools, integers and numbers in the program.

    With integers, `1 - mask` is what integers are, and `0.5 * positions` is not: it is computed.
    """
    origins = {k.origin for k in floats}
    if op == "select_n":
        numbers = {n for k in floats for n in k.numbers}
    elif op in _EXACT and origins != {Origin.LITERAL}:
        numbers = {_EXACT[op](*each) for each in itertools.product(*(k.numbers for k in floats))}
    else:
        return Origin.COMPUTED, ()
    integers = Origin.INTEGER in origins
    whole = all(n.is_integer() for k in floats for n in k.numbers)
    if len(numbers) > _FEW or (integers and not whole):
        return Origin.COMPUTED, ()
    return Origin.INTEGER if integers else Origin.MASK, tuple(sorted(numbers))


def meets_scalar(eqn: Equation, known: Sequence[Known]) -> bool:
    """True if a float32 scalar of unknown size takes the low dtype of an array."""
    return any(
        k.dtype == "float32" and k.origin is Origin.GIVEN and _soft(k, atom, eqn, "")
        for k, atom in zip(known, eqn.invars, strict=True)
    ) and any(k.dtype in LOW for k in known)


def _soft(known: Known, atom: Atom, eqn: Equation, op: str) -> bool:
    """True if the operand takes the dtype of the others, as Python's numbers do in torch."""
    match known.origin:
        case Origin.MASK | Origin.INTEGER:
            return True
        case Origin.LITERAL:
            return not atom.aval.shape or vocabulary().chooses(op_of(op))
        case Origin.GIVEN:  # a scalar tensor, among tensors with dimensions
            return not atom.aval.shape and any(v.aval.shape for v in eqn.outvars)
    return False


def _is_bias(hard: Sequence[Known]) -> bool:
    """True for a contraction's low result, or more of them, plus parameters in float32."""
    return (
        any(k.product for k in hard)
        and all(k.product or k.origin is Origin.GIVEN for k in hard)
        and len({k.dtype for k in hard if k.product}) == 1
    )
