"""The random programs with their casts inserted by hand, from what docs/jax.md says.

A second reading of `programs`, which knows nothing of the package: it goes through the steps,
decides by the documented tables in which dtype each one runs, and writes the function with an
`astype` wherever that asks for one. A product takes rounded operands to float32, adds up there
and is rounded once. Where the documentation leaves a choice, this says what it takes it to mean.

With `noise`, every low value and every low cotangent is moved by random relative errors of the
size of its dtype's roundoff, which shows how far roundings may carry.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.jax.programs import (
    CALLS,
    INDEX,
    LAYERS,
    LOOPS,
    WITH_RULES,
    Block,
    Do,
    Env,
    Op,
    Program,
    apply,
    free,
)

# The table "What runs where", for the ops of the grammar.
LOW_OPS = frozenset({"dot", "inner", "compose"})
FLOAT32_OPS = frozenset(
    {"decay", "log", "inverse", "norm", "softmax", "log_softmax", "standardize", "cumsum"}
)
# "What only float32 ops read is computed in float32": one value, element by element or chosen.
ELEMENTWISE = frozenset(
    """tanh sin neg relu shift masked times plus clip scaled add sub mul max select where bias gain
    turn tame""".split()
)
LAYOUT = frozenset({"turn", "rev"})  # an array that is moved is what it was
SPREAD = frozenset({"inner"})  # a product that is broadcast, to which no bias is added
SUMS = frozenset({"add", "bias", "plus"})
LARGEST = {"bfloat16": 3.3895314e38, "float16": 65504.0, "float32": 3.4028235e38}
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Kind(NamedTuple):
    """A value's dtype, and what the table "Mixed operands" calls it."""

    dtype: str
    what: str = "computed"  # or "given" (a parameter), "product", "number"

    @property
    def low(self) -> bool:
        return self.dtype != "float32"


Kinds = dict[str, Kind]
Region = str  # a low dtype, or "off"


class Step(NamedTuple):
    """One step and how it runs: its dtype, or the planned blocks inside it."""

    of: Op | Do
    region: Region
    run: str | None = None
    blocks: tuple[Planned, ...] = ()
    carry: tuple[str, ...] = ()


class Planned(NamedTuple):
    """A block whose dtypes are decided.

    Attributes:
        params: its parameters.
        steps: in order, those of vmaps and regions among the others.
        results: names of the results.
        kinds: of all values.
        wanted: dtypes that the results take; None leaves them.
    """

    params: tuple[str, ...]
    steps: list[Step]
    results: tuple[str, ...]
    kinds: Kinds
    wanted: tuple[str, ...] | None = None

    def outs(self) -> list[Kind]:
        kinds = [self.kinds[name] for name in self.results]
        if self.wanted is None:
            return kinds
        return [Kind(w) for w in self.wanted]


class Rules:
    """The documented rules. Wrong ones are made of it by overriding, to see that they are found."""

    def run(self, op: Op, region: Region, kinds: list[Kind]) -> str:
        """The dtype that an op runs in."""
        if region == "off" or op.name in (*FLOAT32_OPS, "upper", "explicit"):
            return "float32"
        if op.name in (*LOW_OPS, "lower"):
            return region
        decide = [k for k in kinds if k.what != "number"]
        if self.is_bias(op, decide):
            decide = [k for k in decide if k.what == "product"]
        run = self.widest([k.dtype for k in decide])
        number = abs(op.number)
        if op.name in ("times", "plus") and run != "float32":
            if not SMALLEST[run] <= number <= LARGEST[run]:
                return "float32"
        return run

    def is_bias(self, op: Op, kinds: list[Kind]) -> bool:
        products = {k.dtype for k in kinds if k.what == "product"}
        added = op.name in ("add", "bias")
        return added and len(products) == 1 and all(k.what in ("product", "given") for k in kinds)

    def widest(self, dtypes: list[str]) -> str:
        """Of bfloat16 and float16 neither holds the other, so it is float32."""
        return dtypes[0] if len(set(dtypes)) == 1 else "float32"

    def result(self, op: Op, region: Region, run: str, kinds: list[Kind]) -> Kind:
        if region == "off":
            return Kind(run)
        if op.name in LOW_OPS:
            return Kind(run, "computed" if op.name in SPREAD else "product")
        if op.name in LAYOUT:
            return kinds[0]
        sums = op.name in SUMS and run != "float32"
        if sums and any(k.what == "product" for k in kinds):
            return Kind(run, "product" if all(k.what != "computed" for k in kinds) else "computed")
        return Kind(run)

    def joined(self, carry: tuple[str, ...], after: list[Kind]) -> tuple[str, ...]:
        """A carry is the widest of what goes in and what comes round."""
        return tuple(self.widest([a, b.dtype]) for a, b in zip(carry, after, strict=False))

    def pulls(self) -> bool:
        return True


class _Planner:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.alias: dict[str, str] = {}  # names of what vmaps and regions take and hand on

    def name(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def flat(self, block: Block, region: Region) -> list[tuple[Op | Do, Region]]:
        """A block's steps, with those of jits, vmaps and regions in their place."""
        steps: list[tuple[Op | Do, Region]] = []
        for step in block.steps:
            if isinstance(step, Op) or step.kind in (*LOOPS, "remat", *WITH_RULES, "switch"):
                steps.append((step, region))
                continue
            (inner,) = step.blocks
            self.alias.update(zip(inner.params, step.args, strict=True))
            there = step.option if step.kind == "nested" else step.kind
            steps.extend(self.flat(inner, region if step.kind in ("jit", "vmap") else there))
            self.alias.update(zip(step.targets, inner.results, strict=True))
        return steps

    def plan(
        self, block: Block, region: Region, kinds: Kinds, wanted: tuple[str, ...] | None = None
    ) -> Planned:
        kinds = dict(kinds)
        steps = []
        for step, there in self.flat(block, region):
            made = (
                self.op(step, there, kinds) if isinstance(step, Op) else self.do(step, there, kinds)
            )
            steps.append(made)
        results = tuple(map(self.name, block.results))
        if self.rules.pulls():
            self.pull(steps, zip(results, wanted or [None] * len(results), strict=True), kinds)
        return Planned(block.params, steps, results, kinds, wanted)

    def op(self, step: Op, region: Region, kinds: Kinds) -> Step:
        args = [kinds[self.name(a)] for a in step.args]
        run = self.rules.run(step, region, args)
        kinds[step.target] = self.rules.result(step, region, run, args)
        return Step(step, region, run)

    def do(self, step: Do, region: Region, kinds: Kinds) -> Step:
        inside = dict(kinds)
        if step.kind in LOOPS:
            return self.loop(step, region, inside, kinds)
        blocks = tuple(self.plan(block, region, inside) for block in step.blocks)
        outs = blocks[0].outs()
        if step.kind == "switch":
            dtypes = tuple(
                self.rules.widest([k.dtype for k in some])
                for some in zip(*(b.outs() for b in blocks), strict=True)
            )
            blocks = tuple(self.plan(b, region, inside, dtypes) for b in step.blocks)
            outs = [Kind(f) for f in dtypes]
        if step.kind in WITH_RULES:
            outs = [k if k.what == "product" else Kind(k.dtype) for k in outs]
        kinds.update(zip(step.targets, outs, strict=True))
        return Step(step, region, None, blocks)

    def loop(self, step: Do, region: Region, inside: Kinds, kinds: Kinds) -> Step:
        (block,) = step.blocks
        inside[block.params[-1]] = Kind("float32", "given")  # a layer's matrix, in a scan
        start = [kinds[self.name(a)].dtype for a in step.args]
        if step.kind == "while" and region == "off":  # stop_gradient runs as written
            start = ["float32"] * len(start)
            inside.update({self.name(n): Kind("float32") for n in free(block)})
        carry = tuple(start)
        while True:
            state = {p: Kind(f) for p, f in zip(block.params, carry, strict=False)}
            planned = self.plan(block, region, {**inside, **state})
            wider = self.rules.joined(carry, planned.outs())
            if wider == carry:
                break
            carry = wider
        made = tuple(k.dtype for k in planned.outs()[len(carry) :])
        planned = self.plan(block, region, {**inside, **state}, (*carry, *made))
        kinds.update(zip(step.targets, planned.outs(), strict=True))
        return Step(step, region, None, (planned,), carry)

    def pull(
        self, steps: list[Step], results: Iterable[tuple[str, str | None]], kinds: Kinds
    ) -> None:
        """Compute in float32 what only float32 ops read, from the last step to the first."""
        up: set[str] = set()
        other: set[str] = set()
        for name, dtype in results:
            (up if dtype == "float32" and kinds[name].low else other).add(name)
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            if isinstance(step.of, Op):
                target = step.of.target
                eligible = step.of.name in ELEMENTWISE and kinds[target].low
                if eligible and target in up and target not in other:
                    kinds[target] = Kind("float32")
                    step = steps[at] = step._replace(run="float32")
            for name, dtype in self.reads(step):
                upward = dtype == "float32" and kinds[name].low
                (up if upward else other).add(name)

    def reads(self, step: Step) -> list[tuple[str, str | None]]:
        """The names that a step reads, and in which dtype; None as they are."""
        of = step.of
        if isinstance(of, Op):
            names = [self.name(a) for a in of.args]
            as_is = step.region != "off" and of.name in ("rev", "explicit")
            return [(name, None if as_is else step.run) for name in names]
        off = of.kind == "while" and step.region == "off"
        inner = [(self.name(n), "float32" if off else None) for n in free(*of.blocks)]
        dtypes = step.carry or (None,) * len(of.args)
        return [*zip(map(self.name, of.args), dtypes, strict=True), *inner]


# The casts


NOISE = "noise"


def noise(seed: Any, values: float, cotangents: float, wide: float = 0.0) -> Any:
    """By how many roundoffs low values, low cotangents and float32 values may be off."""
    return jnp.stack([jnp.float32(x) for x in (seed, values, cotangents, wide)])


def by_hand(program: Program, rules: Rules | None = None) -> Callable[[Env], list[Any]]:
    """The function with casts. With `noise` among the arguments, under its name, a noisy one."""
    planner = _Planner(rules or Rules())
    kinds = {name: Kind("float32", "given") for name in ("r0", "r1", "m0", "m1", LAYERS, "v0")}
    kinds["s0"], kinds[INDEX] = Kind("float32", "number"), Kind("int32")
    planned = planner.plan(program.block, program.low, kinds)
    return lambda env: _Casts(planner, program.low).block(planned, {NOISE: None, **env})


class _Casts:
    """Runs planned blocks."""

    def __init__(self, planner: _Planner, low: str) -> None:
        self.name = planner.name
        self.low = low

    def block(self, planned: Planned, env: Env) -> list[Any]:
        env = dict(env)
        for step in planned.steps:
            if isinstance(step.of, Op):
                env[step.of.target] = self.op(step, step.of, env, planned.kinds)
            else:
                env.update(zip(step.of.targets, self.do(step, step.of, env), strict=True))
        results = [env[name] for name in planned.results]
        assert [x.dtype.name for x in results] == [planned.kinds[n].dtype for n in planned.results]
        if planned.wanted is None:
            return results
        return [x.astype(w) for x, w in zip(results, planned.wanted, strict=True)]

    def op(self, step: Step, op: Op, env: Env, kinds: Kinds) -> Any:
        names = [self.name(a) for a in op.args]
        args, run = [env[n] for n in names], step.run
        assert run is not None
        if op.name in LOW_OPS and run != "float32":
            operands = [
                _rounded(x, run) if kinds[n].what == "given" else self.noisy(x.astype(run), n, env)
                for x, n in zip(args, names, strict=True)
            ]
            made = apply(op.name, 0.0, [x.astype(jnp.float32) for x in operands]).astype(run)
        elif op.name in ("upper", "lower"):
            made = args[0].astype(run)
        elif op.name == "explicit":
            low = args[0].astype(run).astype(jnp.bfloat16)
            return self.noisy(low, op.target, env).astype(jnp.float32)
        elif op.name == "rev" and step.region != "off":
            made = apply(op.name, 0.0, args)
        else:
            if op.name in ("bias", "gain"):  # so that a parameter's gradient is summed in float32
                args = [args[0], jnp.broadcast_to(args[1], args[0].shape)]
            number = max(op.number, -LARGEST[run]) if op.name == "clip" else op.number
            made = apply(op.name, number, [x.astype(run) for x in args])
        return self.noisy(made, op.target, env)

    def do(self, step: Step, do: Do, env: Env) -> Any:
        args = [env[self.name(a)] for a in do.args]
        if do.kind == "switch":
            return lax.switch(
                env[INDEX], [lambda b=b: tuple(self.block(b, env)) for b in step.blocks]
            )
        (planned,) = step.blocks
        reads = sorted({self.name(n) for n in free(*do.blocks)})
        if do.kind in LOOPS:
            if do.kind == "while":
                off = step.region == "off"
                inside = {n: lax.stop_gradient(env[n]) for n in reads}
                if off:
                    inside = {
                        n: x if n == INDEX else x.astype("float32") for n, x in inside.items()
                    }
                env, args = {**env, **inside}, [lax.stop_gradient(x) for x in args]
            args = [x.astype(f) for x, f in zip(args, step.carry, strict=True)]

            def body(*given: Any) -> list[Any]:
                return self.block(planned, {**env, **dict(zip(planned.params, given, strict=True))})

            return LOOPS[do.kind](do, args, env, body)
        if env[NOISE] is not None:
            reads.append(NOISE)
        ruled = do.kind in WITH_RULES

        def function(*given: Any) -> list[Any]:
            inside = {NOISE: None, **dict(zip(reads, given, strict=True))}
            if ruled:  # in a rule, a parameter's gradient is an array like any other
                for n in reads:
                    if n not in (NOISE, INDEX):
                        inside[n] = self.noisy(inside[n], n, inside, parameter=True)
            return self.block(planned, inside)

        wrapped = WITH_RULES[do.kind](function) if ruled else CALLS[do.kind](do, function)
        return wrapped(*[env[n] for n in reads])

    def noisy(self, x: Any, name: str, env: Env, parameter: bool = False) -> Any:
        """A value that is a little off, if noise is asked for; of a parameter, its gradient."""
        if env[NOISE] is None:
            return x
        unit = ROUNDOFF.get(x.dtype.name, ROUNDOFF[self.low])
        size = env[NOISE][1] if x.dtype != jnp.float32 else env[NOISE][3] * (not parameter)
        back = env[NOISE][2] if parameter or x.dtype != jnp.float32 else jnp.float32(0)
        how = jnp.stack([env[NOISE][0], unit * size, unit * back])
        return _moved(x, how, zlib.crc32(name.encode()) % 2**31)


def _rounded(x: Any, low: str) -> Any:
    """A float32 parameter as a product sees it; its gradient comes back as it was added up."""

    @jax.custom_jvp
    def cast(x: Any) -> Any:
        return x.astype(low).astype(x.dtype)

    cast.defjvp(lambda primals, tangents: (cast(*primals), tangents[0]))
    return cast(x)


def _moved(x: Any, how: Any, site: int) -> Any:
    """The value, and what is linear in its tangent, off by random relative errors."""

    def factor(x: Any, seed: Any, size: Any) -> Any:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        mixed = bits ^ (seed.astype(jnp.int32) * jnp.int32(0x1E3779B9)) ^ jnp.int32(site)
        mixed = mixed * jnp.int32(0x2C1B3C6D)
        mixed = (mixed ^ lax.shift_right_logical(mixed, 15)) * jnp.int32(0x297A2D39)
        return 1.0 + size * (mixed.astype(jnp.float32) * 2.0**-31)

    @jax.custom_jvp
    def moved(x: Any, how: Any) -> Any:
        return (x.astype(jnp.float32) * factor(x, how[0], how[1])).astype(x.dtype)

    @moved.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        x, how = primals
        tangent = tangents[0].astype(jnp.float32) * factor(x, how[0], how[2])
        return moved(x, how), tangent.astype(x.dtype)

    return moved(x, how)
