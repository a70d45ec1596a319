"""Functions of libraries as ops: recognised wherever they are called, and nothing else is.

And the name scopes that rules by module path go by. What was decided is read from a report; most
programs are traced and never compiled.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.scipy import special

import polymp
from polymp.backends.jax.autocast import known_functions
from polymp.jax import autocast
from polymp.rules.vocabulary import vocabulary
from tests.support.decisions import recording
from tests.support.jax.scaler_tools import bits
from tests.support.jax.walker import equations

X = jnp.linspace(-2.0, 2.0, 16, dtype=jnp.float32).reshape(4, 4)
KEY = jax.random.key(0)
softmax = jax.nn.softmax  # a name of ours for it, so that no test depends on how it is spelled


class Ran(NamedTuple):
    """The decisions of a traced call, for each op that has a row, and the dtypes of its results."""

    ops: list[str]
    dtypes: list[tuple[str, ...]]
    scopes: list[str]
    rules: list[str]
    out: Any


def traced(fn: Callable[..., Any], *args: Any, policy: Any) -> Ran:
    with recording() as report:
        out = jax.eval_shape(autocast(fn, policy=policy), *args)
    return Ran(
        [entry.op for entry in report.entries],
        [entry.dtypes for entry in report.entries],
        [entry.scope for entry in report.entries],
        [str(entry.row.rule) for entry in report.entries],
        jax.tree.map(lambda x: x.dtype.name, out),
    )


def lowers(*ops: str, **more: str) -> dict[str, Any]:
    """A policy that lowers some ops, and has a rule for what they are made of, too."""
    parts = {"class:power": "fp32", "sum": "fp32"}
    return {"rules": {**parts, **dict.fromkeys(ops, "lower"), **more}}


# --- which functions ------------------------------------------------------------------------------


def in_nnx(module: Any, *sizes: int, before: Any = ()) -> Callable[[Any], Any]:
    return lambda x: module(*sizes, rngs=nnx.Rngs(0))(*before, x)


def in_linen(module: Any) -> Callable[[Any], Any]:
    return lambda x: module.init_with_output(KEY, x)[0]


def in_haiku(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        net = hk.without_apply_rng(hk.transform_with_state(fn))
        return net.apply(*net.init(KEY, x), x)[0]

    return call


def named(where: Any, path: str, names: str) -> dict[str, Callable[[Any], Any]]:
    return {f"{path}.{name}": getattr(where, name) for name in names.split()}


def loss(name: str, *others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: getattr(optax.losses, name)(x, *(other(x) for other in others))


CALLS: dict[str, Callable[[Any], Any]] = {
    # Some leave bare equations, some a call of jit, of custom_jvp or of a ufunc.
    **named(jax.nn, "jax.nn", "softmax log_softmax logsumexp standardize softplus relu silu gelu"),
    **named(jax.nn, "jax.nn", "elu celu selu mish log_sigmoid"),
    "jax.nn.dot_product_attention": lambda x: jax.nn.dot_product_attention(*[x[None, None]] * 3),
    **named(jnp, "jax.numpy", "var std mean"),
    "jax.numpy.logaddexp": lambda x: jnp.logaddexp(x, x),
    "jax.numpy.kron": lambda x: jnp.kron(x, x),
    "jax.numpy.cross": lambda x: jnp.cross(x[:, :3], x[:, 1:]),
    **named(jnp.linalg, "jax.numpy.linalg", "norm vector_norm matrix_norm"),
    **named(special, "jax.scipy.special", "softmax i0 i1 entr erfcx ndtr log_ndtr"),
    "jax.scipy.special.multigammaln": lambda x: special.multigammaln(x + 5, 2),
    # Layers
    "flax.nnx.LayerNorm.__call__": in_nnx(nnx.LayerNorm, 4),
    "flax.nnx.RMSNorm.__call__": in_nnx(nnx.RMSNorm, 4),
    "flax.nnx.GroupNorm.__call__": in_nnx(nnx.GroupNorm, 4, 2),
    "flax.nnx.BatchNorm.__call__": in_nnx(nnx.BatchNorm, 4),
    "flax.nnx.InstanceNorm.__call__": in_nnx(nnx.InstanceNorm, 4),
    "flax.nnx.PReLU.__call__": lambda x: nnx.PReLU()(x),
    "flax.nnx.GRUCell.__call__": in_nnx(nnx.GRUCell, 4, 4, before=(X,)),
    "flax.nnx.SimpleCell.__call__": in_nnx(nnx.SimpleCell, 4, 4, before=(X,)),
    "flax.nnx.LSTMCell.__call__": in_nnx(nnx.LSTMCell, 4, 4, before=((X, X),)),
    "flax.linen.LayerNorm.__call__": in_linen(linen.LayerNorm()),
    "flax.linen.RMSNorm.__call__": in_linen(linen.RMSNorm()),
    "flax.linen.GroupNorm.__call__": in_linen(linen.GroupNorm(2)),
    "flax.linen.BatchNorm.__call__": in_linen(linen.BatchNorm(use_running_average=False)),
    "flax.linen.InstanceNorm.__call__": in_linen(linen.InstanceNorm()),
    "flax.linen.PReLU.__call__": in_linen(linen.PReLU()),
    "equinox.nn.LayerNorm.__call__": lambda x: jax.vmap(eqx.nn.LayerNorm(4))(x),
    "equinox.nn.RMSNorm.__call__": lambda x: jax.vmap(eqx.nn.RMSNorm(4))(x),
    "equinox.nn.GRUCell.__call__": lambda x: eqx.nn.GRUCell(4, 4, key=KEY)(x[0], x[1]),
    "haiku.LayerNorm.__call__": in_haiku(lambda x: hk.LayerNorm(-1, True, True)(x)),
    "haiku.BatchNorm.__call__": in_haiku(lambda x: hk.BatchNorm(True, True, 0.9)(x, True)),
    "haiku.VanillaRNN.__call__": in_haiku(lambda x: hk.VanillaRNN(4)(x, x)[0]),
    **{
        f"optax.losses.{name}": loss(name, lambda x: x + 1)
        for name in """squared_error huber_loss cosine_similarity kl_divergence
        sigmoid_binary_cross_entropy softmax_cross_entropy""".split()
    },
    "optax.losses.softmax_cross_entropy_with_integer_labels": loss(
        "softmax_cross_entropy_with_integer_labels", lambda x: jnp.zeros(len(x), jnp.int32)
    ),
    "optax.losses.triplet_margin_loss": loss(
        "triplet_margin_loss", lambda x: x + 1, lambda x: x + 2
    ),
}


# What a function calls on its way, of functions that have no primitive.
INSIDE = {
    "jax.nn.standardize": ("mean",),
    "jax.nn.softplus": ("logaddexp",),
    "jax.nn.selu": ("elu",),
    "jax.nn.mish": ("softplus",),
    "jax.nn.log_sigmoid": ("softplus",),
    "jax.nn.dot_product_attention": ("softmax",),
    "jax.numpy.var": ("mean",),
    "jax.numpy.std": ("var",),
    "jax.numpy.linalg.matrix_norm": ("norm",),
    "jax.scipy.special.entr": ("xlogy",),
    **{
        f"flax.{library}.{layer}.__call__": ("mean",)
        for library in ("linen", "nnx")
        for layer in ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm")
    },
    "equinox.nn.LayerNorm.__call__": ("mean", "var"),
    "equinox.nn.RMSNorm.__call__": ("mean",),
    "haiku.LayerNorm.__call__": ("mean", "var"),
    "haiku.BatchNorm.__call__": ("mean",),
    "haiku.VanillaRNN.__call__": ("relu",),
    "optax.losses.sigmoid_binary_cross_entropy": ("logsigmoid",),
    "optax.losses.softmax_cross_entropy": ("log_softmax",),
    "optax.losses.softmax_cross_entropy_with_integer_labels": ("logsumexp",),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dotted", CALLS)
def test_a_function_of_the_vocabulary_is_one_op_whatever_its_call_leaves(dotted: str) -> None:
    """And no other op but those it calls, which are not seen as long as it is an op itself."""
    words = vocabulary()
    own, aside = words.functions[dotted], ("layout", "linear_algebra")  # parameters are made
    calls = 2 if dotted.startswith("haiku") else 1  # once more when its parameters are made
    for fn in (CALLS[dotted], jax.jit(CALLS[dotted])):
        assert traced(fn, X, policy={"rules": {own: "fp32"}}).ops == [own] * calls
        assert traced(fn, X, policy={"rules": {own: "parts"}}).ops == []
    others = {op for op in words.functions.values() if not words.ops[op].jax and op != own}
    rules = {op: "fp32" for op in others if words.ops[op].kind not in aside}
    assert {*traced(CALLS[dotted], X, policy={"rules": rules}).ops} == {*INSIDE.get(dotted, ())}
    assert {*traced(CALLS[dotted], X, policy={"rules": {**rules, own: "fp32"}}).ops} == {own}


def test_amps_functions_of_libraries_are_all_called_above() -> None:
    """`tests/support/cases.py` calls those of jax alone."""
    amp, words = polymp.policy("amp"), vocabulary()
    called = {words.functions[dotted] for dotted in CALLS}
    theirs = {op for dotted, op in words.functions.items() if not dotted.startswith("jax.")}
    ruled = {op for op in theirs if amp.winner(op, "bfloat16")}
    # A solver leaves several sections in a trace: `test_solvers.py` has those. Pools are below.
    assert {words.ops[op].kind for op in ruled - called} == {"iteration", "pooling"}


def scanned(fn: Any) -> Any:
    return lambda x: lax.scan(lambda c, _: (c + 1, fn(c)), x, None, length=2)[1]


PLACES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "bare": lambda fn: fn,
    "jit": jax.jit,
    "jit round more": lambda fn: jax.jit(lambda x: fn(x + 1) * 2),
    "vmap": lambda fn: lambda x: jax.vmap(fn)(x[None]),
    "vmap of jit": lambda fn: lambda x: jax.vmap(jax.jit(fn))(x[None]),
    "scan": scanned,
    "map": lambda fn: lambda x: lax.map(fn, x[None]),
    "while": lambda fn: lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: fn(c) + 1, x),
    "cond": lambda fn: lambda x: lax.cond(x[0, 0] > 0, fn, lambda x: x, x),
    "remat": jax.checkpoint,
    "grad inside": lambda fn: jax.grad(lambda x: fn(x).sum()),
    "jvp inside": lambda fn: lambda x: jax.jvp(fn, (x,), (x,)),
    "named_scope": lambda fn: jax.named_scope("here")(fn),
    "named_call": lambda fn: jax.named_call(fn, name="a_name"),
    "all of them": lambda fn: lambda x: jax.vmap(jax.jit(scanned(jax.checkpoint(fn))))(x[None]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_call_is_recognised_in_every_place(name: str, place: str) -> None:
    """Inside it nothing else is asked, though sums and exponentials have rows."""
    fn = PLACES[place](partial(getattr(jax.nn, name), axis=0))
    policy = {"rules": {name: "fp32", "exp": "fp32", "sum": "fp32", "log": "fp32"}}
    ops = traced(fn, X, policy=policy).ops
    if place == "grad inside":
        ops.remove("sum")  # the test's own
    assert set(ops) == {name}
    unruled = traced(fn, X, policy={"rules": {**policy["rules"], name: "parts"}}).ops
    assert {"exp", "sum"} <= set(unruled)
    assert name not in unruled


def test_a_gradient_from_outside_follows_the_call() -> None:
    """Forward and backward of what is lowered are as of arrays cast by hand."""
    fn = autocast(lambda x: softmax(x), policy=lowers("softmax"))

    def by_hand(x: Any) -> Any:
        return softmax(x.astype(jnp.bfloat16))

    def loss(fn: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: (fn(x).astype(jnp.float32) * X).sum()))

    for ours, theirs in zip(loss(fn)(X), loss(by_hand)(X), strict=True):
        assert ours.dtype == theirs.dtype == jnp.float32
        assert np.array_equal(ours, theirs)
    plain = loss(softmax)(X)
    assert not np.array_equal(plain[1], loss(fn)(X)[1]), "nothing was rounded: the test is blind"


def test_of_nested_functions_the_outermost_with_a_rule_decides() -> None:
    assert traced(jnp.std, X, policy=lowers("std", "var")).ops == ["std"]
    inner = traced(jnp.std, X, policy=lowers("var")).ops
    assert "var" in inner
    assert "std" not in inner
    assert "sum" not in inner, "var decides for what is in it"
    assert traced(jnp.std, X, policy=lowers("var", std="parts")).ops == inner
    assert "sum" in traced(jnp.std, X, policy=lowers()).ops


def test_two_calls_are_two_ops() -> None:
    def loop(x: Any, fns: Any) -> Any:
        for fn in fns:
            x = fn(x)
        return x

    line = traced(lambda x: softmax(softmax(x)), X, policy=lowers("softmax"))
    assert line.dtypes == [("float32",), ("bfloat16",)]
    assert (
        traced(lambda x: loop(x, [softmax] * 3), X, policy=lowers("softmax")).ops == ["softmax"] * 3
    )
    layers = [nnx.LayerNorm(4, rngs=nnx.Rngs(0)) for _ in range(2)]
    rule = {"rules": {"layer_norm": "fp32"}}
    assert traced(lambda x: loop(x, layers), X, policy=rule).ops == ["layer_norm"] * 2


# --- what is not one of them ----------------------------------------------------------------------


def test_a_users_function_of_the_same_name_is_none_of_them() -> None:
    def softmax(x: Any, axis: int = -1) -> Any:
        return jnp.exp(x) / jnp.exp(x).sum(axis, keepdims=True)

    class LayerNorm(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return softmax(x)

    for fn in (softmax, jax.jit(softmax), LayerNorm()):
        ran = traced(lambda x, fn=fn: fn(x), X, policy=lowers("softmax", "layer_norm"))
        assert {"exp", "sum"} <= set(ran.ops)
        assert not {"softmax", "layer_norm"} & set(ran.ops)


def test_a_subclass_that_calls_the_librarys_is() -> None:
    class Mine(nnx.LayerNorm):
        def __call__(self, x: Any) -> Any:
            return jnp.exp(super().__call__(x))

    ran = traced(lambda x: Mine(4, rngs=nnx.Rngs(0))(x), X, policy=lowers("layer_norm"))
    assert ran.ops == ["layer_norm", "exp"]


def test_callers_of_the_autocast_function_do_not_count() -> None:
    """A library's cell calls an autocast function as its activation; so does its gradient."""

    @jax.custom_jvp
    def activation(x: Any) -> Any:
        return jnp.exp(x)

    activation.defjvp(lambda xs, ts: (activation(*xs), ts[0] * jnp.exp(xs[0])))
    fn = autocast(activation, policy={"rules": {"rnn_tanh_cell": "forbid", "exp": "fp32"}})
    cell = nnx.SimpleCell(4, 4, activation_fn=fn, rngs=nnx.Rngs(0))
    with recording() as report:
        jax.eval_shape(jax.grad(lambda x: cell(X, x)[1].sum()), X)
    assert {entry.op for entry in report.entries} == {"exp"}
    with pytest.raises(polymp.ForbiddenOpError, match="rnn_tanh_cell"):
        traced(lambda x: cell(X, x)[1], X, policy={"rules": {"rnn_tanh_cell": "forbid"}})


def test_a_library_that_is_loaded_later_is_looked_at_then(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_functions.Functions()
    with monkeypatch.context() as unloaded:
        unloaded.delitem(sys.modules, "optax")
        known.refresh()
        assert "softmax" in known.ops.values()
        assert "huber_loss" not in known.ops.values()
    known.refresh()
    assert known.ops[id(known_functions.code_of(optax.losses.huber_loss))] == "huber_loss"


def test_what_has_no_code_cannot_be_known() -> None:
    assert known_functions.code_of(np.sin) is None
    with pytest.raises(TypeError, match="has no code to know it by"):
        known_functions.Functions().add(np.sin, "sin")


def test_a_gain_and_a_bias_do_not_say_what_comes_out() -> None:
    layers = {
        "nnx": nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
        "linen": linen.LayerNorm().bind(linen.LayerNorm().init(KEY, X)),
        "equinox": jax.vmap(eqx.nn.LayerNorm(4)),
    }
    for call in layers.values():
        ran = traced(lambda x, call=call: call(x @ x), X, policy="lean")
        assert ran.out == "bfloat16"
        assert ran.dtypes[ran.ops.index("layer_norm")] == ("bfloat16",)
        assert traced(call, X, policy="lean").out == "float32"
        assert traced(lambda x, call=call: call(x @ x), X, policy="amp").out == "float32"


def test_linear_algebra_runs_as_written() -> None:
    """Its products finish what was factorised in float32: they are not lowered."""
    a, linalg = 4 * jnp.eye(4) + 0.1 * X, jnp.linalg

    def f(a: Any, x: Any) -> Any:
        made = linalg.solve(a, x), linalg.inv(a), linalg.det(a), linalg.norm(x), linalg.pinv(a)
        return made, linalg.cholesky(x @ x + 9 * jnp.eye(4))

    sites = list(equations(jax.make_jaxpr(autocast(f))(a, X)))
    assert [s.op for s in sites].count("polymp_contraction") == 1, "the test's own product"
    plain = [site for site in sites if site.op in ("dot_general", "cholesky")]
    assert {dtype for site in plain for dtype in site.operands} == {"float32"}
    assert bits(autocast(f)(a, X)[0]) == bits(f(a, X)[0])
    assert traced(linalg.inv, X, policy={"rules": {"linalg_inv": "fp32"}}).ops == ["linalg_inv"]


RULED = ("class:matmul", "softmax", "log_softmax")
HEAD = {"rules": dict.fromkeys(RULED, "lower"), "scopes": {"*.head": dict.fromkeys(RULED, "fp32")}}


def product(x: Any) -> Any:
    return x @ x


def head(x: Any) -> Any:
    with jax.named_scope("head"):
        return product(x)


# The scope is outside of the place, or inside of it.
SCOPED = {f"{place} inside": jax.named_scope("head")(PLACES[place](product)) for place in PLACES}
SCOPED |= {f"{place} around": PLACES[place](head) for place in PLACES}
SCOPED |= {fn.__name__: jax.named_scope("head")(fn) for fn in (softmax, jax.nn.log_softmax)}


@pytest.mark.parametrize("place", SCOPED)
def test_a_rule_by_scope_holds_inside(place: str) -> None:
    ran = traced(SCOPED[place], X, policy=HEAD)
    assert set(ran.rules) == {"fp32"}
    assert all("head" in scope.split(".") for scope in ran.scopes)
    assert {*jax.tree.leaves(ran.out)} == {"float32"}
    without = traced(SCOPED[place], X, policy={"rules": HEAD["rules"]})
    assert set(without.rules) == {"lower"}


def test_a_rule_by_scope_ends_with_it() -> None:
    shared = jax.jit(product)

    def f(x: Any) -> Any:
        before = shared(x)
        with jax.named_scope("head"):
            inside = shared(x)
        with jax.named_scope("heads"):
            other = shared(x)
        return before, inside, other

    ran = traced(f, X, policy=HEAD)
    assert ran.out == ("bfloat16", "float32", "bfloat16")
    assert ran.scopes == ["", "head", "heads"]


def test_the_gradient_from_outside_runs_by_the_scope_of_the_forward_pass() -> None:
    def loss(x: Any) -> Any:
        return autocast(lambda x: product(x) + head(x), policy=HEAD)(x).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(X)
    ops = [site.op for site in equations(jaxpr)]
    assert ops.count("polymp_contraction") == 3
    assert ops.count("dot_general") == 3


def test_derivative_rules_run_in_the_scope_of_the_call() -> None:
    @jax.custom_vjp
    def squared(x: Any) -> Any:
        return product(x)

    squared.defvjp(lambda x: (squared(x), x), lambda x, ct: (ct @ x,))
    fn = autocast(jax.named_scope("head")(squared), policy=HEAD)
    with recording() as report:
        jax.eval_shape(jax.grad(lambda x: fn(x).sum()), X)
    assert {(entry.scope, str(entry.row.rule)) for entry in report.entries} == {("head", "fp32")}


def test_modules_of_haiku_are_scopes() -> None:
    def forward(x: Any) -> Any:
        x = hk.Linear(4, name="body")(x)
        return x, hk.Linear(4, name="head")(x)

    net = hk.without_apply_rng(hk.transform(forward))
    assert traced(net.apply, net.init(KEY, X), X, policy=HEAD).out == ("bfloat16", "float32")


def test_a_region_inside_a_scope_has_its_own_policy() -> None:
    def f(x: Any) -> Any:
        with jax.named_scope("head"):
            with autocast(dtype="float16", policy="amp"):
                amp = product(x)
            return amp, product(x)

    assert traced(f, X, policy=HEAD).out == ("float16", "float32")


SIDE = 56
POOLS: dict[str, Callable[[Any], Any]] = {
    "linen": lambda x: linen.avg_pool(x, (SIDE, SIDE)),
    "nnx": lambda x: nnx.avg_pool(x, (SIDE, SIDE)),
    "haiku": lambda x: hk.avg_pool(x, (SIDE, SIDE, 1), 1, "VALID"),
    "haiku padded": lambda x: hk.avg_pool(x, (SIDE, SIDE, 1), (SIDE, SIDE, 1), "SAME"),
    "equinox": lambda x: eqx.nn.AvgPool2d(SIDE)(x[0].transpose(2, 0, 1)),
    "lax": lambda x: (
        lax.reduce_window(x, 0.0, lax.add, (1, SIDE, SIDE, 1), (1,) * 4, "VALID") / SIDE**2
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul"])
@pytest.mark.parametrize("name", POOLS)
def test_average_pools_round_the_mean_alone(name: str, policy: str) -> None:
    def mean(w: Any) -> Any:
        x = jnp.ones((1, SIDE, SIDE, 2)) @ w  # 30, of which 3136 are beyond float16
        return POOLS[name](x).ravel()[0]

    value, grad = jax.value_and_grad(autocast(mean, dtype="float16", policy=policy))(
        jnp.full((2, 1), 15.0)
    )
    assert value == 30
    assert grad == pytest.approx(1, rel=1e-2)
    kept = name != "lax" and policy != "matmul"
    assert value.dtype == ("float16" if kept else "float32")


POWERS = {"x ** 2": lambda x: x**2, "x ** 3": lambda x: x**3, "square": jnp.square}


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul", "torch-cuda", "torch-cpu"])
@pytest.mark.parametrize("name", POWERS)
def test_whole_powers_follow_pow(name: str, policy: str, low: str) -> None:
    def dtype_of(power: Callable[[Any], Any]) -> str:
        run = autocast(lambda x: power(x @ x), dtype=low, policy=policy)
        return jax.eval_shape(run, X).dtype.name

    assert dtype_of(POWERS[name]) == dtype_of(lambda x: x**2.5)


def test_squares_that_the_loss_reads_cost_no_casts() -> None:
    def casts(fn: Callable[[Any], Any]) -> int:
        run = autocast(lambda x: fn(x @ x).sum(), dtype="float16")
        found = [site.op for site in equations(jax.make_jaxpr(run)(X))]
        return found.count("convert_element_type")

    assert all(casts(power) == casts(lambda x: x) for power in POWERS.values())
