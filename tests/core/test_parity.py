"""`polymp.testing`: what it notices, what it refuses, and how tight its tolerance is."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import polymp
from polymp.diagnostics import rounding
from polymp.diagnostics.call_record import Call
from polymp.rules.row import Row, Rule
from polymp.testing import ParityError, assert_parity
from polymp.testing.parity import checked, first_parted
from tests.conftest import FRAMEWORKS, need
from tests.support import processes
from tests.support.decisions import recording
from tests.support.dtype_spellings import spellings

X = np.random.default_rng(0).standard_normal((5, 8))
W = np.random.default_rng(1).standard_normal((8, 8))


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    """Do the set-up of a recording once, for all tests here."""
    with recording():
        yield


@pytest.fixture
def both() -> None:
    need(*FRAMEWORKS)


def in_torch(x: Any, w: Any) -> Any:
    import torch

    return torch.softmax(x @ w, -1)


def in_jax(x: Any, w: Any) -> Any:
    import jax

    return jax.nn.softmax(x @ w)


# --- the tolerance --------------------------------------------------------------------------------


@pytest.mark.usefixtures("both")
def test_a_wrong_gradient_fails_though_the_result_is_right() -> None:
    import jax

    def detached(x: Any, w: Any) -> Any:
        return in_jax(x, jax.lax.stop_gradient(w))

    for first, dtype, op in ((True, "float32", "mm"), (False, "bfloat16", "matmul")):
        with pytest.raises(ParityError) as caught:
            assert_parity(in_torch, detached, [X, W], float32_first=first)
        assert [gap.what for gap in caught.value.gaps if gap.part] == ["gradient of input[1]"]
        assert (caught.value.op, caught.value.dtype) == (op, dtype)
        assert "test_parity.py:" in caught.value.side_by_side
    assert assert_parity(in_torch, detached, [X, W], grads=False).margin > 1


@pytest.mark.usefixtures("both")
def test_the_error_says_in_which_dtype() -> None:
    import jax

    def approximate(x: Any, w: Any) -> Any:
        return jax.nn.softmax((x @ w) * (1 + 1e-5))

    with pytest.raises(ParityError) as caught:
        assert_parity(in_torch, approximate, [X, W], probes=4)
    assert str(caught.value).startswith("in float32, without a region: the two functions compute")
    assert str(caught.value).endswith(
        "bfloat16 was not compared. float32_first=False compares in bfloat16 alone."
    )
    found = assert_parity(in_torch, approximate, [X, W], probes=4, float32_first=False)
    assert found.margin > 1

    def low(x: Any, w: Any) -> Any:
        import torch

        y = x @ w
        return torch.softmax(y * 2 if y.dtype is torch.bfloat16 else y, -1)

    with pytest.raises(ParityError) as caught:
        assert_parity(low, in_jax, [X, W], probes=4)
    assert caught.value.dtype == "bfloat16"
    assert str(caught.value).startswith("in bfloat16, though not in float32: the two functions")
    low_inputs = [X.astype("float16"), W.astype("float16")]
    assert assert_parity(in_torch, in_jax, low_inputs, dtype="float16", probes=4).float32


@pytest.mark.usefixtures("both")
def test_the_same_call_has_the_same_tolerance() -> None:
    import jax.numpy as jnp
    import torch

    one, other = (assert_parity(in_torch, in_jax, [X, W], probes=2) for _ in range(2))
    assert one == other
    assert one == assert_parity(in_torch, in_jax, [torch.tensor(X), jnp.asarray(W)], probes=2)


@pytest.mark.usefixtures("both")
def test_a_longer_sum_has_a_wider_tolerance_and_a_lower_dtype_too() -> None:
    def tolerance_of(n: int, dtype: str | None) -> float:
        x = np.full((1, n), 1.1)
        import jax.numpy as jnp
        import torch

        parity = assert_parity(torch.sum, jnp.sum, [x], dtype=dtype, grads=False)
        return parity.gaps[0].tolerance

    # sqrt(n) roundoffs of float32 and one of the result, on both sides, by chance.
    short, long = tolerance_of(16, None), tolerance_of(16 * 256, None)
    assert 6 < long / short < 30
    product = {
        dtype: assert_parity(lambda x, w: x @ w, lambda x, w: x @ w, [X, W], dtype=dtype)
        for dtype in (None, "float16", "bfloat16")
    }
    high, half, brain = (p.gaps[0].tolerance for p in product.values())
    assert 4 < brain / half < 16  # 2**-8 by 2**-11
    assert half / high > 100


def test_the_roundings_of_an_op() -> None:
    u = {name: rounding.unit_roundoff(name) for name in ("float32", "bfloat16", "float16")}
    assert u == {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    assert rounding.movement("matmul", "matmul", "bfloat16", 48) == (2.0**-8, 4 * 2.0**-24)
    assert rounding.movement("add", "elementwise", "float16") == (2.0**-11, 0.0)
    assert rounding.movement("exp", "power", "float32") == (4 * 2.0**-24, 0.0)
    assert rounding.movement("lgamma", "special", "float32") == (33 * 2.0**-24, 0.0)
    assert rounding.movement("maximum", "elementwise", "float16") == (0.0, 0.0)


def test_the_factor_is_what_hoeffding_says() -> None:
    for count in (1, 1000):
        factor = rounding.factor(count)
        assert 2 * count * np.exp(-(factor**2) / 2) == pytest.approx(1e-6)


def test_a_gap() -> None:
    one, spread = np.array([1.0, -4.0]), np.array([0.01, 0.0])
    near = rounding.gap("result", one, one + np.array([0.01, 0.0]), spread)
    assert not near.part
    assert near.error == pytest.approx(0.0025)
    assert near.tolerance == pytest.approx(rounding.factor(2) * 0.0025)
    assert rounding.gap("result", one, one + np.array([0.0, 0.1]), spread).part
    assert rounding.gap("result", one, one * np.nan, spread).part
    infinite = np.array([np.inf, 1.0])
    assert not rounding.gap("result", infinite, infinite, spread).part
    assert rounding.gap("result", infinite, -infinite, spread).part
    unknown = np.array([0.1, np.nan])  # what no probe tells the change of has to be equal
    assert rounding.gap("result", one, one + np.array([0.0, 1.0]), unknown).part
    assert not rounding.gap("result", one, one, unknown).part


@pytest.mark.usefixtures("both")
def test_a_model_of_integers_compares_gradients_if_its_parameters_are_an_input() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 5))
    params = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    ids = np.array([[1, 2, 2], [0, 8, 3]])

    def theirs(params: Any, ids: Any) -> Any:
        return params["0.weight"][ids] @ params["1.weight"].T + params["1.bias"]

    def ours(params: Any, ids: Any) -> Any:
        return torch.func.functional_call(model, params, (ids,))

    with pytest.warns(UserWarning, match="compared no gradients.*parameters as an input"):
        assert_parity(lambda x: x + 1, lambda x: x + 1, [ids], probes=2)
    parity = assert_parity(ours, theirs, [params, ids], probes=2)  # what it says
    found = [gap.what for gap in parity.gaps if gap.what.startswith("gradient")]
    assert sorted(found) == sorted(f"gradient of input[0]['{name}']" for name in params)
    assert_parity(lambda x: x + 1, lambda x: x + 1, [ids], grads=False, probes=2)


# --- structure, dtypes and bad input -------------------------------------------------------------


@pytest.mark.usefixtures("both")
def test_nested_inputs_and_results_integers_and_constants() -> None:
    import jax.numpy as jnp
    import torch

    def ours(tree: Any, at: Any, flag: bool) -> Any:
        assert type(tree["w"]) is tuple
        x = tree["w"][0][at]
        return {"low": x @ tree["w"][1], "at": torch.argmax(x, -1), "more": (x > 0, None)}

    def theirs(tree: Any, at: Any, flag: bool) -> Any:
        x = tree["w"][0][at]
        return {"low": x @ tree["w"][1], "at": jnp.argmax(x, -1), "more": (x > 0, None)}

    inputs = [{"w": (X, W)}, np.array([2, 0]), True]
    parity = assert_parity(ours, theirs, inputs)
    assert parity.dtypes == {"['low']": "bfloat16", "['at']": "int", "['more'][0]": "bool"}
    assert [gap.what for gap in parity.gaps][-2:] == [
        "gradient of input[0]['w'][0]",
        "gradient of input[0]['w'][1]",
    ]
    named = {"tree": inputs[0], "at": inputs[1], "flag": False}
    assert assert_parity(ours, theirs, named, probes=2).dtypes == parity.dtypes
    with pytest.raises(ParityError, match=r"result\['at'\]: off by"):
        assert_parity(ours, lambda *a: {**theirs(*a), "at": theirs(*a)["at"] + 1}, inputs)


class Pair(NamedTuple):
    x: Any
    w: Any


@pytest.mark.usefixtures("both")
def test_inputs_keep_their_types() -> None:
    """Such as the parameters of flax, mappings that are no dicts."""

    def product(pair: Pair, more: Any) -> Any:
        assert isinstance(more, MappingProxyType)
        return pair.x @ pair.w @ more["w"]

    found = assert_parity(product, product, [Pair(X, W), MappingProxyType({"w": W})], probes=2)
    assert len(found.gaps) == 4


@pytest.mark.usefixtures("both")
def test_each_of_a_dozen_inputs_is_the_same_in_both() -> None:
    def weighted(*args: Any) -> Any:
        return sum((at + 1) * x for at, x in enumerate(args))

    inputs = [X[0] + 10 * at for at in range(12)]
    assert len(assert_parity(weighted, weighted, inputs, dtype=None, probes=2).gaps) == 13


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda y: (y, y), "other structures: result in torch, result[0], result[1] in JAX."),
        (lambda y: y.T, "result has shape (5, 8) in torch and (8, 5) in JAX."),
        (lambda y: y > 0, "result is float32 in torch and bool in JAX."),
    ],
)
def test_other_structures_shapes_and_dtypes(changed: Any, said: str) -> None:
    with pytest.raises(ParityError) as caught:
        assert_parity(in_torch, lambda x, w: changed(in_jax(x, w)), [X, W])
    assert said in str(caught.value)
    assert caught.value.op == ""


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        (X, TypeError, "got ndarray. For one array write [array]."),
        ("x", TypeError, "got str."),
        ([{"x": object()}], TypeError, "input [0]['x'] is builtins.object."),
        ([X.astype(complex)], TypeError, "input [0] is complex128."),
        ([X, np.array([2**40])], ValueError, "input [1] has integers beyond 32 bits"),
        ([np.zeros((0, 3))], ValueError, "input [0] has shape (0, 3)"),
        ([X, W * np.inf], ValueError, "input [1] has Inf or NaN, for which there is no tolerance."),
    ],
)
def test_bad_inputs(inputs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        assert_parity(in_torch, in_jax, inputs)
    assert said in str(caught.value)


@pytest.mark.usefixtures("both")
def test_bad_arguments() -> None:
    import jax

    said = r"assert_parity\(\): dtype 'float8' is not a float dtype that polymp knows"
    with pytest.raises(ValueError, match=said):
        assert_parity(in_torch, in_jax, [X, W], dtype="float8")
    with pytest.raises(TypeError, match=r"input \[1\] is a random key of JAX. Write it into"):
        assert_parity(in_torch, in_jax, [X, jax.random.key(0)])
    with pytest.raises(ValueError, match="probes=1"):
        assert_parity(in_torch, in_jax, [X, W], probes=1)
    with pytest.raises(TypeError, match="assert_parity: jax_fn is no function: 3"):
        assert_parity(in_torch, 3, [X, W])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch_fn is of jax: .* Write assert_parity\(torch_fn, "):
        assert_parity(jax.jit(in_jax), in_torch, [X, W])
    with pytest.raises(polymp.PolicyError, match="nonsense"):
        assert_parity(in_torch, in_jax, [X, W], policy="nonsense")
    with pytest.raises(TypeError, match="the torch function returns object as result"):
        assert_parity(lambda x, w: object(), in_jax, [X, W])


# --- alignment ------------------------------------------------------------------------------------


def call(op: str, run: str, backend: str = "torch", rule: Rule | None = None) -> Call:
    row = Row(op, rule) if rule is not None else None
    outputs, inputs = (run,), ("float32",)
    return Call(
        backend, op, f"x:{op}", "", "a.py:1", "forward", "bfloat16", row, inputs, run, outputs
    )


def test_what_one_framework_takes_apart_is_no_difference() -> None:
    ours = [call("linear", "bfloat16", rule=Rule.LOWER), call("gelu", "bfloat16")]
    theirs = [
        call("linear", "bfloat16", "jax", Rule.LOWER),
        call("add", "bfloat16", "jax"),
        call("mul", "bfloat16", "jax"),
        call("erfc", "bfloat16", "jax"),
    ]
    assert first_parted(ours, theirs) is None
    wide = [call("linear", "float32", "jax", Rule.FP32), *theirs[1:]]
    assert first_parted(ours, wide) == (ours[0], wide[0], "in other dtypes")


def test_all_products_are_one_op_and_jax_may_spare_a_rounding() -> None:
    assert first_parted([call("mm", "bfloat16")], [call("linear", "bfloat16", "jax")]) is None
    assert first_parted([call("mul", "bfloat16")], [call("mul", "float32", "jax")]) is None
    assert first_parted([call("mul", "float32")], [call("mul", "bfloat16", "jax")]) is not None


# --- spellings and imports ------------------------------------------------------------------------


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_every_spelling_of_a_dtype_is_taken(fw: Any, low: str) -> None:
    x = fw.array([[1.0, 2.0], [3.0, 4.0]])
    for spelling in spellings(low):
        assert [c.run for c in polymp.explain(fw.xp.matmul, x, x, dtype=spelling)] == [low]
        assert checked("", spelling, 2) == low
    assert {checked("", f, 2) for f in (None, *spellings("float32"))} == {None}
    with pytest.raises(ValueError, match=r"^explain\(\): dtype 'fp17' is not a float dtype that"):
        polymp.explain(fw.xp.matmul, x, x, dtype="fp17")


def test_importing_imports_no_framework() -> None:
    processes.run(
        "import sys, polymp.testing; "
        "assert not {'torch', 'jax', 'numpy', 'pytest'} & {*sys.modules}"
    )
