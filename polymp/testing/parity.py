"""`assert_parity`, `assert_close`: two functions compared at the same inputs.

    in float32, then in the low dtype:
        run both -> structure -> dtypes, call by call -> probes -> values and gradients
                                                           -> or the first op that differs

The backends' `perturb` runs the functions and returns numpy arrays; `rounding` has the tolerances.
The first op that differs is that of `polymp.compare`, of records of both functions.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from polymp import backends, text_table
from polymp._api import framework_in, framework_of
from polymp.diagnostics import rounding
from polymp.diagnostics.alignment import blocks, shared_name
from polymp.diagnostics.audit_records import Measured
from polymp.diagnostics.call_record import FORWARD, Call, ruled
from polymp.diagnostics.rounding import Gap, Run, gap, spread
from polymp.diagnostics.tables import OUTSIDE
from polymp.dtypes import FORMATS
from polymp.dtypes import name as dtype_name
from polymp.errors import brief, escaped
from polymp.rules.policy_files import Source, load
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary

_NAMES = ("torch", "jax")


class Parity(NamedTuple):
    """The result of an assertion: errors and tolerances of all arrays, which are within.

    Attributes:
        gaps: each result and gradient: error and tolerance.
        dtypes: of the results, by path.
        calls: how many forward calls each side made.
        float32: the same of the comparison in float32 that came first; () if there was none.
    """

    gaps: tuple[Gap, ...]
    dtypes: dict[str, str]
    calls: tuple[int, int]
    float32: tuple[Gap, ...] = ()

    @property
    def margin(self) -> float:
        """How many times larger the tolerance is than the error, where that is least."""
        return min((gap.margin for gap in self.gaps), default=float("inf"))

    def __str__(self) -> str:
        return escaped("\n".join(map(str, self.gaps)))


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
    same policy in the low dtype, whose rounding hides a gelu by tanh in place of one by erf, or an
    epsilon of 1e-3 in place of 1e-5. Compared are, in this order, the results' structure, shapes
    and dtypes; the dtypes, call by call; the values; and the gradients of `sum(result * c)` with
    respect to the float inputs, for a fixed `c` from a normal distribution, in 8 bits.

    Dtypes: the forward calls are aligned by op and run dtype; all matrix products are one op. A
    call that only one side has is no difference, because the frameworks split ops in different
    ways. A call that both have in the same place, in other dtypes, is one if the policy has a row
    for it; without a row, if JAX runs it in a narrower dtype. So is a cast to a low dtype that only
    one program has, and another recipe of a product in 8 bits.

    Values may be off by what rounding explains, which is measured: `probes` more runs of each
    framework, with fixed seeds, move each op's result by a share of its rounding.
    `polymp.diagnostics.rounding` has the formula, its sources, and what in it is a model and not a
    bound. Errors and tolerances are relative to the largest magnitude in torch's array. Integers
    and truth values have to be equal, but for those that a rounding can change.

    Both functions have to be deterministic. torch runs on the CPU, eagerly; the JAX function is
    traced and compiled for the default device.

    Args:
        torch_fn: takes and returns tensors and numbers, in any nesting of tuples, lists and dicts.
        jax_fn: the same, of JAX arrays.
        inputs: the positional arguments: a list or tuple of arrays, numbers, and nestings of
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
        TypeError: `torch_fn` is of JAX, or `jax_fn` of torch; `inputs` are no sequence or dict, or
            hold something else; a result is no array or number, or there is none; `dtype` is
            neither a string nor a dtype.
        ValueError: `dtype` is another dtype, a function has a region of another low dtype, an
            integer is too large for JAX, an input is empty or not finite, or `probes` is too small.
        BackendMissingError: torch or JAX is not installed.
    """
    low = checked("assert_parity", dtype, probes, torch_fn=torch_fn, jax_fn=jax_fn)
    for name, fn in zip(_NAMES, (torch_fn, jax_fn), strict=True):
        if (other := framework_in(fn)) not in (None, name):
            raise TypeError(
                f"assert_parity: {name}_fn is of {other}: {brief(fn)}. Write "
                "assert_parity(torch_fn, jax_fn, inputs)."
            )
    given = arguments(inputs)
    for name in _NAMES:
        backends.get(name)
    load(policy)  # a policy that cannot be read fails before anything runs
    seeds = cotangent if grads else None

    def compared_in(dtype: str | None, given: Any, start: str, last: str = "") -> Parity:
        call = *given, dtype, policy, seeds
        programs = ("torch", torch_fn, *call), ("jax", jax_fn, *call)
        with found_in(dtype or "float32", start, last):
            return compare_programs(programs, _NAMES, probes)

    first: tuple[Gap, ...] = ()
    if low is not None and float32_first:
        last = f"{low} was not compared. float32_first=False compares in {low} alone."
        first = compared_in(None, widened(given), "in float32, without a region: ", last).gaps
    found = compared_in(low, given, f"in {low}, though not in float32: " if first else "")
    if grads:
        warn_without_floats(given, "assert_parity")
    return found._replace(float32=first)


def assert_close(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: object,
    dtype: object = None,
    policy: Source | None = None,
    grads: bool = True,
    probes: int = 16,
    framework: str | None = None,
) -> Parity:
    """Assert that two functions of one framework compute the same, up to rounding.

        assert_close(fused_softmax, torch.softmax, x, -1)
        assert_close(mlp, mlp, params, x, dtype="bfloat16")

    `fn` runs in a region of the dtype, `reference` in float32 and outside of any; both get the same
    inputs. Values and gradients are compared as by `assert_parity`, dtypes are not.

    Both functions have to be deterministic; torch's random numbers begin alike in every run, so
    that dropout has one mask; `rand_like` of tensors of other dtypes draws other numbers. What a
    training step of torch changes is put back after each run; for one that calls backward() itself,
    write grads=False.

    Args:
        fn: takes and returns arrays and numbers, in any nesting of tuples, lists and dicts.
        reference: the same.
        args: the positional arguments of both: torch tensors, JAX arrays and random keys, numpy
            arrays, numbers, and nestings of them. float64 becomes float32; `reference` gets low
            arrays in float32.
        dtype: the low dtype of the region that `fn` runs in, bfloat16 or float16, by name, alias
            or as a dtype object; None or float32 for no region.
        policy: of that region; None for that of a region without one: torch's own table for the
            device, and "amp" in JAX.
        grads: False to compare no gradients.
        probes: runs of each function that measure the tolerance; 2 or more.
        framework: "torch" or "jax"; None to find it from the functions and the arguments.

    Returns:
        The arrays that were compared, with errors and tolerances.

    Warns:
        UserWarning: there are no gradients to compare, because no input has floats.

    Raises:
        ParityError: they differ; its text has the first op that differs, if one can be named.
        TypeError: `fn` or `reference` is not callable, an argument or a result is something else,
            or nothing says which framework this is for.
        ValueError: `dtype` is another dtype, an input is empty or not finite, `probes` is too
            small, `fn` has a region of another low dtype, or there is no such framework.
        BackendMissingError: the framework is not installed.
    """
    low = checked("assert_close", dtype, probes, fn=fn, reference=reference)
    backend = framework_of((fn, reference, args), framework, "assert_close()")
    if (other := framework_in((reference, fn))) not in (None, backend):
        raise TypeError(
            f"assert_close compares two functions of one framework, got one of {backend} and one "
            f"of {other}. assert_parity compares torch and JAX."
        )
    if policy is not None:
        load(policy)  # one that cannot be read fails before anything runs
    elif backend == "jax":
        policy = "amp"
    given, seeds = arguments(args, both=False), cotangent if grads else None
    programs = (
        (backend, fn, *given, low, policy, seeds),
        (backend, reference, *widened(given), None, policy, seeds),
    )
    with found_in(low or "float32", f"in {low}: " if low else ""):
        found = compare_programs(programs, ("fn", "reference"), probes, same_dtypes=False)
    if grads:
        warn_without_floats(given, "assert_close")
    return found


# The results: the arrays that were compared, and the error if they differ.


class ParityError(AssertionError):
    """Two functions differ in their structure, dtypes, values or gradients."""

    def __init__(
        self, text: str, op: str = "", side_by_side: str = "", gaps: Sequence[Gap] = ()
    ) -> None:
        if op:
            text += f". The first op that differs is {op}:\n\n{side_by_side}"
        if gaps:
            text = "\n".join((f"{text}\n\ncompared:", *(f"  {found}" for found in gaps)))
        super().__init__(text)
        # In which they differ: that of the regions, or "float32".
        self.dtype: str = ""
        # Name of the first op that differs, in the vocabulary, and its calls on both sides as a
        # table; "" if it is not known, as where results have other shapes.
        self.op: str = op
        self.side_by_side: str = side_by_side
        # The arrays that were compared, with errors and tolerances; () where dtypes differ.
        self.gaps: tuple[Gap, ...] = tuple(gaps)


@contextmanager
def found_in(dtype: str, start: str, last: str = "") -> Iterator[None]:
    """A context of a comparison in a dtype, whose errors have it, and say more of it."""
    try:
        yield
    except ParityError as error:
        error.dtype = dtype
        error.args = (f"{start}{error}" + (f"\n\n{last}" if last else ""),)
        raise error from None


def program(backend: str, *call: Any) -> Any:
    """The `Program` of a backend's `perturb`: of a function and its arguments, cotangents last."""
    return importlib.import_module(f"polymp.backends.{backend}.diagnostics.perturb").Program(*call)


def compare_programs(
    programs: tuple[Any, Any], names: tuple[str, str], probes: int, *, same_dtypes: bool = True
) -> Parity:
    """Compare what two programs return and, if asked, the dtypes of their calls."""
    first, second = (program(*each) for each in programs)
    (one, written), (other, theirs) = first.ran(), second.ran()
    for (*_, low, _, _), run in zip(programs, (written, theirs), strict=True):
        refuse_own_region(run.calls, low)
    _same_structure(one, other, names)
    if same_dtypes:
        if parted := first_parted(written.calls, theirs.calls):
            *calls, why = parted
            raise ParityError(f"the two functions run {why}", *_called(calls, names))
        for path, ours in one.dtypes.items():
            if ours != other.dtypes[path]:  # and no call has other dtypes
                raise ParityError(f"result{path} is {_both(ours, other.dtypes[path], names)}.")
    moved = (written, first.probes(probes)), (theirs, second.probes(probes))
    gaps = tuple(_gaps(one, other, *moved))
    if any(found.part for found in gaps):
        text = "the two functions compute other values"
        raise ParityError(text, *_first_off(programs, names), gaps)
    return Parity(gaps, one.dtypes, (len(compared(written.calls)), len(compared(theirs.calls))))


_PROBES = 16  # of a record: few leave a spread uncertain


def _first_off(programs: tuple[Any, Any], names: tuple[str, str]) -> tuple[str, str]:
    """The first op whose values differ, by `compare`, and its calls as a table; "" without one."""
    from polymp.diagnostics.compare import beside, compare
    from polymp.diagnostics.record_pairs import ALONE, UNEXPLAINED
    from polymp.errors import RecordError

    # Where gradients agree, they vouch for results that do not, as of exp and expm1.
    for seeds in dict.fromkeys((programs[0][-1], None)):
        records = []
        for (backend, *call, _), name in zip(programs, names, strict=True):
            of = importlib.import_module(f"polymp.backends.{backend}.diagnostics.record")
            with warnings.catch_warnings(action="ignore"):  # as of a step that has no call
                made = program(backend, *call, seeds).record(of.record, _PROBES)
            records.append(made._replace(name=name))
        try:
            found = compare(*records)
        except RecordError:  # one has no call at all
            return "", ""
        for row in (found.first, *found.rows):
            if row is not None and row.array.run and row.verdict in (ALONE, UNEXPLAINED):
                return row.array.name, "\n".join(beside(names, row))
    return "", ""


def _both(one: object, other: object, names: tuple[str, str], joint: str = " and ") -> str:
    """The values of two sides: "float32 in torch and bfloat16 in JAX"."""
    here, there = (name.replace("jax", "JAX") for name in names)
    return f"{one} in {here}{joint}{other} in {there}"


def _gaps(one: Run, other: Run, *moved: tuple[Run, Sequence[Run]]) -> Iterator[Gap]:
    """Compare the arrays of two runs; each is `moved` from a run, which may not be the same."""
    import numpy as np

    for kind, what in (("results", "result"), ("gradients", "gradient of input")):
        for path, ours in getattr(one, kind).items():
            theirs = getattr(other, kind)[path]
            name = what + (path if kind == "results" else path.removeprefix("[0]"))
            sides = [
                (getattr(base, kind)[path], [getattr(run, kind)[path] for run in runs])
                for base, runs in moved
            ]
            if ours.dtype.kind == "f":
                yield gap(name, ours, theirs, np.hypot(*(spread(*side) for side in sides)))
            else:  # an integer may differ where a rounding changes it in a probe
                turns = [x != base for base, probes in sides for x in probes]
                off = np.abs(np.subtract(ours, theirs, dtype=np.int64))
                largest = float(np.abs(ours.astype(np.int64)).max(initial=0)) or 1.0
                error = float(off.max(initial=0, where=~np.any(turns, 0)))
                yield Gap(name, error / largest, 0.0, largest)


def _same_structure(one: Run, other: Run, names: tuple[str, str]) -> None:
    if one.results.keys() != other.results.keys():
        here, there = (", ".join(f"result{p}" for p in run.results) for run in (one, other))
        both = _both(here, there, names, ", ")
        raise ParityError(f"the functions return other structures: {both}.")
    for path, x in one.results.items():
        shape = other.results[path].shape
        if x.shape != shape:
            raise ParityError(f"result{path} has shape {_both(x.shape, shape, names)}.")
    for path, dtype in one.dtypes.items():
        if len({(f in FORMATS, f == "bool") for f in (dtype, other.dtypes[path])}) > 1:
            raise ParityError(f"result{path} is {_both(dtype, other.dtypes[path], names)}.")
    for run in (one, other):  # integers have 64 bits in torch and 32 in JAX
        run.dtypes.update({p: "int" for p, f in run.dtypes.items() if "int" in f})


# The inputs: numbers that both frameworks can be given, checked.


def checked(of: str, dtype: object, probes: int, **functions: object) -> str | None:
    """Check arguments of an assertion; return the full name of its low dtype, None for none."""
    name = "float32" if dtype is None else dtype_name(dtype, (*LOW, "float32"), f"{of}(): dtype")
    if probes < 2:
        raise ValueError(f"{of}(): probes={probes!r} is too few. Write 2 or more.")
    for argument, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"{of}: {argument} is no function: {brief(function)}. Write "
                f"{of}({', '.join(functions)}, ...)."
            )
    return None if name == "float32" else name


def refuse_own_region(calls: Iterable[Call | Measured], low: str | None) -> None:
    """Refuse a function whose own region, of another low dtype, holds for all that it did."""
    ran = {call.region for call in calls if call.direction == FORWARD}
    if low and low not in ran and (own := ", ".join(sorted(ran - {""}))):
        raise ValueError(
            f"the function has a region of its own in {own}, so that nothing of it ran in {low}. "
            f"Give the function without that region, or write dtype={own!r}."
        )


def warn_without_floats(given: object, of: str) -> None:
    """Warn the caller of an assertion if no array of prepared inputs has floats."""
    if all(getattr(x.dtype, "kind", "") in "iub" for x in rounding.arrays(given).values()):
        warnings.warn(
            f"{of} compared no gradients: no input has floats. Give the parameters as an input, a "
            "dict of arrays by name, as for torch.func.functional_call(model, params, ids); or "
            "write grads=False.",
            stacklevel=3,
        )


def arguments(inputs: object, *, both: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of the calls, in `both` frameworks or one."""
    tree: tuple[Any, dict[str, Any]] = (), {}
    if isinstance(inputs, Mapping):
        tree = (), {str(name): x for name, x in inputs.items()}
    elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        tree = tuple(inputs), {}
    else:
        raise TypeError(
            "inputs are a list of positional arguments, or a dict of keyword arguments; got "
            f"{type(inputs).__name__}. For one array write [array]."
        )
    found = [_prepared(x, path[3:], both) for path, x in rounding.flat(tree)]
    prepared: tuple[tuple[Any, ...], dict[str, Any]]
    prepared = rounding.rebuilt(tree, filter(rounding.is_array, found))
    return prepared


def _prepared(x: Any, path: str, both: bool) -> Any:
    """A leaf of the inputs, an array in a dtype that the frameworks have; errors as above."""
    import numpy as np

    if not rounding.is_array(x):
        if isinstance(x, (bool, int, float, str)):
            return x
        raise TypeError(
            f"input {path} is {type(x).__module__}.{type(x).__name__}. Give arrays, numbers, and "
            "lists, tuples and dicts of them; for anything else, such as a module or a dtype, "
            "write lambda x: fn(x, it)."
        )
    if str(x.dtype).startswith("key<"):  # which numpy lacks
        if not both:
            return x
        raise TypeError(
            f"input {path} is a random key of JAX. Write it into the function: lambda x: fn(x, key)"
        )
    if hasattr(x, "detach"):
        x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":  # numpy has none of its own
        import ml_dtypes

        x = x.float().numpy().astype(ml_dtypes.bfloat16)
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError) as error:  # as of 8-bit floats, and of sparse tensors
        raise TypeError(f"input {path}, of {x.dtype}, cannot be compared: {error}") from None
    if array.size == 0:
        raise ValueError(f"input {path} has shape {array.shape}: there is nothing to compare.")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu" and both:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"input {path} has integers beyond 32 bits, which JAX lacks.")
        array = array.astype(np.int64)
    elif array.dtype.kind not in "iub" and array.dtype.name not in ("float32", *LOW):
        raise TypeError(
            f"input {path} is {array.dtype.name}. Give float32, float16, bfloat16, integers or "
            "bool; float64 becomes float32."
        )
    if array.dtype.kind not in "iub" and not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"input {path} has Inf or NaN, for which there is no tolerance.")
    return array


def widened(tree: Any) -> Any:
    """Return prepared inputs with float32 in place of lower dtypes."""
    import numpy as np

    found = [
        x.astype(np.float32) if x.dtype.name in LOW else x for x in rounding.arrays(tree).values()
    ]
    return rounding.rebuilt(tree, iter(found))


def cotangent(path: str, shape: tuple[int, ...]) -> Any:
    """Numbers for a path and a shape, in 8 bits: each dtype holds them, if the results have two."""
    import numpy as np

    seed = [len(path), *path.encode(), *shape]
    normal = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.clip(np.round(32 * normal) / 32, -4.0, 4.0)


# The calls of two runs aligned, and the first that differs in its dtypes.

# The frameworks' names of a cast that the program itself makes.
_CASTS = {"to": "cast", "_to_copy": "cast", "convert_element_type": "cast"}

# Two calls that differ, None for a side that has no such call; and the difference in words.
Parted = tuple[Call | None, Call | None, str]


def name_of(call: Call) -> str:
    """The name of a call in both frameworks."""
    return _CASTS.get(call.op, shared_name(call.op))


def seen(call: Call) -> tuple[str, ...]:
    """Its name, its dtypes, and the recipe of a product in 8 bits."""
    if name_of(call) == "cast":
        return "cast", *call.inputs, *call.outputs
    if call.row is not None and call.row.rule is Rule.FP32_KEEP:
        return name_of(call), str(call.row.rule)  # torch's kernel does so inside
    return name_of(call), call.run, call.recipe


def compared(calls: Iterable[Call]) -> list[Call]:
    """The forward calls that compute with floats, and the casts that the program itself makes."""
    moving = vocabulary().moving
    return [
        call
        for call in calls
        if call.direction == FORWARD
        and (call.run or name_of(call) == "cast")
        and vocabulary().op(call.op).kind not in moving
    ]


def first_parted(one: Iterable[Call], other: Iterable[Call]) -> Parted | None:
    """The first calls of two runs that are one op in other dtypes; None if there are none."""
    # A call that one side alone has is no difference: a bias is an addition of its own in JAX.
    # Calls of one name that are left over between aligned ones on both sides ran in other dtypes,
    # or by other recipes, if either side has a row for them. An op without a row, with nothing else
    # left over there, may be wider in JAX, which leaves out a rounding where only float32 reads it.
    left, right = compared(one), compared(other)
    for tag, i, to_i, j, to_j in blocks([*map(seen, left)], [*map(seen, right)]):
        if tag != "equal" and (parted := _in_gap(left[i:to_i], right[j:to_j])):
            return parted
    return None


def _in_gap(left: Sequence[Call], right: Sequence[Call]) -> Parted | None:
    names, theirs = list(map(name_of, left)), {name_of(c): c for c in reversed(right)}
    same = names == list(map(name_of, right))
    for one in left:
        if (other := theirs.pop(name_of(one), None)) is None:
            if _lowers(one):
                return one, None, _CAST
        elif one.row or other.row or (same and not _holds(other.run, one.run)):
            recipes = one.recipe and other.recipe and one.recipe != other.recipe
            return one, other, "by other recipes" if recipes else "in other dtypes"
    alone = (call for call in right if name_of(call) not in names and _lowers(call))
    return next(((None, call, _CAST) for call in alone), None)


_CAST = "in other dtypes: only one side casts to a low dtype here"


def _lowers(call: Call) -> bool:
    """True for a cast to a narrower dtype."""
    dtypes = (*call.inputs, *call.outputs)
    return name_of(call) == "cast" and len({*dtypes}) == 2 == len(dtypes) and _holds(*dtypes)


def _holds(wide: str, narrow: str) -> bool:
    return {wide, narrow} <= {*FORMATS} and FORMATS[wide].holds(FORMATS[narrow])


def _called(calls: Sequence[Call | None], names: tuple[str, str]) -> tuple[str, str]:
    """The op of two calls, and the calls as a table."""
    sides = [
        {"op": "no such call"}
        if call is None
        else {
            "op": call.op,
            "module": call.module or OUTSIDE,
            "source": call.source,
            "dtypes": text_table.dtypes(call.inputs, call.run, call.outputs),
            "rule": ruled(call) or "no region",
        }
        for call in calls
    ]
    op = next(call.op for call in calls if call is not None)
    return op, "\n".join(text_table.side_by_side(names, sides))
