"""`audit` and `locate`: how large the numbers of a call are, and where the first bad one is from.

    audited = polymp.jax.audit(train_step)
    params, opt_state = audited(params, opt_state, x)      # what train_step returns, bit for bit
    print(audited.audit)

The function itself runs as it always does. Beside it runs a twin of its traced program, which hands
out nothing but measurements; they are read when somebody asks.
"""

import functools
import math
import reprlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.api import is_array
from polymp.backends.jax.diagnostics.call_site import is_update, source
from polymp.backends.jax.diagnostics.explain import Site, Traced, equations, traced, with_sites
from polymp.backends.jax.diagnostics.instrument import Event, Facts, Twin, is_measured
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, Operand
from polymp.diagnostics.blame import DIVIDING, Node, blame
from polymp.diagnostics.call import BACKWARD, FORWARD, Call
from polymp.diagnostics.magnitudes import BINS, INF, Magnitudes, joined, lower_edge


class _Program(NamedTuple):
    """A call as it was traced, with its twin.

    Attributes:
        traced: the program.
        calls: its calls; by their numbers.
        of_event: the number of the call that an equation is part of, by (parent, id).
        twin: what is run, once it was traced.
        run: the twin, compiled.
    """

    traced: Traced
    calls: list[Call]
    of_event: dict[tuple[Any, int], int]
    twin: Twin
    run: Callable[..., Any]


def _program(fn: Callable[..., Any], args: Any, kwargs: Any) -> _Program:
    found = traced(fn, args, kwargs)
    calls: list[Call] = []
    of_event: dict[tuple[Any, int], int] = {}
    ends: dict[tuple[Any, int], int] = {}
    for call, sites in with_sites(found.closed, found.record):
        of_event.update(((s.parent, id(s.eqn)), len(calls)) for s in sites)
        floats = [s for s in sites if any(is_measured(v.aval) for v in s.eqn.outvars)]
        if floats and not _updates(floats[-1]):
            last = _leaving(floats) if call.direction == BACKWARD else floats[-1:]
            ends.update(((s.parent, id(s.eqn)), len(calls)) for s in last)
        calls.append(call)
    places = {(s.parent, id(s.eqn)): s for s in equations(found.closed)}
    twin = Twin(found.closed, ends, places)
    return _Program(found, calls, of_event, twin, jax.jit(twin.run))


def _updates(site: Site) -> bool:
    """True for what an optimizer or a loss scaler does, be it in a branch of theirs."""
    return is_update(site.written) or is_update(site.eqn.source_info.traceback)


def _leaving(sites: Sequence[Site]) -> list[Site]:
    """The equations of a call whose results are read outside of it: one for each gradient."""
    read = {v for s in sites for v in s.eqn.invars if not hasattr(v, "val")}
    return [s for s in sites if not any(v in read for v in s.eqn.outvars)]


class Audited:
    """A function that is measured whenever it is called; see `audit`.

    Attributes:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self._programs: dict[Hashable, _Program] = {}
        self._measured: list[tuple[_Program, Any, Any]] = []  # with facts and scale
        self._read: tuple[int, Audit] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns for these arguments, which are measured before it runs.

        Raises:
            TypeError: an argument is traced: an audit is of values.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                f"audit({self.fn!r}) was called by code that is traced, where there are no values "
                "to measure. Audit the outermost function: polymp.jax.audit(jax.jit(step))."
            )
        types = tuple(jax.typeof(x) if is_array(x) else _kind(x) for x in leaves)
        key = tree, types, compat.trace_context(), nnx.shape_of((args, kwargs))
        if key not in self._programs:
            self._programs[key] = _program(self.fn, args, kwargs)
            arrays = self._programs[key].traced.arrays
        else:
            arrays = _arrays(self.fn, args, kwargs)
        program = self._programs[key]
        facts = program.run(arrays)
        self._measured.append((program, facts, _scale_of((args, kwargs))))
        return self.fn(*args, **kwargs)

    @property
    def audit(self) -> Audit:
        """What was measured so far. Waits for the device."""
        if self._read is None or self._read[0] != len(self._measured):
            self._read = len(self._measured), _read(self._measured)
        return self._read[1]

    def __enter__(self) -> NoReturn:
        """Say how it is used.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "polymp.jax.audit is no block: call what it returns in place of the function, "
            "audited = polymp.jax.audit(step), and read audited.audit."
        )

    def __exit__(self, *error: object) -> None:
        """Never reached; `with` asks for it first."""

    def __repr__(self) -> str:
        return f"audit({self.fn!r}), {len(self._measured)} calls measured"


def audit(fn: Callable[..., Any]) -> Audited:
    """A function that does what `fn` does, and measures its numbers at every call.

        audited = polymp.jax.audit(train_step)          # jitted or not; with its jax.grad inside
        for x in batches:
            params, opt_state = audited(params, opt_state, x)
        print(audited.audit)
        policy = audited.audit.suggest().apply("amp")

    `fn` itself is called as it is, so its results are what they are without, every bit of them.
    What is measured is a twin of its traced program: every op's result and every gradient, in loops
    and branches too. That program is compiled once for each set of types, and runs before `fn`; a
    call takes three to four times as long. Largest magnitudes, Inf and NaN are of all values;
    shares are of up to 2,048 values of each array, spread evenly, in a `while` loop of its last
    round.

    Gradients are found where the program takes them: they are what its backward pass hands to the
    rest of it. A `GradScaler` among the arguments says by which scale to divide them.

    Args:
        fn: a function of arrays, pytrees and flax modules; the outermost one, which jax.jit or
            jax.grad may be inside of, and not around.

    Returns:
        The function, with the audit as its attribute `audit`.

    Raises:
        TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"audit(fn) needs a function, got {reprlib.repr(fn)}.")
    return Audited(fn)


def locate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Fault | None:
    """The op at which a call's numbers broke: where the first value that is not finite came from.

        if not jnp.isfinite(loss):
            print(polymp.jax.locate(train_step, params, opt_state, batch))

    Runs a twin of the call's program, and follows what is not finite at its end, be it a result, or
    a gradient that a scaler finds and skips, back to the op that made it: because its format's
    range was too small, because a value before it became zero in its format, because an argument
    was not finite, or because the operation itself has no finite result there. The fault names the
    row of the policy that decided, and what the op was given. Infinities that a program means and
    takes up again, such as those of a mask, are no fault.

    `fn` is not called, and nothing is changed; arguments that it would donate are left alone.

    Args:
        fn: as in `audit`.
        args: of the call.
        kwargs: of the call.

    Returns:
        The fault; None if everything is finite.

    Raises:
        TypeError: `fn` is not callable, or an argument is traced.
    """
    if not callable(fn):
        raise TypeError(f"locate(fn, *args) needs a function, got {reprlib.repr(fn)}.")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
        raise TypeError("locate was called by code that is traced, where there are no values.")
    program = _program(fn, args, kwargs)
    facts, peaks = jax.device_get(program.run(program.traced.arrays))
    found = _blamed(program, facts, peaks)
    if found is None:
        return None
    # XLA drops all of the twin but what leads to these operands.
    twin = Twin(program.traced.closed, program.twin.groups, program.twin.sites, found.node)
    look = jax.jit(lambda arrays: twin.run(arrays)[0][found.node].operands)
    operands = np.asarray(look(program.traced.arrays))
    bad = _bad(program.twin.events[found.node], facts[found.node])
    if bad.found:  # in a loop, those of that round
        operands = operands[bad.at]
    return _fault(program, found, operands.reshape(-1, *operands.shape[-2:]), facts)


class _Same(NamedTuple):
    """An object that cannot be hashed, and is only equal to itself."""

    it: Any

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it


def _kind(leaf: Any) -> Any:
    """What stands for an argument that is no array: 1, 1.0, True, 0.0 and -0.0 are not the same."""
    try:
        hash(leaf)
    except TypeError:
        return _Same(leaf)
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf


def _arrays(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """The arrays of a call, in the order in which they were traced."""
    function, given = nnx.owned(fn, args)
    if nnx.among((given, kwargs)):
        _, args, _ = nnx.pure_of(function, given, kwargs, named=True)
        kwargs = {}
    return [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_array(leaf)]


def _scale_of(tree: Any) -> Any:
    """The scale of the first scaler among the arguments; 1 if there is none."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, GradScaler)):
        if isinstance(leaf, GradScaler) and leaf.enabled:
            return leaf.state.scale
    return 1.0


# Reading what was measured


def _read(measured: Sequence[tuple[_Program, Any, Any]]) -> Audit:
    audit = Audit()
    audit.steps = len(measured)
    results: dict[Any, list[Measured]] = {}
    gradients: dict[str, list[Measured]] = {}
    for program, facts, scale in measured:
        facts, peaks = jax.device_get(facts)
        audit.scale = float(np.asarray(scale))
        handed = _handed(program)
        for m, number in _results(program, facts, audit.scale):
            results.setdefault(m[:-2], []).append(m)
            for name in handed.get(number, ()):
                gradient = m._replace(op="gradient", spelling="", module=name, source="", row=None)
                gradients.setdefault(name, []).append(gradient)
        if audit.fault is None:
            found = _blamed(program, facts, peaks)
            if found is not None:
                audit.fault = _fault(program, found, None, facts, peaks)
    audit.results = [_together(many) for many in results.values()]
    audit.gradients = [_together(many) for many in gradients.values()]
    return audit


def _together(many: Sequence[Measured]) -> Measured:
    return many[0]._replace(magnitudes=joined(m.magnitudes for m in many))


def _results(
    program: _Program, facts: Sequence[Facts], scale: float
) -> Iterator[tuple[Measured, int]]:
    """What the calls of a program made, each with the number of its event."""
    for number, (event, fact) in enumerate(zip(program.twin.events, facts, strict=True)):
        if event.group is None or not _ran(fact):
            continue
        call = program.calls[event.group]
        magnitudes = _magnitudes(event, fact)
        if call.direction == BACKWARD and scale not in (0.0, 1.0):
            magnitudes = magnitudes.scaled(1 / scale)
        yield Measured(
            call.op, call.spelling, call.module, call.source, call.direction, call.region,
            call.row, event.format, magnitudes,
        ), number  # fmt: skip


def _ran(fact: Facts) -> bool:
    """False of a branch that was not taken, and of a loop without a round."""
    return bool(np.any((fact.peak >= 0) | np.isnan(fact.peak)))


def _magnitudes(event: Any, fact: Facts) -> Magnitudes:
    sample = fact.sample.reshape(-1)
    bins = np.bincount(sample, minlength=BINS + 1)[:BINS]
    peaks = fact.peak.reshape(-1)
    peaks = peaks[(peaks >= 0) | np.isnan(peaks)]  # of what ran
    largest = float(peaks[np.isfinite(peaks)].max(initial=0.0))
    if not np.isfinite(peaks).all():  # the peak of such an array says no more; its bins do
        largest = max([largest, *(lower_edge(int(b)) for b in np.flatnonzero(bins[:INF]))])
    lost = fact.lost.reshape(-1, 3) if fact.lost.size else np.zeros((1, 3))
    return Magnitudes(
        math.prod(event.site.eqn.outvars[0].aval.shape) * event.site.times,
        int(bins.sum()),
        tuple(bins.tolist()),
        largest,
        bool(np.isinf(peaks).any() or (np.isnan(peaks).any() and bins[INF] > 0)),
        bool(np.isnan(peaks).any()),
        float(lost[:, 1].mean()),
        float(lost[:, 2].mean()),
    )


class _Bad(NamedTuple):
    """Where an event's result was first not finite.

    Attributes:
        found: "Inf", "NaN", or "" if it never was.
        first: the round of each loop around it.
        at: the place of that round in its facts.
    """

    found: str = ""
    first: tuple[int, ...] = ()
    at: tuple[int, ...] = ()


def _bad(event: Event, fact: Facts) -> _Bad:
    peaks = np.asarray(fact.peak)
    found = []
    for at in map(tuple, np.argwhere(~np.isfinite(peaks))):
        scans, whiles = iter(at), iter(fact.when[at])
        rounds = tuple(int(next(whiles if counts else scans)) for _, counts in event.loops)
        found.append(_Bad("NaN" if np.isnan(peaks[at]) else "Inf", rounds, at))
    return min(found, key=lambda bad: bad.first, default=_Bad())


def _blamed(program: _Program, facts: Sequence[Facts], peaks: Sequence[Any]) -> Any:
    names = _names(program)
    spoiled = {at: names[at] for at, peak in enumerate(peaks) if not np.isfinite(peak)}
    nodes = []
    for event, fact in zip(program.twin.events, facts, strict=True):
        bad, first, at = _bad(event, fact)
        call = _call_of(program, event.site)
        burst = (
            bool(bad) and event.format == "float16" and (call is None or call.op not in DIVIDING)
        )
        vanished = 0.0
        if fact.lost.size:
            burst = bool(bad) and bool(np.isfinite(fact.lost[at][0]))
            vanished = float(fact.lost[..., 2].max())
        name = event.site.eqn.primitive.name
        nodes.append(
            Node(
                (*event.inputs, *event.later),
                bad,
                event.format,
                burst,
                vanished,
                True,
                (),
                next((spoiled[at] for at in event.outside if at in spoiled), ""),
                event.given,
                bool(event.format),
                name == "is_finite",
                name == "convert_element_type",
                tuple(place for place, _ in event.loops),
                first,
                "" if call is None else call.op,
            )
        )
    return blame(nodes)


def _call_of(program: _Program, site: Site) -> Call | None:
    number = program.of_event.get((site.parent, id(site.eqn)))
    if number is not None:
        return program.calls[number]
    if site.eqn.primitive.name != "shard_map":
        return None
    direction, at = site.scope.direction, source(site.written)
    return Call(
        "jax", "shard_map", "jax:shard_map", site.scope.module, at, direction, "", None, (), "", ()
    )


def _fault(
    program: _Program,
    found: Any,
    operands: Any,
    facts: Sequence[Facts],
    peaks: Sequence[Any] = (),
) -> Fault:
    event, first = program.twin.events[found.node], program.twin.events[found.first]
    call, other = _call_of(program, event.site), _call_of(program, first.site)
    assert call is not None, "what computes with floats is part of a call"
    why = found.why
    if event.site.eqn.primitive.name == "convert_element_type" and found.kind == "overflow":
        why = f"an input of it is beyond {event.format}'s largest number when it is cast"
    became, *_ = _bad(first, facts[found.first])
    if other is not None and found.first != found.node:
        at = f" in {other.module}" if other.module else ""
        became = f"{became}, of {other.op}{at} {other.source}".rstrip()
    return Fault(
        call.op,
        call.spelling,
        call.module,
        call.source,
        call.direction,
        found.kind,
        event.format,
        call.row,
        tuple(_operands(program, event, operands, peaks)),
        became,
        why,
        call.region,
    )


def _operands(
    program: _Program, event: Any, measured: Any, peaks: Sequence[Any]
) -> Iterator[Operand]:
    """What an equation was given; where it was not measured, the largest magnitudes alone."""
    names = {v: n for v, n in zip(_inputs(program), _names(program), strict=True)}
    at = 0
    for v in event.site.eqn.invars:
        if hasattr(v, "val") or not is_measured(v.aval):
            continue
        format, shape, name = v.aval.dtype.name, tuple(v.aval.shape), names.get(v, "")
        if measured is not None:
            rounds = measured[:, at]
            smallest, largest = float(rounds[:, 0].min()), float(rounds[:, 1].max())
            zeros, inf, nan = rounds[:, 2:].mean(0).tolist()
            at += 1
            smallest = smallest if math.isfinite(smallest) else 0.0
            yield Operand(format, shape, smallest, largest, zeros, inf, nan, name)
            continue
        peak = float(peaks[_names(program).index(name)]) if name else 0.0
        largest = peak if math.isfinite(peak) else 0.0
        inf, nan = float(math.isinf(peak)), float(math.isnan(peak))
        yield Operand(format, shape, 0.0, largest, 0.0, inf, nan, name)


def _inputs(program: _Program) -> Sequence[Any]:
    """The variables of a program's inputs, and after them those of its constants."""
    constvars, invars = compat.binders(program.traced.closed)
    return *invars, *constvars


def _names(program: _Program) -> list[str]:
    """What the caller would call the inputs, and words for the constants."""
    constvars, _ = compat.binders(program.traced.closed)
    captured = [f"a captured array ({v.aval.str_short()})" for v in constvars]
    return [*program.traced.names, *captured]


# Gradients


def _handed(program: _Program) -> dict[int, list[str]]:
    """What the backward pass hands to the rest of a program, by event, with names."""
    twin = program.twin
    found: dict[int, list[str]] = {}
    for value, name in zip(twin.results, program.traced.results, strict=True):
        if len(value.events) == 1:
            (number,) = value.events
            if twin.events[number].site.scope.direction == BACKWARD:
                found.setdefault(number, []).append(name)
    names = _by_call(program)
    for number in sorted(twin.handed - found.keys()):
        event = twin.events[number]
        shape = tuple(event.site.eqn.outvars[0].aval.shape)
        named = names.get((event.site.scope.call, shape), [])
        if named:  # a norm's two parameters have one shape, and one name here
            found[number] = [_shared(named)]
    return found


def _shared(names: Sequence[str]) -> str:
    """What names have in common: "p['norm']" of its scale and its bias."""
    same = 0
    while all(name[: same + 1] == names[0][: same + 1] for name in names) and same < len(names[0]):
        same += 1
    return names[0][:same].rstrip("['.") if len(names) > 1 else names[0]


def _by_call(program: _Program) -> dict[Any, list[str]]:
    """Names of the parameters that the forward of each call reads, by its name and their shapes."""
    twin, found = program.twin, dict[Any, list[str]]()
    shapes, names = [tuple(v.aval.shape) for v in _inputs(program)], _names(program)
    for event in twin.events:
        if event.site.scope.direction == FORWARD and event.site.scope.call:
            for at in event.outside:
                named = found.setdefault((event.site.scope.call, shapes[at]), [])
                if names[at] not in named:
                    named.append(names[at])
    return found
