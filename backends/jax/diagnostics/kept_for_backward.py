"""How many bytes of float32, or 8-bit, values a program keeps for its backward equations."""

from collections.abc import Container

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import count_of
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, OpenProgram
from polymp.backends.jax.diagnostics.call_site import Scope, Scopes
from polymp.backends.jax.jaxprs import inside
from polymp.diagnostics.call_record import FORWARD
from polymp.dtypes import FORMATS


def float_dtype(v: Atom) -> str:
    """The dtype of a variable; "" if it holds no floats."""
    name = getattr(getattr(v.aval, "dtype", None), "name", "")
    return name if name in FORMATS else ""


def bytes_of(v: Atom) -> int:
    """The bytes of a variable's values."""
    return count_of(v.aval.shape) * int(v.aval.dtype.itemsize)


def kept_bytes(
    closed: ClosedProgram, dtypes: Container[str] = frozenset({"float32"})
) -> dict[tuple[tuple[int, ...], Atom], int]:
    """Bytes of values of some dtypes that forward equations make and others read.

    By place and name.

    A place is that of the program that a variable is in, as `Site.parent`. A value that a call
    or a loop returns counts for the equation in it that makes it.
    """
    kept: dict[tuple[tuple[int, ...], Atom], int] = {}
    scopes = Scopes()

    def put_down(program: OpenProgram, variable: Atom, size: int, place: tuple[int, ...]) -> None:
        for at, eqn in enumerate(program.eqns):
            if variable not in eqn.outvars:
                continue
            which = eqn.outvars.index(variable)
            for branch, part in enumerate(inside(eqn)):
                inner, given = compat.opened(part.closed)[0], [*compat.binders(part.closed)[1]]
                carries = part.carries if eqn.primitive.name == "scan" else 0
                if which >= len(inner.outvars) or hasattr(inner.outvars[which], "val"):
                    continue
                if (same := inner.outvars[which]) not in given:
                    put_down(inner, same, size, (*place, at, branch))
                elif 0 <= (turn := given.index(same) - part.fixed) < carries:
                    put_down(inner, inner.outvars[turn], size, (*place, at, branch))
                elif not hasattr(outer := eqn.invars[part.takes[given.index(same)]], "val"):
                    put_down(program, outer, size, place)
                return
            kept[place, variable] = size
            return

    def look(program: OpenProgram, outer: Scope, place: tuple[int, ...]) -> None:
        made: set[Atom] = set()
        read: dict[Atom, None] = {}
        for at, eqn in enumerate(program.eqns):
            scope = scopes.inside(outer, eqn.source_info.name_stack)
            if scope.direction == FORWARD:
                made.update(v for v in eqn.outvars if float_dtype(v) in dtypes)
            else:
                found = (v for v in eqn.invars if not hasattr(v, "val") and v in made)
                read.update(dict.fromkeys(found))
            for branch, part in enumerate(inside(eqn)):
                look(compat.opened(part.closed)[0], scope, (*place, at, branch))
        for variable in read:
            put_down(program, variable, bytes_of(variable), place)

    look(compat.opened(closed)[0], Scope(), ())
    return kept
