"""Sections: the equations of one call of a known function, taken as one op.

A policy speaks of softmax; a trace shows a maximum, a difference, an exponential, a sum and a
quotient. Neighbours that were traced in the same call of a function that the policy rules become
one `Section`, which has the shape of an equation on the outside and of a closed jaxpr inside.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal


class Ruled(NamedTuple):
    """What makes equations one section.

    Attributes:
        op: of the vocabulary.
        call: what tells a call of the function in one place from those in others.
        region: that the call is in.
        inside: where in the function the equation was traced; None if that tells nothing.
    """

    op: str
    call: Any
    region: Any
    inside: Any

    def goes_on(self, first: "Ruled") -> bool:
        """True if this is of the same call as the first equation of a section.

        A call in a loop has the same place each time; it begins anew where its first equation
        comes again.
        """
        return self[:3] == first[:3] and (self.inside is None or self.inside != first.inside)


class _Primitive(NamedTuple):
    """What stands for a primitive in a section."""

    name: str


SECTION = "polymp_section"


class Section:
    """Equations of one op, as one equation and as the program inside it.

    Attributes:
        primitive: by whose name a plan tells sections from equations.
        op: of the vocabulary.
        region: that it is in.
        eqns: the equations.
        invars: what they read from outside; variables only.
        outvars: what of theirs is read outside.
    """

    primitive = _Primitive(SECTION)
    constvars: Sequence[Any] = ()
    consts: Sequence[Any] = ()

    def __init__(self, ruled: Ruled, eqns: Sequence[Any], invars: Any, outvars: Any) -> None:
        self.op = ruled.op
        self.region = ruled.region
        self.eqns = eqns
        self.invars = invars
        self.outvars = outvars
        self.params: dict[str, Any] = {}
        self.source_info = eqns[0].source_info
        self.ctx = eqns[0].ctx

    @property
    def jaxpr(self) -> "Section":
        return self

    @property
    def debug_info(self) -> Any:
        raise AttributeError("a section was traced from no function of its own")


def sections(jaxpr: Any, ruled: Callable[[Any], Ruled | None]) -> Sequence[Any]:
    """The equations of an open jaxpr, those of one call as a section.

    Args:
        jaxpr: open.
        ruled: what section an equation belongs to; None for none.
    """
    eqns = jaxpr.eqns
    keys = list(map(ruled, eqns))
    if not any(keys):
        return list(eqns)
    runs: list[tuple[Ruled | None, list[Any]]] = []
    for eqn, key in zip(eqns, keys, strict=True):
        first = runs[-1][0] if runs else None
        if key is not None and first is not None and key.goes_on(first):
            runs[-1][1].append(eqn)
        else:
            runs.append((key, [eqn]))
    made: list[Any] = []
    read = {id(v) for v in jaxpr.outvars}  # by what comes later, for we go backwards
    for key, run in reversed(runs):
        written = [v for eqn in run for v in eqn.outvars]
        outvars = [v for v in written if id(v) in read]
        own = {id(v) for v in written}
        invars = {
            id(v): v
            for eqn in run
            for v in eqn.invars
            if type(v) is not Literal and id(v) not in own
        }
        made.extend(
            run[::-1]
            if key is None or not outvars
            else [Section(key, run, list(invars.values()), outvars)]
        )
        read.update(id(v) for eqn in run for v in eqn.invars)
    return made[::-1]
