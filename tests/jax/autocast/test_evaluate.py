"""Equations put into a trace are those that `bind` would put there, to the last parameter.

Each program is traced twice under autocast, with equations recorded and with every one bound. The
two jaxprs must agree in everything but the names of variables: equations in their order, types
with weakness and sharding, literals with their types, parameters and the programs in them, effects,
name stacks, tracebacks and contexts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import polymp.jax
from polymp.backends.jax import compat
from polymp.jax import autocast
from tests.conftest import need
from tests.support.jax.corpus import corpus
from tests.support.jax.corpus_runs import problem
from tests.support.jax.programs import Program, arguments, plain, programs
from tests.support.sizes import size


def told(closed: Any) -> list[Any]:
    """All that a closed jaxpr is, but for the identity of its variables."""
    jaxpr, consts = compat.opened(closed)
    constvars, invars = compat.binders(closed)
    names: dict[Any, int] = {}

    def binder(var: Any) -> Any:
        names[var] = len(names)
        return names[var], kind(var.aval)

    def atom(x: Any) -> Any:
        if isinstance(x, core.Literal):
            return "literal", type(x.val).__name__, np.asarray(x.val).tobytes(), kind(x.aval)
        return names[x]

    found: list[Any] = [[*map(binder, (*constvars, *invars))]]
    found.append([np.asarray(c).tobytes() if is_array(c) else type(c).__name__ for c in consts])
    for eqn in jaxpr.eqns:
        read = [*map(atom, eqn.invars)]
        found.append(
            (
                eqn.primitive.name,
                read,
                [*map(binder, eqn.outvars)],
                {name: value(eqn.params[name]) for name in sorted(eqn.params)},
                sorted(map(text, eqn.effects)),
                str(eqn.source_info.name_stack),
                list(users(eqn)),
                id(eqn.ctx),
            )
        )
    found.append([*map(atom, jaxpr.outvars)])
    found.append((sorted(map(text, jaxpr.effects)), text(jaxpr.debug_info)))
    return found


def kind(aval: Any) -> Any:
    sharding = getattr(aval, "sharding", None)
    return str(aval), getattr(aval, "weak_type", None), str(sharding), str(getattr(aval, "mat", ""))


def is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )  # fmt: skip


def value(x: Any) -> Any:
    """A parameter, comparable: a program as what it is, a function by its type."""
    if hasattr(x, "eqns"):
        return told(compat.close(x))
    if isinstance(x, (tuple, list)):
        return [value(one) for one in x]
    if callable(x) and not isinstance(x, core.Primitive):
        return type(x).__name__
    return type(x).__name__, text(x)


def text(x: Any) -> str:
    """Return `str` of an object without memory addresses."""
    return re.sub(r"0x[0-9a-f]+|id=\d+", "", str(x))


def users(eqn: Any) -> Iterator[Any]:
    """The frames of an equation's traceback that are neither jax's nor the rewrite's.

    By line, for Python moves within a line when it specialises what has often run.
    """
    frames = compat.frames(eqn.source_info.traceback)
    for code, place in zip(frames.codes, frames.places, strict=True):
        if not any(part in code.co_filename for part in ("/jax/_src/", "/backends/jax/")):
            lines = [line for start, end, line in code.co_lines() if start <= place < end]
            yield code.co_filename, code.co_firstlineno, code.co_name, lines


def both(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return the program as it is when recorded, and as it is when bound."""
    made = []
    for binding in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if binding:
                patch.setattr(compat, "recorder", lambda values: None)
            made.append(told(jax.make_jaxpr(fn(autocast, **options))(*args)))
    return made


def agree(fn: Callable[..., Any], *args: Any, **options: Any) -> None:
    recorded, by_bind = both(fn, *args, **options)
    assert len(recorded) == len(by_bind)
    for ours, theirs in zip(recorded, by_bind, strict=True):
        assert ours == theirs


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [p.name for p in corpus()])
def test_programs_of_the_corpus(name):
    it = problem(name)
    need(it.program.needs)
    with jax.enable_x64(it.program.x64):
        agree(lambda autocast: autocast(it.fn), *it.args)


@settings(
    max_examples=size(4, 12), phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(programs())
def test_random_programs(program: Program):
    env = arguments(program)
    agree(lambda autocast: autocast(plain(program, polymp.jax), dtype=program.low), env)


W = jnp.linspace(-1, 1, 16).reshape(4, 4)
TABLE = np.linspace(-2, 2, 16, dtype=np.float32).reshape(4, 4)


def weak(x):
    scale = jnp.asarray(2.0) * 3
    return lax.convert_element_type(x @ x, float) * scale + lax.full((), 1.5) * x


def several(x):
    a, b = lax.optimization_barrier((x @ x, x))
    top, _ = lax.top_k(a, 2)
    return lax.split(a, (1, 3), axis=1), top, lax.sort((a, b), num_keys=1)


def effects(x):
    jax.debug.print("{}", x.sum())
    return x @ x


def forwards(x):
    y = lax.convert_element_type(x @ x, jnp.float32)
    return lax.broadcast_in_dim(y, (4, 4), (0, 1)), lax.reshape(y, (16,))


def nested(x):
    with jax.named_scope("outer"), set_xla_metadata(a="b"):
        y = jax.checkpoint(lambda x: jnp.tanh(x @ W))(x)
    y = lax.fori_loop(0, 3, lambda i, y: jnp.sin(y @ W), y)
    return jax.nn.softmax(lax.cond(y.sum() > 0, jnp.exp, jnp.cos, y)), jax.nn.relu(y)


def numbers(x):
    return jnp.where(x > 0, x @ x, -1e30) * 2.0 + jnp.maximum(x, 0) ** 3 / 7 + 1e-12


HAND: dict[str, Callable[[Any], Any]] = {
    fn.__name__: fn for fn in (weak, several, effects, forwards, nested, numbers)
} | {
    "constants": lambda x: x @ W + TABLE @ x + jnp.asarray(TABLE)[0] * jnp.float32(3),
    "scatters": lambda x: (x @ x).at[1].add(x[0]).at[2].mul(2.0),
    "fills": lambda x: (x @ x) + jnp.full((4, 4), 1e-3) + jnp.zeros(4) + lax.iota("float32", 4),
    "outputs": lambda x: (x @ x, x, W, 1.0, (x @ x).astype(jnp.float32), jnp.int32(3)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", HAND)
def test_programs_by_hand_inside_jit_and_a_scope_too(name, dtype):
    def make(autocast):
        fn = autocast(HAND[name], dtype=dtype)

        def outer(x):
            with jax.named_scope("ours"):
                return jax.jit(fn)(x), fn(x + 1), fn(W)

        return lambda x: (fn(x), outer(x))

    agree(make, W)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.linearize, jax.hessian])
def test_under_transformations(transform):
    def make(autocast):
        def outer(x):
            made = autocast(lambda x: (nested(x)[0] + numbers(x)).sum())
            if transform is jax.linearize:
                return jax.linearize(made, x)[0]
            return transform(made)(x[None] if transform is jax.vmap else x)

        return outer

    agree(make, W)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_a_mesh(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(W, NamedSharding(mesh, PartitionSpec("d")))
        agree(lambda autocast: autocast(lambda x: jnp.tanh(x @ W) * 2 + x[0]), x)


@pytest.mark.parametrize("check", [True, False])
def test_in_a_shard_map(check):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def body(x, w):
        return lax.psum(jnp.sin(x @ w) + numbers(x), "d")

    def make(autocast, inside):
        specs = PartitionSpec("d"), PartitionSpec()
        mapped = jax.shard_map(
            autocast(body) if inside else body,
            mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check,
        )  # fmt: skip
        return mapped if inside else autocast(mapped)

    for inside in (False, True):
        agree(make, W, W, inside=inside)


def test_values_of_an_outer_trace():
    def make(autocast):
        def outer(x):
            y = x * 2
            inner = autocast(lambda z: jnp.exp(z @ y) + y.sum())
            return jax.jit(inner)(x), lax.map(inner, x[None]), autocast(lambda: y @ y)()

        return outer

    agree(make, W)


# The oracle can fail, and it looks at what is recorded.


def test_it_is_recorded(monkeypatch):
    seen = []

    class Counting(compat.Recorder):
        def put(self, primitive, values, params):
            seen.append(primitive.name)
            return super().put(primitive, values, params)

    monkeypatch.setattr(compat, "Recorder", Counting)
    made = jax.make_jaxpr(autocast(lambda x: jnp.sin(x @ x) * 2 + x))(W)
    assert seen == [eqn.primitive.name for eqn in made.eqns]
    assert len(seen) >= 5


@pytest.mark.parametrize("wrong", ["weak_type", "dtype"])
def test_a_wrong_type_is_seen(monkeypatch, wrong):
    class Wrong(compat.Recorder):
        def put(self, primitive, values, params):
            outs = super().put(primitive, values, params)
            for eqn in outs:
                if type(eqn) is compat.Recorded and primitive.name == "mul":
                    (var,) = eqn.outvars
                    new = {"dtype": np.dtype("float16")} if wrong == "dtype" else {}
                    var.aval = var.aval.update(weak_type=wrong == "weak_type", **new)
            return outs

    monkeypatch.setattr(compat, "Recorder", Wrong)
    recorded, by_bind = both(lambda autocast: autocast(lambda x: jnp.sin(x) * x), W)
    assert recorded != by_bind
