"""The op that `locate` blames: the same, with the same line, kind and inputs, however it runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from polymp.jax import GradScaler, audit, autocast, locate

BIG = "big"  # the largest magnitude is one whose square is beyond the dtype
REGIONS = {"plain": None, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
SQUARED = {"plain": 300.0, "float16": 300.0, "bfloat16": 1e20}  # plain programs compute in float16
RULED = ("float16", "bfloat16")


class Row(NamedTuple):
    """An op that fails."""

    op: str  # the name that is blamed
    fn: Callable[[Any], Any]  # of the matrix that the model has computed; the op stands in its line
    value: float | str  # of all elements of the matrix
    columns: tuple[str, ...] = tuple(REGIONS)  # where it fails


# fmt: off
ROWS = (
    Row("div", lambda h: (h + 1) / h, 0.0),
    Row("reciprocal", lambda h: jnp.reciprocal(h), 0.0, RULED),
    Row("reciprocal", lambda h: 1 / h, 0.0),
    Row("reciprocal", lambda h: h ** -2, 0.0, RULED),
    Row("log", lambda h: jnp.log(h), 0.0),
    Row("log", lambda h: jnp.log2(h), 0.0),
    Row("log1p", lambda h: jnp.log1p(h), -1.0),
    Row("sqrt", lambda h: jnp.sqrt(h), -1.0),
    Row("rsqrt", lambda h: lax.rsqrt(h), 0.0),
    Row("pow", lambda h: h ** 0.3, -1.0),
    Row("pow", lambda h: jnp.power(h, -1.5), 0.0),
    Row("acos", lambda h: jnp.arccos(h), 2.0),
    Row("asin", lambda h: jnp.arcsin(h), 2.0),
    Row("atanh", lambda h: jnp.arctanh(h), 2.0),
    Row("acosh", lambda h: jnp.arccosh(h), 0.0),
    Row("exp", lambda h: jnp.exp(h), 1000.0),
    Row("expm1", lambda h: jnp.expm1(h), 1000.0),
    Row("exp2", lambda h: jnp.exp2(h), 1000.0),
    Row("sinh", lambda h: jnp.sinh(h), 1000.0),
    Row("cosh", lambda h: jnp.cosh(h), 1000.0),
    Row("lgamma", lambda h: lax.lgamma(h), 0.0),
    Row("digamma", lambda h: lax.digamma(h), 0.0),
    Row("erfinv", lambda h: lax.erf_inv(h), 1.0),
    Row("mul", lambda h: h * h, BIG),
    Row("mul", lambda h: jax.nn.relu(h) * h, BIG),
    Row("pow", lambda h: jnp.square(jax.nn.relu(h)), BIG, ("plain",)),
    Row("pow", lambda h: jnp.square(jax.nn.relu(h)), BIG, ("bfloat16",)),
    Row("pow", lambda h: h ** 3, BIG, ("plain",)),
    Row("linear", lambda h: h @ jnp.full((4, 4), 300, h.dtype), BIG, ("plain", "float16")),
    Row("div", lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True), 0.0),
    Row("rsqrt", lambda h: (h - 1) * lax.rsqrt(h.var(-1, keepdims=True)), 1.0),
    Row("log", lambda h: jnp.log(jax.nn.softmax(h * jnp.array([1, 0, 0, 0], h.dtype))), 1000.0),
    Row("log", lambda h: jnp.log(1 - jax.nn.sigmoid(h)), 100.0),
    Row("softmax", lambda h: jax.nn.softmax(jnp.where(h > 0, h, -jnp.inf)), -1.0, RULED),
    Row("log_softmax", lambda h: jax.nn.log_softmax(jnp.where(h > 0, h, -jnp.inf)), -1.0, RULED),
    Row("linalg_inv", lambda h: jnp.linalg.inv(h), 0.0, RULED),
    Row("linalg_solve", lambda h: jnp.linalg.solve(h, jnp.eye(4)), 0.0, RULED),
    Row("linalg_cholesky", lambda h: jnp.linalg.cholesky(h), -1.0, RULED),
    Row("gather", lambda h: jnp.take(h, jnp.array([0, 1, 12, 2]), axis=1), 1.0),
)
# fmt: on
IDS = [f"{number}-{row.op}" for number, row in enumerate(ROWS)]


def value_of(row: Row, column: str) -> float:
    return SQUARED[column] if isinstance(row.value, str) else row.value


def programs(row: Row, column: str, **region: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The functions of a row and their arguments, by name; a region may have another dtype."""
    fn, value, low = row.fn, value_of(row, column), REGIONS[column]
    dtype = jnp.float16 if column == "plain" and row.value == BIG else jnp.float32
    x, w = jnp.eye(4, dtype=dtype), jnp.full((4, 4), value, dtype)
    out = jnp.full((4, 4), 1 / max(abs(value), 1), dtype)

    def model(w: Any, out: Any, x: Any) -> Any:
        return (fn(x @ w) @ out).astype(jnp.float32).mean()

    def scanned(w: Any, out: Any, x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return (fn(c @ w) @ out).astype(c.dtype), None

        return lax.scan(body, x, None, length=2)[0].astype(jnp.float32).mean()

    def again(w: Any, out: Any, x: Any) -> Any:
        y = jax.checkpoint(lambda w, x: fn(x @ w))(w, x)
        return (y @ out).astype(jnp.float32).mean()

    def mapped(w: Any, out: Any, x: Any) -> Any:
        return jax.vmap(model, (None, None, 0))(w, out, x[None]).mean()

    def inside(fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if low is None else autocast(fn, **{"dtype": low, **region})

    def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(inside(fn), argnums=(0, 1))

    def step(scaler: Any, w: Any, out: Any, x: Any) -> Any:
        def loss(w: Any, out: Any) -> Any:
            return scaler.scale(inside(model)(w, out, x))

        found, grads = jax.value_and_grad(loss, argnums=(0, 1))(w, out)
        grads, finite = scaler.unscale(grads)
        new = (p - 0.1 * g.astype(p.dtype) for p, g in zip((w, out), grads, strict=True))
        kept = [jnp.where(finite, n, p) for n, p in zip(new, (w, out), strict=True)]
        return kept, scaler.update(finite), found

    args = w, out, x
    return {
        "forward": (inside(model), args),
        "gradients": (gradients(model), args),
        "jit": (jax.jit(gradients(model)), args),
        "scan": (gradients(scanned), args),
        "remat": (gradients(again), args),
        "vmap": (gradients(mapped), args),
        "step": (step, (GradScaler(2.0**8), *args)),
    }


PROGRAMS = ("forward", "gradients", "jit", "scan", "remat", "vmap", "step")
# Gradients, and those of scans, in each region; every other program with a third of the rows, in
# one of the regions.
CELLS = [
    pytest.param(row, column, name, id=f"{of}-{column}-{name}")
    for (at, (of, row)), (turn, name) in product(
        enumerate(zip(IDS, ROWS, strict=True)), enumerate(PROGRAMS)
    )
    for column in row.columns
    if name in ("gradients", "scan")
    or ((at + turn) % 3 == 0 and column == row.columns[at // 3 % len(row.columns)])
]
# Neighbours in the list differ in the program alone: a slice has all of them, and all columns.
SLICE = 15


def kind_of(row: Row, column: str) -> str:
    if row.op == "gather":
        return "index"
    return "overflow" if row.value == BIG and column != "bfloat16" else "operation"


@pytest.mark.one_in(SLICE)
@pytest.mark.parametrize(("row", "column", "name"), CELLS)
def test_the_op_is_blamed_that_failed(row: Row, column: str, name: str) -> None:
    fn, args = programs(row, column)[name]
    fault = locate(fn, *args)
    assert fault is not None
    line = f"test_blame_matrix.py:{row.fn.__code__.co_firstlineno}"
    assert (fault.op, fault.source, fault.kind) == (row.op, line, kind_of(row, column))
    assert fault.direction == "forward"
    for operand in fault.inputs:  # finite, as the why says; a mask's infinities are the program's
        assert operand.nan == 0
        assert operand.inf == 0 or "constants" in fault.why
    if "(h)" in line_of(row) or row.value == BIG:
        value = abs(value_of(row, column))
        assert fault.inputs[0].largest == pytest.approx(value, rel=1e-2)


def line_of(row: Row) -> str:
    """The op alone in its line, of the matrix itself."""
    names = row.fn.__code__.co_names
    return "(h)" if len(names) <= 3 and row.fn.__code__.co_consts[-1:] in ((), (None,)) else ""


@pytest.mark.one_in(18)
@pytest.mark.parametrize(
    ("row", "low"),
    [
        pytest.param(row, low, id=f"{of}-{low}")
        for of, row in zip(IDS, ROWS, strict=True)
        for low in RULED
        if low in row.columns
    ],
)
def test_a_remedy_helps_or_there_is_none(row: Row, low: str) -> None:
    step, args = programs(row, low)["step"]
    audited = audit(step)
    audited(*args)
    found = audited.audit.suggest()
    if not found:
        assert audited.audit.fault is not None
        assert audited.audit.fault.kind in ("operation", "index")
        assert found.reasons
        return
    assert isinstance(row.value, str), "in float32 it is not finite either"
    region = {"policy": found.apply("amp"), "dtype": jnp.dtype(found.dtype or low)}
    gradients, args = programs(row, low, **region)["gradients"]
    _, (grad, _) = gradients(*args)
    assert np.isfinite(np.asarray(grad)).all()
