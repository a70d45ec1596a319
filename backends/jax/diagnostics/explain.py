"""`explain`: which op runs in which dtype, and why, read off the traced program.

What is reported is what is in the program that runs, forward and backward, with the row that
decided it.
"""

import itertools
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import count_of, is_symbol
from polymp.backends.jax.autocast.api import PolicyLike, autocast
from polymp.backends.jax.autocast.fp8_contraction import In8Bits
from polymp.backends.jax.autocast.frame import LOW_DTYPES
from polymp.backends.jax.autocast.known_functions import LAYOUT, OURS, spelling
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation
from polymp.backends.jax.diagnostics.traced_call import (
    CLOSED,
    Record,
    Scope,
    Site,
    equations,
    op_named,
    planned_call,
    scope_in,
    traced,
)
from polymp.backends.jax.jaxprs import Walk, source
from polymp.backends.jax.modules import nnx
from polymp.diagnostics.call_record import FORWARD, Call
from polymp.diagnostics.report import Report
from polymp.dtypes import FORMATS, widest


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
        TypeError: `fn` is not callable, or `dtype` no dtype.
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


# The calls of a traced program: the equations that became of each, read as one row of a report.
#
# traced program and its record -> equations, each with the name of its call -> calls


def with_sites(
    closed: ClosedProgram, record: Record, counts: Callable[[Atom], object] | None = None
) -> Iterator[tuple[Call, list[Site]]]:
    """The calls of a program, in its order, each with its equations.

    An equation is one if it reads a value that `counts`, or rounds an integer; None for an equation
    that reads floats and is not CLOSED.
    """
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
