"""Autocast on whole programs: dtypes, values, gradients, and what stands in the trace.

    results and gradients   in the documented dtypes, finite, near float32's
    enabled=False           the program itself, bit for bit
    the trace               nothing low that must not be, nothing left in float32 that should be low

How near is near is in `rounding`: a bound derived from the dtype and the program.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from polymp.jax import autocast
from tests.conftest import need
from tests.support.jax.corpus import LOW, PROGRAMS, corpus
from tests.support.jax.corpus_runs import (
    Problem,
    Transform,
    emulated,
    problem,
    reference,
    rounds,
    run,
    too_far,
)
from tests.support.jax.rounding_bound import nearest, rounded
from tests.support.jax.scaler_tools import bits
from tests.support.jax.walker import violations

RUNS = ("bfloat16", "float16")
ALL = [program.name for program in corpus()]


@pytest.fixture
def it(name: str) -> Problem:
    need(PROGRAMS[name].needs)
    return problem(name)


def faults_of_run(it: Problem, fmt: str, transform: Transform) -> list[str]:
    scale = it.program.scale if fmt == "float16" else 1.0
    ran = run(it, transform(it.fn, dtype=jnp.dtype(fmt)), scale)
    want = reference(it.program.name)
    dtypes = tuple(str(x.dtype) for x in ran.out)
    if dtypes != it.program.dtypes(fmt):
        return [f"dtypes are {dtypes}, documented is {it.program.dtypes(fmt)}"]
    found = [
        f"a gradient of a {b.dtype} parameter is {a.dtype}"
        for a, b in zip(ran.grads, want.grads, strict=True)
        if a.dtype != b.dtype
    ]
    floats = (x for part in ran for x in part if jnp.issubdtype(x.dtype, jnp.floating))
    finite = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in floats)
    found += [] if finite else ["a value is not finite"]
    found += too_far(it.program.name, fmt, ran)
    if it.program.lowers and not rounds(it.program.name, ran):
        found.append("nothing was rounded")
    return found


def faults_of_trace(it: Problem, fmt: str, transform: Transform) -> list[str]:
    fn, excepted = transform(it.fn, dtype=jnp.dtype(fmt)), it.program.exceptions
    with jax.enable_x64(it.program.x64):
        forward = jax.make_jaxpr(fn)(*it.args)
        backward = jax.make_jaxpr(it.graded(fn))(*it.inputs())
    found = [f"forward: {v}" for v in violations(forward, fmt)]
    in_gradient = violations(backward, fmt, gradient=True)
    found += [f"gradient: {v}" for v in in_gradient if v.rule not in excepted]
    unused = set(excepted) - {v.rule for v in in_gradient}
    return found + [f"the exception for {rule!r} is not needed" for rule in unused]


def faults_of_off(it: Problem, transform: Transform) -> list[str]:
    """How a transform that does nothing differs from the program."""
    with jax.enable_x64(it.program.x64):
        fn = transform(it.fn, enabled=False)
        texts = [str(jax.make_jaxpr(it.graded(f))(*it.inputs())) for f in (fn, it.fn)]
    if _anonymous(texts[0]) == _anonymous(texts[1]):  # one program: no need to run it twice
        return []
    same = bits(run(it, fn)) == bits(run(it, it.fn))
    return [] if same else ["results differ from the program's own"]


def _anonymous(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.one_in(31)
@pytest.mark.parametrize("fmt", RUNS)
@pytest.mark.parametrize("name", ALL)
def test_results_and_gradients(it, fmt):
    assert faults_of_run(it, fmt, autocast) == []


@pytest.mark.one_in(12)
@pytest.mark.parametrize("fmt", RUNS)
@pytest.mark.parametrize("name", ALL)
def test_dtypes_in_the_trace(it, fmt):
    assert faults_of_trace(it, fmt, autocast) == []


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", ALL)
def test_disabled_is_the_program_itself(it):
    assert faults_of_off(it, autocast) == []


# The oracles can fail.


def identity(fn: Any, **_: Any) -> Any:
    """Lowers nothing."""
    return fn


def everything_low(fn: Any, dtype: Any = jnp.bfloat16, **_: Any) -> Any:
    """Casts arguments down and results up, and knows no op."""

    def cast(tree: Any, before: Any, after: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(after) if x.dtype == before else x, tree)

    return lambda *args: cast(fn(*cast(args, jnp.float32, dtype)), dtype, jnp.float32)


def narrows_all(fn: Any, dtype: Any, **_: Any) -> Any:
    """Takes float64 for float32."""
    return lambda *args: fn(*(x.astype(jnp.float32) for x in args))


SMALL = ["mlp_logits", "mlp_cross_entropy", "conv_2d_classifier", "scan_rnn", "causal_attention"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SMALL)
def test_lowering_nothing_is_caught(it):
    faults = faults_of_trace(it, "bfloat16", identity)
    assert {fault.partition(" dot")[0].partition(" conv")[0] for fault in faults} == {
        "forward: low:",
        "gradient: low:",
    }
    expected = "dtypes" if LOW in it.program.out else "nothing was rounded"
    assert expected in faults_of_run(it, "bfloat16", identity)[0]


@pytest.mark.parametrize("name", ["mlp_cross_entropy", "linear_attention", "three_normalisations"])
def test_lowering_everything_is_caught(it):
    faults = faults_of_trace(it, "bfloat16", everything_low)
    assert any(fault.startswith("forward: float32") for fault in faults)


@pytest.mark.parametrize("name", ["custom_jvp_sign", "custom_vjp_linear"])
def test_a_lost_derivative_rule_is_caught(it):
    ran = run(it, rounded(it.fn, nearest("bfloat16")))  # as it should be, but for the rules
    faults = too_far(it.program.name, "bfloat16", ran)
    assert faults
    assert all(fault.startswith("grads") for fault in faults)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SMALL)
def test_a_coarser_dtype_is_caught_and_the_dtype_itself_is_not(it):
    for fmt, coarser in (("bfloat16", "four bits"), ("float16", "bfloat16")):
        assert too_far(it.program.name, fmt, emulated(it, nearest(coarser)))
        assert too_far(it.program.name, fmt, emulated(it, nearest(fmt))) == []


@pytest.mark.parametrize("name", ["float64_beside_float32"])
def test_a_narrowed_float64_is_caught(it):
    faults = faults_of_trace(it, "bfloat16", narrows_all)
    assert any(fault.startswith("forward: narrow") for fault in faults)
    assert "dtypes" in faults_of_run(it, "bfloat16", narrows_all)[0]


@pytest.mark.parametrize("name", ["mlp_logits"])
def test_a_transform_that_is_not_off_is_caught(it):
    assert faults_of_off(it, lambda fn, enabled: everything_low(fn)) != []


LOOPS = ["scan_rnn", "while_newton", "branches", "scan_over_layers_remat", "custom_vjp_linear"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LOOPS)
def test_the_reference_is_the_program_itself(it):
    assert not rounds(it.program.name, run(it, it.fn))
