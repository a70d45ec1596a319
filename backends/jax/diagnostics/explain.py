"""`explain`: which op runs in which format, and why, read off the traced program.

    trace under a record -> equations, each with the name of the call it came of -> calls

The record numbers every step that a plan makes; its number is a name scope on all equations that
the step becomes, through derivatives, loops and rematerialisation. So what is reported is what is
in the program that runs, forward and backward, with the row that decided it.
"""

import inspect
import itertools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.api import PolicyLike, autocast, is_array
from polymp.backends.jax.autocast.known_functions import op_of, spelling
from polymp.backends.jax.autocast.op_facts import LAYOUT
from polymp.backends.jax.diagnostics.call_site import Scope, Scopes, is_library, source
from polymp.backends.jax.diagnostics.flops import flops
from polymp.backends.jax.modules import nnx
from polymp.diagnostics.call import FORWARD, Call
from polymp.diagnostics.report import Report
from polymp.dtypes import FORMATS, widest
from polymp.rules import decisions


class Followed(NamedTuple):
    """A call that a plan knows.

    Attributes:
        entry: what was decided; None if no row spoke of it.
        low: the region's format, "" outside of enabled regions.
        op: name of the op.
        spelling: jax's name of it.
        saved: casts that were spared, by reason.
    """

    entry: decisions.Entry | None
    low: str
    op: str
    spelling: str
    saved: dict[str, int]


class Record(decisions.Recorder):
    """Numbers the calls of the plans that are made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Followed] = {}
        self.policy = ""
        self._latest: decisions.Entry | None = None

    def note(self, entry: decisions.Entry) -> None:
        super().note(entry)
        self._latest = entry

    def follow(self, what: Any, low: str, policy: str = "") -> str:
        entry, self._latest = self._latest, None
        self.policy = self.policy or policy
        name = f"{regions.CALL}{len(self.calls)}"
        if entry is not None and not entry.spelling:  # of a function
            op, spelled = entry.op, entry.op
        else:
            spelled = spelling(what.eqn)
            op = _named(spelled)
        self.calls[name] = Followed(entry, low, op, f"jax:{spelled}", {})
        return name

    def spared(self, what: Any, why: str) -> None:
        for name in compat.scope_names(what.stack):
            if name in self.calls:
                saved = self.calls[name].saved
                saved[why] = saved.get(why, 0) + 1


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


_numbers = itertools.count(1)


class Traced(NamedTuple):
    """A call as a program.

    Attributes:
        closed: the program, of arrays.
        record: of what was decided in it.
        arrays: that the call has for it.
        names: of these arrays, as the caller would write them.
        results: names of what it returns.
    """

    closed: Any
    record: Record
    arrays: list[Any]
    names: list[str]
    results: list[str]


def traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    """The program of a call, and what was decided in it."""
    called = fn
    function, given = nnx.owned(fn, args)
    if nnx.among((given, kwargs)):
        function, args, _ = nnx.pure_of(function, given, kwargs, named=True)
        kwargs = {}
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in paths]
    places = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [leaf for leaf, at in zip(leaves, places, strict=True) if at]
    given = _parameters(called, modules=function is not called)
    names = [_path(path, given) for (path, _), at in zip(paths, places, strict=True) if at]
    results: list[str] = []

    def flat(*arrays: Any) -> list[Any]:
        left = iter(arrays)
        given = [next(left) if at else leaf for at, leaf in zip(places, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        outs = jax.tree_util.tree_leaves_with_path(function(*args, **kwargs))
        found = [(path, x) for path, x in outs if is_array(x)]
        results[:] = [jax.tree_util.keystr(path) or "result" for path, _ in found]
        return [x for _, x in found]

    record = Record()
    with decisions.recorded_by(record, prepared=False), regions.EXPLAINED(next(_numbers)):
        return Traced(jax.make_jaxpr(flat)(*arrays), record, arrays, names, results)


def _parameters(fn: Any, modules: bool) -> list[str]:
    """Names of a function's parameters; empty if they are not known, or modules are taken apart."""
    if modules:
        return []
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _path(path: Any, parameters: Sequence[str]) -> str:
    """What a caller would write for an argument: "params['w']"."""
    (part, which), rest = (path[0].idx, path[1]), path[2:]
    if part == 1:
        name = which.key
    else:
        name = parameters[which.idx] if which.idx < len(parameters) else f"args[{which.idx}]"
    return str(name) + jax.tree_util.keystr(rest).removesuffix(".value")


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
            programs = list(inside(eqn))
            if not programs:
                yield site
            for which, (program, count, constants) in enumerate(programs):
                closed = compat.close(program)
                same = frozenset(compat.binders(closed)[1][:constants])
                # A library's function is traced once, for the first of the lines that call it.
                outside = site.written if outer.written or is_library(closed) else None
                inner = Site(
                    eqn, site.scope, site.times * count, same, (*site.parent, at, which), outside
                )
                yield from walk(compat.opened(closed)[0], inner)

    jaxpr, _ = compat.opened(closed)
    yield from walk(jaxpr, Site(None, Scope(), 1, frozenset(), (), None))


def inside(eqn: Any) -> Iterator[tuple[Any, int, int]]:
    """The programs in an equation, how often each runs, and how many constants of a loop it has."""
    name, params = eqn.primitive.name, eqn.params
    if name == "polymp_contraction":
        return
    if name == "scan":
        yield params["jaxpr"], params["length"], compat.scan_sizes(params)[0]
    elif name == "while":
        yield params["body_jaxpr"], 1, params["body_nconsts"]
        yield params["cond_jaxpr"], 1, params["cond_nconsts"]
    elif name == "cond":
        yield from ((branch, 1, 0) for branch in params["branches"])
    elif name.startswith(("custom_jvp_call", "custom_vjp_call")):
        yield params.get("call_jaxpr") or params["fun_jaxpr"], 1, 0
    elif name in _CALLS:
        yield params["jaxpr"], 1, 0


_CALLS = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2", "shard_map", "closed_call"})


def calls(closed: Any, record: Record) -> Iterator[Call]:
    """The calls of a program, in its order."""
    return (call for call, _ in with_sites(closed, record))


def with_sites(closed: Any, record: Record) -> Iterator[tuple[Call, list[Site]]]:
    """The calls of a program, in its order, each with its equations."""
    groups: list[list[Site]] = []
    known: dict[tuple[str, str], list[list[Site]]] = {}
    for site in equations(closed):
        if site.scope.call not in record.calls:
            if _counts(site.eqn):
                groups.append([site])
            continue
        alike = known.setdefault((site.scope.call, site.scope.direction), [])
        group = next((sites for sites in alike if _together(sites[0].parent, site.parent)), None)
        if group is None:
            group = []
            alike.append(group)
            groups.append(group)
        group.append(site)
    kept = _kept(closed)
    seen: set[str] = set()
    for sites in groups:
        name, direction = sites[0].scope.call, sites[0].scope.direction
        followed = record.calls.get(name)
        if followed is None or any(map(_counts, (s.eqn for s in sites))) or followed.saved:
            saved = () if name in seen or followed is None else tuple(followed.saved.items())
            seen.add(name)
            yield _call(sites, followed, direction, saved, kept), sites


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if one place is inside of the other, or the same: a function's casts are outside it."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _call(
    sites: Sequence[Site],
    followed: Followed | None,
    direction: str,
    saved: tuple[tuple[str, int], ...],
    kept: dict[tuple[Any, Any], int],
) -> Call:
    first = sites[0]
    made = {id(v) for site in sites for v in site.eqn.outvars}
    outside = min((site.parent for site in sites), key=len)
    given = [str(site.eqn.outvars[0].aval) for site in sites
             if site.parent == outside and _is_cast(site.eqn)]  # fmt: skip
    casts = cast_bytes = work = 0
    hoisted = 0
    inputs: dict[Any, str] = {}
    run: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    spelled = ""
    for site in sites:
        eqn = site.eqn
        for v in eqn.invars:
            if not hasattr(v, "val") and id(v) not in made and (f := _format(v)):
                if v not in inputs and len(site.parent) > len(outside) and str(v.aval) in given:
                    given.remove(str(v.aval))  # a cast's result, by its name in the function
                    made.add(id(v))
                else:
                    inputs.setdefault(v, f)
        outputs = _formats(eqn.outvars) or outputs
        if _is_cast(eqn):
            times = 1 if eqn.invars[0] in site.fixed else site.times
            hoisted += site.times - times
            casts += times
            cast_bytes += times * (_bytes(eqn.invars[0]) + _bytes(eqn.outvars[0]))
            continue
        if eqn.primitive.name == "polymp_contraction":
            for v in eqn.invars[:2]:
                if _format(v) != eqn.params["run"]:
                    times = 1 if v in site.fixed else site.times
                    hoisted += site.times - times
                    casts += times
                    size = np.dtype(eqn.params["run"]).itemsize
                    cast_bytes += times * (_bytes(v) + int(np.prod(v.aval.shape)) * size)
        own = flops(eqn)
        if _counts(eqn) and (not run or (own and not work)):
            run = _run(eqn)
            spelled = spelling(eqn)
        work += own * site.times
    if hoisted:
        saved = (*saved, ("hoisted", hoisted))
    if not spelled:
        spelled = spelling(first.eqn)
    op = followed.op if followed else _named(spelled)
    entry = followed.entry if followed else None
    return Call(
        "jax",
        op,
        followed.spelling if followed else f"jax:{spelled}",
        _module(sites),
        source(first.written),
        direction,
        followed.low if followed else "",
        entry.row if entry else None,
        tuple(inputs.values()),
        widest(run) if run else "",
        outputs,
        casts,
        cast_bytes,
        saved,
        work,
        sum(kept.get((site.parent, v), 0) for site in sites for v in site.eqn.outvars),
        first.times,
    )


def _named(spelled: str) -> str:
    """The name of an op, by jax's of it; a cast in the program is called as in torch."""
    plain = spelled.partition(":")[0]
    return op_of(spelled) or ("to" if plain == "convert_element_type" else plain)


def _module(sites: Sequence[Site]) -> str:
    """The innermost module that all of a call is in; casts for a function stand outside of it."""
    named = [s.scope for s in sites if not _is_cast(s.eqn)] or [s.scope for s in sites]
    levels = zip(*(scope.names for scope in named), strict=False)
    same = itertools.takewhile(lambda names: len({*names}) == 1, levels)
    return Scope(tuple(names[0] for names in same)).module


def _format(v: Any) -> str:
    name = getattr(getattr(v.aval, "dtype", None), "name", "")
    return name if name in FORMATS else ""


def _formats(variables: Sequence[Any]) -> tuple[str, ...]:
    return tuple(filter(None, map(_format, variables)))


def _run(eqn: Any) -> tuple[str, ...]:
    if eqn.primitive.name == "polymp_contraction":
        return (eqn.params["run"],)
    return _formats([v for v in eqn.invars if not hasattr(v, "val")]) or _formats(eqn.outvars)


def _bytes(v: Any) -> int:
    return int(np.prod(v.aval.shape)) * int(v.aval.dtype.itemsize)


def _is_cast(eqn: Any) -> bool:
    """True for a cast from one float format to another."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = _format(eqn.invars[0]), _format(eqn.outvars[0])
    return bool(old and new and old != new) and not hasattr(eqn.invars[0], "val")


# What only arranges numbers, or says something of a value, is no call of its own.
_SILENT = LAYOUT | {"name", "stop_gradient", "pvary", "optimization_barrier", "iota", "copy"}


def _counts(eqn: Any) -> bool:
    """True for an equation that computes with floats, or casts them."""
    if _is_cast(eqn):
        return True
    name = eqn.primitive.name
    if name in _SILENT or name == "convert_element_type":
        return False
    return any(_format(v) for v in eqn.invars if not hasattr(v, "val"))


def _carried(eqn: Any, at: int) -> int | None:
    """Which result of a scan's turn is the argument in a place in the next one; None if none is."""
    if eqn.primitive.name != "scan":
        return None
    constants, carries = compat.scan_sizes(eqn.params)
    return at - constants if constants <= at < constants + carries else None


def _kept(closed: Any) -> dict[tuple[Any, Any], int]:
    """Bytes of the float32 values that forward equations make and others read, by place and name.

    A place is that of the program that a variable is in, as `Site.parent`. What a call or a loop
    returns is put down to the equation in it that makes it.
    """
    kept: dict[tuple[Any, Any], int] = {}
    scopes = Scopes()

    def put_down(program: Any, variable: Any, size: int, place: tuple[int, ...]) -> None:
        for at, eqn in enumerate(program.eqns):
            if variable not in eqn.outvars:
                continue
            which = eqn.outvars.index(variable)
            for branch, (part, _, _) in enumerate(inside(eqn)):
                within = compat.close(part)
                inner = compat.opened(within)[0]
                if which >= len(inner.outvars) or hasattr(inner.outvars[which], "val"):
                    continue
                given = [*compat.binders(within)[1]]
                if (same := inner.outvars[which]) not in given:
                    put_down(inner, same, size, (*place, at, branch))
                elif (turn := _carried(eqn, given.index(same))) is not None:
                    put_down(inner, inner.outvars[turn], size, (*place, at, branch))
                elif not hasattr(outer := eqn.invars[given.index(same)], "val"):
                    put_down(program, outer, size, place)
                return
            kept[place, variable] = size
            return

    def look(program: Any, outer: Scope, place: tuple[int, ...]) -> None:
        made: set[Any] = set()
        read: dict[Any, None] = {}
        for at, eqn in enumerate(program.eqns):
            scope = scopes.inside(outer, eqn.source_info.name_stack)
            if scope.direction == FORWARD:
                made.update(v for v in eqn.outvars if _format(v) == "float32")
            else:
                found = (v for v in eqn.invars if not hasattr(v, "val") and v in made)
                read.update(dict.fromkeys(found))
            for branch, (inner, _, _) in enumerate(inside(eqn)):
                look(compat.opened(compat.close(inner))[0], scope, (*place, at, branch))
        for variable in read:
            put_down(program, variable, _bytes(variable), place)

    look(compat.opened(closed)[0], Scope(), ())
    return kept


def explain(
    fn: Any, *args: Any, dtype: Any = None, policy: PolicyLike = None, **kwargs: Any
) -> Report:
    """What runs in which format, and why: a report with a row for each op call site.

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
        dtype: the low format of an autocast that is put around the function, bfloat16 or float16;
            None to put none, unless a policy is given.
        policy: of that autocast.
        kwargs: of the call.

    Returns:
        The report; its rows are worked out when they are asked for.

    Raises:
        TypeError: `fn` is not callable, or `dtype` no dtype.
    """
    if not callable(fn):
        raise TypeError(
            f"explain(fn, *args) needs a function or a module, got {reprlib.repr(fn)}. Give the "
            "function and its arguments, not what it returned."
        )
    if "device" in kwargs and "device" not in _parameters(fn, modules=False):
        raise TypeError(
            f"explain(device={kwargs['device']!r}): in JAX the table is the same on every device. "
            "Leave it out."
        )
    title = getattr(fn, "__name__", None) or type(fn).__name__
    if dtype is not None or policy is not None:
        fn, args = nnx.owned(fn, args)
        fn = autocast(fn, dtype="bfloat16" if dtype is None else dtype, policy=policy)
    closed, record, *_ = traced(fn, args, kwargs)
    lows = [f.low for f in record.calls.values() if f.low]
    return Report(lambda: calls(closed, record), title, lows[0] if lows else "", record.policy)
