"""Regions: where they hold, how they nest, and that no cache forgets them."""

import gc
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polymp
import polymp.jax
from polymp.jax import autocast
from tests.support.processes import in_thread

X = jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32).reshape(4, 4)
half = partial(autocast, dtype=jnp.float16)


def name(x):
    return x.dtype.name


def square(x):
    return x @ x


@pytest.mark.parametrize("order", [1, -1], ids=["inside first", "outside first"])
def test_a_jitted_function_is_traced_once_for_each_region_and_never_reused_in_another(order):
    traces = []

    @jax.jit
    def helper(x):
        traces.append(1)
        return x @ x

    def outer(x):
        with half():
            low = helper(x)
        return helper(x), low

    calls = {
        "inside": lambda: [*map(name, jax.jit(autocast(outer))(X))] == ["bfloat16", "float16"],
        "outside": lambda: name(helper(X)) == "float32",
    }
    for where in [*calls][::order] * 2:
        assert calls[where](), where
    assert len(traces) == 3


def test_regions_nest_and_the_innermost_wins():
    @autocast
    def f(x):
        out = [x @ x]
        with autocast(enabled=False):
            out.append(x @ x)
            with half():
                out.append(x @ x)
                with autocast(enabled=False):
                    out.append(x @ x)
                out.append(x @ x)
            out.append(x @ x)
        return [*out, x @ x]

    inside = ["float32", "float16", "float32", "float16", "float32"]
    assert [*map(name, f(X))] == ["bfloat16", *inside, "bfloat16"]


def test_decorators():
    @autocast
    def plain(x):
        return x @ x

    @autocast(dtype=jnp.float16)
    def low(x):
        """Square it."""
        return x @ x

    @autocast(enabled=False)
    def off(x):
        return x @ x, plain(x)

    assert name(plain(X)) == "bfloat16"
    assert (name(low(X)), low.__name__, low.__doc__) == ("float16", "low", "Square it.")
    assert [*map(name, off(X))] == ["float32", "bfloat16"]


def test_one_region_object_may_be_entered_again_and_again():
    region = half()

    def f(x):
        with region:
            a = x @ x
            with region:
                b = x @ x
            c = x @ x
        return a, b, c, x @ x

    assert [*map(name, autocast(f)(X))] == ["float16"] * 3 + ["bfloat16"]


def test_an_exception_leaves_the_region():
    def f(x):
        try:
            with half():
                raise KeyError("mine")
        except KeyError:
            return x @ x

    assert name(autocast(f)(X)) == "bfloat16"
    with pytest.raises(ZeroDivisionError):
        autocast(lambda x: 1 / 0)(X)
    assert name(jax.jit(square)(X)) == "float32"


def test_another_thread_is_in_no_region():
    seen = []

    def f(x):
        seen.append(in_thread(lambda: name(autocast(square)(X))))
        return x @ x

    assert name(half(f)(X)) == "float16"
    assert seen == ["bfloat16"]  # by its own region, not by the one of the thread that waits


def test_a_call_reads_anew_what_python_reads_from_outside():
    outside = {}
    f = autocast(lambda x: x @ outside["w"])

    def loss(w):
        outside["w"] = w
        return f(X).astype(jnp.float32).sum()

    for w in (X, 2 * X):
        outside["w"] = w
        assert np.array_equal(f(X), autocast(jnp.matmul)(X, w))
        assert np.abs(jax.grad(loss)(w) - jax.grad(lambda w: (X @ w).sum())(w)).max() < 0.05


def test_a_value_that_a_function_stores_elsewhere_is_refused_by_jax_where_it_is_used():
    stored = {}

    @autocast
    def f(x):
        stored["h"] = jnp.tanh(x @ x)
        return stored["h"].sum()

    f(X)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"test_regions\.py:\d+:\d+ \(.*f\)"):
        stored["h"] + 1


def test_numbers_that_are_equal_and_not_the_same():
    f = autocast(lambda x, s: (x @ x, jnp.full((), s)))
    assert [str(f(X, s)[1]) for s in (0.0, -0.0, 0, 1, 1.0)] == ["0.0", "-0.0", "0", "1", "1.0"]
    g = autocast(lambda x: jnp.where(x > 2, x @ x, -0.0))
    assert np.signbit(np.float32(g(X))).all()
    assert not np.signbit(np.float32(autocast(lambda x: jnp.where(x > 2, x @ x, 0.0))(X))).any()


def test_constants_come_as_arrays_of_jax():
    out = autocast(lambda x: (x @ x, jnp.zeros(()), jnp.asarray([1.0, 2.0]), np.ones(2)))(X)
    assert all(isinstance(leaf, jax.Array) for leaf in out)
    assert isinstance(polymp.jax.upper(np.ones(2)), jax.Array)


def test_a_scope_of_the_users_is_no_mark():
    def f(x):
        with jax.named_scope("polymp:mine"):
            return x @ x

    assert name(autocast(f)(X)) == "bfloat16"
    (eqn,) = jax.make_jaxpr(autocast(f))(X).eqns
    assert str(eqn.source_info.name_stack) == "polymp:mine"


@pytest.mark.parametrize("on", [True, False])
def test_the_cycle_collector_is_left_as_it_was(on):
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        jax.jit(autocast(square))(X)
        assert gc.isenabled() == on
        with pytest.raises(polymp.ForbiddenOpError):
            autocast(jnp.tanh, policy={"rules": {"tanh": "forbid"}})(X)
        assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()


def test_an_op_that_a_policy_forbids():
    forbidden = {"rule": "forbid", "instead": "hardtanh"}
    with pytest.raises(polymp.ForbiddenOpError) as error:
        autocast(lambda x: jnp.tanh(x), policy={"name": "strict", "rules": {"tanh": forbidden}})(X)
    assert str(error.value) == (
        "policy 'strict' forbids 'tanh', called here with (float32). Use hardtanh, or give it "
        "another rule in the policy."
    )
    (note,) = error.value.__notes__
    assert re.match(r"It was traced at .*test_regions.py:[0-9]+", note)


NO_FUNCTION = (
    "autocast(fn) needs a function, got {}. Write autocast(fn, dtype=...), and call the result: "
    "autocast(loss)(params, x)."
)
NO_LOW_DTYPE = (
    "autocast(dtype={}): this is not a float dtype. Write dtype='bfloat16' or dtype='float16'."
)
BY_NAME = (
    "autocast takes one function and nothing else without a name, and no device; got {}. "
    "Write autocast(fn, dtype=...)."
)
NO_LOW = (
    "autocast(dtype=float32): the low dtype of a region is bfloat16 or float16. For a region in "
    "which ops run as written, use enabled=False."
)
NO_GENERATOR = (
    "autocast(fn): {} is a {} function, whose body runs after the call that is traced. Wrap the "
    "functions that it calls."
)


def yields(x):
    yield x


async def waits(x):
    return x


BAD = [
    (lambda: autocast(3), TypeError, NO_FUNCTION.format(3)),
    (lambda: autocast(dtype=jnp.float16)("cuda"), TypeError, NO_FUNCTION.format("'cuda'")),
    (lambda: autocast(np.float16), TypeError, NO_FUNCTION.format(np.float16)),
    (lambda: autocast("cuda", jnp.float16), TypeError, BY_NAME.format(f"'cuda', {jnp.float16!r}")),
    (lambda: autocast(dtype=jnp.float32), ValueError, NO_LOW),
    (lambda: autocast(dtype="lo"), TypeError, NO_LOW_DTYPE.format("'lo'")),
    (lambda: autocast(dtype=None), TypeError, NO_LOW_DTYPE.format(None)),
    (lambda: autocast(enabled="no"), TypeError, "autocast(enabled=...) is True or False, got 'no'"),
    (lambda: autocast(yields), TypeError, NO_GENERATOR.format(yields, "generator")),
    (lambda: autocast(waits), TypeError, NO_GENERATOR.format(waits, "coroutine")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_arguments(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_what_runs_ops_of_torch_is_refused():
    torch = pytest.importorskip("torch")
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    write = "Around calls of PyTorch write `with polymp.torch.autocast('cuda', dtype=...):`."
    for fn in (model, model.forward):
        with pytest.raises(TypeError) as error:
            autocast(fn)
        assert str(error.value) == (
            "polymp.jax.autocast(fn) needs a function of JAX arrays, got the torch module Linear, "
            f"which would run as written. {write}"
        )
    with pytest.raises(TypeError) as error:
        autocast(lambda x: {"y": model(x)})(x)
    assert str(error.value) == (
        "polymp.jax.autocast(fn): <lambda> returned a torch tensor. JAX does not trace the ops of "
        f"PyTorch, so they ran as written. {write}"
    )
    product, same = autocast(lambda x, batch: (x @ x, batch))(X, x)  # which is handed on
    assert (product.dtype, same) == (jnp.bfloat16, x)
    assert autocast(model, enabled=False)(x).dtype == torch.float32


BAD_RULES = {
    ("lineer", "lower"): "no op 'lineer'. Did you mean linear, inner, bilinear?",
    ("bmm", "fp32"): "jax runs 'bmm' as matmul, by the rules for those: give fp32 to them. One "
    "primitive in JAX.",
    ("class:fft", "lower"): "jax cannot run 'class:fft' by rule lower: it has no low form of it. "
    "Leave the row out, or say fp32.",
    ("class:linear_algebra", "lower"): "jax cannot run 'class:linear_algebra' by rule lower: it "
    "has no low form of it. Leave the row out, or say fp32.",
    ("jax:dot_genral", "lower"): "jax has no primitive 'dot_genral' whose dtype a policy may "
    "choose. Did you mean dot_general, ragged_dot_general?",
}


@pytest.mark.parametrize("rule", BAD_RULES, ids=" ".join)
def test_bad_rules(rule):
    with pytest.raises(polymp.PolicyError) as error:
        autocast(policy={"rules": dict([rule])})
    assert str(error.value) == f"policy 'unnamed': {BAD_RULES[rule]}"


def test_an_op_that_jax_lacks_may_have_the_rule_of_what_it_becomes():
    both = {"rules": {"bmm": "fp32", "matmul": "fp32"}}
    stack = jnp.ones((2, 4, 4))
    assert name(autocast(jnp.matmul, policy=both)(stack, stack)) == "float32"
    assert name(autocast(jnp.matmul)(stack, stack)) == "bfloat16"


def test_the_with_form_needs_an_autocast_function_around_it():
    with pytest.raises(RuntimeError) as error, autocast():
        pass
    assert str(error.value) == (
        "`with autocast(...)` marks a region for the autocast function around it, and there is "
        "none here. Wrap the function that is called from outside: polymp.jax.autocast(fn), or "
        "autocast(fn, enabled=False) if the rest of it is to run as written."
    )


LAYERS = {f"layer{i}": {"w": jnp.ones((64, 64))} for i in range(20)}
SWAPPED = {
    "autocast": lambda: autocast(LAYERS),
    "autocast(dtype)": lambda: autocast(jnp.sin, dtype=LAYERS),
    "catch": lambda: polymp.jax.catch(LAYERS),
    "expect_scaler": lambda: polymp.jax.expect_scaler(LAYERS),
    "GradScaler": lambda: polymp.jax.GradScaler(LAYERS),
    "update": lambda: polymp.jax.GradScaler().update(LAYERS),
    "value_and_grad": lambda: polymp.jax.GradScaler().value_and_grad(LAYERS),
    "low_weights": lambda: polymp.jax.low_weights(LAYERS, optax.sgd(0.1)),
    "low_weights(mode)": lambda: polymp.jax.low_weights(optax.sgd(0.1), LAYERS),
    "low_weights(keep)": lambda: polymp.jax.low_weights(optax.sgd(0.1), keep=LAYERS),
    "scoped": lambda: polymp.jax.scoped(LAYERS),
    "UpdateWatch": lambda: polymp.jax.UpdateWatch(LAYERS),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_an_error_that_was_given_parameters_is_short(name):
    with pytest.raises((TypeError, ValueError)) as caught:
        SWAPPED[name]()
    assert "layer0" in str(caught.value)
    assert len(str(caught.value)) < 600
