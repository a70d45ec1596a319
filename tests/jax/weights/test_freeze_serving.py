"""Frozen functions at work: whole programs, transformations, libraries, shardings, decoding.

The oracle is the autocast function on the float32 parameters; all comparisons are of bits.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polymp.jax
from polymp.jax import Frozen, autocast, freeze, lower
from tests.conftest import need
from tests.jax.weights.test_freeze import QUICK, V, W, X, faults, halved, parameter, turned
from tests.support.jax import forms, hlo
from tests.support.jax.corpus import PROGRAMS, corpus
from tests.support.jax.corpus_runs import problem
from tests.support.jax.programs import Program, arguments, plain, programs
from tests.support.jax.scaler_tools import bits
from tests.support.sizes import size

ALL = [program.name for program in corpus()]


# Whole programs


@cache
def frozen(name: str) -> tuple[Any, Frozen, Any]:
    """A program of the corpus under autocast, and frozen, all of its arguments as parameters."""
    it = problem(name)
    low = ("bfloat16", "float16")[ALL.index(name) % 2]
    with jax.enable_x64(it.program.x64):
        fn = autocast(lambda args: it.fn(*args), dtype=low)
        return fn, *freeze(fn, it.args)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", ALL)
def test_every_program_of_the_corpus_gives_the_same_bits(name):
    need(PROGRAMS[name].needs)
    fn, serve, served = frozen(name)
    it = problem(name)
    with jax.enable_x64(it.program.x64):
        want = jax.jit(fn, compiler_options=QUICK)(it.args)
        got = jax.jit(serve, compiler_options=QUICK)(served)
    assert bits(got) == bits(want)


@pytest.mark.sized
def test_most_of_what_the_corpus_computes_with_is_stored_low():
    stored, floats = Counter[str](), 0
    for name in ALL[:: size(5, 1)]:  # an odd number: they are frozen for the two dtypes in turn
        if PROGRAMS[name].missing():
            continue
        _, serve, served = frozen(name)
        stored.update(serve.stored.values())
        floats += sum(x.dtype == np.float32 for x in jax.tree.leaves(problem(name).args))
        kinds = Counter(str(x.dtype) for x in jax.tree.leaves(served))
        assert kinds["float32"] <= len(serve.kept)
    assert stored["bfloat16"] >= size(16, 80)
    assert stored["float16"] >= size(16, 80)
    assert stored.total() >= 0.6 * floats


@pytest.mark.sized
@settings(max_examples=size(2, 8), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(it=programs())
def test_random_programs_give_the_same_bits(it: Program):
    assert faults(autocast(plain(it, polymp.jax), dtype=it.low), arguments(it)) == []


# Transformations


def block(p: Any, x: Any, rule: Any = turned) -> Any:
    return jnp.tanh(halved(x, p["w"])) @ p["v"] + rule(lower(x), p["w"])


PARAMS = {"w": W, "v": V}


@pytest.fixture(scope="module")
def blocks() -> tuple[Any, Frozen, Any]:
    fn = autocast(block)
    serve, served = freeze(fn, PARAMS, X)
    assert set(serve.stored) == {"['v']"}
    return fn, serve, served


def test_in_scan_and_under_vmap(blocks):
    fn, serve, served = blocks

    def looped(fn, params, x):
        return lax.scan(lambda x, _: (x + fn(params, x).astype(x.dtype), None), x, length=3)[0]

    def over_rows(fn, params, x):
        return jax.vmap(lambda row: fn(params, row[None])[0])(x)

    def over_params(fn, params, x):
        many = jax.tree.map(lambda p: jnp.stack([p, -p]), params)
        return jax.vmap(fn, (0, None))(many, x)

    for way in (looped, over_rows, over_params):
        got, want = (jax.jit(partial(way, f))(p, X) for f, p in ((serve, served), (fn, PARAMS)))
        assert bits(got) == bits(want)


@pytest.mark.parametrize("mode", ["reverse", "forward", "remat"])
def test_gradients_with_respect_to_other_arguments_are_the_same(blocks, mode):
    fn, serve, served = blocks
    if mode == "forward":  # which functions with a rule for backward do not have
        fn = autocast(partial(block, rule=halved))
        serve, served = freeze(fn, PARAMS, X)

    def gradient(fn, params, x):
        if mode == "forward":
            return jax.jvp(partial(fn, params), (x,), (jnp.cos(x),))
        inner = jax.checkpoint(partial(fn, params)) if mode == "remat" else partial(fn, params)
        return jax.grad(lambda x: inner(x).astype(jnp.float32).sum())(x)

    want = jax.jit(partial(gradient, fn))(PARAMS, X)
    got = jax.jit(partial(gradient, serve))(served, X)
    assert bits(got) == bits(want)
    assert bits(got) != bits(jax.tree.map(jnp.zeros_like, want))


def test_derivatives_with_respect_to_stored_parameters_come_low():
    fn = autocast(partial(block, rule=halved))
    serve, served = freeze(fn, PARAMS, X)

    def derivatives(fn, params):
        grads = jax.grad(lambda p: fn(p, X).astype(jnp.float32).sum())(params)
        return grads, *jax.jvp(lambda p: fn(p, X), (params,), (params,))

    want, result, tangents = derivatives(fn, PARAMS)
    got, same, low = derivatives(serve, served)
    for name, grad in got.items():
        assert grad.dtype == served[name].dtype
        assert np.allclose(grad.astype(jnp.float32), want[name], rtol=2e-2, atol=2e-2)
    assert bits(same) == bits(result)
    assert np.allclose(*(x.astype(jnp.float32) for x in (low, tangents)), rtol=0.05, atol=0.05)


# Where parameters come from


def test_shapes_stand_for_arrays():
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    fn = autocast(block)
    serve, served = freeze(fn, shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    real, params = freeze(fn, PARAMS, X)
    assert (serve.stored, serve.kept, repr(serve)) == (real.stored, real.kept, repr(real))
    assert {name: (s.shape, s.dtype) for name, s in served.items()} == {
        name: (p.shape, p.dtype) for name, p in params.items()
    }
    compiled = jax.jit(serve).lower(served, X).compile(hlo.AS_FOR_USERS)
    assert bits(compiled(params, X)) == bits(jax.jit(fn)(PARAMS, X))


@pytest.mark.parametrize("kind", list(AxisType)[:2], ids=str)
def test_sharded_parameters_keep_their_sharding(kind):
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(kind, kind))
    sharding = NamedSharding(mesh, P("a", None))
    params = jax.tree.map(lambda p: jax.device_put(p, sharding), PARAMS)
    with jax.set_mesh(mesh):
        fn = autocast(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"])
        x = jax.device_put(X, NamedSharding(mesh, P(None, None)))
        serve, served = freeze(fn, params, x)
        assert {p.sharding for p in served.values()} == {sharding}
        assert {p.dtype.name for p in served.values()} == {"bfloat16"}
        assert bits(jax.jit(serve)(served, x)) == bits(jax.jit(fn)(params, x))


def test_freezing_where_everything_is_traced():
    fn = autocast(block)

    @jax.jit
    def both(params, x):
        serve, served = freeze(fn, params, x)
        assert {n: p.dtype.name for n, p in served.items()} == {"v": "bfloat16", "w": "float32"}
        return serve(served, x)

    assert bits(both(PARAMS, X)) == bits(jax.jit(fn)(PARAMS, X))


def test_the_state_of_an_nnx_module():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.rest = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            x = self.norm(jnp.tanh(self.first(x)))
            return self.rest[1](self.rest[0](x))

    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model)
    layers = {f"{of}['{name}']" for of in ("['first']", "['rest'][0]", "['rest'][1]")
              for name in ("bias", "kernel")}  # fmt: skip
    last = {"['rest'][0]['bias']", "['rest'][1]['bias']", "['rest'][1]['kernel']"}
    wide = {"extends": "amp", "scopes": {"rest.1": {"linear": "fp32"}}}
    for policy, stored in (("amp", layers), (wide, layers - last)):
        fn = autocast(lambda params, *args: nnx.merge(graph, params)(*args), policy=policy)
        serve, served = freeze(fn, params, X)
        assert {path.removesuffix(".value") for path in serve.stored} == stored
        low = nnx.merge(graph, served)
        assert low.first.kernel[...].dtype == jnp.bfloat16
        assert model.first.kernel[...].dtype == jnp.float32
        for run in (lambda fn: fn, jax.jit):
            assert bits(run(serve)(served, X)) == bits(run(fn)(params, X))


def test_nnx_modules_are_refused():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    fn = autocast(lambda model, x: model(x))
    for call in (lambda: freeze(fn, model, X), lambda: freeze(autocast(model), X)):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value).endswith(
            "Write graph, params = nnx.split(model), and as its function autocast(lambda params, "
            "*args: nnx.merge(graph, params)(*args))."
        )
    both = autocast(lambda p, other: other(X) @ p["w"])
    with pytest.raises(TypeError, match="takes no flax nnx modules as arguments"):
        freeze(both, {"w": parameter("w", 2, 3)}, model)
    either = autocast(lambda p, other: X @ p["w"] if other is None else other(X))
    serve, served = freeze(either, {"w": parameter("w", 4, 3)}, None)
    with pytest.raises(TypeError, match="takes no flax nnx modules as arguments"):
        serve(served, model)


def test_linen_variables_with_batch_statistics():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)))

    model = Model()
    variables = model.init(jax.random.key(0), X, train=False)
    fn = autocast(partial(model.apply, mutable=["batch_stats"]))
    serve, served = freeze(fn, variables, X, train=False)
    assert {path.split("]")[1] for path in serve.stored} == {"['Dense_0'", "['Dense_1'"}
    assert {path.split("]")[0] for path in serve.kept} == {"['batch_stats'", "['params'"}
    for train in (False, True):
        run = jax.jit(partial(fn, train=train)), jax.jit(partial(serve, train=train))
        assert bits(run[1](served, X)) == bits(run[0](variables, X))


def test_an_equinox_module():
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    fn = autocast(lambda model, x: jax.vmap(model)(x))
    serve, served = freeze(fn, model, X)
    assert set(serve.stored) >= {f".layers[{i}].weight" for i in range(3)}
    assert isinstance(served, eqx.nn.MLP)
    assert bits(eqx.filter_jit(serve)(served, X)) == bits(eqx.filter_jit(fn)(model, X))
    assert model.layers[0].weight.dtype == jnp.float32


# Decoding

WIDTH, LENGTH, WORDS = 24, 8, 40


def next_token(p: Any, cache: Any, token: Any, at: Any) -> tuple[Any, Any]:
    """The next token of one layer that keeps what it has seen, greedily."""
    x = p["embedding"][token]
    cache = lax.dynamic_update_slice_in_dim(cache, (x @ p["in"]).astype(cache.dtype), at, 0)
    x = x + jax.nn.gelu(cache.mean(0, keepdims=True) @ p["up"] + p["bias"]) @ p["down"].T
    return (x @ p["head"]).argmax(-1).astype(jnp.int32), cache


def test_decoding_with_a_cache_casts_no_stored_parameter():
    shapes = {"embedding": (WORDS, WIDTH), "in": (WIDTH, WIDTH), "head": (WIDTH, WORDS + 3)}
    shapes |= dict.fromkeys(("up", "down"), (WIDTH, 4 * WIDTH + 1)) | {"bias": (4 * WIDTH + 1,)}
    params = {name: parameter(name, *shape) / 5 for name, shape in shapes.items()}
    fn = autocast(next_token)
    cache = jnp.zeros((LENGTH, WIDTH), jnp.bfloat16)
    first = jnp.ones(1, jnp.int32)
    serve, served = freeze(fn, params, cache, first, jnp.int32(0))
    assert set(serve.kept) >= {"['embedding']"}
    assert set(serve.stored) >= {f"['{name}']" for name in ("in", "up", "down", "head")}
    stored = [shapes[path[2:-2]] for path in serve.stored]
    sizes = {prod(shape) for shape in stored if len(shape) == 2}
    assert prod(shapes["embedding"]) not in sizes

    def run(fn: Any, params: Any) -> tuple[Any, set[int]]:
        step = jax.jit(fn).lower(params, cache, first, jnp.int32(0)).compile(hlo.AS_FOR_USERS)
        program = hlo.read(step.as_text())
        ops = [op for body in program.values() for op in body.values()]
        casts = {prod(op.shape) for op in ops if op.opcode == "convert"}
        state, token, seen = cache, first, []
        for at in range(LENGTH):
            token, state = step(params, state, token, jnp.int32(at))
            seen.append(int(token[0]))
        return (seen, state), casts

    with forms.lowered_as("row_by_row"):  # others widen operands, which is a cast, too
        want, before = run(fn, params)
        got, after = run(serve, served)
    assert got[0] == want[0]
    assert bits(got[1]) == bits(want[1])
    assert sizes <= before, "the oracle sees no casts"
    assert not sizes & after
    assert serve.bytes_after < 0.65 * serve.bytes_before
