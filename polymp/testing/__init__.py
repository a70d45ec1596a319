"""Assertions for tests: torch against JAX, one function against another, dtypes, casts, ranges.

    assert_parity(torch_fn, jax_fn, inputs)      the same dtypes, and values equal up to rounding
    assert_close(fn, reference, x)               two functions of one framework, likewise
    assert_fits(model, x, dtype="float16")       nothing overflows or vanishes
    assert_same_dtypes(fn, other, x)             two functions, or reports, run in the same dtypes
    assert_casts(fn, 3, x, dtype="bfloat16")     a function casts three arrays

No framework is imported before it is needed.
"""

from collections.abc import Callable, Mapping, Sequence

from polymp import text_table
from polymp._api import explain
from polymp.diagnostics.report import Report
from polymp.rules.policy_files import Source
from polymp.testing import parity
from polymp.testing.close import assert_close as assert_close
from polymp.testing.fits import assert_fits as assert_fits
from polymp.testing.parity import Parity as Parity
from polymp.testing.parity import ParityError as ParityError
from polymp.testing.parity import assert_parity as assert_parity

# --- dtypes and casts ----------------------------------------------------------------------------


def assert_same_dtypes(
    fn: Callable[..., object] | Report,
    other: Callable[..., object] | Report,
    *args: object,
    other_args: Sequence[object] | None = None,
    dtype: object = None,
    policy: Source | None = None,
) -> None:
    """Assert that two functions run the same ops in the same dtypes, forward.

        assert_same_dtypes(model, faster_model, x, dtype="bfloat16")
        assert_same_dtypes(polymp.explain(model, x, dtype="bfloat16"), saved_report)

    In one framework a call that only one of them makes is a difference, too; between torch and JAX
    it is not, see `assert_parity`.

    Args:
        fn: a function, a module or a `Report`.
        other: likewise; of either framework.
        args: of the calls.
        other_args: of the call of `other`, where they differ: arrays of the other framework, say.
        dtype: the low dtype of a region around each call; None for none, unless there is a policy.
        policy: of that region.

    Raises:
        ParityError: the dtypes differ; its text has the first difference.
        TypeError: `fn` or `other` is neither a function nor a report.
    """
    for f in (fn, other):
        if not isinstance(f, Report) and not callable(f):
            raise TypeError(f"assert_same_dtypes compares functions and reports, got {f!r}.")
    reports = [
        _report(f, *given, dtype=dtype, policy=policy)
        for f, given in ((fn, args), (other, args if other_args is None else other_args))
    ]
    sides = [next((c.backend for c in r), "") for r in reports]
    differ = parity.first_parted if len({*sides}) > 1 else parity.strictly_parted
    parted = differ(*(r.calls for r in reports))
    if parted is not None:
        names = (sides[0], sides[1]) if sides[0] != sides[1] else ("one", "other")
        table = parity.side_by_side(parted, names)
        text = f"the first difference is at {parted.op}, {parted.why}:\n\n{table}"
        raise ParityError(text, parted.op, table)


def _report(fn: Callable[..., object] | Report, *args: object, **kwargs: object) -> Report:
    return fn if isinstance(fn, Report) else explain(fn, *args, **kwargs)


def assert_casts(
    fn: Callable[..., object] | Report,
    expected: int | Mapping[str, int],
    *args: object,
    dtype: object = None,
    policy: Source | None = None,
    **kwargs: object,
) -> None:
    """Assert the number of arrays that a function casts.

        assert_casts(model, 12, x, dtype="bfloat16")
        assert_casts(model, {"linear": 8, "layer_norm": 0}, x, dtype="bfloat16")

    Args:
        fn: a function or a module, or a `Report`.
        expected: the number of all casts; or a dict of numbers by op, for these ops alone.
        args: positional arguments of the call.
        dtype: the low dtype of a region around the call; None for none, unless there is a policy.
        policy: of that region.
        kwargs: keyword arguments of the call.

    Raises:
        ParityError: there are more or fewer; its text has the calls that cast. Its `op` is the
            first with another number, "" if `expected` is one number.
        TypeError: `expected` is neither a number nor a dict of numbers by op.
    """
    wanted = {"": expected} if isinstance(expected, int) else expected
    if (
        not isinstance(wanted, Mapping)
        or not all(
            isinstance(op, str) and isinstance(n, int) and not isinstance(n, bool)
            for op, n in wanted.items()
        )
        or isinstance(expected, bool)
    ):
        raise TypeError(
            f"assert_casts(): expected={expected!r} is neither a number of casts nor a dict of "
            "numbers by op."
        )
    report = _report(fn, *args, dtype=dtype, policy=policy, **kwargs)
    wrong = []
    for op, count in wanted.items():
        found = sum(call.casts for call in (report.of(op) if op else report))
        if found != count:
            name = f"{op!r} casts" if op else "there are"
            wrong.append((op, f"{name} {text_table.plural(found, 'array')}, not {count}"))
    if wrong:
        rows = _casting(report)
        text = f"{'; '.join(said for _, said in wrong)}.\n\n{rows}"
        raise ParityError(text, wrong[0][0], rows)


def _casting(report: Report) -> str:
    rows = [
        (
            call.op,
            call.module,
            text_table.dtypes(call.inputs, call.run, call.outputs),
            call.rule,
            str(call.casts),
            call.source,
        )
        for call in report
        if call.casts
    ]
    if not rows:
        return "Nothing is cast."
    heads = ("op", "module", "dtypes", "rule", "casts", "source")
    return "\n".join(text_table.columns(heads, rows, ("casts",)))
