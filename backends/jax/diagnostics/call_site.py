"""Where an equation was written: the line of the user's code, and the scopes it is in."""

import os
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from polymp import code_origin
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import count_of
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.compat.programs import (
    Atom,
    ClosedProgram,
    Equation,
    NameStack,
)
from polymp.backends.jax.jaxprs import inside
from polymp.backends.jax.scaler import grad_scaler, optimizer_step
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE


class Scope(NamedTuple):
    """The scopes of an equation: from its name stack, and those of the equations around it."""

    names: tuple[str, ...] = ()  # of the scopes, outermost first, our own left out
    call: str = ""  # the name that the call was followed by, the innermost; "" without one
    direction: str = FORWARD  # "forward", "backward" or "recompute"

    @property
    def module(self) -> str:
        """The scopes as a path of modules.

        Without those that equinox opens in its layers, "eqx.nn.Linear", if others have the path.
        """
        path = [name for name in self.names if not name.startswith("eqx.nn.")] or self.names
        return ".".join(path).replace("/", ".")


@lru_cache(4096)
def scope_in(outer: Scope, stack: NameStack) -> Scope:
    """The scope of an equation in a program inside an equation of the scope `outer`."""
    names, call, direction = list(outer.names), outer.call, outer.direction
    for name in compat.scope_names(stack):
        if name.startswith(regions.CALL):
            call = name
        elif name == "rematted_computation":
            direction = RECOMPUTE
        elif _PATH.fullmatch(name) and name != regions.SCALED and not regions.is_mark(name):
            names.append(name)
    if compat.in_backward(stack) and direction == FORWARD:
        direction = BACKWARD
    return Scope(tuple(names), call, direction)


# What a path may be: jax.numpy opens scopes such as "ij,jk->ik", too.
_PATH = re.compile(r"[\w./\[\]-]+")


@cache
def source(traceback: object) -> str:
    """File and line of the innermost code that is not a library's: "train.py:12"; "" if none."""
    for code, offset in zip(*compat.frames(traceback), strict=True):
        if not code_origin.is_library(code.co_filename, *_LIBRARIES):
            return f"{Path(code.co_filename).name}:{_line(code, offset)}"
    return ""


@cache
def function_of(traceback: object) -> str:
    """The outermost function of jax.numpy that an equation was traced in: "take"; "" if none."""
    inside = [c for c in compat.frames(traceback).codes if _NUMPY in c.co_filename]
    return next((c.co_name.lstrip("_") for c in reversed(inside) if c.co_name.isidentifier()), "")


@cache
def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


def is_library(closed: ClosedProgram) -> bool:
    """True if a jaxpr was traced from a function of a library, and not by a rewrite of ours."""
    filename, _, _ = compat.traced_from(closed)
    if filename is None or code_origin.is_ours(filename):
        return False  # what is rewritten keeps the lines that it was written in
    return code_origin.is_library(filename, *_LIBRARIES)


@cache
def _is_of_user(traceback: object, filename: str | None, line: int | None) -> bool:
    """True if the user's code made an equation of a function at a line of a library's file.

    Such a function calls the user's: as what `equinox.filter_jit` or `flax.linen.scan` returns.
    """
    for code in compat.frames(traceback).codes:
        if not code_origin.is_library(code.co_filename, *_LIBRARIES):
            return True
        if (code.co_filename, code.co_firstlineno) == (filename, line):
            return False
    return False


@cache
def is_update(traceback: object) -> bool:
    """True for what an optimizer of optax, or a loss scaler, does."""
    files = (code.co_filename for code in compat.frames(traceback).codes)
    return any(file in _SCALING or _OPTAX in file for file in files)


@cache
def optimizer_of(traceback: object) -> str:
    """The function of optax that an equation is in; "" without one."""
    files = (code for code in compat.frames(traceback).codes if _OPTAX in code.co_filename)
    return next((code.co_qualname.partition(".")[0] for code in files), "")


_OPTAX = f"{os.sep}optax{os.sep}_src{os.sep}"
_SCALING = frozenset(module.__file__ for module in (grad_scaler, optimizer_step))
_NUMPY = f"{os.sep}_src{os.sep}numpy{os.sep}"


# Whose lines say nothing of the user's program.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "chex")


# The equations of a program, each where it stands: its scopes, its loops, what it is inside of.


# Of an equation: what it is inside of, as `Site.parent`, and its id.
Key = tuple[tuple[int, ...], int]


# Of these, nothing inside is measured.
CLOSED = frozenset({"shard_map", "while"})


class Site(NamedTuple):
    """An equation of the final program, where it stands."""

    eqn: Equation
    scope: Scope  # what the name stacks say
    times: int  # how often it runs
    fixed: frozenset[Atom]  # variables around it that do not change while a loop runs
    parent: tuple[int, ...]  # what it is inside of, by the places of equations
    written: object  # traceback of the equation, or of the call of the library's function it is in
    scans: tuple[tuple[int, ...], ...]  # where those around it stand, the outermost first

    @property
    def key(self) -> Key:
        return self.parent, id(self.eqn)


def equations(closed: ClosedProgram, around: Site | None = None) -> Iterator[Site]:
    """The equations of a program and of those inside it, calls and loops taken apart.

    A shard_map or a `while` comes before those inside it. `around` has the program's place, in all
    its fields but the equation.
    """
    outer, times, fixed, parent, written, scans = (
        around[1:] if around else (Scope(), 1, frozenset(), (), None, ())
    )
    filename, line, _ = compat.traced_from(closed)
    for at, eqn in enumerate(compat.opened(closed)[0].eqns):
        scope, traceback = scope_in(outer, eqn.source_info.name_stack), eqn.source_info.traceback
        own = written is None or _is_of_user(traceback, filename, line)
        site = Site(eqn, scope, times, fixed, parent, traceback if own else written, scans)
        programs, name = inside(eqn), eqn.primitive.name
        more = ((*parent, at),) if name == "scan" else ()
        if not programs or name in CLOSED:
            yield site
        for which, part in enumerate(programs):
            same = frozenset(compat.binders(part.closed)[1][: part.fixed])
            # A library's function is traced once, for the first of the lines that call it.
            outside = site.written if written or is_library(part.closed) else None
            turns = times * count_of([part.times])
            own_place = *parent, at, which
            place = Site(eqn, scope, turns, same, own_place, outside, (*scans, *more))
            yield from equations(part.closed, place)
