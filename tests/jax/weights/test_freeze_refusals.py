"""The errors of `freeze` and of the functions that it makes, and the text of these functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from polymp.errors import PolicyError
from polymp.jax import autocast, freeze
from tests.jax.weights.test_freeze import (
    B16,
    V,
    W,
    X,
    a_gain_in_float32,
    a_linear_and_its_bias,
    bits,
)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_functions_that_cannot_be_frozen():
    def plain(p, x):
        return x @ p

    text = "freeze(fn, params, ...) needs a function that polymp.jax.autocast returned, got "
    name = plain.__qualname__
    for fn in (plain, jax.jit(autocast(plain)), jax.vmap(autocast(plain))):
        refused(TypeError, f"{text}{name}. Write ", lambda fn=fn: freeze(fn, W, X))
    refused(TypeError, f"{text}an object of NoneType. Write ", lambda: freeze(None, W, X))
    refused(
        RuntimeError,
        "freeze(fn, params, ...) was called inside an autocast function. Call it outside, before "
        "serving.",
        lambda: autocast(lambda x: freeze(autocast(plain), W, x))(X),
    )
    serve, served = freeze(autocast(plain), W, X)
    refused(
        RuntimeError,
        f"{serve!r} was called inside an autocast function, but its dtypes are settled. Call it "
        "outside, or freeze the autocast function around it instead.",
        lambda: autocast(lambda x: serve(served, x))(X),
    )


def test_parameters_that_were_not_frozen():
    serve, served = freeze(autocast(a_linear_and_its_bias), {"w": W, "b": W[0]}, X)
    refused(
        TypeError,
        "['b'] is float32, but was frozen as bfloat16; 2 of 2 arrays differ. Pass the parameters "
        "that freeze returned.",
        lambda: jax.jit(serve)({"w": W, "b": W[0]}, X),
    )
    refused(
        TypeError,
        "['w'] is float, but was frozen as bfloat16; 1 of 2 arrays differ.",
        lambda: serve({**served, "w": 1.0}, X),
    )
    refused(
        TypeError,
        "The first argument has another structure than the parameters that freeze returned. "
        "Missing: ['b']. New: ['c'], ['d']. Frozen: PyTreeDef({'b': *, 'w': *}). Given: "
        "PyTreeDef({'c': *, 'd': *, 'w': *}).",
        lambda: serve({"w": served["w"], "c": X, "d": X}, X),
    )
    refused(TypeError, "Missing: ['b'], ['w']. Frozen: ", lambda: serve({}, X))


def test_a_call_that_reads_a_stored_parameter_wide():
    def fn(p, x, squash=False):
        return x @ (jnp.exp(p["w"]) if squash else p["w"]) @ p["v"]

    params = {"w": W, "v": V}
    serve, served = freeze(autocast(fn), params, X)
    assert set(serve.stored) == {"['w']", "['v']"}
    line = fn.__code__.co_firstlineno + 1
    with pytest.raises(PolicyError) as caught:
        jax.jit(serve, static_argnames="squash")(served, X, squash=True)
    text = str(caught.value)
    assert text.startswith(
        "['w'] is stored in bfloat16, but with these arguments 'exp' reads it in float32: exp in "
        "bfloat16: fp32 (runs in float32), by the row exp = fp32, policies/torch-cuda.toml ("
    )
    assert f"test_freeze_refusals.py:{line}:" in text
    assert text.endswith(
        "). Freeze with these arguments as well: polymp.jax.freeze(serve, params, ...), where "
        "serve is this function and params are the float32 parameters, keeps it in float32."
    )
    # Nothing was kept of that call, and what the text says helps.
    want = [autocast(fn)(params, X, squash=squash) for squash in (False, True)]
    assert bits(serve(served, X)) == bits(want[0])
    both, served = freeze(serve, params, X, squash=True)
    assert both.stored == {"['v']": B16}
    assert [bits(both(served, X, squash=s)) for s in (False, True)] == list(map(bits, want))
    again, _ = freeze(both, params, X)
    assert again.stored == both.stored
    assert again.kept["['w']"].startswith("'exp' reads it")


def test_other_shapes_are_traced_anew():
    serve, served = freeze(autocast(a_linear_and_its_bias), {"w": W, "b": W[0]}, X)
    for x in (X[0], X[:1], jnp.stack([X, X]), X.astype(jnp.bfloat16)):
        assert bits(serve(served, x)) == bits(
            autocast(a_linear_and_its_bias)({"w": W, "b": W[0]}, x)
        )


def test_the_record():
    serve, served = freeze(autocast(a_gain_in_float32), {"w": W, "g": W[0]}, X)
    assert (serve.bytes_before, serve.bytes_after) == (16 * 4 + 16, 16 * 2 + 16)
    assert sum(x.nbytes for x in served.values()) == serve.bytes_after
    assert repr(serve) == (
        "<frozen a_gain_in_float32: 1 of 2 arrays in bfloat16, 80 bytes before, 48 after>"
    )
    assert serve.__name__ == "a_gain_in_float32"


def test_stored_parameters_are_not_frozen_again():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    fn = autocast(lambda p, x: x @ p["w"] + p["b"])
    serve, served = freeze(fn, params, jnp.ones((2, 4)))
    with pytest.raises(TypeError, match=r"Pass the float32 parameters"):
        freeze(serve, served, jnp.ones((3, 4)))


def test_a_message_holds_no_arrays():
    with pytest.raises(TypeError) as raised:
        freeze({"w": jnp.ones((4, 4))}, autocast(jnp.sin))
    assert "an object of dict" in str(raised.value)
    assert "1." not in str(raised.value)


def test_tied_parameters_stay_one_array():
    w = jnp.ones((64, 64))
    serve, served = freeze(autocast(lambda p, x: x @ p["a"] @ p["b"]), {"a": w, "b": w}, w)
    assert served["a"] is served["b"]
    assert (serve.bytes_before, serve.bytes_after) == (64 * 64 * 4, 64 * 64 * 2)
