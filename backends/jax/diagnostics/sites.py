"""The equations of a program, each where it stands: its scopes, its loops, what it is inside of."""

from collections.abc import Iterator
from typing import NamedTuple

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import count_of
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation, OpenProgram
from polymp.backends.jax.diagnostics.call_site import Scope, Scopes, is_library
from polymp.backends.jax.jaxprs import inside


class Site(NamedTuple):
    """An equation of the final program, where it stands.

    Attributes:
        eqn: the equation.
        scope: what the name stacks say.
        times: how often it runs.
        fixed: variables around it that do not change while a loop runs.
        parent: what it is inside of, by the places of equations.
        written: traceback of the equation, or of the call of the library's function it is in.
    """

    eqn: Equation
    scope: Scope
    times: int
    fixed: frozenset[Atom]
    parent: tuple[int, ...]
    written: object


# What a site says of the program that an equation is in: all its fields but the equation.
_Around = tuple[Scope, int, frozenset[Atom], tuple[int, ...], object]


def equations(closed: ClosedProgram) -> Iterator[Site]:
    """The equations of a program and of those inside it, calls and loops taken apart."""
    scopes = Scopes()

    def walk(jaxpr: OpenProgram, outer: _Around) -> Iterator[Site]:
        for at, eqn in enumerate(jaxpr.eqns):
            around, times, fixed, parent, written = outer
            info = eqn.source_info
            scope = scopes.inside(around, info.name_stack)
            site = Site(eqn, scope, times, fixed, parent, written or info.traceback)
            programs = inside(eqn)
            if not programs:
                yield site
            for which, (closed, _, count, _, turns, _) in enumerate(programs):
                same = frozenset(compat.binders(closed)[1][:count])
                # A library's function is traced once, for the first of the lines that call it.
                outside = site.written if written or is_library(closed) else None
                inner = scope, times * count_of([turns]), same, (*parent, at, which), outside
                yield from walk(compat.opened(closed)[0], inner)

    jaxpr, _ = compat.opened(closed)
    yield from walk(jaxpr, (Scope(), 1, frozenset(), (), None))
