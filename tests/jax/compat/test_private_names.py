"""Every private name of jax that polymp uses does what `compat` says; loud when one changes."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.extend.source_info_util import new_name_stack
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction import contract, spec_of


def mesh_of_one():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check", [True, False])
def test_varying_axes(check):
    seen = []

    def body(whole, part):
        for arrays in ((whole, part), compat.varying_alike(whole, part)):
            seen.append([compat.varying_axes(x) for x in arrays])
        return whole

    specs, x = (PartitionSpec(), PartitionSpec("d")), jnp.ones(1)
    how = {"mesh": mesh_of_one(), "in_specs": specs, "out_specs": specs[0], "check_vma": check}
    jax.shard_map(body, **how)(x, x)
    nothing, over = frozenset(), frozenset({"d"} if check else ())
    assert seen == [[nothing, over], [over, over]]
    assert compat.varying_axes(x) == nothing


def traced(fn, *args):
    return jax.make_jaxpr(fn)(*args)


X = jnp.ones((2, 2))


def test_trace_context_tells_configurations_apart():
    here = compat.trace_context()
    assert here == compat.trace_context()
    assert hash(here) is not None
    for setting in (jax.enable_x64(True), jax.default_matmul_precision("highest")):
        with setting:
            assert compat.trace_context() != here


@pytest.mark.parametrize(
    "name", ["highest", "high", "default", "float32", "bfloat16", "BF16_BF16_F32"]
)
def test_default_precision_is_what_an_equation_holds(name):
    assert compat.default_precision() is None
    with jax.default_matmul_precision(name):
        (eqn,) = traced(jnp.dot, X, X).eqns
        assert eqn.params["precision"] == compat.default_precision()


def test_the_context_of_an_equation_is_one_object():
    (eqn,) = traced(jnp.sin, X).eqns
    assert eqn.ctx is compat.JaxprEqnContext()
    with set_xla_metadata(a="b"):
        assert eqn.ctx is not compat.JaxprEqnContext()


def test_which_leaves_of_a_call_are_static():
    def f(x, n, kind="a", *, train=True):
        return x

    static = partial(compat.static_leaves, jax.jit(f, static_argnums=2, static_argnames="train"))
    assert [*static((X, 1), {})] == [False, False]
    assert [*static(({"a": X, "b": X}, 1, ("a", None, "b")), {})] == [False] * 3 + [True] * 2
    assert [*static((X,), {"train": False, "n": 3})] == [False, False, True]
    static = partial(compat.static_leaves, jax.jit(f, static_argnums=2))
    assert [*static((X,), {"n": 3, "kind": "b"})] == [False, True, False]
    assert not next(compat.static_leaves(jax.jit(f), (X, 1), {}))


def test_binders_and_constants_of_a_closed_jaxpr():
    table = jnp.arange(4.0)
    closed = traced(lambda x: x @ table[:2] + table[2:], X)
    constvars, invars = compat.binders(closed)
    _, consts = compat.opened(closed)
    assert [v.aval.shape for v in invars] == [(2, 2)]
    assert [v.aval.shape for v in constvars] == [c.shape for c in consts] == [(4,)]
    jaxpr, lifted = compat.lifted(closed)
    out = core.jaxpr_as_fun(compat.close(jaxpr))(*lifted, X)
    assert np.array_equal(out[0], [3, 4])


def test_an_open_jaxpr_can_be_closed():
    (eqn,) = traced(jax.checkpoint(jnp.sin), X).eqns
    closed = compat.close(eqn.params["jaxpr"])
    assert compat.close(closed) is compat.close(eqn.params["jaxpr"]) is closed
    assert not compat.opened(closed)[1]
    assert np.array_equal(core.jaxpr_as_fun(closed)(X)[0], jnp.sin(X))


def test_only_arrays():
    assert compat.only_arrays(traced(jnp.sin, X))

    def writes(ref):
        ref[...] = ref[...] * 2

    ref = jax.new_ref(X)
    (*_, eqn) = traced(lambda: jax.jit(writes)(ref)).eqns
    assert not compat.only_arrays(eqn.params["jaxpr"])


def test_the_scopes_of_a_name_stack():
    def f(x):
        with jax.named_scope("keep"), jax.named_scope("drop"):
            return jax.vmap(jnp.sin)(x)

    (eqn,) = traced(jax.grad(lambda x: f(x).sum()), X).eqns[:1]
    stack, nothing = eqn.source_info.name_stack, new_name_stack()
    assert str(stack) == "jvp(keep)/drop/vmap()"
    assert str(compat.without_scopes(stack, "drop".__eq__)) == "jvp(keep)/vmap()"
    more = compat.with_scope(stack, "polymp:call:7")
    assert compat.scope_names(more) == ["keep", "drop", "polymp:call:7"]
    assert compat.scope_names(stack) == ["keep", "drop"], "the stack itself is as it was"
    assert compat.transforms(more) == compat.transforms(stack) == {"jvp", "vmap"}
    assert (compat.scope_names(nothing), compat.transforms(nothing)) == ([], frozenset())
    (eqn,) = traced(jnp.sin, X).eqns
    assert nothing == eqn.source_info.name_stack


def test_the_dtypes_that_would_come_out():
    (dot,) = traced(lambda x: lax.dot(x, x), X).eqns
    assert compat.dtypes_out(dot, ["float16", "float16"]) == ("float16",)
    (sort,) = traced(lambda x: lax.sort((x, x), num_keys=1), X).eqns
    assert compat.dtypes_out(sort, ["bfloat16", None]) == ("bfloat16", "float32")
    (top,) = traced(lambda x: lax.top_k(x, 1), X).eqns
    assert compat.dtypes_out(top, ["float16"]) == ("float16", "int32")


def test_the_frames_of_an_equation():
    def called(x):
        return jnp.sin(x), jnp.sin(x)

    def calls(x):
        return called(x)

    eqns = traced(calls, X).eqns
    one, two = (compat.frames(eqn.source_info.traceback) for eqn in eqns)
    inner, outer = map(one.codes.index, (called.__code__, calls.__code__))
    assert inner < outer, "innermost first"
    assert one.codes == two.codes
    assert len(one.codes) == len(one.places)
    assert one.places[inner] != two.places[inner], "two calls in one function"
    assert one.places[outer:] == two.places[outer:]
    assert compat.frames(None) == ((), ())


def test_where_a_jitted_function_was_written():
    @jax.jit
    def log_softmax(x):
        return x

    jaxprs = [traced(fn, X).eqns[0].params["jaxpr"] for fn in (jax.nn.log_softmax, log_softmax)]
    theirs, ours = map(compat.traced_from, jaxprs)
    code = log_softmax.__wrapped__.__code__
    assert ours == (code.co_filename, code.co_firstlineno, "log_softmax") != theirs
    code = jax.nn.log_softmax.__wrapped__.__code__
    assert theirs == (code.co_filename, code.co_firstlineno, "log_softmax")


def test_what_is_traced_from_a_function_can_be_said_to_be_of_another():
    def one(x):
        return jnp.sin(x)

    inner = jax.make_jaxpr(one)(X)
    made = jax.make_jaxpr(compat.traced_as(lambda x: jnp.cos(x), inner))(X)
    assert compat.traced_from(made) == compat.traced_from(inner)
    assert made.jaxpr.debug_info.func_name == "one"
    assert [eqn.primitive.name for eqn in made.eqns] == ["cos"]


def test_answers_of_rematerialisation_policies():
    policies = jax.checkpoint_policies
    assert compat.remat_case(True) == "save"
    assert compat.remat_case(False) == "recompute"
    offload = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    (eqn,) = traced(jnp.dot, X, X).eqns
    answer = offload(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    there, back = compat.remat_case(answer)
    assert (there, back) == (jax.memory.Space.Host, jax.memory.Space.Device)
    assert eqn.primitive not in compat.remat_rules  # else policies would not be asked about it


def test_equations_and_parameters_that_the_rewrite_reads():
    """Names in equations are no API: this is where a change of one shows first."""

    def names(fn, *args):
        return {eqn.primitive.name: eqn.params for eqn in traced(fn, *args).eqns}

    assert "jaxpr" in names(jax.jit(jnp.sin), X)["jit"]
    remat = names(jax.checkpoint(jnp.sin), X)
    assert {"jaxpr", "policy"} <= remat.get("remat2", remat.get("checkpoint")).keys()
    loop = names(lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c + 1, x), X)["while"]
    assert {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"} <= loop.keys()
    branch = names(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)["cond"]
    assert len(branch["branches"]) == 2
    mapped = jax.shard_map(jnp.sin, mesh=mesh_of_one(), in_specs=jax.P("d"), out_specs=jax.P("d"))
    keys = {"jaxpr", "mesh", "in_specs", "out_specs", "newly_manual_axes", "check_vma"}
    assert keys <= names(mapped, X)["shard_map"].keys()
    assert "call_jaxpr" in names(jax.nn.relu, X)["custom_jvp_call"]
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    held = names(rule, X)["custom_vjp_call"]
    assert {"call_jaxpr", "num_consts", "symbolic_zeros"} <= held.keys()
    dot = names(jnp.dot, X, X)["dot_general"]
    keys = {"dimension_numbers", "precision", "preferred_element_type", "out_sharding"}
    assert dot.keys() == keys
    cast = names(lambda x: x.astype(jnp.bfloat16), X)["convert_element_type"]
    assert cast.keys() == {"new_dtype", "weak_type", "sharding"}


def test_is_ready():
    assert compat.is_ready(jax.block_until_ready(jnp.ones(3)))


def test_equations_that_a_transposition_made():
    def f(x):
        with jax.named_scope("transpose"):
            return (x * x).sum()

    eqns = traced(jax.grad(f), X).eqns
    back = [compat.in_backward(eqn.source_info.name_stack) for eqn in eqns]
    assert back[0] is False
    assert back[-1] is True
    assert not any(compat.in_backward(e.source_info.name_stack) for e in traced(f, X).eqns)


def test_a_primitive_runs_eagerly_as_one_kernel():
    lowered, twice = [], core.Primitive("twice")
    twice.def_abstract_eval(lambda x, by: x)
    compat.run_eagerly(twice)
    rule = mlir.lower_fun(lambda x, by: (lowered.append(by), by * x)[1], multiple_results=False)
    mlir.register_lowering(twice, rule)
    for _ in range(2):
        assert np.array_equal(twice.bind(X, by=2), 2 * X)
    with jax.disable_jit():
        assert np.array_equal(twice.bind(X, by=3), 3 * X)
    assert lowered == [2, 3]


def test_repeated_ops_of_a_lowered_program_are_merged():
    """Casts and layouts of one value, that forms of different contractions made of it."""
    params = {
        "dimension_numbers": (((1,), (0,)), ((), ())),
        "out_sharding": None,
        "precision": None,
    }

    def twice(x, y, w):
        low = partial(contract, spec_of(lax.dot_general_p, params, "bfloat16", "float32"))
        return low(x, w), low(y, w)

    def casts():
        jax.clear_caches()
        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((256, 4), (512, 4), (4, 8))]
        text = jax.jit(twice).lower(*shapes).as_text()
        return text.count("tensor<4x8xf32>) -> tensor<4x8xbf16>")

    assert casts() == 1
    with mock.patch.object(compat, "merge_repeated"):
        assert casts() == 2
    jax.clear_caches()


def test_a_program_for_one_device_of_this_machine():
    primitive, seen = core.Primitive("asks"), []
    primitive.def_abstract_eval(lambda x: x)

    def rule(ctx, x):
        seen.append(compat.is_for_one_device(ctx))
        return [x]

    mlir.register_lowering(primitive, rule, cacheable=False)
    fn = jax.jit(primitive.bind)
    fn.lower(X)
    export.export(fn)(X)
    two = NamedSharding(AbstractMesh((2,), ("x",)), PartitionSpec())
    on_two = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=two)
    fn.trace(on_two).lower(lowering_platforms=("cpu",))
    assert seen == [True, False, False]
