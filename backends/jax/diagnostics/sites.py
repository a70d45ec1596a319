"""The equations of a program, each where it stands: its scopes, its loops, what it is inside of."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from polymp.backends.jax import compat
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

    eqn: Any
    scope: Scope
    times: int
    fixed: frozenset[Any]
    parent: tuple[int, ...]
    written: Any


def equations(closed: Any) -> Iterator[Site]:
    """The equations of a program and of those inside it, calls and loops taken apart."""
    scopes = Scopes()

    def walk(jaxpr: Any, outer: Site) -> Iterator[Site]:
        for at, eqn in enumerate(jaxpr.eqns):
            info = eqn.source_info
            site = outer._replace(
                eqn=eqn,
                scope=scopes.inside(outer.scope, info.name_stack),
                written=outer.written or info.traceback,
            )
            programs = inside(eqn)
            if not programs:
                yield site
            for which, (closed, _, fixed, _, times, _) in enumerate(programs):
                same = frozenset(compat.binders(closed)[1][:fixed])
                # A library's function is traced once, for the first of the lines that call it.
                outside = site.written if outer.written or is_library(closed) else None
                inner = Site(
                    eqn, site.scope, site.times * times, same, (*site.parent, at, which), outside
                )
                yield from walk(compat.opened(closed)[0], inner)

    jaxpr, _ = compat.opened(closed)
    yield from walk(jaxpr, Site(None, Scope(), 1, frozenset(), (), None))
