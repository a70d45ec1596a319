"""A call as a program, and where each of its equations was written.

The program is traced under a record that numbers what every plan makes of it. The number is a name
scope on all equations that a step becomes, through derivatives, loops and rematerialisation.
"""

import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import jax

from polymp import code_origin
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart, count_of, is_array, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.frame import Cast, Step
from polymp.backends.jax.autocast.function_calls import FunctionCall
from polymp.backends.jax.autocast.known_functions import op_of, spelling
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation, NameStack
from polymp.backends.jax.jaxprs import LIBRARIES, Walk, inside
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.scaler import grad_scaler, optimizer_step, tree_math
from polymp.diagnostics.bad_step import NoBlock
from polymp.diagnostics.blame import rounded
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, Call
from polymp.rules import decision_log
from polymp.rules.row import Row


class Record(decision_log.Recorder):
    """Numbers the calls of the plans that are made under it."""

    def __init__(self) -> None:
        super().__init__()
        # By name, what a plan knows of a call: its op and its row.
        self.calls: dict[str, Call] = {}
        # Likewise its operands, by place, that are numbers which a low dtype makes 0 or 1.
        self.numbers: dict[str, tuple[tuple[int, float], ...]] = {}
        self.policy: str = ""
        self._latest: decision_log.Entry | None = None

    def note(self, entry: decision_log.Entry) -> None:
        self._latest = entry

    def follow(self, what: Step, low: str, policy: str = "") -> str:
        entry, self._latest = self._latest, None
        self.policy = self.policy or policy
        name = f"{regions.CALL}{len(self.calls)}"
        if isinstance(what.eqn, FunctionCall):
            op = spelled = what.eqn.op
        else:
            spelled = spelling(what.eqn)
            op = op_named(spelled)
        row, how = None if entry is None else entry.row, what.in_8_bits
        recipe = "" if how is None else how.recipe
        self.calls[name] = planned_call(op, spelled, low, row, recipe, what.fallback)
        self.numbers[name] = tuple(
            (at, o.number)
            for at, o in enumerate(what.operands)
            if type(o) is Cast and o.number is not None and rounded(o.number, o.dtype) is not None
        )
        return name


def planned_call(
    op: str,
    spelled: str,
    low: str = "",
    row: Row | None = None,
    recipe: str = "",
    fallback: str = "",
) -> Call:
    """A call, before its equations are known."""
    own = "jax", op, f"jax:{spelled}", "", "", FORWARD, low, row, (), "", ()
    return Call(*own, recipe=recipe, fallback=fallback)


def op_named(spelled: str) -> str:
    """The name of an op, by jax's of it; a cast in the program is called as in torch."""
    plain = spelled.partition(":")[0]
    return op_of(spelled) or ("to" if plain == "convert_element_type" else plain)


_numbers = itertools.count(1)


class Traced(NamedTuple):
    """A call as a program."""

    closed: ClosedProgram  # the program, of arrays
    record: Record  # of what was decided in it
    arrays: list[jax.Array]  # that the call has for it
    names: list[str]  # of these arrays, as the caller would write them
    results: list[str]  # names of what it returns


def called(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]]:
    """A call as one of a function of arrays: modules among the arguments are taken apart."""
    function, given = nnx.owned(fn, args)
    if not nnx.among((given, kwargs)):
        return fn, args, kwargs
    function, args, _ = nnx.pure_of(function, given, kwargs, named=True)
    return function, args, {}


def traced(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Traced:
    """The program of a call, and what was decided in it."""
    names = _names(fn, args, kwargs)
    function, args, kwargs = called(fn, args, kwargs)
    arrays, together = apart((args, kwargs), is_typed)
    results: list[str] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        args, kwargs = together(arrays)
        outs = jax.tree_util.tree_leaves_with_path(function(*args, **kwargs))
        found = [(path, x) for path, x in outs if is_array(x)]
        results[:] = [jax.tree_util.keystr(path) or "result" for path, _ in found]
        return [x for _, x in found]

    with regions.EXPLAINED(next(_numbers)):
        record = Record()
        with (stack := ExitStack()), stack:  # an interrupt may come where one of the two is left
            decision_log.recorded_by(stack, record)
            return Traced(jax.make_jaxpr(flat)(*arrays), record, arrays, names, results)


class Wrapped(NoBlock):
    """A function, `fn`, whose calls are looked at; `form` is how it is written."""

    def __init__(self, fn: Callable[..., object], form: str) -> None:
        self._form, self._name = form, form.partition("(")[0]
        self._usage = (
            f"polymp.jax.{self._name} is not a context manager. Write wrapped = polymp.jax.{form}, "
            f"call wrapped in place of the step, and read wrapped.{self._name}."
        )
        functools.update_wrapper(cast(Any, self), fn)
        self.fn = fn
        # Arguments that cannot be hashed, so that their ids stay theirs.
        self._kept: dict[int, object] = {}

    def _key(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Hashable:
        """The key of a call, whose arguments have values: for calls of one key one program does."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                f"{self._name}({self.fn!r}) was called by code that is traced, where there are no "
                f"values. {self._name.capitalize()} the outermost function: polymp.jax."
                f"{self._form}."
            )
        types = tuple(jax.typeof(x) if is_array(x) else self._kind(x) for x in leaves)
        return tree, types, compat.trace_context(), nnx.shape_of((args, kwargs))

    def _arrays(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[jax.Array]:
        """The arrays that the program of a call takes."""
        return [x for x in jax.tree.leaves(called(self.fn, args, kwargs)[1:]) if is_array(x)]

    def _kind(self, leaf: object) -> Hashable:
        """A key for an argument that is no array: 1, 1.0, True, 0.0, -0.0 have different ones."""
        try:
            hash(leaf)
        except TypeError:
            self._kept[id(leaf)] = leaf
            return type(leaf), id(leaf)
        return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def parameters(fn: Callable[..., object]) -> list[str]:
    """Names of a function's parameters; empty if they are not known."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _names(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[str]:
    """The arrays among the arguments of `called`, as a caller would write them."""
    function, given = nnx.owned(fn, args)
    words, names = parameters(function), list[str]()
    for (part, which, *keys), leaf in nnx.leaves_with_paths((given, kwargs)):
        if part.idx == 1:
            name = str(which.key)
        else:
            name = words[which.idx] if which.idx < len(words) else f"args[{which.idx}]"
        if is_typed(leaf):
            names.append(name + jax.tree_util.keystr(tuple(keys)).removesuffix(".value"))
    return names


# Where an equation was written: the line of the user's code, and the scopes it is in.


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
def function_of(traceback: object) -> str:
    """The outermost function of jax.numpy that an equation was traced in: "take"; "" if none."""
    inside = [c for c in compat.frames(traceback).codes if _NUMPY in c.co_filename]
    return next((c.co_name.lstrip("_") for c in reversed(inside) if c.co_name.isidentifier()), "")


def is_library(closed: ClosedProgram) -> bool:
    """True if a jaxpr was traced from a function of a library, and not by a rewrite of ours."""
    filename, _, _ = compat.traced_from(closed)
    if filename is None or code_origin.is_ours(filename):
        return False  # what is rewritten keeps the lines that it was written in
    return code_origin.is_library(filename, *LIBRARIES)


@cache
def _is_of_user(traceback: object, filename: str | None, line: int | None) -> bool:
    """True if the user's code made an equation of a function at a line of a library's file.

    Such a function calls the user's: as what `equinox.filter_jit` or `flax.linen.scan` returns.
    """
    for code in compat.frames(traceback).codes:
        if not code_origin.is_library(code.co_filename, *LIBRARIES):
            return True
        if (code.co_filename, code.co_firstlineno) == (filename, line):
            return False
    return False


@cache
def is_update(traceback: object) -> bool:
    """True for what an optimizer of optax, or a loss scaler, does."""
    codes = compat.frames(traceback).codes
    return any(_OPTAX in code.co_filename or _scales(code) for code in codes)


def _scales(code: CodeType) -> bool:
    """True for a loss scaler's code, but for what calls a function for its value and gradients."""
    calls = code.co_qualname.startswith("GradScaler.value_and_grad.")
    return code.co_filename in _SCALING and not calls


@cache
def optimizer_of(traceback: object) -> str:
    """The function of optax that an equation is in; "" without one."""
    files = (code for code in compat.frames(traceback).codes if _OPTAX in code.co_filename)
    return next((code.co_qualname.partition(".")[0] for code in files), "")


_OPTAX = f"{os.sep}optax{os.sep}_src{os.sep}"
_SCALING = frozenset(module.__file__ for module in (grad_scaler, optimizer_step, tree_math))
_NUMPY = f"{os.sep}_src{os.sep}numpy{os.sep}"


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
    closed: str  # the primitive that is CLOSED and that it is inside of; "" if it is in none

    @property
    def key(self) -> Key:
        return self.parent, id(self.eqn)


T = TypeVar("T")


class Placed(Walk[T, tuple[int, ...]]):
    """A walk that knows where it is, as `Site.parent`, and goes into nothing that is CLOSED."""

    def inner(self, around: tuple[int, ...], eqn: Equation, at: int, which: int) -> tuple[int, ...]:
        return *around, at, which

    def equation(
        self, at: int, eqn: Equation, values: list[T], around: tuple[int, ...]
    ) -> Sequence[T]:
        if eqn.primitive.name in CLOSED:
            return self.leaf(eqn, values, around)
        return super().equation(at, eqn, values, around)


def equations(closed: ClosedProgram, around: Site | None = None) -> Iterator[Site]:
    """The equations of a program and of those inside it, calls and loops taken apart.

    A shard_map or a `while` comes before those inside it. `around` has the program's place, in all
    its fields but the equation.
    """
    outer, times, fixed, parent, written, scans, closed_by = (
        around[1:] if around else (Scope(), 1, frozenset(), (), None, (), "")
    )
    filename, line, _ = compat.traced_from(closed)
    for at, eqn in enumerate(compat.opened(closed)[0].eqns):
        scope, traceback = scope_in(outer, eqn.source_info.name_stack), eqn.source_info.traceback
        own = written is None or _is_of_user(traceback, filename, line)
        by = traceback if own else written
        site = Site(eqn, scope, times, fixed, parent, by, scans, closed_by)
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
            within = closed_by or (name if name in CLOSED else "")
            place = Site(eqn, scope, turns, same, own_place, outside, (*scans, *more), within)
            yield from equations(part.closed, place)
