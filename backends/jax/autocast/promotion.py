"""Operands of different dtypes in one op: which decide its dtype, and which follow.

    numbers, masks           follow
    scalar arguments         follow arrays
    a bias                   follows the contraction's result that it is added to
    weak float32 values      follow low ones, in a region that promotes weakly

Everything else decides, and the widest dtype wins. Nothing here makes a step.
"""

from collections.abc import Iterable, Sequence

from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.known_functions import op_of
from polymp.backends.jax.autocast.values import LOW, Known, Origin, declared, fits, fixed
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.dtypes import FORMATS, widest
from polymp.rules.vocabulary import vocabulary


def deciding(eqn: Equation, op: str, known: Sequence[Known], weak: bool) -> tuple[str, ...]:
    """The dtypes that decide: those of the operands that do not follow the others.

    Args:
        eqn: the equation.
        op: its primitive, as the vocabulary spells it.
        known: of its operands.
        weak: True in a region that promotes weakly.

    Returns:
        The dtypes; none if nothing is eligible or an operand is of a dtype that none may join.
    """
    if any(map(fixed, eqn.invars)):
        return ()
    pairs = zip(known, eqn.invars, strict=True)
    hard = [k.dtype for k, a in pairs if k.dtype and not _follows(k, a, eqn, op, weak)]
    return tuple(hard or [k.dtype for k in known if k.dtype])


def alike(eqn: Equation, op: str, known: Sequence[Known], weak: bool, fold: bool) -> dict[str, str]:
    """Operands declared alike stay alike: for each declared dtype, the widest actual one.

    Args:
        eqn: the equation.
        op: its primitive, as the vocabulary spells it.
        known: of its operands.
        weak: True in a region that promotes weakly.
        fold: True if a bias takes the dtype of what it is added to.

    Returns:
        By declared dtype, the actual one.
    """
    atoms = eqn.invars
    groups: dict[str, str] = {}
    dtypes = [declared(atom) for atom in atoms]
    for one in {f for f in dtypes if f}:
        members = [
            (k, a) for k, a, f in zip(known, atoms, dtypes, strict=True) if f == one and k.dtype
        ]
        hard = [k for k, a in members if not _follows(k, a, eqn, op, weak)]
        if fold and op_of(op) == "add" and _is_bias(hard):
            hard = [k for k in hard if k.product]
        run = widest(k.dtype for k in hard or [k for k, _ in members] if k.dtype)
        for k, _ in members:
            if run in LOW and k.number is not None and not fits(k.number, run):
                too_large = abs(float(k.number)) > FORMATS[run].max
                if not (too_large and vocabulary().chooses(op_of(op))):
                    run = "float32"
        groups[one] = run
    return groups


def origin(eqn: Equation, op: str, known: Iterable[Known]) -> tuple[Origin, float | None]:
    """Where a result comes from, and the number that each of its elements is, if it is one."""
    floats = [k for k in known if k.dtype]
    if op in op_facts.LAYOUT:
        (first, *_) = floats
        spread = not eqn.invars[0].aval.shape and eqn.outvars[0].aval.shape
        if first.origin is Origin.GIVEN and spread:
            return Origin.LITERAL, None  # what jnp.where makes of a scalar
        return first.origin, first.number
    scalar = not any(v.aval.shape for v in eqn.outvars)
    if scalar and all(k.origin is not Origin.COMPUTED for k in floats):
        return Origin.GIVEN, None  # of unknown size
    return Origin.COMPUTED, None


def meets_scalar(eqn: Equation, known: Sequence[Known]) -> bool:
    """True if a float32 scalar of unknown size takes the low dtype of an array."""
    return any(
        k.dtype == "float32" and k.origin is Origin.GIVEN and _soft(k, atom, eqn, "")
        for k, atom in zip(known, eqn.invars, strict=True)
    ) and any(k.dtype in LOW for k in known)


def stays_weak(known: Iterable[Known]) -> bool:
    """True if no operand is low, and none is a float32 value that something made float32."""
    return all(k.dtype is None or (k.dtype == "float32" and _untainted(k)) for k in known)


def _untainted(known: Known) -> bool:
    return known.weak or known.origin is not Origin.COMPUTED


def _follows(known: Known, atom: Atom, eqn: Equation, op: str, weak: bool) -> bool:
    if weak and known.dtype == "float32" and _untainted(known):
        return True
    return _soft(known, atom, eqn, op)


def _soft(known: Known, atom: Atom, eqn: Equation, op: str) -> bool:
    """True if the operand takes the dtype of the others, as Python's numbers do in torch."""
    match known.origin:
        case Origin.MASK:
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
