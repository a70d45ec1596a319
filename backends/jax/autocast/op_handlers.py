"""Handlers of single ops: in which dtype each runs, and what is known of its result.

    lower, fp32, ...   what the policy's row says
    no row             in the dtypes of the operands, the widest of those declared alike
    as written         ops that cannot run in another dtype: see `op_facts`

Numbers in the program, scalar arguments and masks take the dtype of what they meet. A parameter
that is added to the result of a contraction is its bias, and takes the low dtype too.
"""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import op_facts, promotion
from polymp.backends.jax.autocast.contraction_forms import free_sizes
from polymp.backends.jax.autocast.fp8_operands import In8Bits
from polymp.backends.jax.autocast.fp8_products import in_8_bits, in_trial
from polymp.backends.jax.autocast.frame import Frame, Planned
from polymp.backends.jax.autocast.known_functions import op_of, spelling
from polymp.backends.jax.autocast.pass_switches import Pass
from polymp.backends.jax.autocast.plan import Kind
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.autocast.values import ELIGIBLE, LOW, Known, Origin, declared
from polymp.backends.jax.compat.programs import Equation
from polymp.dtypes import widest
from polymp.rules import decision_log
from polymp.rules.answers import Decision
from polymp.rules.few_rows import why_float32
from polymp.rules.region import Region
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary

UPPER, LOWER = "polymp:upper", "polymp:lower"  # checkpoint_names that mark a value


class _OpPlan(NamedTuple):
    """How an op runs, whichever equation it is: the fields of its step."""

    reads: list[str | None]
    writes: tuple[str | None, ...]
    returns: tuple[str | None, ...] | None
    outs: list[Known]
    kind: Kind = Kind.BIND


def convert(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A cast in the program."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    old, new, known = declared(atom), declared(var), frame.known(atom)
    if region.policy is AS_CALLED and region.dtype == "float32" and old and new in LOW:
        # A library rounds to what it was given; what is computed in float32 stays so.
        return frame.step(eqn, ["float32"], ["float32"], Kind.CAST), [Known("float32")]
    if old is not None and old == new:  # the trace changed nothing but weakness
        if atom.aval.weak_type == eqn.params["weak_type"]:
            return frame.step(eqn, [None], [known.dtype], Kind.CAST), [known]
        params = {**eqn.params, "new_dtype": np.dtype(known.dtype)}
        return frame.step(eqn, [None], [known.dtype], params=params), [known]
    origin, numbers = promotion.converted(atom, known)
    if new is None:
        numbers = ()
    return frame.step(eqn, [None], [new]), [Known(new, origin, numbers=numbers)]


def name(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A name for a value, which may be one of our marks."""
    if eqn.params["name"] not in (UPPER, LOWER):
        return free(frame, eqn, region)
    (atom,) = eqn.invars
    if frame.known(atom).dtype is None:
        return frame.step(eqn, [None], [None], Kind.CAST), [frame.known(atom)]
    dtype = "float32" if eqn.params["name"] == UPPER else region.dtype
    return frame.step(eqn, [dtype], [dtype], Kind.CAST), [Known(dtype)]


def independent(frame: Frame, eqn: Equation, _: Region) -> Planned:
    """An op whose results have the dtypes of the operands in their places."""
    known = [frame.known(atom) for atom in eqn.invars][: len(eqn.outvars)]
    outs = [k._replace(numbers=()) for k in known]
    return frame.step(eqn, [None] * len(eqn.invars), [k.dtype for k in known]), outs


def free(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """An op that computes in any dtype, as the policy says."""
    atoms = eqn.invars
    known = [frame.known(atom) for atom in atoms]
    op = spelling(eqn)
    avals = [a.aval for a in atoms] + [v.aval for v in eqn.outvars]
    # The plans keep regions and types alive, so that no other object gets their ids.
    signature = (op, id(region), *known, *map(id, avals))
    plans = frame.planner.op_plans
    # Most equations repeat an earlier one; a report needs a decision for each.
    if signature not in plans or decision_log.current() is not None:
        plans[signature] = avals, _plan_of(frame, eqn, op, known, region)
    _, plan = plans[signature]
    if plan is None:
        return frame.as_written(eqn)
    params = eqn.params
    if "update_jaxpr" in params and params["update_jaxpr"] is not None:
        params = {**params, "update_jaxpr": None}  # made at emission, where JAX is called
    return frame.step(eqn, plan.reads, plan.writes, plan.kind, params, plan.returns), plan.outs


def _plan_of(
    frame: Frame, eqn: Equation, op: str, known: list[Known], region: Region
) -> _OpPlan | None:
    """How an op that is free in its dtype runs; None for as written."""
    hard = promotion.deciding(eqn, op, known)
    if not hard:
        return None
    decision = frame.decision(op_of(op), hard, region, op)
    kind = Kind.BIND
    if vocabulary().picks(op_of(op)):
        if decision.rule is Rule.FP32_KEEP and hard[0] in LOW:
            decision, kind = Decision(decision.rule, None, None), Kind.PICK
        elif decision.rule is Rule.LOWER:
            decision = Decision(decision.rule, None, decision.run)
    dtypes = [declared(atom) for atom in eqn.invars]
    if decision.run is not None:
        groups = {f: decision.run for f in dtypes if f}
    else:
        fold = Pass.BIAS_FOLD not in frame.planner.off
        groups = promotion.alike(eqn, op, known, fold)
    reads = [groups[f] if f else None for f in dtypes]
    writes = [groups.get(f, f) if f else None for f in map(declared, eqn.outvars)]
    finals = [decision.out or f if f else None for f in writes]
    elementwise = decision.run is None and op in op_facts.ELEMENTWISE
    if elementwise and promotion.meets_scalar(eqn, known):
        # The scalar may be anything: it is not rounded, the result is.
        reads, writes = [f and "float32" for f in reads], [f and "float32" for f in writes]
    returns = tuple(finals) if finals != writes else None
    origin, numbers = promotion.origin(eqn, op, known, ruled=decision.run is not None)
    adds = op_of(op) == "add" and all(k.product or k.origin is not Origin.COMPUTED for k in known)
    # Spread over more elements, a product is no longer what a bias is added to.
    moved = op in op_facts.LAYOUT and op != "broadcast_in_dim"
    product = (adds or moved) and any(k.product for k in known)
    outs = [Known(f, origin, product and f in LOW, numbers) if f else Known(None) for f in finals]
    return _OpPlan(reads, tuple(writes), returns, outs, kind)


def contraction(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A sum of products: the primitive of polymp, where it runs low."""
    known = [frame.known(atom) for atom in eqn.invars]
    hard = promotion.deciding(eqn, eqn.primitive.name, known)
    spelled = spelling(eqn)
    if not hard:
        return _not_eligible(frame, eqn, known, spelled, region)
    how_in_8_bits = partial(in_8_bits, frame, eqn, known, op_of(spelled), region)
    decision = frame.decision(op_of(spelled), hard, region, spelled, how_in_8_bits)
    wide = {f for f in map(declared, eqn.invars) if f}
    preferred = eqn.params.get("preferred_element_type")
    asked = None if preferred is None else np.dtype(preferred).name  # a class or a name as well
    if why := _why_as_written(eqn, asked):
        step, outs = frame.as_written(eqn)
        low = decision.rule in (Rule.LOWER, Rule.FP8)
        return step._replace(fallback=why if low else ""), outs
    run = decision.run or widest(hard)
    plain = asked is None or asked == widest(wide)  # jnp always fills it in
    in_float32 = _why_float32(eqn, known, region) if decision.rule is Rule.LOWER else ""
    if in_float32:  # the result has the dtype that it has otherwise
        decision, run = decision._replace(out=run if plain else asked), "float32"
    out = run if plain else asked
    final = decision.out or out
    if run not in LOW:
        params = {**eqn.params, "preferred_element_type": np.dtype(out)}
        reads = [run if k.dtype else None for k in known]
        returns = (final,) if final != out else None
        step = frame.step(eqn, reads, [out], Kind.BIND, params, returns)
        return step._replace(fallback=in_float32), [Known(final, product=final in LOW)]
    # A parameter goes in as it is and is cast inside, so that its gradient is never rounded.
    reads = [run if k.dtype and not k.is_parameter else None for k in known]
    if decision.rule is Rule.FP8:
        how = how_in_8_bits()
    else:
        how = in_trial(frame, eqn, known, op_of(spelled), spelled, region) or ""
    if isinstance(how, In8Bits) and not how.trial:
        reads = [None] * len(known)  # they are quantised from the dtypes that they come in
    made = out if out == run else "float32"
    returns = (final,) if final != made else None
    step = frame.step(eqn, reads, [made], Kind.CONTRACT, returns=returns, low=run)
    if isinstance(how, In8Bits):
        step = step._replace(in_8_bits=how)
    else:
        step = step._replace(fallback=how)
    return step, [Known(final, product=final in LOW)]


def _why_as_written(eqn: Equation, asked: str | None) -> str:
    """Why a product runs as written, though some operand is eligible; "" if it does not."""
    if asked is not None and asked not in ELIGIBLE:
        return f"its result is to be {asked}"
    if not _precision_is_default(precision := eqn.params.get("precision")):
        one = precision[0] if isinstance(precision, tuple) else precision
        return f"it asks for the precision {getattr(one, 'name', one)}"
    other = (a.aval.dtype for a in eqn.invars[:2] if declared(a) is None)
    return next((f"an operand is {dtype}" for dtype in other), "")


def _why_float32(eqn: Equation, known: list[Known], region: Region) -> str:
    """Why a product with rule lower runs in float32, though it is eligible; "" if it does not."""
    assert region.policy is not None, "it has a row"
    if not region.policy.few_rows or eqn.primitive.name != "dot_general":
        return ""
    lhs, rhs = (atom.aval for atom in eqn.invars)
    rows = free_sizes(lhs, rhs, eqn.params["dimension_numbers"])
    facing = [n for n, k in zip(reversed(rows), known, strict=True) if k.is_parameter]
    return why_float32(region.policy.few_rows, min(facing)) if facing else ""


def _not_eligible(
    frame: Frame, eqn: Equation, known: list[Known], spelled: str, region: Region
) -> Planned:
    """A product of dtypes that autocast leaves alone: as written, and why it is not in 8 bits."""
    step, outs = frame.as_written(eqn)
    policy = region.policy
    if policy is not None and policy.fp8:
        row = policy.at(region.scope).winner(op_of(spelled), region.dtype, f"jax:{spelled}")
        if row is not None and row.rule is Rule.FP8:
            how = partial(in_8_bits, frame, eqn, known, op_of(spelled), region)
            frame.decision(op_of(spelled), (), region, spelled, how)
            why = how()
            assert isinstance(why, str), "no such dtype is quantised"
            step = step._replace(fallback=why)
    return step, outs


def unknown(frame: Frame, eqn: Equation, _: Region) -> Planned:
    """A primitive of which nothing is known: it runs as written, and so does a program inside."""
    name = eqn.primitive.name
    if name not in op_facts.OPAQUE and compat.has_program(eqn.params):
        frame.planner.warn(name)
    return frame.as_written(eqn)


def _precision_is_default(precision: object) -> bool:
    """True unless this op, and not the configuration, asks for more than the default."""
    if precision is None or precision == compat.default_precision():
        return True
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in both)
