"""How far rounding may move the results of a program: a bound derived from the dtype.

Monte Carlo arithmetic (D. Stott Parker, 1997): the float32 program is run again with a random
relative error of at most the dtype's unit roundoff wherever a region may round. The results of
several such runs scatter round the float32 ones as far as the program's own conditioning carries
an error of that size; a rounded run has to stay within a fixed multiple of that scatter. Nothing
is known of a program but its jaxpr, and the multiple is the same for all.

A region may round the operands and the result of every contraction, and those of every arithmetic
op that a low value reaches before a float32 function does, together with the constants and the
parameters in it. Backward, it may round the cotangents of those results, and wherever a low value
takes part. What is exact in any dtype (selection, layout, comparison) stays exact.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.support.jax.walker import AS_WRITTEN, CONTRACTIONS, FLOAT32, LINALG, LINEAR

# bits behind the point, smallest subnormal's exponent, bits of the exponent
DTYPES = {"bfloat16": (7, -133, 8), "float16": (10, -24, 5), "four bits": (3, -133, 8)}

EXACT = frozenset(
    """abs argmax argmin broadcast_in_dim clamp concatenate convert_element_type copy copy_p
    dynamic_slice dynamic_update_slice eq expand_dims floor gather ge gt is_finite le lt max min
    name ne neg optimization_barrier pad reduce_max reduce_min reduce_window_max reshape rev
    round select_n sign slice sort split squeeze stop_gradient top_k transpose""".split()
)
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

Rounding = Callable[[jax.Array], jax.Array]


class Kind(IntEnum):
    """Knowledge of the dtype of a float32 value in a region; a join is the maximum."""

    FREE = 0  # a parameter, a constant and what comes of them
    LOW = 1  # a contraction's result and what comes of it
    STRONG = 2  # a float32 function's result and what comes of it: never rounded in passing


class Closed(NamedTuple):
    """A jaxpr with its constants, however the version of JAX keeps them."""

    body: Any
    consts: Any


def scatter(unit: jax.Array, tiny: jax.Array, seed: jax.Array) -> Rounding:
    """A rounding that errs at random, by at most `unit` of the value plus `tiny`.

    With zeros for both it changes nothing. The error is a hash of the value and the seed: equal
    values are rounded alike, as a dtype rounds a weight alike wherever it is used.
    """

    def rounding(x: jax.Array) -> jax.Array:
        bits = (lax.bitcast_convert_type(x, jnp.int32) ^ seed) * jnp.int32(0x2C1B3C6D)
        error = bits.astype(jnp.float32) * 2.0**-31
        return x + error * (unit * jnp.abs(x) + tiny)

    return rounding


def nearest(fmt: str) -> Rounding:
    """Round to the dtype itself: what a region does, emulated."""
    bits, subnormal, exponent = DTYPES[fmt]

    def rounding(x: jax.Array) -> jax.Array:
        normal = lax.reduce_precision(x, exponent, bits)  # flushes subnormals
        if subnormal < -126:
            return normal
        step = 2.0**subnormal
        small = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        return jnp.where(jnp.abs(x) < step * 2**bits, small, normal)

    return rounding


def scatter_of(fmt: str, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arguments of `scatter` for a dtype."""
    bits, subnormal, _ = DTYPES[fmt]
    return (
        jnp.float32(2.0 ** -(bits + 1)),
        jnp.float32(2.0 ** max(subnormal - 1, -126)),
        jnp.int32((seed + 1) * 0x1E3779B9 % 2**31),
    )


@jax.custom_vjp
def _mark(x: jax.Array) -> jax.Array:
    """The same value; its cotangent is named, for `rounded` to find."""
    return x


_mark.defvjp(lambda x: (x, None), lambda _, g: (checkpoint_name(g, COTANGENT),))
COTANGENT = "cotangent of a low value"


def marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a mark on every low value. Mark first, then differentiate, then round."""
    return _through(fn, Pass(_mark, marks=True))


def rounded(fn: Callable[..., Any], rounding: Rounding) -> Callable[..., Any]:
    """The function with `rounding` wherever a region may round."""
    return _through(fn, Pass(rounding))


def _through(fn: Callable[..., Any], one: Pass) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        kinds = [Kind.FREE] * len(leaves)
        values, _ = _evaluate(_closed(jaxpr), leaves, kinds, one)
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    return run


class Pass(NamedTuple):
    """One pass through a jaxpr: with a rounding it computes, without it only finds the kinds."""

    rounding: Rounding | None
    marks: bool = False  # results are marked, and custom rules kept
    backward: bool = False  # in a part that transposition has made
    off: bool = False  # in a part that the program wants as written

    def within(self, eqn: Any) -> Pass:
        scope = str(eqn.source_info.name_stack)
        backward, off = "transpose(" in scope, "as_written" in scope
        return self._replace(backward=self.backward or backward, off=self.off or off)

    def kinds(self, body: Closed, operands: list[Kind]) -> list[Kind]:
        dry = self._replace(rounding=None)
        return _evaluate(body, [None] * len(operands), operands, dry)[1]


def _closed(jaxpr: Any) -> Closed:
    return Closed(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()))


Known = tuple[list[Any], list[Kind]]  # results, and what is known of each


def _evaluate(jaxpr: Closed, values: list[Any], kinds: list[Kind], run: Pass) -> Known:
    body, consts = jaxpr
    env = _pairs(body.constvars, consts, [Kind.FREE] * len(consts))
    env.update(_pairs(body.invars, values, kinds))

    def read(var: Any) -> tuple[Any, Kind]:
        if hasattr(var, "val"):
            return jnp.asarray(var.val, var.aval.dtype), Kind.FREE
        return env[var]

    for eqn in body.eqns:
        pairs = [read(var) for var in eqn.invars]
        operands, before = [p[0] for p in pairs], [p[1] for p in pairs]
        results, after = _equation(eqn, operands, before, run.within(eqn))
        env.update(_pairs(eqn.outvars, results, after))
    pairs = [read(var) for var in body.outvars]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _pairs(names: Any, values: Any, kinds: list[Kind]) -> dict[Any, tuple[Any, Kind]]:
    return {v: (x, kind) for v, x, kind in zip(names, values, kinds, strict=True)}


def _equation(eqn: Any, operands: list[Any], kinds: list[Kind], run: Pass) -> Known:
    op, params = eqn.primitive.name, eqn.params
    if op in AS_WRITTEN or (op in ("jit", "pjit") and params["name"] in LINALG):
        return _bind(eqn, operands, run), [Kind.STRONG] * len(eqn.outvars)
    if run.marks and op in ("custom_jvp_call", "custom_vjp_call"):
        after = run.kinds(_closed(params["call_jaxpr"]), kinds)
        return _results(eqn, _bind(eqn, operands, run), after, run), after
    if op in CALLS:
        return _evaluate(_closed(params[CALLS[op]]), operands, kinds, run)
    if op in CONTROL:
        return CONTROL[op](params, operands, kinds, run)
    asked = run.off or "HIGH" in str(params.get("precision"))
    contraction = op in CONTRACTIONS and not asked
    named = op == "name" and params["name"] == COTANGENT
    kind = Kind.LOW if contraction or named else _kind(op, kinds, run)
    rounds = run.rounding is not None and kind == Kind.LOW and (named or op not in EXACT)
    if rounds and not run.marks:
        operands = [
            run.rounding(x) if _is_float32(v) and (contraction or k != Kind.LOW) else x
            for v, x, k in zip(eqn.invars, operands, kinds, strict=True)
        ]
    results, after = _bind(eqn, operands, run), [kind] * len(eqn.outvars)
    return _results(eqn, results, after, run) if rounds else results, after


def _results(eqn: Any, results: list[Any], kinds: list[Kind], run: Pass) -> list[Any]:
    return [
        run.rounding(x) if run.rounding and k == Kind.LOW and _is_float32(v) else x
        for v, x, k in zip(eqn.outvars, results, kinds, strict=True)
    ]


def _kind(op: str, operands: list[Kind], run: Pass) -> Kind:
    if run.backward and Kind.LOW in operands and (op in LINEAR or op not in FLOAT32):
        return Kind.LOW
    if op in FLOAT32 or run.off:
        return Kind.STRONG
    return max(operands, default=Kind.FREE)


def _bind(eqn: Any, operands: list[Any], run: Pass) -> list[Any]:
    if run.rounding is None:
        return [None] * len(eqn.outvars)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _is_float32(var: Any) -> bool:
    return getattr(var.aval, "dtype", None) == jnp.float32


def _cond(params: Any, operands: list[Any], kinds: list[Kind], run: Pass) -> Known:
    branches = [_closed(branch) for branch in params["branches"]]
    each = [run.kinds(branch, kinds[1:]) for branch in branches]
    after = [max(some) for some in zip(*each, strict=True)]
    if run.rounding is None:
        return [None] * len(after), after
    functions = [
        lambda *xs, branch=branch: _evaluate(branch, list(xs), kinds[1:], run)[0]
        for branch in branches
    ]
    return lax.switch(operands[0], functions, *operands[1:]), after


def _carried(body: Closed, fixed: list[Kind], carry: list[Kind], xs: list[Kind], run: Pass) -> Any:
    """Return the knowledge of a loop's carry that holds in every iteration."""
    while True:
        after = run.kinds(body, fixed + carry + xs)[: len(carry)]
        wider = [max(a, b) for a, b in zip(carry, after, strict=True)]
        if wider == carry:
            return carry
        carry = wider


def _scan(params: Any, operands: list[Any], kinds: list[Kind], run: Pass) -> Known:
    if "ft_in" in params:  # since jax 0.11
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    body, split = _closed(params["jaxpr"]), consts + carry
    state = _carried(body, kinds[:consts], kinds[consts:split], kinds[split:], run)
    inside = kinds[:consts] + state + kinds[split:]
    after = state + run.kinds(body, inside)[carry:]
    if run.rounding is None:
        return [None] * len(after), after

    def step(state: Any, xs: Any) -> Any:
        values, _ = _evaluate(body, [*operands[:consts], *state, *xs], inside, run)
        return tuple(values[:carry]), tuple(values[carry:])

    init, xs = tuple(operands[consts:split]), tuple(operands[split:])
    last, stacked = lax.scan(step, init, xs, params["length"], reverse=params["reverse"])
    return [*last, *stacked], after


def _while(params: Any, operands: list[Any], kinds: list[Kind], run: Pass) -> Known:
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    state = _carried(body, kinds[a:b], kinds[b:], [], run)
    if run.rounding is None:
        return [None] * len(state), state

    def go_on(values: Any) -> Any:
        return _evaluate(test, [*operands[:a], *values], kinds[:a] + state, run)[0][0]

    def step(values: Any) -> Any:
        return tuple(_evaluate(body, [*operands[a:b], *values], kinds[a:b] + state, run)[0])

    return list(lax.while_loop(go_on, step, tuple(operands[b:]))), state


def _shard_map(params: Any, operands: list[Any], kinds: list[Kind], run: Pass) -> Known:
    body = _closed(params["jaxpr"])
    after = run.kinds(body, kinds)
    if run.rounding is None:
        return [None] * len(after), after
    mapped = jax.shard_map(
        lambda *xs: tuple(_evaluate(body, list(xs), kinds, run)[0]),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands)), after


CONTROL = {"shard_map": _shard_map, "cond": _cond, "scan": _scan, "while": _while}
