"""Module paths of flax nnx and equinox models: they hold however the model is called."""

from __future__ import annotations

import pickle
import reprlib
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import polymp
from polymp.errors import PolicyWarning
from polymp.jax import autocast, explain, scoped
from tests.support.processes import in_thread

X = jnp.ones((2, 4))
KEYS = jax.random.split(jax.random.key(0), 3)


def policy(*patterns):
    return polymp.policy("amp").override(scopes={p: {"all": "fp32"} for p in patterns})


PATHS = policy("layers.1.linear", "head")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def features(self, x):
        return self.layers[1](x)


NET = Net(nnx.Rngs(0))
GRAPH, STATE = nnx.split(NET)


class Layer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)


class Model(eqx.Module):
    layers: list[Layer]
    head: eqx.nn.Linear

    def __call__(self, x):
        for layer in self.layers:
            x = jax.vmap(layer)(x)
        return jax.vmap(self.head)(x)

    def features(self, x):
        return jax.vmap(self.layers[1])(x)


LINEARS = [eqx.nn.Linear(4, 4, key=key) for key in KEYS]
MODEL = Model(list(map(Layer, LINEARS[:2])), LINEARS[2])


def merged(state):
    return nnx.merge(GRAPH, state)


CALLS = {
    "nnx": {
        "argument": (lambda net, x: net(x), NET),
        "closure": (lambda _, x: NET(x), 0),
        "merge": (lambda state, x: merged(state)(x), STATE),
        "merge in jit": (lambda state, x: jax.jit(lambda s, x: merged(s)(x))(state, x), STATE),
        "nnx.jit": (lambda state, x: nnx.jit(lambda n, x: n(x))(merged(state), x), STATE),
        "remat": (lambda state, x: nnx.remat(lambda n, x: n(x))(merged(state), x), STATE),
        "capture": (lambda s, x: nnx.capture(merged(s), nnx.Intermediate)(x)[0], STATE),
        "partial": (partial(lambda net, _, x: net(x), NET), 0),
    },
    "equinox": {
        "argument": (lambda model, x: model(x), MODEL),
        "closure": (lambda _, x: MODEL(x), 0),
        "filter_jit": (lambda m, x: eqx.filter_jit(lambda m, x: m(x))(m, x), MODEL),
        "checkpoint": (lambda m, x: eqx.filter_checkpoint(lambda m, x: m(x))(m, x), MODEL),
        "vmap": (lambda model, x: jax.vmap(lambda x: model(x[None])[0])(x), MODEL),
        "parts": (lambda m, x: eqx.combine(*eqx.partition(m, eqx.is_array))(x), MODEL),
    },
}
WAYS = [(library, way) for library, ways in CALLS.items() for way in ways]


def products(fn, *args):
    """How many products run low, and how many in float32."""
    text = str(jax.make_jaxpr(fn)(*args))
    return text.count("polymp_contraction["), text.count("dot_general[")


@pytest.mark.parametrize(("library", "way"), WAYS)
def test_rules_by_path_hold_however_the_model_is_called(library, way):
    fn, model = CALLS[library][way]
    arrays, rest = eqx.partition(model, eqx.is_array) if library == "equinox" else (model, None)

    def call(arrays, x):
        whole = arrays if rest is None else eqx.combine(arrays, rest)
        return autocast(fn, policy=PATHS)(whole, x)

    if model is NET:  # flax lets no module through jax's own transformations
        assert products(lambda x: call(NET, x), X) == (1, 2)
    else:
        assert products(call, arrays, X) == (1, 2)


def test_a_model_itself_may_be_the_function():
    for model in (NET, MODEL):
        assert products(autocast(model, policy=PATHS), X) == (1, 2)


def test_models_and_their_classes_are_left_as_they_are():
    classes = Block, Layer, nnx.Linear, eqx.nn.Linear
    before = [vars(cls)["__call__"] for cls in classes]
    with pytest.raises(ZeroDivisionError):
        autocast(lambda x: NET(x) / (1 // 0), policy=PATHS)(X)
    autocast(lambda x: NET(x) + MODEL(x), policy=PATHS)(X)
    assert type(NET.layers[1].linear) is nnx.Linear
    assert type(MODEL.layers[1].linear) is eqx.nn.Linear
    assert [vars(cls)["__call__"] for cls in classes] == before
    pickle.dumps(MODEL.head)


def test_a_thread_that_is_in_no_region_calls_models_as_ever():
    seen = []

    def fn(x):
        seen.append(in_thread(lambda: products(MODEL, X)))
        return MODEL(x)

    assert products(autocast(fn, policy=PATHS), X) == (1, 2)
    assert seen == [(0, 3)]


def test_a_model_that_is_returned_is_as_it_was():
    tree = jax.tree.structure(autocast(lambda m, x: m, policy=policy("*"))(MODEL, X))
    assert tree == jax.tree.structure(MODEL)


INNER = policy("layers.1.linear")


def test_a_scoped_nnx_model_has_its_paths_in_other_methods_too():
    net = merged(STATE)
    assert products(lambda x: autocast(Net.features, policy=INNER)(net, x), X) == (0, 1)
    fn = autocast(lambda x: net.features(x), policy=INNER)
    with pytest.warns(PolicyWarning, match=r"'layers\.1\.linear': paths are, for example, 'linear"):
        assert products(fn, X) == (1, 0)
    assert scoped(net) is net
    assert products(autocast(lambda x: net.features(x), policy=INNER), X) == (0, 1)
    assert (net(X) == NET(X)).all()


def test_a_scoped_equinox_model_is_a_copy():
    named = scoped(MODEL)
    assert type(MODEL.layers[1].linear) is eqx.nn.Linear
    for model, there in ((named, True), (MODEL, False)):
        text = jax.jit(jax.vmap(model.layers[1])).lower(X).as_text(debug_info=True)
        assert ("/linear/eqx.nn.Linear" in text.replace("vmap(linear)", "/linear")) is there
    assert (named(X) == MODEL(X)).all()


def test_methods_of_equinox_models_have_paths_too():
    def again(model, x):
        return model.twice(x)

    class Twice(Model):
        def twice(self, x):
            return self(self.features(x))

    twice = Twice(MODEL.layers, MODEL.head)
    assert products(autocast(again, policy=INNER), twice, X) == (2, 2)


def test_scoped_takes_nnx_and_equinox_models_alone():
    with pytest.raises(TypeError) as error:
        scoped(X)
    assert str(error.value) == (
        "scoped(model) names the modules of a flax nnx or equinox model, got "
        f"{reprlib.repr(X)}. linen and haiku modules have name scopes of their own."
    )


def test_a_pattern_that_matches_nothing_is_told_once():
    fn = autocast(lambda model, x: model(x), policy=policy("haed", "*.linaer", "zzz", "head"))
    with pytest.warns(PolicyWarning) as told:
        fn(MODEL, X)
    assert [str(w.message) for w in told] == [
        "autocast(): policy 'amp*' has rules for paths that no module of <lambda> has. "
        "'*.linaer': did you mean '*.linear' or '*.layers'? "
        "'haed': did you mean 'head'? "
        "'zzz': paths are, for example, 'head', 'layers', 'layers.0'."
    ]
    assert told[0].filename == __file__
    fn(MODEL, X[:1])
    jax.jit(lambda x: fn(MODEL, x))(X)
    with pytest.warns(PolicyWarning, match=f"that no module of {type(MODEL).__name__} has"):
        autocast(MODEL, policy=policy("zzz"))(X)
    with pytest.warns(PolicyWarning, match=r"polymp\.jax\.scoped\(model\) gives names"):
        autocast(lambda x: x @ x.T, policy=policy("zzz"))(X)


def test_patterns_are_sought_in_loops_and_regions_inside():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="inner")(x)

    module = Dense()
    params = module.init(jax.random.key(0), X)

    def looped(x, rules):
        def turn(x, _):
            with autocast(policy=rules):
                return module.apply(params, x).astype("float32"), None

        return jax.lax.scan(turn, x, None, length=2)[0]

    for rules in (policy("*.inner"), "amp"):  # without a warning
        autocast(partial(looped, rules=rules), policy=policy("*.inner"))(X)
    with pytest.warns(PolicyWarning, match=r"'\*\.iner': did you mean '\*\.inner'\?"):
        autocast(partial(looped, rules=policy("*.iner")), policy=policy("*.inner"))(X)


def test_a_module_that_runs_no_op_is_there_all_the_same():
    autocast(NET.features, policy=policy("head"))(X)  # without a warning
    autocast(lambda model, x: model.features(x), policy=policy("head"))(MODEL, X)


def test_a_function_without_modules_is_told_where_names_come_from():
    with pytest.warns(PolicyWarning, match=r"there is jax\.named_scope\(name\)\.$"):
        autocast(lambda x: x @ x.T, policy=policy("head"))(X)

    def named(x):
        with jax.named_scope("head"):
            return x @ x.T

    assert products(autocast(named, policy=policy("head")), X) == (0, 1)


MLP = eqx.nn.MLP(4, 4, 4, 2, key=KEYS[0])
PRINTED = {
    "eqx.nn.MLP": lambda model: lambda x: jax.vmap(model)(x),
    "eqx.nn.Sequential": lambda model: lambda x: jax.vmap(eqx.nn.Sequential(model.layers))(x),
    "a gradient with checkpoints": lambda model: jax.grad(
        lambda x: jax.checkpoint(jax.vmap(model))(x).sum()
    ),
    "another scope": lambda model: lambda x: jax.named_scope("a b: c")(jax.vmap(model))(x),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_paths_that_explain_prints_are_those_of_patterns(name):
    def calls(rules):
        fn = autocast(lambda model, x: PRINTED[name](model)(x), policy=rules)
        return [call for call in explain(fn, MLP, X) if call.row is not None]

    for path in {call.module for call in calls("amp")} - {""}:
        inside = [call for call in calls(policy(path)) if call.module == path]
        assert {call.run for call in inside} == {"float32"}, path
