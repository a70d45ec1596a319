"""How each equation of a program runs: the step that it becomes.

    lower, fp32, ...   what the policy's row says
    no row             in the formats of the operands, the widest of those declared alike
    as written         what no format of ours may enter: see `op_facts`

Numbers in the program, scalar arguments and masks take the format of what they meet. A parameter
that is added to the result of a contraction is its bias, and takes the low format too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import (
    function_calls,
    op_facts,
    passes,
    promotion,
    sharded_weights,
)
from polymp.backends.jax.autocast.known_functions import op_of, spelling
from polymp.backends.jax.autocast.passes import Pass
from polymp.backends.jax.autocast.plan import AS_CALLED, Cast, Operand, Plan, Planner, Step
from polymp.backends.jax.autocast.sections import SECTION, sections
from polymp.backends.jax.autocast.values import (
    LOW,
    Known,
    Origin,
    declared,
    fits,
    fixed,
    in_format,
    literal,
    name_of,
    number_of,
)
from polymp.dtypes import widest
from polymp.errors import ForbiddenOpError
from polymp.rules import decisions
from polymp.rules.policy import Decision, Policy
from polymp.rules.region import Region
from polymp.rules.row import Rule

UPPER, LOWER = "polymp:upper", "polymp:lower"  # checkpoint_names that mark a value

Planned = tuple[Step, list[Known]]


class Way(NamedTuple):
    """How an op runs, whichever equation it is: the fields of its step."""

    reads: list[str | None]
    writes: tuple[str | None, ...]
    returns: tuple[str | None, ...] | None
    outs: list[Known]


class Program:
    """One jaxpr under one set of known inputs, as its equations become steps.

    Args:
        planner: of the whole program, for what is inside this one.
        control: for each control primitive, the function that plans it.
        jaxpr: closed.
        known: of its inputs.
        region: that holds where no mark says otherwise.
        results: formats that the outputs must have; None leaves those as they come.
        gradients: True if the outputs are gradients: a contraction that makes one of a float32
            value then does not round it.
    """

    def __init__(
        self,
        planner: Planner,
        control: "Mapping[str, Handler]",
        jaxpr: Any,
        known: tuple[Known, ...],
        region: Region,
        results: Sequence[str | None] | None,
        gradients: bool,
    ) -> None:
        self.planner = planner
        self.control = control
        self.gradients = gradients
        self.closed = jaxpr
        self.jaxpr, self.consts = compat.opened(jaxpr)
        self.inputs = known
        self.region = region
        self.wanted = results
        self.env: dict[Any, Known] = {}
        self.steps: list[Step] = []
        self.stack: Any = None  # of the equation at hand
        self.casts = results is not None  # whether there may be any
        self.shares = Pass.SHARING not in planner.off

    def plan(self) -> Plan:
        env = self.env
        constvars, invars = compat.binders(self.closed)
        env.update(zip(constvars, map(_constant, constvars, self.consts), strict=True))
        env.update(zip(invars, self.inputs, strict=True))
        place, region, stack = self.planner.place, self.region, None
        record = decisions.current() if region.policy is not AS_CALLED else None
        for eqn in sections(self.jaxpr, partial(function_calls.ruled, self)):
            if eqn.source_info.name_stack is not stack:  # most are that of the one before
                stack = eqn.source_info.name_stack
                here, plain = place(stack, region)
            self.stack = plain
            name = eqn.primitive.name
            if name in self.control:
                step, outs = self.control[name](self, eqn, here)
            elif not here.enabled:
                step, outs = self.as_written(eqn)
            elif name == "convert_element_type":
                step, outs = self.convert(eqn, here)
            elif name == "name" and eqn.params["name"] in (UPPER, LOWER):
                step, outs = self.marker(eqn, here)
            elif name in op_facts.INDEPENDENT:
                step, outs = self.independent(eqn)
            elif name in op_facts.FREE:
                step, outs = self.free(eqn, here)
            elif function_calls.is_registered(name):
                step, outs = function_calls.plan_registered(self, eqn, here)
            else:
                step, outs = self.as_written(eqn)
                if name not in op_facts.OPAQUE and compat.has_program(eqn.params):
                    self.planner.warn(name)
            if record is not None and (name not in self.control or name == SECTION):
                step = _followed(step, record, here)
            self.steps.append(step)
            for var, known in zip(eqn.outvars, outs, strict=True):
                env[var] = known
        passes.improve(self)
        sharded_weights.round_before(self)
        return self.finish()

    # What is known of operands, and how they are read

    def known(self, atom: Any) -> Known:
        if isinstance(atom, core.Literal):
            return literal(declared(atom), number_of(atom.val))
        return self.env[atom]

    def read(self, atom: Any, format: str | None) -> Operand:
        """Read an operand in a format; None takes its actual one."""
        if format is None:
            return atom
        if isinstance(atom, core.Literal):
            have = declared(atom)
            if have is None or have == format:
                return atom
            return Cast(atom, format, value=in_format(atom.val, format))
        known = self.env[atom]
        if known.format is None or known.format == format:
            return atom
        if known.number is not None and format in LOW:
            if not atom.aval.shape or not fits(known.number, format):
                return Cast(atom, format, value=in_format(known.number, format))
        self.casts = True
        return Cast(atom, format, shared=self.shares and known.origin is Origin.COMPUTED)

    def step(
        self,
        eqn: Any,
        reads: Iterable[str | None],
        writes: Sequence[str | None],
        how: Any = "bind",
        params: Any = None,
        returns: tuple[str | None, ...] | None = None,
        parts: tuple[Any, ...] = (),
    ) -> Step:
        operands = list(map(self.read, eqn.invars, reads))
        if operands == eqn.invars:
            operands = eqn.invars  # one list less for each equation that reads as written
        params = params or eqn.params
        return Step(eqn, how, operands, params, tuple(writes), returns, parts, self.stack)

    # One method for each way to run an equation

    def as_written(self, eqn: Any) -> Planned:
        writes = [declared(v) for v in eqn.outvars]
        return self.step(eqn, map(declared, eqn.invars), writes), [Known(f) for f in writes]

    def convert(self, eqn: Any, region: Region) -> Planned:
        (atom,), (var,) = eqn.invars, eqn.outvars
        old, new, known = declared(atom), declared(var), self.known(atom)
        if region.policy is AS_CALLED and region.format == "float32" and old and new in LOW:
            # A library rounds to what it was given; what is computed in float32 stays so.
            return self.step(eqn, ["float32"], ["float32"], "cast"), [Known("float32")]
        if old is not None and old == new:  # the trace changed nothing but weakness
            if atom.aval.weak_type == eqn.params["weak_type"]:
                return self.step(eqn, [None], [known.format], "cast"), [known]
            params = {**eqn.params, "new_dtype": np.dtype(known.format)}
            return self.step(eqn, [None], [known.format], params=params), [known]
        origin = Origin.COMPUTED
        if known.origin is Origin.LITERAL:
            origin = Origin.LITERAL
        elif old is None and getattr(atom.aval, "dtype", None) == np.bool_:
            origin = Origin.MASK
        elif known.origin is Origin.GIVEN and not atom.aval.shape:
            origin = Origin.GIVEN
        number = known.number if new is not None and origin is Origin.LITERAL else None
        weak = self.planner.colours and new == "float32" and not fixed(atom) and old is None
        return self.step(eqn, [None], [new]), [Known(new, origin, number=number, weak=weak)]

    def marker(self, eqn: Any, region: Region) -> Planned:
        (atom,) = eqn.invars
        if self.known(atom).format is None:
            return self.step(eqn, [None], [None], "cast"), [self.known(atom)]
        format = "float32" if eqn.params["name"] == UPPER else region.format
        return self.step(eqn, [format], [format], "cast"), [Known(format)]

    def independent(self, eqn: Any) -> Planned:
        known = [self.known(atom) for atom in eqn.invars][: len(eqn.outvars)]
        outs = [k._replace(number=None) for k in known]
        return self.step(eqn, [None] * len(eqn.invars), [k.format for k in known]), outs

    def free(self, eqn: Any, region: Region) -> Planned:
        atoms = eqn.invars
        known = [self.known(atom) for atom in atoms]
        if eqn.primitive.name in op_facts.CONTRACTIONS:
            return self.contraction(eqn, known, region)
        op = spelling(eqn)
        avals = [a.aval for a in atoms] + [v.aval for v in eqn.outvars]
        # A region that was planned for stays in its plan, a type in its way.
        signature = (op, id(region), *known, *map(id, avals))
        ways = self.planner.ways
        # A program asks the same few questions over and over; a report wants every answer.
        if signature not in ways or decisions.current() is not None:
            ways[signature] = avals, self.way(eqn, op, known, region)
        _, way = ways[signature]
        if way is None:
            return self.as_written(eqn)
        params = eqn.params
        if "update_jaxpr" in params and params["update_jaxpr"] is not None:
            params = {**params, "update_jaxpr": None}  # made at emission, where JAX is called
        return self.step(eqn, way.reads, way.writes, "bind", params, way.returns), way.outs

    def way(self, eqn: Any, op: str, known: list[Known], region: Region) -> Way | None:
        """How an op that is free in its format runs; None for as written."""
        weak = region.promotion == "weak"
        hard = promotion.deciding(eqn, op, known, weak)
        if not hard:
            return None
        decision = self.decision(op_of(op), hard, region, op)
        if decision.rule is Rule.LOWER and op_of(op) in op_facts.PICKS:
            decision = Decision(decision.rule, None, decision.run)
        formats = [declared(atom) for atom in eqn.invars]
        if decision.run is not None:
            groups = {f: decision.run for f in formats if f}
        else:
            fold = Pass.BIAS_FOLD not in self.planner.off
            groups = promotion.alike(eqn, op, known, weak, fold)
        reads = [groups[f] if f else None for f in formats]
        writes = [groups.get(f, f) if f else None for f in map(declared, eqn.outvars)]
        finals = [decision.out or f if f else None for f in writes]
        elementwise = decision.run is None and op in op_facts.ELEMENTWISE
        if elementwise and promotion.meets_scalar(eqn, known):
            # The scalar may be anything: it is not rounded, the result is.
            reads, writes = [f and "float32" for f in reads], [f and "float32" for f in writes]
        returns = tuple(finals) if finals != writes else None
        origin, number = promotion.origin(eqn, op, known)
        adds = op in promotion.ADDITIONS and all(
            k.product or k.origin is not Origin.COMPUTED for k in known
        )
        # Spread over more elements, a product is no longer what a bias is added to.
        moved = op in op_facts.LAYOUT and op != "broadcast_in_dim"
        product = (adds or moved) and any(k.product for k in known)
        ruled = decision.rule in (Rule.FP32, Rule.FP32_KEEP)
        stays = self.planner.colours and not ruled and promotion.stays_weak(known)
        outs = [
            Known(f, origin, product and f in LOW, number, stays and f == "float32")
            if f
            else Known(None)
            for f in finals
        ]
        return Way(reads, tuple(writes), returns, outs)

    def decision(self, op: str, formats: tuple[str, ...], region: Region, spelled: str) -> Decision:
        policy = region.policy
        assert policy is not None, "polymp.jax fills in the policy of every region"
        decision = policy.decide(op, formats, region, f"jax:{spelled}")
        if (found := decisions.current()) is not None:
            row = policy.at(region.scope).winner(op, region.format, f"jax:{spelled}")
            if row is not None and region.enabled:
                spelled = spelled and f"jax:{spelled}"
                at = "jax", op, spelled, region.format, region.scope
                found.note(decisions.Entry(*at, row, formats, decision, policy.name))
        if decision.rule is Rule.FORBID:
            raise _forbidden(policy, op or spelled, formats, region)
        return decision

    def contraction(self, eqn: Any, known: list[Known], region: Region) -> Planned:
        weak = region.promotion == "weak"
        hard = promotion.deciding(eqn, eqn.primitive.name, known, weak)
        if not hard:
            return self.as_written(eqn)
        spelled = spelling(eqn)
        decision = self.decision(op_of(spelled), hard, region, spelled)
        wide = {f for f in map(declared, eqn.invars) if f}
        asked = name_of(eqn.params.get("preferred_element_type"))
        if eqn.params.get("preferred_element_type") is not None and asked is None:
            return self.as_written(eqn)
        if not _precision_is_default(eqn.params.get("precision")):
            return self.as_written(eqn)
        if any(declared(atom) is None for atom in eqn.invars[:2]):
            return self.as_written(eqn)
        run = decision.run or widest(hard)
        plain = asked is None or asked == widest(wide)  # jnp always fills it in
        out = run if plain else asked
        final = decision.out or out
        if run not in LOW:
            params = {**eqn.params, "preferred_element_type": np.dtype(out)}
            reads = [run if k.format else None for k in known]
            returns = (final,) if final != out else None
            return self.step(eqn, reads, [out], "bind", params, returns), [Known(final)]
        # A parameter goes in as it is and is cast inside, so that its gradient is never rounded.
        reads = [run if k.format and not k.is_parameter else None for k in known]
        made = out if out == run else "float32"
        returns = (final,) if final != made else None
        step = self.step(eqn, reads, [made], "contract", returns=returns, parts=(run,))
        return step, [Known(final, product=final in LOW)]

    def finish(self) -> Plan:
        atoms = self.jaxpr.outvars
        wanted = self.wanted or [None] * len(atoms)
        reads = tuple(map(self.read, atoms, wanted))
        outs = []
        for atom, want, read in zip(atoms, wanted, reads, strict=True):
            known = self.known(atom)
            cast = type(read) is Cast
            format = want if want and known.format else known.format
            outs.append(known._replace(format=format, product=known.product and not cast))
        formats = [k.format for k in (*self.inputs, *outs)]
        as_written = (
            formats == [*map(declared, compat.binders(self.closed)[1]), *map(declared, atoms)]
            and all(map(_is_as_written, self.steps))
            and not any(type(read) is Cast for read in reads)
        )
        return Plan(
            self.closed,
            self.consts,
            self.inputs,
            self.region,
            self.steps,
            reads,
            tuple(outs),
            as_written,
        )


def _followed(step: Step, record: decisions.Recorder, region: Region) -> Step:
    """The step, with a name on all that it becomes, if calls are followed."""
    under = region.policy.name if region.enabled and region.policy is not None else ""
    name = record.follow(step, region.format if region.enabled else "", under)
    return step if name is None else step._replace(stack=compat.with_scope(step.stack, name))


def _is_as_written(step: Step) -> bool:
    if any(type(o) is Cast for o in step.operands) or step.returns:
        return False
    if step.how in ("contract", "round"):
        return False
    if step.how == "bind":
        written = all(f == declared(v) for f, v in zip(step.writes, step.eqn.outvars, strict=True))
        return written and (
            step.params is step.eqn.params or step.params.get("update_jaxpr", 0) is None
        )
    return step.how == "cast" or all(
        part.as_written for part in step.parts if isinstance(part, Plan)
    )


def given(var: Any) -> Known:
    """What is known of an argument or constant; a scalar of Python's is a number."""
    weak = not var.aval.shape and getattr(var.aval, "weak_type", False)
    return Known(declared(var), Origin.LITERAL if weak else Origin.GIVEN)


def _constant(var: Any, value: Any) -> Known:
    """What is known of a constant; a scalar that is there already is a number."""
    if var.aval.shape or declared(var) is None or isinstance(value, jax.core.Tracer):
        return given(var)
    return literal(declared(var), number_of(value))


def _forbidden(policy: Policy, op: str, formats: Sequence[str], region: Region) -> ForbiddenOpError:
    row = policy.at(region.scope).winner(op, region.format)
    instead = row.instead if row else ""
    return ForbiddenOpError(
        f"policy {policy.name!r} forbids {op!r}, called here with ({', '.join(formats)}). "
        f"Use {instead or 'another op'}, or give it another rule in the policy."
    )


def _precision_is_default(precision: Any) -> bool:
    """True unless this op, and not the configuration, asks for more than the default."""
    if precision is None or precision == compat.default_precision():
        return True
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in both)


Handler = Callable[[Program, Any, Region], Planned]
