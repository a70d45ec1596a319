"""Programs inside programs: what an equation holds, what it takes, and how to go through it.

    inside(eqn)         the programs that an equation holds, each with what it takes and hands on
    interpreted(...)    a program, equation by equation, with values of any kind
    Walk                the same with facts about values, through everything inside
    source(...)         the user's line that an equation was written in

Facts about JAX's primitives; nothing here knows of dtypes.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from pathlib import Path
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import Literal

from polymp import code_origin
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_inexact
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation

T = TypeVar("T")
A = TypeVar("A")

JITTED = frozenset({"jit", "pjit"})
REMATTED = frozenset({"checkpoint", "remat", "remat2"})
# Primitives that run one program once: its inputs are the operands, its outputs the results.
CALLS = JITTED | REMATTED | {"shard_map"}
# The same with derivative rules of the user's.
RULED = frozenset({"custom_jvp_call", "custom_vjp_call"})
HOLDERS = CALLS | RULED | {"scan", "while", "cond"}


class Inner(NamedTuple):
    """A program inside an equation."""

    closed: ClosedProgram
    takes: Sequence[int]  # by input, the place of the operand that it is
    # How many inputs, the first ones, are the same in every turn of a loop; 0 of others.
    fixed: int = 0
    carries: int = 0  # how many inputs after these a loop carries; the first results replace them
    times: int = 1  # how often it runs, as far as the program says
    # Whether its outputs are results of the equation; not so of a loop's condition.
    gives: bool = True

    def of(self, operands: Sequence[T]) -> list[T]:
        """The operands that are its inputs, in their order."""
        return [operands[at] for at in self.takes]

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """The same of a loop: those that are fixed, those carried, and the rows gone through."""
        given, first = self.of(operands), self.fixed + self.carries
        return given[: self.fixed], given[self.fixed : first], given[first:]

    @property
    def carried(self) -> Sequence[int]:
        """The places of the operands that a loop carries."""
        return self.takes[self.fixed : self.fixed + self.carries]


def inside(eqn: Equation) -> list[Inner]:
    """The programs in an equation; none for a primitive that holds none, or none of the user's."""
    name, params, every = eqn.primitive.name, eqn.params, range(len(eqn.invars))
    if name == "scan":
        fixed, carries = compat.scan_sizes(params)
        return [Inner(params["jaxpr"], every, fixed, carries, params["length"])]
    if name == "while":
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        state = every[of_test + of_body :]
        tested = [*every[:of_test], *state]
        return [
            Inner(params["body_jaxpr"], every[of_test:], of_body, len(state)),
            Inner(params["cond_jaxpr"], tested, of_test, len(state), gives=False),
        ]
    if name == "cond":
        return [Inner(branch, every[1:]) for branch in params["branches"]]
    key = _KEYS.get(name)
    return [] if key is None else [Inner(compat.close(params[key]), every)]


def ends_at_tolerance(eqn: Equation) -> bool:
    """True for a while loop that ends by a comparison of floats that its body computes."""
    body, test = inside(eqn)
    first = len(test.takes) - body.carries  # of its inputs, the first that the loop carries
    todo, seen = {at - first for at in _decide(test.closed, 0) if at >= first}, set[int]()
    outs, given = compat.opened(body.closed)[0].outvars, compat.binders(body.closed)[1]
    while todo:
        seen.add(at := todo.pop())
        if outs[at] is given[body.fixed + at]:
            continue  # the same in every turn, as the tolerance is
        if is_inexact(outs[at].aval):
            return True
        todo |= {i - body.fixed for i in _decide(body.closed, at) if i >= body.fixed} - seen
    return False


def _decide(closed: ClosedProgram, out: int) -> set[int]:
    """The inputs of a program that decide an output, but no floats that decide an integer."""
    # A loop that decodes tokens ends at one of them; which of the scores is the largest is no
    # comparison with a tolerance.
    jaxpr, _ = compat.opened(closed)
    makers = {var: (eqn, at) for eqn in jaxpr.eqns for at, var in enumerate(eqn.outvars)}
    places = {var: at for at, var in enumerate(compat.binders(closed)[1])}
    todo, seen = [jaxpr.outvars[out]], set[Atom]()
    while todo:
        atom = todo.pop()
        if type(atom) is Literal or atom in seen:
            continue
        seen.add(atom)
        if atom not in makers:
            continue
        eqn, at = makers[atom]
        read = eqn.invars
        if eqn.primitive.name in CALLS | RULED | {"cond"}:
            parts = inside(eqn)
            todo.extend(read[:1] if eqn.primitive.name == "cond" else [])  # which branch
            read = [part.of(read)[i] for part in parts for i in _decide(part.closed, at)]
        elif jax.numpy.issubdtype(getattr(atom.aval, "dtype", bool), jax.numpy.integer):
            read = [v for v in read if not is_inexact(v.aval)]
        todo.extend(read)
    return {places[atom] for atom in seen if atom in places}


_KEYS = dict.fromkeys(CALLS, "jaxpr") | dict.fromkeys(RULED | {"closed_call"}, "call_jaxpr")


def with_programs(eqn: Equation, programs: Sequence[ClosedProgram]) -> jax.core.ParamDict:
    """The parameters of an equation that holds others in place of its programs."""
    if eqn.primitive.name == "cond":
        return {"branches": tuple(programs)}
    keys = ("body_jaxpr", "cond_jaxpr") if eqn.primitive.name == "while" else ("jaxpr",)
    return dict(zip(keys, programs, strict=True))


# Whose lines say nothing of the user's program.
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "chex")


@cache
def source(traceback: object) -> str:
    """File and line of the innermost code that is not a library's: "train.py:12"; "" if none."""
    for code, offset in zip(*compat.frames(traceback), strict=True):
        if not code_origin.is_library(code.co_filename, *LIBRARIES):
            return f"{Path(code.co_filename).name}:{_line(code, offset)}"
    return ""


@cache
def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


def where_written(eqn: Equation) -> str:
    """The user's line of an equation, or else words for it."""
    return source(eqn.source_info.traceback) or "an unknown line"


def interpreted(
    closed: ClosedProgram,
    values: Sequence[T],
    equation: Callable[[int, Equation, list[T]], Sequence[T]],
    number: Callable[[Any], T] | None = None,
    consts: Sequence[T] | None = None,
) -> list[T]:
    """The results of a program, equation by equation; no value is kept longer than it is read."""
    jaxpr, own = compat.opened(closed)
    constvars, invars = compat.binders(closed)
    if consts is None:
        consts = own if number is None else list(map(number, own))
    env: dict[Atom, T] = dict(zip(constvars, consts, strict=True))
    env.update(zip(invars, values, strict=True))

    def read(atom: Atom) -> T:
        if type(atom) is not Literal:
            return env[atom]
        value: T = atom.val if number is None else number(atom.val)
        return value

    last = last_reads([*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars])
    for at, eqn in enumerate(jaxpr.eqns):
        outs = equation(at, eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        for atom in (*eqn.invars, *eqn.outvars):
            if type(atom) is not Literal and last.get(atom, -1) <= at:
                env.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]


def last_reads(readers: Iterable[Sequence[Atom]]) -> dict[Atom, int]:
    """By variable, the number of the last one that reads it."""
    pairs = ((atom, at) for at, atoms in enumerate(readers) for atom in atoms)
    return {atom: at for atom, at in pairs if type(atom) is not Literal}


class Walk(Generic[T, A]):
    """Follows facts about values through a program and the programs inside it.

    A feature is a type of facts T, what is handed inwards of a place A, and the methods that raise
    here. Branches are joined; what a loop carries is joined with what comes round until it stays
    the same. Where values are arrays, `equation` has loops and branches of its own.
    """

    def number(self, value: Any) -> T:
        """The facts about a constant, or a number in the program."""
        raise NotImplementedError

    def leaf(self, eqn: Equation, values: list[T], around: A) -> Sequence[T]:
        """Those about the results of an equation that holds no program."""
        raise NotImplementedError

    def join(self, one: T, other: T) -> T:
        """Those about a value that may be either."""
        raise NotImplementedError

    def program(
        self,
        closed: ClosedProgram,
        values: Sequence[T],
        around: A,
        consts: Sequence[T] | None = None,
    ) -> list[T]:
        """Those about the results of a program."""

        def equation(at: int, eqn: Equation, values: list[T]) -> Sequence[T]:
            return self.equation(at, eqn, values, around)

        return interpreted(closed, values, equation, self.number, consts)

    def inner(self, around: A, eqn: Equation, at: int, which: int) -> A:
        """The place of a program of an equation, from their numbers."""
        return around

    def equation(self, at: int, eqn: Equation, values: list[T], around: A) -> Sequence[T]:
        """Those about the results of an equation."""
        programs = [(which, one) for which, one in enumerate(inside(eqn)) if one.gives]
        if not programs:
            return self.leaf(eqn, values, around)
        outs = (self.looped(one, values, self.inner(around, eqn, at, n)) for n, one in programs)
        return [reduce(self.join, several) for several in zip(*outs, strict=True)]

    def looped(self, program: Inner, operands: list[T], around: A) -> list[T]:
        """Those about the results of a program that an equation runs, once or in a loop."""
        # They are those of a turn, and come from what the loop began with only if its body reads
        # that.
        fixed, start, over = program.split(operands)
        outs: list[T] = []

        def turn(state: list[T]) -> list[T]:
            outs[:] = self.program(program.closed, [*fixed, *state, *over], around)
            return outs

        fixed_point(start, turn, self.join)
        return outs


def fixed_point(
    start: list[T], turn: Callable[[list[T]], Sequence[T]], join: Callable[[T, T], T]
) -> list[T]:
    """Join what a loop carries with what comes round, until that changes nothing."""
    while (joined := list(map(join, start, turn(start)))) != start:
        start = joined
    return start
