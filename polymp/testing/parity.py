"""`assert_parity`: a torch function and a JAX function compared at the same inputs.

    in float32, then in the low dtype:
        run both -> structure -> dtypes, call by call -> probes -> values and gradients
                                                           -> or the first op that differs

The backends' `perturb` runs the functions and returns numpy arrays; `rounding` has the tolerances,
and `align` finds the calls that belong together.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from polymp import backends
from polymp.diagnostics import trees
from polymp.diagnostics.call_record import Call
from polymp.diagnostics.rounding import Gap, Run, gap, spread
from polymp.dtypes import FORMATS
from polymp.rules.policy_files import Source, load
from polymp.testing import align
from polymp.testing.align import Parted
from polymp.testing.parity_inputs import arguments, checked_dtype, cotangent, widened
from polymp.testing.parity_results import Parity, ParityError

_NAMES = ("torch", "jax")
_KINDS = ("results", "gradients")  # of the arrays of a run


def assert_parity(
    torch_fn: Callable[..., Any],
    jax_fn: Callable[..., Any],
    inputs: Sequence[object] | Mapping[str, object],
    policy: Source = "amp",
    dtype: object = "bfloat16",
    grads: bool = True,
    *,
    probes: int = 16,
    float32_first: bool = True,
) -> Parity:
    """Assert that a torch function and a JAX function compute the same in the same dtypes.

        assert_parity(torch.softmax, jax.nn.softmax, [x, -1], dtype="float16")

    Both are called with the same numbers: first in float32, without a region, and then under the
    same policy in the low dtype. Rounding to bfloat16 hides a gelu by tanh in place of one by erf,
    and an epsilon of 1e-3 in place of 1e-5; float32 tells them apart. The error says in which of
    the two the functions differ.

    Compared are, in this order, the results' structure, shapes and dtypes; the dtypes, call by
    call; the values; and the gradients of `sum(result * c)` with respect to the float inputs, for a
    fixed `c` from a normal distribution.

    Dtypes: the forward calls are aligned by op and run dtype. All matrix products are one op, as
    in JAX. A call that only one side has is no difference, because the frameworks split ops in
    different ways: a layer's bias is an addition of its own in JAX, gelu one call in torch. A call
    that both have in the same place, in other dtypes, is a difference if the policy has a row for
    it; without a row, if JAX runs it in a narrower dtype. A cast to a low dtype that only one
    program has is a difference, too, and so is another recipe of a product in 8 bits.

    Values: an array may be off by

        tolerance = sqrt(2 ln(2 n / 1e-6)) * max sqrt(s_torch^2 + s_jax^2)

    where n is how many numbers it has, and s the root mean square change of a number when every
    op's result is moved by an even share of its rounding: of the unit roundoff of its dtype; for
    functions such as exp, of three more of float32, in which they are computed; and for a sum of k
    terms, of sqrt(k / 3) float32 roundoffs of the root of the sum's square and of its terms'
    squares. `polymp.diagnostics.rounding` has the derivation, its sources, and what in it is a
    model and not a bound. `probes` more runs of each framework measure s, with fixed seeds, so that
    the same call has the same tolerance. Errors and tolerances are relative to the largest
    magnitude in torch's array. Integers and truth values have to be equal, but for those that a
    rounding can change.

    Both functions have to be deterministic. torch runs on the CPU, eagerly; the JAX function is
    traced and compiled for the default device.

    Args:
        torch_fn: takes and returns tensors, in any nesting of tuples, lists and dicts.
        jax_fn: the same, of JAX arrays.
        inputs: the positional arguments: a list or tuple of numpy arrays, numbers, and nestings of
            them; or a dict of keyword arguments. Arrays may be float64, which becomes float32,
            float32, float16, bfloat16, integers and bool. Numbers, strings and None are passed on
            as they are.
        policy: of the regions.
        dtype: the low dtype of the regions, bfloat16 or float16, by name, alias or as a dtype
            object; None or float32 for no region at all.
        grads: False to compare no gradients.
        probes: runs that measure the tolerance in each framework; 2 or more.
        float32_first: False to compare in the low dtype alone, as for functions that differ in
            float32 by intent. The first comparison gets low inputs in float32.

    Returns:
        The arrays that were compared, with errors and tolerances.

    Warns:
        UserWarning: there are no gradients to compare, because no input has floats.

    Raises:
        ParityError: they differ; its text has the first op that differs, and in which dtype.
        TypeError: `inputs` are no sequence or dict, or hold something else; a result is no array;
            `dtype` is neither a string nor a dtype.
        ValueError: `dtype` is another dtype, an integer is too large for JAX, an input is empty or
            not finite, or `probes` is too small.
        BackendMissingError: torch or JAX is not installed.
    """
    low = checked_dtype(dtype)
    if probes < 2:
        raise ValueError(f"assert_parity(): probes={probes!r} is too few. Write 2 or more.")
    for name, fn in zip(_NAMES, (torch_fn, jax_fn), strict=True):
        if not callable(fn):
            raise TypeError(f"assert_parity needs a {name} function, got {fn!r}.")
    args, kwargs = arguments(inputs)
    for name in _NAMES:
        backends.get(name)
    load(policy)  # a policy that cannot be read fails before anything runs
    first: tuple[Gap, ...] = ()
    if low is not None and float32_first:
        wide: tuple[Any, Any] = widened((args, kwargs))
        try:
            first = _Pair(torch_fn, jax_fn, *wide, None, policy, grads, probes).compared().gaps
        except ParityError as error:
            last = f"{low} was not compared. float32_first=False compares in {low} alone."
            said = _said(error, "float32", "in float32, without a region: ", last)
            raise ParityError(*said) from None
    try:
        found = _Pair(torch_fn, jax_fn, args, kwargs, low, policy, grads, probes).compared()
    except ParityError as error:
        start = f"in {low}, though not in float32: " if first else ""
        raise ParityError(*_said(error, low or "float32", start)) from None
    if grads and all(x.dtype.kind in "iub" for x in trees.arrays((args, kwargs)).values()):
        warnings.warn(_NO_GRADIENTS, stacklevel=2)
    return found._replace(float32=first)


_NO_GRADIENTS = (
    "assert_parity compared no gradients: no input has floats. Give the "
    "parameters as an input, a dict of arrays by name, as for torch.func.functional_call(model, "
    "params, ids); or write grads=False."
)


def _said(
    error: ParityError, dtype: str, start: str, last: str = ""
) -> tuple[str, str, str, Sequence[Gap], str]:
    """The arguments of the same error with the dtype in which it was found."""
    text = "\n\n".join([f"{start}{error}", *([last] if last else [])])
    return text, error.op, error.side_by_side, error.gaps, dtype


class _Pair:
    """Two functions at the same inputs."""

    def __init__(
        self,
        torch_fn: Callable[..., Any],
        jax_fn: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        dtype: str | None,
        policy: Source,
        grads: bool,
        probes: int,
    ) -> None:
        from polymp.backends.jax.diagnostics import perturb as in_jax
        from polymp.backends.torch.diagnostics import perturb as in_torch

        self._probes = probes
        seeds = cotangent if grads else None
        given = args, kwargs, dtype, policy, seeds

        self._torch = in_torch.Program(torch_fn, *given)
        self._in_jax = partial(in_jax.Program, jax_fn, *given)

    def compared(self) -> Parity:
        with self._torch.watch:
            self._jax = self._in_jax()
            one, other = self._torch.run(), self._jax.run()
        calls = tuple([s.call for s in run.steps] for run in (one, other))
        _same_structure(one, other)
        parted = align.first_parted(*calls)
        if parted is not None:
            raise _error(f"run {parted.why}", parted)
        if one.dtypes != other.dtypes:
            raise self._other_results(one, other, calls)
        torch_moved = [self._torch.probe(seed) for seed in range(1, self._probes + 1)]
        jax_moved = self._jax.probes(self._probes)
        gaps = tuple(_gaps(one, other, torch_moved, jax_moved))
        if any(found.part for found in gaps):
            raise self._off(one, other, gaps)
        forward = tuple(len(align.compared(side)) for side in calls)
        return Parity(gaps, one.dtypes, (forward[0], forward[1]))

    def _other_results(self, one: Run, other: Run, calls: Sequence[Sequence[Call]]) -> ParityError:
        """The results have other dtypes, and no call has."""
        path = next(path for path in one.dtypes if one.dtypes[path] != other.dtypes[path])
        said = f"{_named('result', path)} is {one.dtypes[path]} in torch and "
        forward = [align.compared(side) for side in calls]
        wanted = one.dtypes[path], other.dtypes[path]
        last = [
            next((c for c in reversed(side) if dtype in c.outputs), None)
            for side, dtype in zip(forward, wanted, strict=True)
        ]
        return _error(f"{said}{other.dtypes[path]} in JAX", Parted(last[0], last[1], ""))

    def _off(self, one: Run, other: Run, gaps: Sequence[Gap]) -> ParityError:
        """Some values differ: find the first op whose values do."""
        with self._torch.watch:
            kept = self._torch.run(keep=True)
            moved = [self._torch.run(seed, keep=True) for seed in range(1, 5)]
        theirs = self._jax.kept()
        at = align.first_off(kept, moved, theirs)
        worst = next(place for place, found in enumerate(gaps) if found.part)
        if at is None:  # each step's own values are as in JAX: the step that made the array
            names = [f"{kind}{p}" for kind in _KINDS for p in getattr(one, kind)]
            at = kept.makers.get(names[worst])
        if at is None:
            return _error(f"do not return the same: {gaps[worst]}", None, gaps)
        call = kept.steps[at].call
        other_call = align.partner(at, kept, moved, theirs)
        return _error("compute other values", Parted(call, other_call, ""), gaps)


def _gaps(
    one: Run, other: Run, torch_moved: Sequence[Run], jax_moved: Sequence[Run]
) -> Iterator[Gap]:
    import numpy as np

    for kind in _KINDS:
        what = "result" if kind == "results" else "gradient of input"
        for path, ours in getattr(one, kind).items():
            theirs = getattr(other, kind)[path]
            name = _named(what, path)
            sides = [
                (base, [getattr(run, kind)[path] for run in moved])
                for base, moved in ((ours, torch_moved), (theirs, jax_moved))
            ]
            if ours.dtype.kind == "f":
                yield gap(name, ours, theirs, np.hypot(*(spread(*side) for side in sides)))
            else:  # an integer may differ where a rounding changes it in a probe
                turns = [x != base for base, probes in sides for x in probes]
                wrong = (ours != theirs) & ~np.any(turns, 0)
                yield Gap(name, float(np.count_nonzero(wrong)), 0.0, 1.0)


def _same_structure(one: Run, other: Run) -> None:
    if [*one.results] != [*other.results] and {*one.results} != {*other.results}:
        raise ParityError(
            "the functions return other structures: "
            f"{_listed(one.results)} in torch, {_listed(other.results)} in JAX."
        )
    for path, x in one.results.items():
        shape = other.results[path].shape
        if x.shape != shape:
            raise ParityError(
                f"{_named('result', path)} has shape {x.shape} in torch and {shape} in JAX."
            )
    kinds = [{p: f if f in FORMATS else "" for p, f in run.dtypes.items()} for run in (one, other)]
    for path in one.dtypes:
        both = one.dtypes[path], other.dtypes[path]
        if (not kinds[0][path]) != (not kinds[1][path]) or ("bool" in both and both[0] != both[1]):
            raise ParityError(
                f"{_named('result', path)} is {both[0]} in torch and {both[1]} in JAX."
            )
    for run in (one, other):  # integers have 64 bits in torch and 32 in JAX
        run.dtypes.update({p: "int" for p, f in run.dtypes.items() if "int" in f})


def _listed(results: Mapping[str, Any]) -> str:
    return ", ".join(_named("result", path) for path in results) or "nothing"


def _named(what: str, path: str) -> str:
    return f"{what}{path.removeprefix('[0]') if what != 'result' else path}"


def _error(what: str, parted: Parted | None, gaps: Sequence[Gap] = ()) -> ParityError:
    """The error: the first op that differs, then the arrays that were compared."""
    if parted is None:
        lines = [f"the two functions {what}", *map(str, gaps)]
        return ParityError("\n".join(lines), gaps=gaps)
    table = align.side_by_side(parted, ("torch", "jax"))
    start = f"the two functions {what}" if "result" not in what[:6] else what
    lines = [f"{start}. The first op that differs is {parted.op}:", "", table]
    if gaps:
        lines += ["", "compared:", *(f"  {found}" for found in gaps)]
    return ParityError("\n".join(lines), parted.op, table, gaps)
