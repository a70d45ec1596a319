"""`GradScaler` for JAX: its rule beside torch's, what it refuses, and that a skip is a skip."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp import scaling
from polymp.backends.jax.scaler import GradScaler
from polymp.scaling import ScaleRule, ScaleState
from tests.conftest import need

FLOATS = ("float16", "bfloat16", "float32", "float8_e5m2", "complex64")


def values(scaler: GradScaler) -> tuple[float, int]:
    return float(scaler.state.scale), int(scaler.state.tracker)


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """What is in the arrays, to the last bit."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in leaves]


# --- made, shown, taken apart --------------------------------------------------------------------


def test_defaults_are_torchs():
    need("torch")
    import torch

    assert GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()


RANGE = "from 1.1754943508222875e-38 to 3.4028234663852886e+38"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"growth_factor": 1.0},
            ValueError,
            "growth_factor must be finite and above 1, got 1.0.",
        ),
        (
            {"growth_factor": float("nan")},
            ValueError,
            "growth_factor must be finite and above 1, got nan.",
        ),
        (
            {"backoff_factor": 1.5},
            ValueError,
            "backoff_factor must be between 0 and 1, got 1.5.",
        ),
        (
            {"backoff_factor": 0.0},
            ValueError,
            "backoff_factor must be between 0 and 1, got 0.0.",
        ),
        (
            {"growth_interval": 0},
            ValueError,
            "growth_interval must be from 1 to 2147483647, got 0.",
        ),
        (
            {"growth_interval": 2**31},
            ValueError,
            "growth_interval must be from 1 to 2147483647, got 2147483648.",
        ),
        (
            {"growth_interval": 2.5},
            TypeError,
            "growth_interval must be a whole number, got 2.5.",
        ),
        (
            {"init_scale": "cuda"},
            TypeError,
            "init_scale must be a number, got 'cuda'.",
        ),
        (
            {"init_scale": 0.0},
            ValueError,
            f"init_scale must be a normal float32, {RANGE}; got 0.0.",
        ),
        (
            {"init_scale": 1e39},
            ValueError,
            f"init_scale must be a normal float32, {RANGE}; got 1e+39.",
        ),
    ],
)
def test_arguments_are_checked_unless_disabled(arguments, error, message):
    with pytest.raises(error) as raised:
        GradScaler(**arguments)
    assert raised.value.args[0] == message
    assert not GradScaler(**arguments, enabled=False).enabled


ODD = GradScaler(8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)


def test_no_field_is_forgotten_on_the_way_through_a_transform():
    scaler = ODD.update(True)
    text = "GradScaler(scale=8.0, tracker=1, growth=3.0, backoff=0.25, interval=7, enabled=True)"
    through = (
        jax.jit(lambda s: s)(scaler),
        jax.tree.map(lambda x: x, scaler),
        jax.tree_util.tree_map_with_path(lambda _, x: x, scaler),
        jax.lax.scan(lambda s, _: (s, None), scaler, None, length=2)[0],
        copy.deepcopy(scaler),
        pickle.loads(pickle.dumps(scaler)),
    )
    assert [repr(s) for s in through] == [text] * len(through)
    off = jax.jit(lambda s: s)(GradScaler(enabled=False))
    assert not off.enabled
    assert [(str(x.dtype), x.shape) for x in jax.tree.leaves(ODD)] == [
        ("float32", ()),
        ("int32", ()),
    ]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ODD)]
    assert paths == [".state.scale", ".state.tracker"]


def test_other_constants_are_another_program():
    traced = []

    @jax.jit
    def run(scaler):
        traced.append(scaler)
        return scaler.update(True)

    for scaler in (ODD, ODD.update(True), GradScaler(8.0), GradScaler(9.0)):
        run(scaler)
    assert len(traced) == 2
    assert repr(traced[0]) == (
        "GradScaler(scale=float32[], tracker=int32[], "
        "growth=3.0, backoff=0.25, interval=7, enabled=True)"
    )


def test_it_shows_itself_with_something_else_for_a_state():
    marked = jax.tree.map(lambda _: "here", ODD)
    assert repr(marked).startswith("GradScaler(scale='here', tracker='here', growth=3.0")
    hole = jax.tree.unflatten(jax.tree.structure(ODD, is_leaf=lambda x: x is ODD.state), ["state"])
    assert repr(hole).startswith("GradScaler(state='state', growth=3.0")


def test_numbers_of_other_types_are_the_same_constants():
    other = GradScaler(np.float32(8), 3, np.float64(0.25), 7.0)
    assert repr(other) == repr(ODD)
    assert jax.tree.structure(other) == jax.tree.structure(ODD)


def test_it_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        ODD.rule = ScaleRule()  # type: ignore[misc]


# --- the rule, beside torch's --------------------------------------------------------------------


def torch_history(rule: ScaleRule, scale: float, history: Any) -> list[tuple[float, int]]:
    import torch

    state = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    seen = []
    for finite in history:
        torch._amp_update_scale_(*state, torch.tensor(0.0 if finite else 1.0), *rule)
        seen.append((state[0].item(), int(state[1])))
    return seen


def jax_history(
    rule: ScaleRule, scale: float, history: Any, update: Any = GradScaler.update
) -> list[tuple[float, int]]:
    (seen,) = jax_histories(rule, [scale], [history], update)
    return seen


def jax_histories(
    rule: ScaleRule, scales: Any, histories: Any, update: Any = GradScaler.update
) -> list[list[tuple[float, int]]]:
    """A batch of scalers, each along its own history."""

    def one(scaler, finite):
        after = update(scaler, finite)
        return after, after.state

    start = GradScaler(1.0, *rule)
    tracker = jnp.zeros(len(scales), jnp.int32)
    batch = jax.tree.unflatten(jax.tree.structure(start), (jnp.asarray(scales), tracker))
    run = jax.jit(jax.vmap(lambda scaler, history: jax.lax.scan(one, scaler, history)[1]))
    states = run(batch, jnp.asarray(histories))
    return [
        list(zip(*row, strict=True))
        for row in zip(states.scale.tolist(), states.tracker.tolist(), strict=True)
    ]


@given(
    seed=st.integers(0, 2**32 - 1),
    skips=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    growth=st.sampled_from([2.0, 4.0, 1.5, 1.1, 1.001, 3.3, 1e30, 1e300]),
    backoff=st.sampled_from([0.5, 0.75, 0.9, 0.999, 1e-3]),
    interval=st.sampled_from([1, 3]),
)
@settings(max_examples=16)
def test_histories_are_torchs_bit_for_bit(seed, skips, growth, backoff, interval):
    need("torch")
    rng, rule = np.random.default_rng(seed), ScaleRule(growth, backoff, interval)
    histories = rng.random((24, 64)) >= skips
    scales = np.ldexp(rng.random(24) + 1, rng.integers(-20, 128, 24)).astype(np.float32)
    for scale, history, ours in zip(
        scales, histories, jax_histories(rule, scales, histories), strict=True
    ):
        theirs = torch_history(rule, float(scale), history)
        lost = [at for at, (value, _) in enumerate(theirs) if value < np.finfo(np.float32).tiny]
        until = lost[0] if lost else len(theirs)  # XLA on CPU flushes subnormal scales
        assert ours[:until] == theirs[:until]


def test_the_comparison_notices_a_product_in_float32():
    need("torch")
    rule, history = ScaleRule(1.1, 0.9, 1), [True] * 64

    def rounded(scaler, finite):
        state = scaling.step(rule, scaler.state, finite, jnp.where)
        return jax.tree.unflatten(jax.tree.structure(scaler), state)

    expected = torch_history(rule, 3.0, history)
    assert jax_history(rule, 3.0, history) == expected
    assert jax_history(rule, 3.0, history, rounded) != expected


@given(history=st.lists(st.booleans(), max_size=12))
@settings(max_examples=30)
def test_eager_updates_are_those_of_torchs_scaler(history):
    need("torch")
    import torch

    arguments = {"init_scale": 2.0**16, "growth_interval": 2}
    theirs = torch.amp.GradScaler("cpu", **arguments)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    ours = GradScaler(**arguments)
    for finite in history:
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((2,), 1.0 if finite else float("inf"))
        theirs.step(optimizer)
        theirs.update()
        ours = ours.update(finite)
        assert ours.state_dict() == theirs.state_dict()


def test_a_count_past_a_lowered_interval_grows():
    scaler = GradScaler(4.0, growth_interval=9)
    for _ in range(5):
        scaler = scaler.update(True)
    lowered = scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 2})
    assert values(lowered.update(True)) == (8.0, 0)


def test_a_scale_never_becomes_infinite_and_a_lost_one_writes_nothing():
    top = jax.jit(lambda s: jax.lax.scan(lambda s, _: (s.update(True), None), s, None, 200)[0])
    assert values(top(GradScaler(growth_interval=1))) == (2.0**127, 0)
    down = jax.jit(lambda s: jax.lax.scan(lambda s, _: (s.update(False), None), s, None, 200)[0])
    lost = down(GradScaler())
    assert lost.state.scale == 0  # subnormal numbers are flushed
    old = jnp.ones(3)
    new, lost, finite = lost.step(lost.scale(old), lambda g, w: w - g, old)
    assert (new.tolist(), values(lost), bool(finite)) == ([1.0, 1.0, 1.0], (0.0, 0), False)


@pytest.mark.parametrize(
    ("finite", "shown"),
    [(1.0, "float32[]"), (1, "int32[]"), (np.ones(2, bool), "bool[2]")],
    ids=["float", "int", "two"],
)
def test_update_wants_one_bool(finite, shown):
    with pytest.raises(TypeError) as raised:
        GradScaler().update(finite)
    assert raised.value.args[0] == f"finite must be one bool, got {shown}."


# --- scale and unscale ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_and_unscale_are_in_float32_or_wider(dtype):
    scaler = GradScaler(2.0**20)
    x = jnp.asarray([1.5, -0.25, 0.0], jnp.float32).astype(dtype)
    if dtype == "complex64":
        x = x * (1 - 2j)
    scaled = scaler.scale({"a": [x]})["a"][0]
    wide = "complex64" if dtype == "complex64" else "float32"
    assert scaled.dtype == wide  # 1.5 * 2**20 is too large for float16
    assert np.array_equal(scaled, np.asarray(x).astype(wide) * 2**20)
    back, finite = scaler.unscale({"a": [scaled]})
    assert np.array_equal(back["a"][0], np.asarray(x).astype(wide))
    assert back["a"][0].dtype == wide
    assert finite


def test_doubles_stay_doubles():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        scaler = GradScaler(3.0)
        x = jnp.asarray([0.1, 1e300])
        z = jax.lax.complex(x, x)
        assert [s.dtype for s in jax.tree.leaves(scaler)] == [jnp.float32, jnp.int32]
        (back, complex_back), finite = scaler.unscale([x, z])
        assert (back.dtype, complex_back.dtype) == (jnp.float64, jnp.complex128)
        assert np.array_equal(back, np.asarray(x) * (1 / 3))
        assert np.array_equal(complex_back.imag, np.asarray(x) * (1 / 3))
        assert finite
        assert scaler.scale(x).dtype == jnp.float64
        after = jax.jit(scaler.update)(False)
        assert [s.dtype for s in jax.tree.leaves(after)] == [jnp.float32, jnp.int32]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nothing_vanishes_where_the_inverse_of_the_scale_is_subnormal(wrap):
    scaler = GradScaler(2.0**127)
    (back,), finite = wrap(lambda s, g: s.unscale(g))(scaler, [jnp.asarray([2.0**127, 2.0**100])])
    assert back.tolist() == [1.0, 2.0**-27]
    assert finite
    new, _, _ = wrap(lambda s, g: s.step(g, lambda g, w: w - g, jnp.ones(())))(scaler, 2.0**126)
    assert new == 0.5


@given(
    exponent=st.integers(-30, 125),
    mantissa=st.integers(0, 2**23 - 1),
    grads=st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=8, max_size=8),
)
def test_quotients_are_torchs_bit_for_bit(exponent, mantissa, grads):
    need("torch")
    import torch

    scale = (1 + mantissa / 2**23) * 2.0**exponent
    weight = torch.zeros(8, requires_grad=True)
    weight.grad = torch.tensor(grads)
    theirs = torch.amp.GradScaler("cpu", init_scale=scale)
    theirs.scale(torch.ones(()))
    theirs.unscale_(torch.optim.SGD([weight]))
    expected = weight.grad.numpy()
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)  # flushed
    assert np.array_equal(UNSCALE(GradScaler(scale), jnp.asarray(grads))[0], expected)


UNSCALE = jax.jit(lambda scaler, grads: scaler.unscale(grads))


@pytest.mark.parametrize("size", [1, 100, 4096, 10_001])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_inf_or_nan_anywhere_is_found(dtype, size):
    unscale = jax.jit(lambda s, g: s.unscale(g)[1])
    scaler, fine = GradScaler(), {"b": jnp.ones(3), "empty": jnp.ones((0, 2))}
    clean = np.linspace(-1, 1, size).astype(jnp.dtype(dtype))
    assert unscale(scaler, fine | {"a": jnp.asarray(clean)})
    for bad in (np.inf, -np.inf, np.nan) + (
        (1j * np.nan, complex(0, np.inf)) if dtype == "complex64" else ()
    ):
        for position in {0, size // 3, size - 1}:
            grad = clean.copy()
            grad[position] = bad
            assert not unscale(scaler, fine | {"a": jnp.asarray(grad)}), (bad, position)


def test_a_quotient_that_overflows_is_not_finite():
    small = GradScaler(2.0**-10)
    largest = jnp.asarray([1.0, 2.0**127])
    assert jnp.isfinite(largest).all()
    true, finite = small.unscale(largest)
    assert true.tolist() == [2.0**10, np.inf]
    assert not finite
    assert small.unscale(largest[:1])[1]


def test_what_is_not_a_float_passes():
    integers = jnp.arange(3)
    nothing = jax.grad(lambda n: 1.0, allow_int=True)(3)
    key = jax.random.key(0)
    tree = {"n": integers, "float0": nothing, "none": None, "key": key, "b": True, "text": "w"}
    scaler = GradScaler()
    assert nothing.dtype == jax.dtypes.float0
    for out in (scaler.scale(tree), scaler.unscale(tree)[0]):
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        assert all(out[name] is tree[name] for name in tree)
    assert scaler.unscale(tree)[1]
    assert scaler.unscale({})[1]
    assert scaler.scale(2.0) == 2.0**17
    assert scaler.scale(np.float16(2.0)).dtype == jnp.float32


def test_disabled_passes_everything_through():
    scaler = GradScaler(enabled=False)
    tree = {"w": jnp.asarray([jnp.inf], jnp.float16)}
    assert scaler.scale(tree) is tree
    true, finite = scaler.unscale(tree)
    assert true is tree
    assert finite.dtype == jnp.bool_
    assert finite
    assert scaler.update(False) is scaler
    new, after, finite = jax.jit(lambda s, g: s.step(g, lambda g, w: w - g, jnp.zeros(1, g.dtype)))(
        scaler, tree["w"]
    )
    assert (new.tolist(), bool(finite), after.enabled) == ([-np.inf], True, False)
    assert (scaler.state_dict(), scaler.load_state_dict({})) == ({}, scaler)


# --- step ----------------------------------------------------------------------------------------


def descend(grads, weights, count):
    return jax.tree.map(lambda w, g: w - 0.5 * g, weights, grads), count + 1


HARD = {  # numbers that arithmetic, and some copies, would change
    "nan": jax.lax.bitcast_convert_type(jnp.uint32(0x7FC12345), jnp.float32),
    "zero": jnp.float32(-0.0),
    "tiny": jnp.asarray([1e-40, -1e-42]),
    "inf": jnp.asarray([jnp.inf, -1.5]),
}


@pytest.mark.parametrize("way", ["eager", "jit", "donated", "vmap", "scan"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_every_bit(way, bad):
    def run(scaler, grads, weights, state):
        return scaler.step(
            grads,
            lambda g, w, s: (descend(g, w, 0)[0], jax.tree.map(lambda x: x, s)),
            weights,
            state,
        )

    weights = jax.tree.map(jnp.array, HARD)
    state = {"n": jnp.int32(7), "yes": jnp.bool_(True), "low": jnp.asarray([0.1], jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, weights)
    grads["tiny"] = grads["tiny"].at[1].set(bad)
    before = bits((weights, state))
    scaler = GradScaler(8.0)
    arguments = (scaler, grads, weights, state)
    if way == "jit":
        run = jax.jit(run)
    elif way == "donated":
        run = jax.jit(run, donate_argnums=(0, 2, 3))
        arguments = jax.tree.map(jnp.array, arguments)
    elif way == "vmap":
        one, run = run, jax.jit(jax.vmap(run))
        arguments = jax.tree.map(lambda x: x[None], arguments)
        before = bits(jax.tree.map(lambda x: x[None], (weights, state)))
    elif way == "scan":
        one = run

        @jax.jit
        def run(scaler, grads, weights, state):
            def body(carry, _):
                new, scaler, finite = one(carry[0], grads, *carry[1])
                return (scaler, new), finite

            (scaler, new), finite = jax.lax.scan(body, (scaler, (weights, state)), None, length=1)
            return new, scaler, finite[0]

    new, after, finite = run(*arguments)
    assert not finite.any()
    assert bits(new) == before
    assert after.state.scale.tolist() == ([4.0] if way == "vmap" else 4.0)


def test_the_oracle_of_bits_sees_one_bit():
    one = jnp.float32(1)
    assert bits(one) != bits(jnp.nextafter(one, 2))
    assert bits(jnp.float32(0.0)) != bits(jnp.float32(-0.0))
    assert bits(jnp.int32(0)) != bits(jnp.float32(0))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_are_divided_by_the_scale_that_they_were_multiplied_with(wrap):
    """With interval 1 every good step grows the scale: it must be too late for this step."""
    weights = jnp.asarray([1.0, 2.0])

    @wrap
    def train(scaler, weights, count):
        grads = jax.grad(lambda w: scaler.scale((3.0 * w).sum()))(weights)
        (weights, count), scaler, finite = scaler.step(grads, descend, weights, count)
        return weights, count, scaler, finite

    scaler = GradScaler(4.0, growth_interval=1)
    seen = []
    count = jnp.int32(0)
    for _ in range(3):
        weights, count, scaler, finite = train(scaler, weights, count)
        seen.append((weights.tolist(), int(count), values(scaler), bool(finite)))
    assert seen == [
        ([-0.5, 0.5], 1, (8.0, 0), True),
        ([-2.0, -1.0], 2, (16.0, 0), True),
        ([-3.5, -2.5], 3, (32.0, 0), True),
    ]


def test_one_state_comes_back_as_itself_and_several_as_a_tuple():
    scaler = GradScaler(2.0)
    grads = scaler.scale([jnp.ones(2)])
    new, _, _ = scaler.step(grads, lambda g, w: [w[0] - g[0]], [jnp.zeros(2)])
    assert isinstance(new, list)
    assert new[0].tolist() == [-1.0, -1.0]
    new, _, _ = scaler.step(grads, lambda g, w, n: (w, n + 1), [jnp.zeros(2)], jnp.int32(3))
    assert isinstance(new, tuple)
    assert int(new[1]) == 4


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_leaves_that_are_no_arrays_stay(wrap):
    state = {"w": jnp.ones(2), "act": jax.nn.relu, "name": "layer", "count": 3}

    def update(grads, state):
        assert state["act"] is jax.nn.relu
        return state | {"w": state["w"] - grads["w"], "count": state["count"] + 1}

    @wrap
    def run(scaler, g):
        new, scaler, _ = scaler.step({"w": g, "act": None}, update, state)
        assert new["act"] is jax.nn.relu
        assert new["name"] == "layer"
        return new["w"], new["count"], scaler

    scaler = GradScaler(2.0)
    assert [x.tolist() for x in map(jnp.asarray, run(scaler, jnp.full(2, 4.0))[:2])] == [
        [-1, -1],
        4,
    ]
    assert [x.tolist() for x in map(jnp.asarray, run(scaler, jnp.full(2, np.inf))[:2])] == [
        [1, 1],
        3,
    ]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_update_changes_in_place_is_its_own(wrap):
    state = {"w": jnp.ones(2), "none": np.zeros(3, jax.dtypes.float0)}

    def update(grads, state):
        state["w"] = state["w"] - grads.pop("w")
        return state

    def run(scaler, g):
        grads = {"w": g}
        new, _, _ = scaler.step(grads, update, state)
        assert grads["w"] is g
        return new["w"]

    before = state["w"]
    assert wrap(run)(GradScaler(2.0), jnp.full(2, 4.0)).tolist() == [-1, -1]
    assert wrap(run)(GradScaler(2.0), jnp.full(2, np.nan)).tolist() == [1, 1]
    assert state["w"] is before


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda g, w: {"w": w["w"], "v": w["w"]},
            "update must return the state in the structure that it came in, "
            "PyTreeDef(({'act': *, 'w': *},)); it returned PyTreeDef(({'v': *, 'w': *},)).",
        ),
        (
            lambda g, w: w | {"w": w["w"].astype(jnp.float16)},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['w'] was float32[2] and came back as float16[2].",
        ),
        (
            lambda g, w: w | {"w": w["w"][:1]},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['w'] was float32[2] and came back as float32[1].",
        ),
        (
            lambda g, w: w | {"act": "gelu"},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['act'] was relu and came back as gelu.",
        ),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_update_that_changes_what_the_state_is(wrap, update, message):
    run = wrap(lambda g, w: GradScaler().step(g, update, {"w": w, "act": "relu"})[1])
    with pytest.raises(TypeError) as raised:
        run(jnp.ones(2), jnp.ones(2))
    assert raised.value.args[0] == message


def flat(jaxpr):
    """The equations, those inside of a jit in its place."""
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "jit":
            yield from flat(eqn.params["jaxpr"])
        else:
            yield eqn


def test_the_quotients_are_made_in_the_branch_and_the_state_is_not_selected():
    def names(jaxpr):
        shapes = ((eqn, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]) for eqn in flat(jaxpr))
        return [eqn.primitive.name for eqn, each in shapes if (7, 3) in each]

    def run(scaler, grads, weights):
        return scaler.step(grads, lambda g, w: w - g, weights)

    jaxpr = jax.make_jaxpr(run)(GradScaler(), jnp.ones((7, 3)), jnp.ones((7, 3)))
    assert names(jaxpr) == ["mul", "mul", "mul", "reduce_sum", "cond"]
    (cond,) = (eqn for eqn in flat(jaxpr) if eqn.primitive.name == "cond")
    assert [names(branch) for branch in cond.params["branches"]] == [[], ["mul", "mul", "sub"]]


# --- transforms ----------------------------------------------------------------------------------


def test_a_batch_of_scalers_under_vmap():
    batch = jax.vmap(lambda _: GradScaler(4.0, growth_interval=1))(jnp.arange(3))
    with pytest.raises(
        TypeError,
        match=r"^this GradScaler is a batch of shape \(3,\); call its methods in jax.vmap\.$",
    ):
        batch.scale(1.0)
    grads = jnp.asarray([[1.0, 2.0], [np.inf, 1.0], [4.0, np.nan]]) * 4
    weights = jnp.zeros((3, 2))
    run = jax.vmap(lambda s, g, w: s.step(g, lambda g, w: w - g, w))
    new, after, finite = run(batch, grads, weights)
    assert finite.tolist() == [True, False, False]
    assert new.tolist() == [[-1.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    assert after.state.scale.tolist() == [8.0, 2.0, 2.0]


def test_gradients_flow_through_scale():
    scaler = GradScaler(8.0)
    w = jnp.asarray([1.0, 2.0], jnp.float16)
    loss, grad = jax.value_and_grad(lambda w: scaler.scale((w * w).sum()))(w)
    assert (loss.dtype, float(loss)) == (jnp.float32, 40.0)
    assert (grad.dtype, grad.tolist()) == (jnp.float16, [16.0, 32.0])
    second = jax.grad(lambda w: jax.grad(lambda w: scaler.scale(w**3))(w))(2.0)
    assert second == 8.0 * 12.0


def test_microbatches_are_added_up_scaled_and_checked_once():
    scaler = GradScaler(2.0**10)

    @jax.jit
    def run(scaler, batches):
        def add(total, x):
            return total + jax.grad(lambda w: scaler.scale((w * x).sum()))(1.0), None

        total, _ = jax.lax.scan(add, 0.0, batches)
        return scaler.step(total, lambda g, w: g, jnp.float32(-1))

    assert run(scaler, jnp.arange(6.0).reshape(3, 2))[0] == 15.0
    new, after, finite = run(scaler, jnp.asarray([[1.0, 2.0], [np.inf, 1.0], [1.0, 1.0]]))
    assert (float(new), float(after.state.scale), bool(finite)) == (-1.0, 512.0, False)


def test_no_promotion_is_left_to_chance():
    def run(scaler, grads, weights):
        scaler.scale(grads)
        scaler.unscale(grads)
        return scaler.step(grads, lambda g, w: jax.tree.map(jnp.subtract, w, g), weights)

    grads = [jnp.ones(2, jnp.float16), jnp.ones(2), jnp.ones(2, jnp.complex64)]
    weights = [jnp.ones(2), jnp.ones(2), jnp.ones(2, jnp.complex64)]
    with jax.numpy_dtype_promotion("strict"):
        new, _, _ = jax.jit(run)(GradScaler(2.0, growth_factor=1.1), grads, weights)
    assert [x.tolist() for x in new] == [[0.5, 0.5]] * 3


def test_nothing_leaks_and_no_nan_is_reported_for_a_check():
    run = jax.jit(lambda s, g: s.step(g, lambda g, w: w - g, jnp.ones(2)))
    with jax.checking_leaks(), jax.debug_nans(True):
        new, _, finite = run(GradScaler(), jnp.asarray([np.inf, 1.0]))
        assert not GradScaler().unscale(jnp.asarray([np.inf, 1.0]))[1]
    assert (new.tolist(), bool(finite)) == ([1.0, 1.0], False)


# --- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch.amp", "polymp.torch"])
def test_state_dicts_go_both_ways(kind):
    need("torch")
    import torch

    import polymp.torch

    make = torch.amp.GradScaler if kind == "torch.amp" else polymp.torch.GradScaler
    ours = GradScaler(12.0, 3.0, 0.25, 7).update(True).update(True)
    theirs = make("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    back = GradScaler().load_state_dict(theirs.state_dict())
    assert (values(back), back.rule) == ((12.0, 2), ScaleRule(3.0, 0.25, 7))
    assert [(str(x.dtype), x.shape) for x in jax.tree.leaves(back)] == [
        ("float32", ()),
        ("int32", ()),
    ]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": None}, KeyError, "a scaler's state needs the entry 'scale'; it has"),
        ({"scale": "big"}, TypeError, "a scaler's scale must be a number, got 'big'"),
        (
            {"scale": 1e39},
            ValueError,
            "scale must be from 0 to 3.4028234663852886e+38, the largest float32; got 1e+39.",
        ),
        (
            {"scale": float("nan")},
            ValueError,
            "scale must be from 0 to 3.4028234663852886e+38, the largest float32; got nan.",
        ),
        (
            {"_growth_tracker": -1},
            ValueError,
            "_growth_tracker must be from 0 to 2147483647; got -1.",
        ),
        (
            {"growth_factor": 0.5},
            ValueError,
            "growth_factor must be finite and above 1, got 0.5.",
        ),
        (
            dict.fromkeys(GradScaler().state_dict()),
            RuntimeError,
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler.",
        ),
    ],
)
def test_a_bad_state_dict(change, error, message):
    saved = GradScaler().state_dict() | change
    saved = {k: v for k, v in saved.items() if v is not None}
    with pytest.raises(error) as raised:
        GradScaler().load_state_dict(saved)
    assert raised.value.args[0].startswith(message)


@given(scale=st.floats(0, 2.0**127, width=32, allow_subnormal=False), tracker=st.integers(0, 99))
def test_what_was_saved_comes_back(scale, tracker):
    saved = scaling.to_state_dict(ScaleRule(interval=100), ScaleState(scale, tracker))
    assert GradScaler().load_state_dict(saved).state_dict() == saved
