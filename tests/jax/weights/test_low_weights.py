"""`low_weights` around optax optimizers: what they step on, transformations, and refusals.

The oracle is the optimizer itself on float32 parameters, given the same gradients: in "master" and
"split" the float32 weights have to be its weights, bit for bit. Both run op by op, because XLA
makes one rounding of a product and a sum where it fuses them, and fuses by the program around.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polymp
from polymp import weights
from polymp.errors import PolicyError
from polymp.jax import LowWeightsState, autocast, low_weights
from tests.support.jax.scaler_tools import bits

MODES = tuple(weights.MODES)
EXACT = ("master", "split")
STEPS = 9
PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (24, 8)),
    "b": 0.1 * jax.random.normal(jax.random.key(1), (8,)),
}

OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "nadamw": optax.nadamw(1e-2),
    "radam": optax.radam(1e-2),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "adagrad": optax.adagrad(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-3),
    "yogi": optax.yogi(1e-2),
    "schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)),
    "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 3),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    "averaged": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def gradients(number: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(100), number)
    return jax.tree.map(lambda x: jax.random.normal(key, x.shape), PARAMS)


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def by_loop(step: Any, params: Any, state: Any, steps: int = STEPS) -> Any:
    for number in range(steps):
        params, state = step(params, state, gradients(number))
    return params, state


def run(tx: Any, params: Any, steps: int = STEPS) -> Any:
    start = tx.weights(params) if hasattr(tx, "weights") else params
    return by_loop(step_of(tx), start, tx.init(params), steps)


def wide(mode: str, params: Any, state: Any) -> Any:
    """The float32 weights that low ones stand for, as docs/low-weights.md takes them out."""
    cast = jax.lax.bitcast_convert_type

    def joined(p: Any, rest: Any) -> Any:
        return cast(cast(p.astype(jnp.float32), jnp.int32) + rest, jnp.float32)

    if mode == "split":
        return jax.tree.map(joined, params, state.beside)
    low = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return state.beside if mode == "master" else low


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_steps_as_on_float32(name, mode):
    optimizer = OPTIMIZERS[name]
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    want, inner = run(optimizer, PARAMS)
    params, state = run(low_weights(OPTIMIZERS[name], mode), PARAMS)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    got = wide(mode, params, state)
    if mode in EXACT:
        assert bits(got) == bits(want)
        assert bits(state.inner) == bits(inner)
        assert jax.tree.structure(state.inner) == jax.tree.structure(inner)
        return
    bound = STEPS * 2.0**-7  # each step is rounded to 8 bits at random
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.all(np.abs(a - b) <= bound * (np.abs(b) + 1))  # some were larger on the way
        assert not np.array_equal(a, jax.tree.leaves(PARAMS)[0])


def test_this_oracle_finds_plain_bfloat16():
    want, _ = run(OPTIMIZERS["adamw"], PARAMS)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    got, _ = run(OPTIMIZERS["adamw"], low)
    assert bits(jax.tree.map(lambda x: x.astype(jnp.float32), got)) != bits(want)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_may_be_low_too(mode):
    """They are cast to float32, so that the moments are those of float32 gradients."""
    tx = low_weights(optax.adam(1e-2), mode)
    state, low = tx.init(PARAMS), tx.weights(PARAMS)
    assert {x.dtype.name for x in jax.tree.leaves(state.inner[0].mu)} == {"float32"}
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients(0))
    back = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    assert bits(step_of(tx)(low, state, grads)) == bits(step_of(tx)(low, state, back))


def by_scan(step: Any, params: Any, state: Any) -> Any:
    def body(carry: Any, number: Any) -> Any:
        return step(*carry, gradients(number)), None

    numbers = jnp.arange(STEPS)
    return jax.jit(lambda *carry: jax.lax.scan(body, carry, numbers)[0])(params, state)


def by_donation(step: Any, params: Any, state: Any) -> Any:
    return by_loop(jax.jit(step, donate_argnums=(0, 1)), params, state)


def by_vmap(step: Any, params: Any, state: Any) -> Any:
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (params, state))
    many = by_loop(jax.jit(jax.vmap(step, (0, 0, None))), *twice)
    first, second = (jax.tree.map(lambda x, i=i: x[i], many) for i in range(2))
    assert bits(first) == bits(second)
    return first


WAYS = {"jit": lambda step, *rest: by_loop(jax.jit(step), *rest), "eager": by_loop}
WAYS |= {"scan": by_scan, "donation": by_donation, "vmap": by_vmap}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_every_transformation_gives_the_same_bits(mode):
    # Of powers of two, so that one rounding of a product and a sum is as good as two.
    tx = low_weights(optax.sgd(2**-5, momentum=0.5), mode)

    def start() -> Any:
        return tx.weights(PARAMS), tx.init(PARAMS)

    seen = {name: bits(way(step_of(tx), *start())) for name, way in WAYS.items()}
    assert seen == dict.fromkeys(WAYS, seen["jit"])


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_the_arguments(mode):
    """Of parameters, state and gradients, with Adam; the counters are a few bytes."""
    tx = low_weights(optax.adam(1e-2), mode)
    params = {"w": jnp.ones((256, 256))}
    state, low = tx.init(params), tx.weights(params)
    grads = jax.tree.map(jnp.zeros_like, low)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(low, state, grads).compile()
    size = step.memory_analysis().argument_size_in_bytes / params["w"].size
    want = {"master": 16, "split": 14, "stochastic": 12}[mode]
    assert want <= size <= want + 0.1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_the_parameters(mode):
    """In multi_transform each part is masked; the random bits follow the place in the part."""
    tx = low_weights(optax.sgd(2**-5, momentum=0.5), mode)
    parts = optax.multi_transform({"low": tx, "wide": optax.sgd(0.1)}, {"w": "low", "b": "wide"})
    params, state = {"w": tx.weights(PARAMS["w"]), "b": PARAMS["b"]}, parts.init(PARAMS)
    alone = tx.weights(PARAMS["w"]), tx.init(PARAMS["w"])
    for number in range(3):
        params, state = jax.jit(step_of(parts))(params, state, gradients(number))
        alone = jax.jit(step_of(tx))(*alone, gradients(number)["w"])
    assert bits(params["w"]) == bits(alone[0])
    assert params["b"].dtype == jnp.float32


def test_as_the_last_of_a_chain():
    tx = low_weights(optax.adam(1e-2))
    clip = optax.clip_by_global_norm(0.5)
    want, _ = run(low_weights(optax.chain(clip, optax.adam(1e-2))), PARAMS)
    chain = optax.chain(clip, tx)
    params, _ = by_loop(step_of(chain), tx.weights(PARAMS), chain.init(PARAMS))
    assert bits(params) == bits(want)


def test_several_steps_around_it():
    tx = low_weights(optax.adam(1e-2))
    several = optax.MultiSteps(tx, 3).gradient_transformation()
    params, state = tx.weights(PARAMS), several.init(PARAMS)
    start, seen = bits(params), []
    for number in range(6):
        params, state = step_of(several)(params, state, gradients(number))
        seen.append(bits(params))
    assert seen[0] == seen[1] == start != seen[2] == seen[3] == seen[4] != seen[5]
    want, _ = run(low_weights(optax.MultiSteps(optax.adam(1e-2), 3)), PARAMS, 6)
    assert bits(params) == bits(want)


def test_arguments_for_the_optimizer_arrive():
    optimizer = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = low_weights(optax.chain(optax.sgd(0.1), optimizer))
    params, state = tx.weights(PARAMS), tx.init(PARAMS)
    for _ in range(4):
        _, state = tx.update(gradients(0), state, params, value=1.0)
    assert float(state.inner[1].scale) < 1


def test_what_is_kept_takes_plain_steps():
    want, _ = run(optax.adam(1e-2), PARAMS)
    params, state = run(low_weights(optax.adam(1e-2), keep=["b"]), PARAMS)
    assert params["w"].dtype == jnp.bfloat16
    assert bits(params["b"]) == bits(want["b"])
    assert jax.tree.structure(state.beside["b"]) == jax.tree.structure(optax.MaskedNode())


def test_the_optimizer_shows_what_is_kept_and_why():
    assert repr(low_weights(optax.sgd(0.1), keep=["b"])) == (
        "low weights: bfloat16, mode 'split'\nnot stored low:\n    b: is in keep="
    )
    assert repr(low_weights(optax.sgd(0.1))) == "low weights: bfloat16, mode 'split'"


def test_a_function_with_its_arguments_keeps_what_it_reads_in_float32():
    params = {"gain": jnp.ones(4), "w": jnp.ones((4, 4)), "other": jnp.ones(4)}
    loss = autocast(lambda params, x: jnp.sum((jnp.exp(params["gain"]) * x) @ params["w"]))
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    tx = low_weights(optax.sgd(0.1), keep=(loss, params, x))
    assert tx.kept["gain"].startswith("'exp' reads it in float32")
    assert tx.kept == {"gain": tx.kept["gain"], "other": "nothing reads it"}
    several = low_weights(optax.sgd(0.1), keep=[(loss, params, x), "w"])
    assert several.kept == {**tx.kept, "w": "is in keep="}
    assert low_weights(optax.sgd(0.1), keep=tx.kept).kept.keys() == tx.kept.keys()


def test_what_a_function_reads_need_not_be_a_parameter_of_the_optimizer():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    net = Net(nnx.Rngs(0))
    loss = autocast(lambda net, x: jnp.sum(net(x)))
    tx = low_weights(optax.sgd(0.1), keep=(loss, net, jnp.ones((2, 4))))
    for again in (tx, low_weights(optax.sgd(0.1), keep=tx.kept)):
        nnx.Optimizer(net, again, wrt=nnx.Param)
        low = again.weights(nnx.state(net, nnx.Param))
        assert (low.norm.scale.dtype, low.linear.kernel.dtype) == (jnp.float32, jnp.bfloat16)
    assert "norm.mean" in tx.kept
    for other in ({"net": nnx.state(net)}, nnx.state(net.norm)):  # there they have other paths
        with pytest.raises(PolicyError, match="matches no float parameter"):
            tx.init(other)


def test_arrays_that_are_no_weights_are_left_alone():
    others = {"n": jnp.int32(3), "z": jnp.ones(2, jnp.complex64), "f": jax.nn.relu, "t": np.float32}
    low = low_weights(optax.sgd(0.1)).weights({"w": PARAMS["w"], **others})
    assert all(low[name] is x for name, x in others.items())
    assert low["w"].dtype == jnp.bfloat16


def test_shapes_alone_say_the_dtypes():
    tx = low_weights(optax.adam(1e-2))
    state, low = jax.eval_shape(lambda p: (tx.init(p), tx.weights(p)), PARAMS)
    assert state.beside["w"].dtype == jnp.int16
    assert low["w"].dtype == jnp.bfloat16


def test_low_parameters_start_with_nothing_beside_them():
    tx = low_weights(optax.adam(1e-2))
    low = tx.weights(PARAMS)
    state = tx.init(low)
    assert not np.any(state.beside["w"])
    assert state.inner[0].mu["w"].dtype == jnp.float32
    assert bits(tx.weights(low)) == bits(low)


def refusals() -> dict[str, Any]:
    tx, params = low_weights(optax.adam(1e-2)), {"w": PARAMS["w"]}
    state, low = tx.init(params), tx.weights(params)
    other, master = (low_weights(optax.adam(1e-2), mode) for mode in ("stochastic", "master"))
    grads = {"w": gradients(0)["w"]}
    alone = (
        f"low_weights(): keep has the function {jax.nn.silu!r:.80} without its arguments. "
        "Write keep=(autocast(loss_fn), params, batch)."
    )
    beside = (
        "low_weights: beside parameter 'w' the state has int16, and mode {} there. Give the mode "
        "and keep that the state was made with."
    )
    return {
        "optimizer": (lambda: low_weights(3), TypeError,
            "low_weights needs an optax optimizer, got 3. Write low_weights(optax.adamw(1e-3))."),
        "mode": (lambda: low_weights(optax.adam(1e-2), "half"), ValueError,
            "low_weights(): mode 'half' is not one of 'master', 'split', 'stochastic'."),
        "keep": (lambda: low_weights(optax.adam(1e-2), keep="norm"), TypeError,
            "low_weights(): keep='norm' is not a list. Write keep=['norm']."),
        "keep as in torch": (lambda: low_weights(optax.adam(1e-2), keep=jax.nn.silu), TypeError,
            alone),
        "keep of a function alone": (
            lambda: low_weights(optax.adam(1e-2), keep=["w", (jax.nn.silu,)]), TypeError, alone),
        "keep of a plain function": (
            lambda: low_weights(optax.adam(1e-2), keep=(jax.nn.silu, params)), TypeError,
            "low_weights(optimizer, keep=(fn, params, ...)) needs a function that "
            "polymp.jax.autocast returned, got silu. Write low_weights(optimizer, "
            "keep=(autocast(fn), params, ...))."),
        "path": (lambda: low_weights(optax.adam(1e-2), keep=["norm"]).init(params), PolicyError,
            "low_weights(): keep: 'norm' matches no float parameter: paths are, for example, "
            "'w'."),
        "seed": (lambda: low_weights(optax.adam(1e-2), seed=0.5), TypeError,
            "low_weights(): seed must be a whole number, got 0.5."),
        "state": (lambda: tx.update(grads, (), low), TypeError,
            "an optimizer of low_weights needs the state that its init returned, got "
            "<class 'tuple'>."),
        "no parameters": (lambda: tx.update(grads, state), TypeError,
            "an optimizer of low_weights needs the parameters as well: "
            "tx.update(grads, opt_state, params)."),
        "float32 parameters": (lambda: tx.update(grads, state, params), TypeError,
            "low_weights: parameter 'w' is float32, and this optimizer keeps it in bfloat16. Train "
            "with params = tx.weights(params), or leave it as it is with keep=['w']."),
        "state of another mode": (lambda: other.update(grads, state, low), ValueError,
            beside.format("'stochastic' has nothing")),
        "state without": (lambda: tx.update(grads, other.init(params), low), ValueError,
            beside.replace("int16", "nothing").format("'split' has int16")),
        "state of a third mode": (lambda: master.update(grads, state, low), ValueError,
            beside.format("'master' has float32")),
        "state with other kept parameters": (
            lambda: low_weights(optax.adam(1e-2), keep=["w"]).update(grads, state, params),
            ValueError, beside.format("'split' has nothing")),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_bad_input_is_refused(name):
    call, error, text = refusals()[name]
    with pytest.raises(error) as found:
        call()
    assert str(found.value) == text


def test_the_state_is_what_optax_can_search():
    tx = low_weights(optax.adam(1e-2))
    state = tx.init(PARAMS)
    assert isinstance(state, LowWeightsState)
    assert int(optax.tree.get(state, "step")) == 0
    doubled = optax.tree.map_params(tx, lambda x: x * 2, state)
    assert bits(doubled.beside) == bits(jax.tree.map(lambda x: x * 2, state.beside))


def test_explain_has_the_dtypes_of_low_and_of_kept_weights():
    """A low bias is cast to the dtype of the sum, float32, by jax.numpy as it is traced."""
    loss = autocast(lambda p, x: jnp.sum(((x * p["gain"]) @ p["up"] + p["bias"]) @ p["up"].T))
    params = {"gain": jnp.ones(8), "up": jnp.ones((8, 16)), "bias": jnp.ones(16)}
    x = jnp.ones((4, 8))
    low = low_weights(optax.sgd(0.1), keep=(loss, params, x)).weights(params)
    calls = (reversed([*polymp.explain(loss, p, x)]) for p in (params, low))
    before, after = ({call.op: call for call in each} for each in calls)
    assert before["mul"].inputs == after["mul"].inputs == ("float32", "float32")  # the gain
    assert before["linear"].inputs == ("float32", "float32")
    assert after["linear"].inputs == ("float32", "bfloat16")
    assert after["linear"].run == after["linear"].outputs[0] == "bfloat16"
    assert (after["to"].inputs, after["to"].outputs) == (("bfloat16",), ("float32",))
    assert [at["add"].outputs for at in (before, after)] == [("bfloat16",), ("float32",)]
