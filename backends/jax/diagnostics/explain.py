"""`explain`: which op runs in which dtype, and why, read off the traced program.

What is reported is what is in the program that runs, forward and backward, with the row that
decided it. The program is traced under a record that numbers what every plan makes of it. The
number is a name scope on all equations that a step becomes, through derivatives, loops and
rematerialisation. `audit`, `locate` and `record` find the calls of a program in the same way.

    a call -> traced program and its record -> equations, each where it stands -> calls
"""

import functools
import inspect
import itertools
import os
import reprlib
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.extend.core as core
import numpy as np

from polymp import code_origin
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart, count_of, is_array, is_symbol, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.api import JITTED_FUNCTION, PolicyLike, autocast, stand_for
from polymp.backends.jax.autocast.fp8_contraction import In8Bits
from polymp.backends.jax.autocast.frame import LOW_DTYPES, Cast, Step
from polymp.backends.jax.autocast.function_calls import FunctionCall
from polymp.backends.jax.autocast.known_functions import LAYOUT, OURS, op_of, spelling
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation, NameStack
from polymp.backends.jax.jaxprs import LIBRARIES, Walk, inside, source
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.scaler import grad_scaler, optimizer_step, tree_math
from polymp.diagnostics.bad_step import NoBlock
from polymp.diagnostics.blame import rounded
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, Call
from polymp.diagnostics.report import Report
from polymp.dtypes import FORMATS, widest
from polymp.rules import decision_log
from polymp.rules.policy import Policy
from polymp.rules.row import Row


def explain(
    fn: Callable[..., object],
    *args: object,
    dtype: jax.typing.DTypeLike | None = None,
    policy: PolicyLike = None,
    **kwargs: object,
) -> Report:
    """Report which op runs in which dtype, and why: a row for each op call site.

        report = explain(loss, params, x, dtype="bfloat16")
        report = explain(train_step, params, opt_state, x)     # the regions are the program's own

    The function is traced and not run; what is reported is the program that would run. Its
    derivatives are in it where it takes them: `jax.grad(autocast(loss))`, or a whole train step.
    Bytes of float32 kept for backward are counted there; a program without a backward pass keeps
    none.

    Args:
        fn: a function of arrays, pytrees of them and flax modules; jitted or not. An nnx module,
            or a method of one, is called by its paths.
        args: of the call; arrays, or `jax.ShapeDtypeStruct` in their places.
        dtype: the low dtype of an autocast that is put around the function, bfloat16 or float16;
            None to put none, unless a policy is given.
        policy: of that autocast.
        kwargs: of the call.

    Returns:
        The report; its rows are worked out when they are asked for. A symbolic size, as in an
        export, counts as 1 in its FLOPs and bytes, and its title says so.

    Raises:
        TypeError: `fn` is not callable or reads values of arrays, or `dtype` is no dtype.
    """
    if not callable(fn):
        raise TypeError(
            f"explain(fn, *args) needs a function or a module, got {reprlib.repr(fn)}. Give the "
            "function and its arguments, not what it returned."
        )
    title = getattr(fn, "__name__", None) or type(fn).__name__
    if dtype is not None or policy is not None:
        fn, args = nnx.owned(fn, args)
        fn = autocast(fn, dtype="bfloat16" if dtype is None else dtype, policy=policy)
    closed, record, *_ = traced(fn, args, kwargs)
    given = (var.aval for var in compat.binders(closed)[1])
    sizes = (n for aval in given for n in getattr(aval, "shape", ()))
    if symbols := {str(n): None for n in sizes if is_symbol(n)}:
        title += f" (FLOPs and bytes for {' = '.join(symbols)} = 1)"
    low = next((c.region for c in record.calls.values() if c.region), "")
    rows = lambda: (call for call, _ in with_sites(closed, record))  # noqa: E731
    return Report(rows, title, low, record.policy)


# A call as a program.


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
    own: Callable[..., Sequence[jax.Array]]  # runs it as the caller does, with no Python of theirs


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
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    change: Callable[[Policy], Policy] | None = None,
) -> Traced:
    """The program of a call, and what was decided in it; with a change, by other policies."""
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

    stand_for(fn, flat)
    with regions.EXPLAINED(next(_numbers)):
        record = Record()
        record.instead = change
        with (stack := ExitStack()), stack:  # an interrupt may come where one of the two is left
            decision_log.recorded_by(stack, record)
            try:
                closed = jax.make_jaxpr(flat)(*arrays)
            except _READS as error:
                frames = traceback.extract_tb(error.__traceback__)
                users = [f for f in frames if not code_origin.is_library(f.filename, *LIBRARIES)]
                at = f" at {Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""
                raise TypeError(_READ.format(at=at)) from error
    # A jitted function may be compiled already.
    compiled = isinstance(fn, JITTED_FUNCTION) and change is None
    own = flat if compiled else core.jaxpr_as_fun(closed)
    return Traced(closed, record, arrays, names, results, own)


# Where Python reads a value while it is traced; errors of JAX.
_READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_READ = (
    "The function could not be traced: Python reads the value of an array{at}, as float(loss) and "
    "`if loss > 0` do. Return the loss as an array, or give the part that jax.jit can trace."
)


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

    names: tuple[str, ...] = ()  # of the scopes that are modules, outermost first
    call: str = ""  # the name that the call was followed by, the innermost; "" without one
    direction: str = FORWARD  # "forward", "backward" or "recompute"

    @property
    def module(self) -> str:
        """The scopes as a path of modules."""
        return regions.module_path(*self.names)


@lru_cache(4096)
def scope_in(outer: Scope, stack: NameStack) -> Scope:
    """The scope of an equation in a program inside an equation of the scope `outer`."""
    names, call, direction = list(outer.names), outer.call, outer.direction
    for name in compat.scope_names(stack):
        if name.startswith(regions.CALL):
            call = name
        elif name == "rematted_computation":
            direction = RECOMPUTE
        elif regions.is_module(name):
            names.append(name)
    if compat.in_backward(stack) and direction == FORWARD:
        direction = BACKWARD
    return Scope(tuple(names), call, direction)


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
    """True if the user's code made an equation of a function at a line of a library's file."""
    # Such a function calls the user's: as what `equinox.filter_jit` or `flax.linen.scan` returns.
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
    """The equations of a program and of those inside it, calls and loops taken apart."""
    # A shard_map or a `while` comes before those inside it. `around` has the program's place, in
    # all its fields but the equation.
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


# The calls of a traced program: the equations that became of each, read as one row of a report.


def with_sites(
    closed: ClosedProgram, record: Record, counts: Callable[[Atom], object] | None = None
) -> Iterator[tuple[Call, list[Site]]]:
    """The calls of a program, in its order, each with its equations."""
    # An equation is one if it reads a value that `counts`, or rounds an integer; None for an
    # equation that reads floats and is not CLOSED.
    of = counts or float_dtype
    groups: list[list[Site]] = []
    known: dict[tuple[str, str], list[list[Site]]] = {}
    for site in equations(closed):
        if site.scope.call not in record.calls or site.eqn.primitive.name in CLOSED:
            if _computes(site.eqn, of):
                groups.append([site])
            continue
        alike = known.setdefault((site.scope.call, site.scope.direction), [])
        group = next((sites for sites in alike if _together(sites[0].parent, site.parent)), None)
        if group is None:
            group = []
            alike.append(group)
            groups.append(group)
        group.append(site)
    kept = _Kept(closed).bytes
    for sites in groups:
        call = record.calls.get(sites[0].scope.call)
        if call is not None and call.recipe and _is_batched(sites):
            call = call._replace(recipe="", fallback="it runs under a vmap around the region")
            record.calls[sites[0].scope.call] = call  # and so does its gradient
        computes = any(_computes(site.eqn, of) for site in sites)
        if call is None or computes or call.fallback:
            yield _call(sites, call, kept), sites


def _is_batched(sites: Sequence[Site]) -> bool:
    """True for a product of rule fp8 that a batching rule has put into the region's dtype."""
    ours = [s for s in sites if s.eqn.primitive.name in OURS]
    forward = [s.eqn for s in ours if s.scope.direction == FORWARD]
    return bool(forward) and not any("how" in eqn.params for eqn in forward)


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if one place is inside of the other, or the same: a function's casts are outside it."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _call(
    sites: Sequence[Site],
    planned: Call | None,
    kept: Mapping[tuple[tuple[int, ...], Atom], int],
) -> Call:
    first = sites[0]
    made = {id(v) for site in sites for v in site.eqn.outvars}
    outside = min((site.parent for site in sites), key=len)
    given = [str(site.eqn.outvars[0].aval) for site in sites
             if site.parent == outside and _is_cast(site.eqn)]  # fmt: skip
    casts = cast_bytes = work = hoisted = 0
    inputs: dict[Atom, str] = {}
    run: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    spelled = ""
    for site in sites:
        eqn = site.eqn
        in_8_bits = eqn.primitive.name in OURS and "how" in eqn.params
        for v in eqn.invars[:2] if in_8_bits else eqn.invars:  # the two that are multiplied
            if not hasattr(v, "val") and id(v) not in made and (f := float_dtype(v)):
                if v not in inputs and len(site.parent) > len(outside) and str(v.aval) in given:
                    given.remove(str(v.aval))  # a cast's result, by its name in the function
                    made.add(id(v))
                else:
                    inputs.setdefault(v, f)
        quantises, is_cast = eqn.primitive.name == "polymp_fp8_quantise", _is_cast(eqn)
        cast = [
            (v, count_of(v.aval.shape) * np.dtype(dtype).itemsize) for v, dtype in _cast_inside(eqn)
        ]
        if quantises or is_cast:
            cast = [(eqn.invars[0], bytes_of(eqn.outvars[0]))]
        for v, size in cast:
            times = 1 if v in site.fixed and not quantises else site.times
            hoisted += site.times - times
            casts += times
            cast_bytes += times * (bytes_of(v) + size)
        outputs = outputs if quantises else _dtypes(eqn.outvars) or outputs
        if quantises or is_cast:
            continue
        own = flops(eqn)
        if _computes(eqn, float_dtype) and (not run or (own and not work)):
            run = _run(eqn)
            spelled = spelling(eqn)
        work += own * site.times
    spelled = spelled or spelling(first.eqn)
    call = planned or planned_call(op_named(spelled), spelled)
    return call._replace(
        module=module_of(sites),
        source=source(first.written),
        direction=first.scope.direction,
        inputs=tuple(inputs.values()),
        run=widest(run) if run else "",
        outputs=outputs,
        casts=casts,
        cast_bytes=cast_bytes,
        saved=(("hoisted", hoisted),) if hoisted else (),
        flops=work,
        kept=sum(kept.get((site.parent, v), 0) for site in sites for v in site.eqn.outvars),
        times=first.times,
    )


def _cast_inside(eqn: Equation) -> Iterator[tuple[Atom, str]]:
    """The operands that a contraction casts, each with the dtype that it casts to."""
    if eqn.primitive.name not in OURS:
        return
    how: In8Bits | None = eqn.params.get("how")
    taken = [(eqn.params["spec"].run, False)] * 2
    if how is not None:  # some come in these dtypes as well
        taken = [(how.rules.format_of(part.role), part.shared) for part in how.both]
    for v, (dtype, ready) in zip(eqn.invars, taken, strict=False):
        if not ready and float_dtype(v) != dtype:
            yield v, dtype


def module_of(sites: Sequence[Site]) -> str:
    """The innermost module that all equations are in; casts for a function stand outside of it."""
    named = [s.scope for s in sites if not _is_cast(s.eqn)] or [s.scope for s in sites]
    levels = zip(*(scope.names for scope in named), strict=False)
    same = itertools.takewhile(lambda names: len({*names}) == 1, levels)
    return Scope(tuple(names[0] for names in same)).module


def _dtypes(variables: Sequence[Atom]) -> tuple[str, ...]:
    return tuple(filter(None, map(float_dtype, variables)))


def _run(eqn: Equation) -> tuple[str, ...]:
    if eqn.primitive.name in OURS:
        how: In8Bits | None = eqn.params.get("how")
        return (eqn.params["spec"].run if how is None else how.format,)
    return _dtypes([v for v in eqn.invars if not hasattr(v, "val")]) or _dtypes(eqn.outvars)


def _is_cast(eqn: Equation) -> bool:
    """True for a cast from one float dtype to another."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = float_dtype(eqn.invars[0]), float_dtype(eqn.outvars[0])
    return bool(old and new and old != new) and not hasattr(eqn.invars[0], "val")


# What only arranges numbers, or says something of a value, is no call of its own.
_SILENT = LAYOUT | frozenset(
    "pvary optimization_barrier iota real imag polymp_fp8_quantise".split()
)


def _computes(eqn: Equation, counts: Callable[[Atom], object]) -> bool:
    """True for an equation that computes with values that count, or casts them."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        rounds = counts is not float_dtype and float_dtype(eqn.outvars[0]) in LOW_DTYPES
        return _is_cast(eqn) or (rounds and not float_dtype(eqn.invars[0]))
    if name in _SILENT or (name in CLOSED and counts is float_dtype):
        return False
    return any(counts(v) for v in eqn.invars if not hasattr(v, "val"))


# How many bytes of float32, or 8-bit, values a program keeps for its backward equations.


def float_dtype(v: Atom) -> str:
    """The dtype of a variable; "" if it holds no floats."""
    return _float_name(getattr(v.aval, "dtype", None))


@cache
def _float_name(dtype: object) -> str:
    name: str = getattr(dtype, "name", "")  # NumPy makes it anew each time
    return name if name in FORMATS else ""


def bytes_of(v: Atom) -> int:
    """The bytes of a variable's values."""
    return count_of(v.aval.shape) * int(v.aval.dtype.itemsize)


# What is handed inwards: the scope of the equations around, and their place, as `Site.parent`.
_Place = tuple[Scope, tuple[int, ...]]

# A variable, by the place of the program that it is in, as `Site.parent`.
_Variable = tuple[tuple[int, ...], Atom]
_Maker = _Variable | None


class _Kept(Walk[_Maker, _Place]):
    """Finds the float32 values that forward equations make and others read.

    The fact about a value is the variable that it is of the equation that makes it, inside of
    calls, loops and branches; of several, the innermost and first.
    """

    def __init__(self, closed: ClosedProgram) -> None:
        self.bytes: dict[_Variable, int] = {}
        self.program(closed, [None] * len(compat.binders(closed)[1]), (Scope(), ()))

    def number(self, value: object) -> _Maker:
        return None

    def join(self, one: _Maker, other: _Maker) -> _Maker:
        makers = filter(None, (one, other))
        return min(makers, key=lambda maker: (-len(maker[0]), maker[0]), default=None)

    def inner(self, around: _Place, eqn: Equation, at: int, which: int) -> _Place:
        return scope_in(around[0], eqn.source_info.name_stack), (*around[1], at, which)

    def equation(
        self, at: int, eqn: Equation, values: list[_Maker], around: _Place
    ) -> Sequence[_Maker]:
        if scope_in(around[0], eqn.source_info.name_stack).direction != FORWARD:
            for v, maker in zip(eqn.invars, values, strict=True):
                if maker is not None:
                    self.bytes.setdefault(maker, bytes_of(v))
        return super().equation(at, eqn, values, around)

    def leaf(self, eqn: Equation, values: list[_Maker], around: _Place) -> Sequence[_Maker]:
        scope, place = scope_in(around[0], eqn.source_info.name_stack), around[1]
        forward = scope.direction == FORWARD
        return [
            (place, v) if forward and float_dtype(v) == "float32" else None for v in eqn.outvars
        ]


# FLOPs of products and convolutions, from their shapes; a multiply-add is two.


def flops(eqn: Equation) -> int:
    """FLOPs of an equation; 0 of any but a product or a convolution."""
    name, params = eqn.primitive.name, eqn.params
    if name in OURS:
        name, params = params["spec"].of.name, params["spec"].params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * count_of(eqn.outvars[0].aval.shape) * count_of([shape[d] for d in contracted])
    if name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
        window = count_of(kernel) // kernel[numbers.rhs_spec[0]]
        if any(d != 1 for d in params["lhs_dilation"]):
            # A transposed one, as for the gradient of the input: each number of the input meets
            # one weight for each channel it goes to and place of the window.
            places = count_of(kernel) // count_of([kernel[d] for d in numbers.rhs_spec[:2]])
            channels = kernel[numbers.rhs_spec[0]] // params["feature_group_count"]
            return int(2 * count_of(eqn.invars[0].aval.shape) * places * channels)
        # Each result is made of one weight for each input channel and place of the window.
        return int(2 * count_of(eqn.outvars[0].aval.shape) * window)
    return 0
