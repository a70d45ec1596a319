"""The parameters that `freeze` stores in a low dtype, and those that it leaves.

The oracle is the autocast function itself on the float32 parameters: results have to be the same
bits in the same dtypes. `faults` says where they are not, and a planted fault shows that it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from polymp.backends.jax.weights import freeze as freeze_module
from polymp.errors import PolicyError
from polymp.jax import autocast, freeze, lower, upper
from tests.support.jax.scaler_tools import bits

QUICK = {"xla_backend_optimization_level": 0}
X = jax.random.normal(jax.random.key(0), (3, 4))
B16, F16 = "bfloat16", "float16"


def parameter(name: str, *shape: int) -> jax.Array:
    """A float32 array that no low dtype holds."""
    return jax.random.normal(jax.random.key(sum(map(ord, name))), shape)


def faults(fn: Callable[..., Any], params: Any, *args: Any, eager: bool = False) -> list[str]:
    """Where the frozen function and the autocast function differ."""
    serve, served = freeze(fn, params, *args)

    def compiled(fn: Any) -> Any:
        return fn if eager else jax.jit(fn, compiler_options=QUICK)

    want, got = bits(compiled(fn)(params, *args)), bits(compiled(serve)(served, *args))
    pairs = enumerate(zip(got, want, strict=True))
    return [f"result {i}" for i, (one, other) in pairs if one != other]


@dataclass(frozen=True)
class Case:
    """A function of parameters and X, and the dtype of each that is stored."""

    name: str
    fn: Callable[..., Any]
    params: dict[str, Any]
    stored: dict[str, str]

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []
W, V = parameter("w", 4, 4), parameter("v", 4, 4)
STACK = parameter("stack", 2, 4, 4)


def made(name: str, fn: Callable[..., Any], params: dict[str, Any], stored: dict[str, str]) -> Case:
    return Case(name, fn, params, {f"['{key}']": dtype for key, dtype in stored.items()})


def case(params: dict[str, Any], **stored: str) -> Callable[[Any], Any]:
    def enter(fn: Any) -> Any:
        CASES.append(made(fn.__name__, fn, params, stored))
        return fn

    return enter


@case({"w": W, "b": parameter("b", 4)}, w=B16, b=B16)
def a_linear_and_its_bias(p, x):
    return x @ p["w"] + p["b"]


@case({"w": W, "g": parameter("g", 4)}, w=B16)
def a_gain_in_float32(p, x):
    y = x @ p["w"]
    return p["g"] * y * lax.rsqrt((y * y).mean(-1, keepdims=True))


@case({"w": parameter("w", 2, 8)}, w=B16)
def moved(p, x):
    w = lax.rev(p["w"].reshape(4, 4).T[::-1], (1,))
    return x @ lax.dynamic_slice(w, (0, 1), (4, 2)) @ jnp.squeeze(w[None])[:2]


@case({"q": W, "k": V, "e": STACK}, q=B16, k=B16, e=B16)
def joined_split_and_picked(p, x):
    q, k = jnp.split(x @ jnp.concatenate([p["q"], p["k"]], 1), 2, 1)
    left, right = jnp.split(p["e"][jnp.array([1, 0])], 2)
    return q @ left[0] + k @ right[0] @ jnp.stack([p["q"], p["k"]])[1]


@case({"w": W, "v": V, "stack": STACK}, w=B16, v=B16, stack=B16)
def in_bodies(p, x):
    @jax.jit
    def turned(w):
        return w.T

    def layer(h, w):
        return jnp.tanh(h @ p["w"] @ w), w.T

    h, ws = lax.scan(jax.checkpoint(layer), x, p["stack"])
    h = lax.fori_loop(0, 2, lambda _, h: h @ p["v"], h @ ws[0] @ turned(p["w"]))
    return lax.while_loop(lambda h: (h @ p["v"]).argmax() < 0, lambda h: h @ p["w"] + 1, h)


@case({"w": W, "v": V}, v=B16)
def carried(p, x):
    def layer(w, row):
        return w.T, row @ w @ p["v"]

    return lax.scan(layer, p["w"], x)[1]


@case({"w": W, "v": V})
def carried_by_a_while(p, x):
    def step(state):
        i, w, h = state
        return i + 1, w.T, h @ w

    return lax.while_loop(lambda s: s[0] < 2, step, (0, p["w"], x @ jnp.tanh(p["v"])))[2]


@case({"w": W, "v": V, "u": STACK}, u=B16)
def off(p, x):
    with autocast(enabled=False):
        h = x @ p["w"]
    return h @ p["v"] @ p["u"][0], (h * p["v"][0])


@case({"w": W, "v": V, "u": STACK[0]}, u=B16)
def in_regions_of_two_dtypes(p, x):
    with autocast(dtype="float16"):
        h = x @ p["w"] @ p["v"]
    return h @ p["u"] @ p["v"]


@case({"w": W, "v": V}, w=B16)
def cast_by_the_user(p, x):
    low = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return low, x.astype(jnp.float16) @ p["v"].astype(jnp.float16), low @ p["v"]


@case({"w": W, "g": parameter("g", 4), "b": parameter("b", 4)}, w=B16)
def around_a_known_function(p, x):
    h = jax.nn.standardize(x @ p["w"]) * p["g"] + p["b"]
    return jax.nn.softmax(h + p["b"])


@case({"q": W, "k": V, "v": STACK[1]}, q=B16, k=B16, v=B16)
def in_a_library(p, x):
    q, k, v = ((x @ p[n]).reshape(1, 3, 2, 2) for n in "qkv")
    return jax.nn.dot_product_attention(q, k, v)


@jax.custom_jvp
def halved(x, w):
    return x @ w / 2


@halved.defjvp
def _(primals, tangents):
    x, w = primals
    return halved(x, w), tangents[0] @ w / 2 + x @ tangents[1] / 2


@jax.custom_vjp
def turned(x, w):
    return x @ w


turned.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))


# By name: a function of parameters and X, the parameters, and the dtype of each that is stored.
ONE, TWO, QK = {"w": W}, {"w": W, "v": V}, {"q": W, "k": V}
SHORT: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = {
    "read_low_and_wide": (lambda p, x: (x @ p["w"], jnp.exp(p["w"]).sum()), ONE, {}),
    "returned": (lambda p, x: (x @ p["w"], p["w"].T), ONE, {}),
    "a_scalar": (lambda p, x: (x @ p["w"]) * p["s"], {"w": W, "s": parameter("s")}, {"w": B16}),
    "unread": (lambda p, x: x @ p["w"], {"w": W, "unread": V}, {"w": B16}),
    "of_other_dtypes": (lambda p, x: (x @ p["w"])[p["i"][:2]] @ p["h"] * p["n"],
        {"w": W, "i": jnp.arange(4), "h": V.astype(jnp.float16), "n": np.float64(0.5)}, {"w": B16}),
    "of_numpy": (lambda p, x: x @ p["w"], {"w": np.asarray(W)}, {"w": B16}),
    "joined_with_one_that_is_read_wide": (
        lambda p, x: (x @ jnp.concatenate([p["q"], p["k"]], 1), p["k"].sum()), QK, {}),
    "joined_with_a_computed_one": (
        lambda p, x: x @ jnp.concatenate([p["w"], jnp.exp(x)], 0).T, ONE, {}),
    "filled_up_with_a_number": (
        lambda p, x: x @ p["w"].at[jnp.array([0, 9])].get(mode="fill", fill_value=0.3).T, ONE, {}),
    "in_branches": (lambda p, x: lax.switch(1, [lambda x: x @ p["w"], lambda x: x @ p["v"].T], x),
        TWO, {"w": B16, "v": B16}),
    "chosen_by_a_branch": (
        lambda p, x: x @ lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["v"]), TWO, {}),
    "chosen_with_a_computed_one": (
        lambda p, x: x @ lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["v"] * 2), TWO, {}),
    "marked": (lambda p, x: lower(p["w"]) * lower(x[0]) @ upper(p["v"]), TWO,
        {"w": B16, "v": B16}),
    "of_a_higher_precision": (lambda p, x: jnp.dot(x, p["w"], precision="highest"), ONE, {}),
    "convolved": (lambda p, x: lax.conv(x.T[None], p["w"].transpose(0, 1, 2), (1,), "SAME"),
        {"w": parameter("w", 2, 4, 3)}, {"w": B16}),
    "with_rules_of_their_own": (lambda p, x: turned(halved(x, p["w"]), p["v"]), TWO, {}),
}  # fmt: skip
CASES += [made(name, *rest) for name, rest in SHORT.items()]

# Tables that are read by rows and by products: programs in which rows go on low, and others.
P = {"table": parameter("table", 16, 8), "w": parameter("rows", 8, 8)}
IDS = jnp.array([3, 0, 15])
LOWERED: dict[str, Any] = {
    "a product of rows": lambda p, _: (p["table"][IDS] @ p["w"]) @ p["table"].T,
    "taken": lambda p, _: (jnp.take(p["table"], IDS, axis=0) @ p["w"]) @ p["table"].T,
    "filled up": lambda p, _: (
        (p["table"].at[IDS + 2].get(mode="fill", fill_value=0.5) @ p["w"]) @ p["table"].T
    ),
    "rows marked": lambda p, _: (lower(p["table"][IDS]) * 3 @ p["w"]) @ p["table"].T,
}
KEPT: dict[str, Any] = {
    "scaled": lambda p, _: (p["table"][IDS] * 3 @ p["w"]) @ p["table"].T,
    "rows returned": lambda p, _: (p["table"][IDS], p["w"] @ p["table"].T),
}
ALWAYS = {"['w']": B16}
CASES += [Case(name, fn, P, ALWAYS | {"['table']": B16}) for name, fn in LOWERED.items()]
CASES += [Case(name, fn, P, ALWAYS) for name, fn in KEPT.items()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("it", CASES, ids=str)
def test_what_is_stored_and_that_the_bits_are_the_same(it):
    fn = autocast(it.fn)
    serve, served = freeze(fn, it.params, X)
    assert serve.stored == it.stored
    paths = {f"['{name}']" for name in it.params}
    assert set(serve.kept) == paths - set(it.stored)
    for name, x in it.params.items():
        stored = it.stored.get(f"['{name}']")
        assert served[name].dtype == (stored or x.dtype)
        assert stored or served[name] is x
    assert faults(fn, it.params, X) == []
    assert faults(fn, it.params, X, eager=True) == []


REASONS = {
    "a_gain_in_float32": ("g", "'mul' reads it in float32 ("),
    "read_low_and_wide": ("w", "'exp' reads it in float32 ("),
    "returned": ("w", "it is handed on in float32, as a result"),
    "unread": ("unread", "nothing reads it"),
    "carried": ("w", "a scan carries it in float32 ("),
    "chosen_by_a_branch": ("v", "it is handed on in float32, as a result"),
    "off": ("w", "'dot_general' reads it in float32 ("),
    "in_regions_of_two_dtypes": ("v", "'dot_general' reads it in float16 ("),
    "cast_by_the_user": ("v", "a cast to float16 reads it ("),
    "of_a_higher_precision": ("w", "'dot_general' reads it in float32 ("),
    "with_rules_of_their_own": ("v", "a function with a derivative rule takes it in float32 ("),
    "of_other_dtypes": ("i", "it is int32, not float32"),
    "around_a_known_function": ("g", "'mul' reads it in float32 ("),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_a_parameter_is_kept(name):
    (it,) = [it for it in CASES if it.name == name]
    serve, _ = freeze(autocast(it.fn), it.params, X)
    parameter, why = REASONS[name]
    reason = serve.kept[f"['{parameter}']"]
    assert reason.startswith(why)
    if why.endswith("("):
        assert "test_freeze.py:" in reason[len(why) :]


# The oracle can fail.


def test_a_checker_that_misses_a_wide_read_is_noticed(monkeypatch):
    fn = autocast(SHORT["read_low_and_wide"][0])
    assert faults(fn, {"w": W}, X, eager=True) == []
    every = lambda self, low, *_: self.read.update(low)  # noqa: E731
    monkeypatch.setattr(freeze_module.LowPlan, "reads", every)
    assert faults(fn, {"w": W}, X, eager=True) == ["result 1"]


@pytest.mark.parametrize("dtype", [B16, F16])
def test_every_kind_of_number_is_stored_as_the_program_would_cast_it(dtype):
    """Overflows, NaNs, zeros with a sign, subnormal numbers of both dtypes, ties."""
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -65520.0, 65519.0, 1e-41, 6e-8, -3e-8]
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-133, 2.0**-24]
    w = jnp.asarray(np.array([*ends, *ties, *np.random.default_rng(0).normal(size=15)], np.float32))

    def fn(w, x):
        return x @ w[:, None], lower(w)

    fn = autocast(fn, dtype=dtype)
    serve, served = freeze(fn, w, jnp.eye(32))
    assert serve.stored == {"": dtype}
    assert bits(served) == bits(jax.jit(lambda w: w.astype(dtype))(w))
    assert faults(fn, w, jnp.eye(32)) == []
    assert faults(fn, w, jnp.eye(32), eager=True) == []


@pytest.mark.parametrize("scale", [1, 3])
def test_an_embedding_layer_under_lean(scale):
    layer = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)

    def attended(params, ids):
        layer = nnx.merge(graph, params)
        return layer.attend(layer(ids) * scale)

    fn = autocast(attended, policy="lean")
    serve, served = freeze(fn, params, IDS)
    assert serve.stored == {"['embedding'].value": "bfloat16"}
    assert (jax.jit(serve)(served, IDS) == jax.jit(fn)(params, IDS)).all()
    kept = freeze(autocast(attended), params, IDS)[0].kept
    assert list(kept) == ["['embedding'].value"]  # under amp the rows go on in float32


# --- The errors of `freeze` and of the functions that it makes, and the text of these functions ---


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
        "['w'] is stored in bfloat16, but with these arguments 'exp' reads it in float32 ("
    )
    assert f"test_freeze.py:{line})" in text
    assert text.endswith(
        "). Freeze with these arguments as well: polymp.jax.freeze(serve, params, ...), where "
        "serve is this function and params are the float32 parameters, keeps it in float32."
    )
    # Nothing was kept of that call, and what the text says helps.
    want = [autocast(fn)(params, X, squash=squash) for squash in (False, True)]
    assert bits(serve(served, X)) == bits(want[0])
    both, served = freeze(serve, params, X, squash=True)
    assert both.stored == {"['v']": B16}
    assert bits([both(served, X, squash=squash) for squash in (False, True)]) == bits(want)
    again, _ = freeze(both, params, X)
    assert again.stored == both.stored
    assert again.kept["['w']"].startswith("'exp' reads it")


def test_other_shapes_are_traced_anew():
    fn, params = autocast(a_linear_and_its_bias), {"w": W, "b": W[0]}
    serve, served = freeze(fn, params, X)
    for x in (X[0], X[:1], jnp.stack([X, X]), X.astype(jnp.bfloat16)):
        assert bits(serve(served, x)) == bits(fn(params, x))


def test_the_record():
    serve, served = freeze(autocast(a_gain_in_float32), {"w": W, "g": W[0]}, X)
    assert (serve.bytes_before, serve.bytes_after) == (16 * 4 + 16, 16 * 2 + 16)
    assert sum(x.nbytes for x in served.values()) == serve.bytes_after
    assert repr(serve) == (
        "<frozen a_gain_in_float32: 1 of 2 arrays in bfloat16, 80 bytes before, 48 after>"
    )
    assert serve.__name__ == "a_gain_in_float32"


def test_stored_parameters_are_not_frozen_again():
    serve, served = freeze(autocast(a_linear_and_its_bias), {"w": W, "b": W[0]}, X)
    refused(TypeError, "Pass the float32 parameters", lambda: freeze(serve, served, X[:2]))


def test_tied_parameters_stay_one_array():
    serve, served = freeze(autocast(lambda p, x: x @ p["a"] @ p["b"]), {"a": W, "b": W}, X)
    assert served["a"] is served["b"]
    assert (serve.bytes_before, serve.bytes_after) == (16 * 4, 16 * 2)
