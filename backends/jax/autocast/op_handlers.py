"""Handlers of single ops: in which dtype each runs, and what is known of its result.

    lower, fp32, ...   what the policy's row says
    no row             in the dtypes of the operands, the widest of those declared alike
    as written         ops that cannot run in another dtype: see `known_functions`

Numbers in the program, scalar arguments and masks take the dtype of what they meet. A parameter
that is added to the result of a contraction is its bias, and takes the low dtype too.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from math import inf

import jax
import jax.extend.core as core
import numpy as np
from jax.extend.core import Literal

from polymp import fp8
from polymp.backends.jax import compat
from polymp.backends.jax.autocast import known_functions
from polymp.backends.jax.autocast.contraction import sizes_of, spec_of
from polymp.backends.jax.autocast.fp8_contraction import In8Bits, Part
from polymp.backends.jax.autocast.frame import (
    ELIGIBLE,
    LOW_DTYPES,
    Frame,
    Kind,
    Origin,
    Planned,
    ValueFacts,
    decide,
    declared,
    fits,
    fixed,
    winner,
)
from polymp.backends.jax.autocast.known_functions import MARKS, UPPER, op_of, spelling
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.compat import Atom, Equation
from polymp.dtypes import FORMATS, widest
from polymp.fp8 import ACTIVATION, RECIPES, WEIGHT
from polymp.rules.policy import Decision, Region
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary


def convert(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A cast in the program."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    old, new, known = declared(atom), declared(var), frame.known(atom)
    if region.policy is AS_CALLED and region.dtype == "float32" and old and new in LOW_DTYPES:
        # A library rounds to what it was given; what is computed in float32 stays so.
        return frame.step(eqn, ["float32"], ["float32"], Kind.CAST), [ValueFacts("float32")]
    if old is not None and old == new:  # the trace changed nothing but weakness
        if atom.aval.weak_type == eqn.params["weak_type"]:
            return frame.step(eqn, [None], [known.dtype], Kind.CAST), [known]
        params = {**eqn.params, "new_dtype": np.dtype(known.dtype)}
        return frame.step(eqn, [None], [known.dtype], params=params), [known]
    origin, numbers = converted(atom, known)
    if new is None:
        numbers = ()
    return frame.step(eqn, [None], [new]), [ValueFacts(new, origin, numbers=numbers)]


def name(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A name for a value, which may be one of our marks."""
    if eqn.params["name"] not in MARKS:
        return free(frame, eqn, region)
    (atom,) = eqn.invars
    if frame.known(atom).dtype is None:
        return frame.step(eqn, [None], [None], Kind.CAST), [frame.known(atom)]
    dtype = "float32" if eqn.params["name"] == UPPER else region.dtype
    return frame.step(eqn, [dtype], [dtype], Kind.CAST), [ValueFacts(dtype)]


def independent(frame: Frame, eqn: Equation, _: Region) -> Planned:
    """An op whose results have the dtypes of the operands in their places."""
    known = [frame.known(atom) for atom in eqn.invars][: len(eqn.outvars)]
    outs = [k._replace(numbers=()) for k in known]
    return frame.step(eqn, [None] * len(eqn.invars), [k.dtype for k in known]), outs


def free(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """An op that computes in any dtype, as the policy says."""
    op = spelling(eqn)
    return frame.repeated(eqn, region, (op, _is_of_read(eqn, op)), _free)


def _is_of_read(eqn: Equation, op: str) -> bool:
    """True for the transpose of a gather, which keeps the traceback of the gather."""
    return op == "scatter-add" and _GATHER in compat.frames(eqn.source_info.traceback).codes


def _free(frame: Frame, eqn: Equation, region: Region) -> Planned:
    op, known = spelling(eqn), [frame.known(atom) for atom in eqn.invars]
    hard = deciding(eqn, op, known)
    if not hard:
        return frame.as_written(eqn)
    decision = decide(eqn, op_of(op), hard, region, op)
    rule = decision.rule
    picks = vocabulary().op(op_of(op)).picks
    if picks and rule in (Rule.LOWER, Rule.FP32_KEEP):  # no table is cast, but what is picked of it
        decision = Decision(rule, None, decision.run if rule is Rule.LOWER else None)
    if _is_of_read(eqn, op) and rule not in _IN_FLOAT32 and _adds_up_in_float32(rule, region):
        decision = Decision(rule, "float32", widest(hard))
    dtypes = [declared(atom) for atom in eqn.invars]
    if decision.run is not None:
        groups = {f: decision.run for f in dtypes if f}
    else:
        groups = alike(eqn, op, known)
    reads = [groups[f] if f else None for f in dtypes]
    writes = [groups.get(f, f) if f else None for f in map(declared, eqn.outvars)]
    finals = [decision.out or f if f else None for f in writes]
    elementwise = decision.run is None and op in known_functions.ELEMENTWISE
    if elementwise and meets_scalar(eqn, known):
        # The scalar may be anything: it is not rounded, the result is.
        reads, writes = [f and "float32" for f in reads], [f and "float32" for f in writes]
    returns = tuple(finals) if finals != writes else None
    origin, numbers = origin_of(eqn, op, known, ruled=decision.run is not None)
    adds = op_of(op) == "add" and all(k.product or k.origin is not Origin.COMPUTED for k in known)
    # Spread over more elements, a product is no longer what a bias is added to.
    moved = op in known_functions.LAYOUT and op != "broadcast_in_dim"
    product = (adds or moved) and any(k.product for k in known)
    picks_low = picks and writes[0] in LOW_DTYPES
    kind = Kind.PICK if picks_low and _adds_up_in_float32(rule, region) else Kind.BIND
    outs = [
        ValueFacts(f, origin, product and f in LOW_DTYPES, numbers) if f else ValueFacts(None)
        for f in finals
    ]
    return frame.step(eqn, reads, writes, kind, returns=returns), outs


_GATHER = known_functions.code_of(jax.lax.gather)
_IN_FLOAT32 = (Rule.FP32, Rule.FP32_KEEP)


def _adds_up_in_float32(rule: Rule, region: Region) -> bool:
    """True if gradients of what is read more than once are, unless a row of scatter_add differs."""
    row, policy = winner("scatter_add", region, "jax:scatter-add"), region.policy
    assert policy is not None, "it has decided already"
    if rule in _IN_FLOAT32 or (row is not None and row.rule in _IN_FLOAT32):
        return True
    named = row is not None and row.of in ("scatter_add", "jax:scatter-add")
    return not named and policy.halves != "raise"  # as torch.amp does


def contraction(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A sum of products: the primitive of polymp, where it runs low."""
    like = (eqn.primitive, compat.default_precision(), *eqn.params.items())
    return frame.repeated(eqn, region, like, _contraction)


def _contraction(frame: Frame, eqn: Equation, region: Region) -> Planned:
    known = [frame.known(atom) for atom in eqn.invars]
    hard = deciding(eqn, eqn.primitive.name, known)
    spelled = spelling(eqn)
    op = op_of(spelled)
    rule = getattr(winner(op, region, f"jax:{spelled}"), "rule", None)
    wants_8_bits = rule is Rule.FP8
    as_given = rule is Rule.LOWER and any(a.aval.dtype == np.float64 for a in eqn.invars)
    if not (hard or wants_8_bits or as_given):
        return frame.as_written(eqn)
    decision = decide(eqn, op, hard, region, spelled)
    how = in_8_bits(frame, eqn, known, op, region) if wants_8_bits else ""
    wide = {f for f in map(declared, eqn.invars) if f}
    preferred = eqn.params.get("preferred_element_type")
    asked = None if preferred is None else np.dtype(preferred).name  # a class or a name as well
    if why := _why_as_written(eqn, asked) if hard or as_given else str(how):
        step, outs = frame.as_written(eqn)
        low = wants_8_bits or decision.rule is Rule.LOWER
        return step._replace(fallback=why if low else ""), outs
    run = decision.run or widest(hard)
    plain = asked is None or asked == widest(wide)  # jnp always fills it in
    in_float32 = _why_float32(eqn, known, region) if decision.rule is Rule.LOWER else ""
    if in_float32:  # the result has the dtype that it has otherwise
        decision, run = decision._replace(out=run if plain else asked), "float32"
    out = run if plain else asked
    final = decision.out or out
    low = run in LOW_DTYPES
    how = how if low else in_float32
    made = out if out == run or not low else "float32"
    returns = (final,) if final != made else None
    if low:
        # A parameter goes in as it is and is cast inside, so that its gradient is never rounded.
        # What is quantised goes in as it is, too.
        kept = isinstance(how, In8Bits)
        reads = [None if kept or k.is_parameter or not k.dtype else run for k in known]
        params = {**eqn.params, "precision": None} if kept else eqn.params
        assert made is not None, "a contraction has a float result"
        spec = spec_of(eqn.primitive, params, run, made)
        step = frame.step(eqn, reads, [made], Kind.CONTRACT, returns=returns, spec=spec)
    else:
        params = {**eqn.params, "preferred_element_type": np.dtype(out)}
        reads = [run if k.dtype else None for k in known]
        step = frame.step(eqn, reads, [made], params=params, returns=returns)
    step = step._replace(in_8_bits=how) if isinstance(how, In8Bits) else step._replace(fallback=how)
    return step, [ValueFacts(final, product=final in LOW_DTYPES)]


def _why_as_written(eqn: Equation, asked: str | None) -> str:
    """Why a product with a rule runs as written all the same; "" if it does not."""
    for atom in eqn.invars[:2]:
        if declared(atom) is None:
            return f"an operand is {atom.aval.dtype}"
    if asked is not None and asked not in ELIGIBLE:
        return f"its result is to be {asked}"
    if not _precision_is_default(precision := eqn.params.get("precision")):
        one = precision[0] if isinstance(precision, tuple) else precision
        return f"it asks for the precision {getattr(one, 'name', one)}"
    return ""


def _why_float32(eqn: Equation, known: list[ValueFacts], region: Region) -> str:
    """Why a product with rule lower runs in float32, though it is eligible; "" if it does not."""
    assert region.policy is not None, "it has a row"
    if not region.policy.few_rows or eqn.primitive.name != "dot_general":
        return ""
    lhs, rhs = (atom.aval for atom in eqn.invars)
    batch, rows, columns, _ = sizes_of(lhs, rhs, eqn.params["dimension_numbers"])
    both = batch * columns, batch * rows
    facing = [n for n, k in zip(both, known, strict=True) if k.is_parameter]
    fewest, most = min(facing, default=0), region.policy.few_rows
    if not facing or fewest > most:
        return ""
    # A cast of the weight reads it once more and writes half as much, whatever the rows; a row
    # costs less in a low dtype. benchmarks/jax_speed.py measures how many rows pay for the cast.
    times = "1 row" if fewest == 1 else f"{fewest} rows"
    return f"casting the float32 parameter takes longer than {times} (few_rows = {most})"


def unknown(frame: Frame, eqn: Equation, _: Region) -> Planned:
    """A primitive of which nothing is known: it runs as written, and so does a program inside."""
    name = eqn.primitive.name
    if name not in known_functions.OPAQUE and [*core.jaxprs_in_params(eqn.params)]:
        frame.planner.warn(name)
    return frame.as_written(eqn)


def _precision_is_default(precision: object) -> bool:
    """True unless this op, and not the configuration, asks for more than the default."""
    if precision is None or precision == compat.default_precision():
        return True
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in both)


# In an op, numbers, masks and integers follow the other operands, scalar arguments follow arrays,
# and a bias follows the contraction's result. All else decides, and the widest dtype wins.


def deciding(eqn: Equation, op: str, known: Sequence[ValueFacts]) -> tuple[str, ...]:
    """The dtypes that decide: those of the operands that do not follow the others."""
    if any(map(fixed, eqn.invars)):
        return ()
    pairs = zip(known, eqn.invars, strict=True)
    hard = [k.dtype for k, a in pairs if k.dtype and not _soft(k, a, eqn, op)]
    return tuple(hard or [k.dtype for k in known if k.dtype])


def alike(eqn: Equation, op: str, known: Sequence[ValueFacts]) -> dict[str, str]:
    """Operands declared alike stay alike: for each declared dtype, the widest actual one."""
    atoms = eqn.invars
    groups: dict[str, str] = {}
    dtypes = [declared(atom) for atom in atoms]
    for one in {f for f in dtypes if f}:
        members = [
            (k, a) for k, a, f in zip(known, atoms, dtypes, strict=True) if f == one and k.dtype
        ]
        hard = [k for k, a in members if not _soft(k, a, eqn, op)]
        if op_of(op) == "add" and _is_bias(hard):
            hard = [k for k in hard if k.product]
        run = widest(k.dtype for k in hard or [k for k, _ in members] if k.dtype)
        for k, _ in members:
            if run in LOW_DTYPES and not all(fits(n, run) for n in k.numbers):
                too_large = k.number is not None and abs(float(k.number)) > FORMATS[run].max
                if not (too_large and vocabulary().op(op_of(op)).chooses):
                    run = "float32"
        groups[one] = run
    return groups


def converted(atom: Atom, known: ValueFacts) -> tuple[Origin, tuple[float, ...]]:
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


def origin_of(
    eqn: Equation, op: str, known: Iterable[ValueFacts], ruled: bool
) -> tuple[Origin, tuple[float, ...]]:
    """Where a result comes from, and the few numbers that its elements are."""
    floats = [k for k in known if k.dtype]
    if op in known_functions.LAYOUT:
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


def _made_of_numbers(op: str, floats: Sequence[ValueFacts]) -> tuple[Origin, tuple[float, ...]]:
    """The same, of what an op makes of bools, integers and numbers in the program."""
    # With integers, `1 - mask` is what integers are, and `0.5 * positions` is not: it is computed.
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


def meets_scalar(eqn: Equation, known: Sequence[ValueFacts]) -> bool:
    """True if a float32 scalar of unknown size takes the low dtype of an array."""
    return any(
        k.dtype == "float32" and k.origin is Origin.GIVEN and _soft(k, atom, eqn, "")
        for k, atom in zip(known, eqn.invars, strict=True)
    ) and any(k.dtype in LOW_DTYPES for k in known)


def _soft(known: ValueFacts, atom: Atom, eqn: Equation, op: str) -> bool:
    """True if the operand takes the dtype of the others, as Python's numbers do in torch."""
    match known.origin:
        case Origin.MASK | Origin.INTEGER:
            return True
        case Origin.LITERAL:
            return not atom.aval.shape or vocabulary().op(op_of(op)).chooses
        case Origin.GIVEN:  # a scalar tensor, among tensors with dimensions
            return not atom.aval.shape and any(v.aval.shape for v in eqn.outvars)
    return False


def _is_bias(hard: Sequence[ValueFacts]) -> bool:
    """True for a contraction's low result, or more of them, plus parameters in float32."""
    return (
        any(k.product for k in hard)
        and all(k.product or k.origin is Origin.GIVEN for k in hard)
        and len({k.dtype for k in hard if k.product}) == 1
    )


_ONE = "JAX's {} has no form in 8 bits"
_UNKNOWN = "its sizes are not known before it runs"
_GRADIENT = "it is in the backward rule of a jax.custom_vjp function, whose gradients are not told"


def in_8_bits(
    frame: Frame, eqn: Equation, known: Sequence[ValueFacts], op: str, region: Region
) -> In8Bits | str:
    """How a product runs in 8 bits, or why it runs by rule `lower` instead."""
    # The weight is the operand that is an argument or a constant of the program, or a layout of
    # one. If both are, or neither, it is the second one, as in `x @ w`.
    assert region.policy is not None, "it has a row with rule fp8"
    if eqn.primitive.name != "dot_general":
        return _ONE.format(eqn.primitive.name)
    if frame.gradients:
        return _GRADIENT
    lhs, rhs = (atom.aval for atom in eqn.invars)
    sizes = sizes_of(lhs, rhs, eqn.params["dimension_numbers"])
    if inf in sizes:
        return _UNKNOWN  # a symbol, as in an export
    batch, *free, summed = map(int, sizes)
    given = [k.origin is Origin.GIVEN for k in known]
    weight = 0 if given == [True, False] else 1
    recipe = RECIPES[region.policy.fp8]
    device, capability = compat.device_type()
    product = fp8.Product(
        op,
        free[1 - weight],
        summed,
        free[weight],
        (str(lhs.dtype), str(rhs.dtype)),
        device,
        region.dtype,
        batch,
        capability=capability,
    )
    if why := fp8.why_not(product, recipe):
        return why
    # Its inputs and constants are in memory as they are.
    own = {var for binders in compat.binders(frame.closed) for var in binders}
    first, second = (
        Part(
            WEIGHT if i == weight else ACTIVATION,
            given[i] and not isinstance(atom, Literal) and atom in own,
        )
        for i, atom in enumerate(eqn.invars)
    )
    return In8Bits(recipe.name, (first, second))
