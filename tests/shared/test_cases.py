"""One table of cases, two frameworks: dtypes, values, training.

The table is `cases`, the frameworks' verbs are `frameworks`. torch runs CUDA's table on CPU
tensors, JAX its default table. What a row says of torch is also held to torch.amp itself, on fake
CUDA tensors.
"""

from __future__ import annotations

import contextlib
import zlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.dtypes import FORMATS
from polymp.rules.policy import Policy
from polymp.rules.vocabulary import vocabulary
from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks
from tests.support.cases import LOW, MAIN, OFF, OPS, OTHER, RAISES, Case, Op
from tests.support.sizes import LONG

BY_OP: dict[str, list[Case]] = {op.name: [] for op in OPS}
for _case in cases.rows():
    BY_OP[_case.op].append(_case)
ROWS = [case for rows in BY_OP.values() for case in rows]

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


# --- the table ------------------------------------------------------------------------------------


def test_a_row_says_why_exactly_where_the_frameworks_differ() -> None:
    assert [str(c) for c in ROWS if bool(c.why) != (c.torch != c.jax)] == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_both_have_the_ops_and_no_others(name: str) -> None:
    need(name)
    assert set(frameworks.load(name).ops) == {op.name for op in OPS}


@by_op
def test_the_inputs_are_exact_in_every_dtype(op: Op) -> None:
    for arg, value in zip(op.args, cases.values(op.name), strict=True):
        if arg.is_float:
            steps = value * 16
            assert np.array_equal(steps, np.round(steps))
            assert np.abs(steps).max() < 2 ** (FORMATS["bfloat16"].mantissa + 1)


# --- dtypes --------------------------------------------------------------------------------------


def arrays(fw: Any, case: Case) -> list[Any]:
    return [fw.array(v, f) for v, f in zip(cases.values(case.op), case.dtypes, strict=True)]


def found(fw: Any, case: Case, region: Any = None) -> str:
    """The dtype that comes out, or "raises"."""
    with fw.wide() if "float64" in case.dtypes else contextlib.nullcontext():
        call = fw.ops[case.op], arrays(fw, case), case.regions, case.made, region or fw.region
        dtype = fw.dtype_of(*call)
        if dtype != RAISES == getattr(case, fw.name):  # some refusals come when it is compiled
            try:
                fw.run(*call)
            except Exception:
                return RAISES
    return dtype


def in_turn(case: Case) -> bool:
    """True for every row in `make test-long`, and for about a sixth of them in `make test`."""
    return LONG or zlib.crc32(str(case).encode()) % 6 == 0


@pytest.mark.sized
@by_op
def test_a_result_has_the_dtype_that_the_row_names(fw: ModuleType, op: Op) -> None:
    first, *others = BY_OP[op.name]
    rows = [first, *filter(in_turn, others)]
    wanted = {str(case): getattr(case, fw.name) for case in rows}
    assert {str(case): found(fw, case) for case in rows} == wanted


REPRESENTATIVES = [case for name in cases.NESTED for case in BY_OP[name]][::3]


def wrong(fw: Any, region: Any) -> float:
    """The share of rows that notice that another region is opened than the one asked for."""
    seen = [found(fw, c, region) != getattr(c, fw.name) for c in REPRESENTATIVES]
    return sum(seen) / len(seen)


def test_wrong_regions_are_noticed(fw: ModuleType) -> None:
    right = fw.region
    swapped = {OFF: OFF, **OTHER}
    assert wrong(fw, right) == 0
    assert wrong(fw, lambda kind, *fn: right(OFF, *fn)) > 0.1
    assert wrong(fw, lambda kind, *fn: right(swapped[kind], *fn)) > 0.1
    assert wrong(fw, lambda kind, *fn: right(kind if kind != OFF else "bfloat16", *fn)) > 0.05


def nearly_all_low(fw: Any) -> Any:
    kinds = "activation elementwise matmul normalisation power reduction softmax".split()
    return ruled(fw, {"rules": {f"class:{kind}": "lower" for kind in kinds}})


def ruled(fw: Any, table: Any) -> Any:
    """Regions under a policy, as the frameworks' `region`."""
    from importlib import import_module

    autocast = import_module(f"polymp.{fw.name}").autocast
    if fw.name == "torch":
        import torch

        return lambda kind: autocast(
            "cpu", getattr(torch, kind, torch.bfloat16), kind != OFF, policy=table
        )
    return lambda kind, fn=None: autocast(
        fn, dtype="bfloat16" if kind == OFF else kind, enabled=kind != OFF, policy=table
    )


# float16 inputs whose result is beyond float16, or 0 in it, and is needed by what comes next.
RANGES: dict[str, tuple[list[float], ...]] = {
    "logsigmoid": ([20.0],), "logaddexp": ([0.0], [-20.0]), "logaddexp2": ([0.0], [-30.0]),
    "exp2": ([20.0],), "lgamma": ([2e4],), "digamma": ([1e-5],), "exp": ([12.0],),
    "x ** 2": ([300.0],), "reciprocal": ([1e-5],), "sum": ([6e4, 6e4],), "prod": ([6e4, 6e4],),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["amp", "lean"])
@pytest.mark.parametrize("name", RANGES)
def test_float16_keeps_what_the_next_op_needs(fw: ModuleType, name: str, policy: str) -> None:
    """A logarithm of the result's size, in the same region, is finite."""
    if fw.name == "jax" and name in ("sum", "prod"):
        pytest.skip(cases.CASTS_BACK)
    values = [fw.array(value, "float16") for value in RANGES[name]]

    def sizes(*arrays: Any) -> Any:
        return fw.ops["log"](fw.ops["abs"](fw.ops[name](*arrays)))

    rounded = fw.numbers(fw.cast(fw.ops[name](*values), "float16"))
    assert not np.isfinite(rounded).all() or (rounded == 0).any(), "float16 holds it"
    region = ruled(fw, policy)
    if fw.name == "torch":
        with region("float16"):
            found = sizes(*values)
    else:
        found = region("float16", sizes)(*values)
    assert np.isfinite(fw.numbers(found)).all()


# --- values ---------------------------------------------------------------------------------------


def valued(op: Op) -> list[Case]:
    """The cases of an op whose values are looked at: each of the main patterns in one region."""

    def chosen(case: Case) -> bool:
        low = LOW[zlib.crc32(f"{op.name} {MAIN.index(case.inputs) // 2}".encode()) % 2]
        return case.low == low

    rows = [c for c in BY_OP[op.name] if c.inputs in MAIN and c.nesting == "on"]
    return [c for c in rows if RAISES not in (c.torch, c.jax) and chosen(c)]


def computed(fw: Any, op: Op, rows: list[Case], function: Any = None) -> tuple[Any, list[Any]]:
    """The result in float32 outside of regions, and (dtype, numbers) of each case."""
    function = function or fw.ops[op.name]

    def call(case: Case) -> Any:
        def run(*arrays: Any) -> Any:
            cast = [fw.cast(x, f) for x, f in zip(arrays, case.dtypes, strict=True)]
            return fw.run(function, cast, case.regions, case.made)

        return run

    wide = {"f": "float32", "i": "int", "b": "bool"}
    inputs = [fw.array(v, wide[v.dtype.kind]) for v in cases.values(op.name)]
    exact, *results = fw.together([fw.ops[op.name], *map(call, rows)], inputs)
    return fw.numbers(exact), [(fw.dtype(r), fw.numbers(r)) for r in results]


def too_far(case: Case, name: str, dtype: str, result: Any, exact: Any) -> str:
    error = float(np.abs(result - exact).max(initial=0))
    limit = cases.bound(case, name, dtype, exact)
    return "" if error <= limit else f"{case} in {name}: off by {error:.3g}, bound {limit:.3g}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", [op for op in OPS if valued(op)], ids=lambda op: op.name)
def test_results_agree(op: Op) -> None:
    """Each framework's with its own float32, and with the other's within both bounds."""
    rows, results, exacts = valued(op), {}, {}
    for name in FRAMEWORKS:
        need(name)
        fw = frameworks.load(name)
        exacts[name], results[name] = computed(fw, op, rows)
        for case, (dtype, result) in zip(rows, results[name], strict=True):
            assert dtype == getattr(case, name)
            assert too_far(case, name, dtype, result, exacts[name]) == ""
    exact = exacts["torch"]
    far = np.abs(exact - exacts["jax"]).max(initial=0)
    assert far <= 2 * cases.bound(rows[0], "jax", "float32", exact), "float32 itself differs"
    for case, torch, jax in zip(rows, results["torch"], results["jax"], strict=True):
        limit = cases.bound(case, "torch", torch[0], exact) + cases.bound(
            case, "jax", jax[0], exact
        )
        assert np.abs(torch[1] - jax[1]).max(initial=0) <= limit, str(case)


@pytest.mark.parametrize("low", LOW)
def test_a_computation_in_the_low_dtype_that_is_called_float32_is_noticed(
    fw: ModuleType, low: str
) -> None:
    """And a value that is off by twice the bound."""
    seen = []
    for name in (
        "exp",
        "softmax",
        "layer_norm",
        "rms_norm",
        "logsumexp",
        "tan",
        "cosine_similarity",
    ):
        op = cases.BY_NAME[name]

        def lowered(*arrays: Any, op: Op = op) -> Any:
            return fw.cast(fw.cast(fw.ops[op.name](*arrays), low), "float32")

        rows = [c for c in BY_OP[name] if (c.inputs, c.low, c.nesting) == ("made", low, "on")]
        exact, results = computed(fw, op, rows, lowered)
        seen += [too_far(c, fw.name, *r, exact) for c, r in zip(rows, results, strict=True)]
        exact, [(dtype, right)] = computed(fw, op, rows)
        off = right + 2 * cases.bound(rows[0], fw.name, dtype, exact)
        assert "off by" in too_far(rows[0], fw.name, dtype, off, exact)
        assert "off by" in too_far(rows[0], fw.name, dtype, right * np.nan, exact)
    assert len(seen) == 7
    assert all(seen)


# --- against torch.amp, and against the tables ----------------------------------------------------

# On fake tensors there are no kernels that could lack a dtype; gru_cell asks for a CUDA build, and
# of pinv a fake tensor knows the dtype that comes out and not the products inside.
NO_KERNEL = {op.name for op in OPS if op.torch == cases.NO_LOW} | {"gru_cell", "pinv"}


@pytest.mark.sized
def test_the_column_of_torch_is_what_torch_amp_does() -> None:
    need("torch")
    from tests.support.torch.outcomes import fake

    fw = frameworks.load("torch")
    wrong = []
    for case in filter(in_turn, ROWS):
        if case.op in (*NO_KERNEL, *cases.CPU_ROWS):
            continue
        tensors = [fake(x, "cuda") for x in arrays(fw, case)]
        got = _in_torch_amp(fw, case, tensors)
        if got != case.torch:
            wrong.append(f"{case}: {got}, the row says {case.torch}")
    assert wrong == []


def _in_torch_amp(fw: Any, case: Case, tensors: list[Any]) -> str:
    import torch

    from tests.support.torch.outcomes import fake_mode, torch_cuda

    @contextlib.contextmanager
    def region(kind: str) -> Any:
        with torch_cuda(getattr(torch, kind, torch.bfloat16)):
            torch.set_autocast_enabled("cuda", kind != OFF)
            yield

    with fake_mode(), torch.no_grad():
        return fw.dtype_of(fw.ops[case.op], tensors, case.regions, case.made, region)


def test_a_wrong_column_of_torch_is_noticed() -> None:
    need("torch")
    from tests.support.torch.outcomes import fake

    fw = frameworks.load("torch")
    case = next(c for c in BY_OP["exp"] if (c.inputs, c.nesting) == ("low", "on"))
    for said, of in (("float32", case), (case.low, case._replace(nesting="off"))):
        tensors = [fake(x, "cuda") for x in arrays(fw, of)]
        assert _in_torch_amp(fw, of, tensors) == said


# Ops of a table that no shared case meets, though the framework has them.
UNSHARED: dict[str, dict[str, str]] = {
    "torch-cuda": {
        **dict.fromkeys(
            ("chain_matmul", "frobenius_norm", "nuclear_norm"), "deprecated: torch warns"
        ),
        **dict.fromkeys(
            ("cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_gru_cell",
             "_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention", "_cudnn_rnn",
             "miopen_rnn"),
            "what the public op calls on a GPU",
        ),
        **dict.fromkeys(
            ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
             "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d"),
            "jax.image.resize has other weights",
        ),
        **dict.fromkeys(("upsample_nearest1d", "upsample_nearest3d"), "as upsample_nearest2d"),
        "linalg_matrix_sqrth": "torch has it from 2.14 on",
        **dict.fromkeys(("grid_sampler", "multilabel_margin_loss"), "not in JAX"),
    },
    "amp": {
        **dict.fromkeys(
            ("batch_norm", "binary_cross_entropy_with_logits", "cosine_similarity", "group_norm",
             "gru_cell", "huber_loss", "instance_norm", "kl_div", "lstm_cell", "mse_loss", "prelu",
             "rms_norm", "rnn_relu_cell", "rnn_tanh_cell", "triplet_margin_loss"),
            "functions of flax, optax and haiku; here they are written out: tests/jax has those",
        ),
        **dict.fromkeys(
            ("i0", "igammac", "mvlgamma", "special_entr", "special_erfcx", "special_i1",
             "special_log_ndtr", "special_ndtr"),
            "as i0e, by the row of their class",
        ),
        **dict.fromkeys(("celu", "selu"), "as elu"),
        **dict.fromkeys(
            ("fixed_point", "iterate_solve", "least_squares", "minimize", "ode_solve", "root_find",
             "run_solver", "while_loop"),
            "not in torch: tests/jax/autocast/test_solvers.py has those",
        ),
        "scaled_dot_product_attention": "its products and its softmax run by their own rows",
        "convolution": "one of no dimensions, or of more than three",
        "betainc": "not in torch",
        "igamma_grad_a": "a derivative",
        "log2": "jax.numpy.log2 is made of log in jax 0.10",
    },
}  # fmt: skip

OLD = {"log2"}  # excused for the older versions of JAX


def test_every_op_of_jaxs_table_is_met_or_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that JAX has; the others become them in a trace, which the vocabulary says."""
    need("jax")
    import jax

    jax.clear_caches()  # a jitted function of jax.numpy that was planned before has its plan
    fw, asked, policy = frameworks.load("jax"), set(), polymp.policy("amp")
    decide = Policy.decide

    def spy(policy: Any, op: str, *args: Any) -> Any:
        asked.add(op)
        return decide(policy, op, *args)

    monkeypatch.setattr(Policy, "decide", spy)
    for op in OPS:
        found(fw, BY_OP[op.name][0])
    in_jax = {op.name for op in vocabulary().ops.values() if op.jax or op.functions}
    table = {op for op in in_jax if any(policy.winner(op, low) for low in LOW)}
    assert table - asked - OLD == set(UNSHARED["amp"]) - OLD
    assert OLD <= set(UNSHARED["amp"]) <= table


def test_every_op_of_torchs_table_is_met_or_excused() -> None:
    need("torch")
    import torch

    fw, policy = frameworks.load("torch"), polymp.policy("torch-cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for op in OPS:
            found(fw, BY_OP[op.name][0])
    called = {event.name.removeprefix("aten::") for event in profile.events()}
    overloads = [
        o for op in vocabulary().ops.values() for o in op.aten if policy.winner(op.name, "float16")
    ]
    table = {overload.partition(".")[0] for overload in overloads}
    assert table - called == set(UNSHARED["torch-cuda"])


# --- training -------------------------------------------------------------------------------------


def trained(fw: Any, low: str, scaled: bool, regions: bool = True) -> float:
    """The excess of the loss after training in a dtype."""
    it = cases.regression()
    x, targets, w = (fw.array(a, "float32") for a in (it.x, it.targets, it.start))
    inside = () if low == "float32" or not regions else (low,)

    def loss(w: Any) -> Any:
        def mean_square(w: Any) -> Any:
            residual = fw.ops["mv"](x, w) - targets
            return (residual * residual).mean()

        return it.small * fw.run(mean_square, [w], inside)

    graded = fw.jit(lambda w, scale: fw.grad(lambda w: loss(w) * scale, w)[1])
    scaler = fw.Scaler(growth_interval=4) if scaled else fw.Scaler(enabled=False)
    for _ in range(it.steps):
        scale = scaler.scale(fw.array(1.0, "float32"))
        w = scaler.step(w, graded(w, scale), it.rate)
    return it.excess(fw.numbers(w))


@pytest.mark.parametrize("low", ["float32", *LOW])
def test_training_reaches_the_loss(fw: ModuleType, low: str) -> None:
    it = cases.regression()
    assert it.excess(it.start) > 100 * it.bound("bfloat16"), "there is nothing to learn"
    assert trained(fw, low, scaled=low == "float16") <= it.bound(low)


def test_float16_without_a_scaler_learns_nothing(fw: ModuleType) -> None:
    it = cases.regression()
    assert trained(fw, "float16", scaled=False) == it.excess(it.start)


@pytest.mark.filterwarnings("ignore:GradScaler has no effect in a bfloat16 region")
def test_a_bound_of_training_is_one_of_its_dtype(fw: ModuleType) -> None:
    """Float32's, which bfloat16 and float16 miss: they round."""
    it = cases.regression()
    for low in LOW:
        assert trained(fw, low, scaled=True) > it.bound("float32")
