"""`GradScaler.report`: every count is numpy's, and every leaf has its name."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from polymp.backends.jax.scaler import grad_scaler
from polymp.jax import GradScaler
from polymp.scaling import Gradient

DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2fnuz")
# Near every border: 0 of both signs, float16's least and least normal, float32's subnormals.
SPECIAL = [
    *[0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.5, 2.0**-14, -(2.0**-14), 2.0**-15, 2.0**-24],
    *[2.0**-25, 2.0**-126, 2.0**-130, -(2.0**-149), 6e4, 1e30, 2.0**-14 * (1 - 2.0**-11)],
]


def numbers(dtype: str, values: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float64).astype(jnp.dtype(dtype))


def flushed(x: np.ndarray) -> np.ndarray:
    """In float64, which holds every value of every dtype; float32's subnormals are 0."""
    wide = x.astype(np.float64)
    return np.where(np.abs(wide) < 2.0**-126, 0, wide) if x.dtype.itemsize in (2, 4) else wide


def by_numpy(x: np.ndarray, factor: float = 1.0) -> tuple[int, int, int, int]:
    """Inf, NaN, zero and subnormal."""
    parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
    parts = list(map(flushed, parts))
    inf = np.logical_or.reduce([np.isinf(part) for part in parts])
    nan = np.logical_or.reduce([np.isnan(part) for part in parts]) & ~inf
    with np.errstate(all="ignore"):
        size = np.hypot(*parts) if len(parts) == 2 else np.abs(parts[0])
    zero = size == 0
    tiny = (size * factor < 2.0**-14) & ~zero
    return tuple(int(kind.sum()) for kind in (inf, nan, zero, tiny))  # type: ignore[return-value]


def counts(g: Gradient) -> tuple[int, int, int, int]:
    return g.inf, g.nan, g.zero, g.subnormal


values = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_subnormal=False)), max_size=20
)


@given(st.tuples(*[values for _ in DTYPES]))  # one shape, one program
def test_counts_are_numpys(given):
    given = zip(DTYPES, given, strict=True)
    arrays = [numbers(dtype, np.resize(v or [0.0], 20)) for dtype, v in given]
    with jax.enable_x64(True):
        rows = GradScaler().report([jnp.asarray(a) for a in arrays]).gradients
    assert [counts(row) for row in rows] == [by_numpy(a) for a in arrays]
    assert [row.shape for row in rows] == [a.shape for a in arrays]


@given(
    st.lists(st.tuples(st.sampled_from(SPECIAL), st.sampled_from(SPECIAL)), min_size=1, max_size=9)
)
def test_complex_numbers(pairs):
    x = np.array([complex(*pair) for pair in pairs], np.complex64)
    # On the border, the distance from 0 may be rounded across it.
    size = np.hypot(x.real.astype(np.float64), x.imag.astype(np.float64))
    x = np.resize(x[~((size > 2.0**-15) & (size < 2.0**-13)) | (x.imag == 0)], 9)
    (row,) = GradScaler().report(jnp.asarray(x)).gradients
    assert counts(row) == by_numpy(x)


@given(values, st.integers(-20, 20))
def test_true_gradients_are_counted_as_their_scaled_ones(values, exponent):
    scaler = GradScaler(2.0**exponent)
    x = numbers("float32", np.resize(values or [0.0], 20))
    (row,) = scaler.report(jnp.asarray(x), scaled=False).gradients
    assert counts(row) == by_numpy(x, 2.0**exponent)


def test_the_report_holds_rule_and_state_as_python_numbers():
    scaler = GradScaler(8.0, growth_interval=7).update(False).update(False, loss_finite=False)
    report = scaler.report({"w": jnp.ones(3), "step": jnp.int32(3), "f0": np.zeros(2, "V")})
    assert report.rule == scaler.rule
    assert tuple(report.state) == (2.0, 0, 2, 1, 2)
    assert [type(x) for x in report.state] == [float, int, int, int, int]
    assert [g.name for g in report.gradients] == ["w"], "what is no float has no gradient"
    assert str(report).startswith(
        "the loss scale is 2; 2 steps skipped so far, the last 2 in a row"
    )


def test_an_empty_tree_and_a_disabled_scaler():
    assert GradScaler().report({}).gradients == ()
    report = GradScaler(enabled=False).report(jnp.array([jnp.inf]))
    assert (report.state.scale, counts(report.gradients[0])) == (1.0, (1, 0, 0, 0))


def test_names_are_paths():
    params = nn.Sequential([nn.Dense(3), nn.Dense(2)]).init(jax.random.key(0), jnp.ones((1, 2)))
    model = nnx.state(nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))))
    of_layers = ["0.bias", "0.kernel", "1.bias", "1.kernel"]
    for tree, names in (
        (params["params"], [f"layers_{name}" for name in of_layers]),
        (model, [f"layers.{name}" for name in of_layers]),
        (nnx.to_pure_dict(model), [f"layers.{name}" for name in of_layers]),
        (jnp.ones(2), ["gradient"]),
        ([jnp.ones(2), {"value": (jnp.ones(1), 1.5)}], ["0", "1.value.0", "1.value.1"]),
    ):
        assert [g.name for g in GradScaler().report(tree).gradients] == names


TRACED = r"Return the gradients from the jitted function, and call scaler\.report\(grads\)"
BATCH = jax.vmap(lambda _: GradScaler())(jnp.arange(3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: jax.jit(lambda g: GradScaler().report(g))(jnp.ones(2)), TRACED),
        (lambda: jax.jit(lambda s: s.report(np.ones(2)))(GradScaler()), TRACED),
        (lambda: BATCH.report(jnp.ones(3), scaled=False), "batch of shape"),
        (lambda: BATCH.report(jnp.ones(3)), "batch of shape"),
    ],
)
def test_where_there_is_no_report(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_one_program_and_one_array_to_the_host(monkeypatch):
    grads = {f"p{i}": jnp.full(i + 1, float(i)) for i in range(9)}
    grad_scaler._table.clear_cache()
    seen = []
    on_host = grad_scaler.on_host
    monkeypatch.setattr(grad_scaler, "on_host", lambda x: (seen.append(np.shape(x)), on_host(x))[1])
    for _ in range(3):
        GradScaler().report(grads)
    assert grad_scaler._table._cache_size() == 1
    assert [shape for shape in seen if shape != ()] == [(9, 4)] * 3


def test_very_large_leaves_are_counted_in_int64():
    big = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    table = jax.eval_shape(grad_scaler._table.__wrapped__, [big], jnp.float32(1))
    assert table.dtype == jnp.int64


def test_this_oracle_tells_the_kinds_apart():
    x = numbers("float32", [np.inf, np.nan, 0.0, 2.0**-15, 2.0**-14, 2.0**-149])
    assert by_numpy(x) == (1, 1, 2, 1)
    assert by_numpy(x, 0.5) == (1, 1, 2, 2)
    assert by_numpy(x.astype(np.float16)) == (1, 1, 2, 1)
    assert by_numpy(np.array([complex(np.inf, np.nan), complex(0, 1), 0j])) == (1, 0, 1, 0)
