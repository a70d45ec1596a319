"""Random programs: a small grammar, drawn by Hypothesis, read as plain JAX functions.

A program is data: steps on rows (3, 4) or (4,), matrices (4, 4), a vector, a scalar and an index,
inside and outside of jit, vmap, scan, loops, branches, remat, functions with derivative rules of
their own, and regions. `plain` reads it as the float32 function that a user would write, `by_hand`
as that function with casts. Every name is given once in a program.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax

Env = dict[str, Any]
Formula = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    target: str
    name: str
    args: tuple[str, ...]
    number: float = 0.0


@dataclass(frozen=True)
class Do:
    """A construct with programs inside it; what they read from outside is closed over."""

    targets: tuple[str, ...]
    kind: str
    args: tuple[str, ...]
    blocks: tuple[Block, ...]
    option: Any = None


@dataclass(frozen=True)
class Block:
    """Steps, and the names that they are given and hand on."""

    params: tuple[str, ...]
    steps: tuple[Op | Do, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A block that is read in a region of a low dtype, and the seed of its arguments."""

    block: Block
    low: str
    seed: int

    def counts(self) -> Counter[str]:
        return Counter(s.kind if isinstance(s, Do) else s.name for s in every(self.block))


def every(block: Block) -> Iterator[Op | Do]:
    for step in block.steps:
        yield step
        if isinstance(step, Do):
            for inner in step.blocks:
                yield from every(inner)


def free(*blocks: Block) -> tuple[str, ...]:
    """The names that blocks read from outside."""
    found: dict[str, None] = {}
    for block in blocks:
        known = set(block.params)
        for step in block.steps:
            inner = step.blocks if isinstance(step, Do) else ()
            own = OWN.get(step.kind, ()) if isinstance(step, Do) else ()
            read = (*step.args, *own, *free(*inner))
            found.update(dict.fromkeys(name for name in read if name not in known))
            known.update(step.targets if isinstance(step, Do) else (step.target,))
        found.update(dict.fromkeys(n for n in block.results if n not in known))
    return tuple(found)


# The ops. Rows are r, matrices m, the vector v, the scalar s; the first letter of a name tells.

KEEP_HALF = np.array([True, False, False, True])
INDEX, LAYERS = "k0", "layers"
OWN = {"switch": (INDEX,), "scan": (LAYERS,)}  # what constructs read besides their arguments


def _select(x: Any, y: Any) -> Any:
    return lax.select(jnp.broadcast_to(KEEP_HALF, x.shape), x, y)


def _inner(x: Any, y: Any) -> Any:
    return jnp.broadcast_to(jnp.einsum("...i,...i->...", x, y)[..., None], x.shape)


def _norm(x: Any) -> Any:
    return lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1.0) + jnp.zeros_like(x)


ROWS: dict[str, tuple[str, Formula]] = {
    "tanh": ("r", jnp.tanh),
    "sin": ("r", jnp.sin),
    "neg": ("r", jnp.negative),
    "relu": ("r", lambda x: jnp.maximum(x, 0.0)),
    "shift": ("r", lambda x: x - jnp.max(x, -1, keepdims=True)),
    "rev": ("r", lambda x: lax.rev(x, (x.ndim - 1,))),
    "masked": ("r", lambda x: (x > 0).astype(x.dtype) * x),
    "times": ("r", lambda x, number: x * number),
    "plus": ("r", lambda x, number: x + number),
    "clip": ("r", lambda x, number: jnp.maximum(x, number)),
    "scaled": ("rs", lambda x, s: x * s),
    "add": ("rr", jnp.add),
    "sub": ("rr", jnp.subtract),
    "mul": ("rr", jnp.multiply),
    "max": ("rr", jnp.maximum),
    "select": ("rr", _select),
    "where": ("rr", lambda x, y: jnp.where(KEEP_HALF, x, y)),
    "bias": ("rv", jnp.add),
    "gain": ("rv", jnp.multiply),
    "dot": ("rm", jnp.matmul),
    "inner": ("rr", _inner),
    "decay": ("r", lambda x: jnp.exp(-jnp.abs(x))),
    "log": ("r", lambda x: jnp.log(1.0 + x * x)),
    "inverse": ("r", lambda x: 1.0 / (1.5 + x * x)),
    "norm": ("r", _norm),
    "softmax": ("r", lambda x: jax.nn.softmax(x)),
    "log_softmax": ("r", lambda x: jax.nn.log_softmax(x)),
    "standardize": ("r", lambda x: jax.nn.standardize(x, epsilon=0.1)),
    "cumsum": ("r", lambda x: jnp.cumsum(x, -1)),
    "upper": ("r", None),  # type: ignore[dict-item]  # markers, see `plain`
    "lower": ("r", None),  # type: ignore[dict-item]
    "explicit": ("r", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
}
MATRICES: dict[str, tuple[str, Formula]] = {
    "turn": ("m", lambda m: m.T),
    "tame": ("m", jnp.tanh),
    "compose": ("mm", jnp.matmul),
}
FORMULAS = {name: formula for name, (_, formula) in {**ROWS, **MATRICES}.items()}
NUMBERS = {"times": (0.5, -0.7978846, 1.7), "plus": (0.3, -1.1, 1e-12), "clip": (-1e30, -2.0)}
POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
}
OFTEN = (*ROWS, *["dot"] * 6, *["bias"] * 2)  # a region is about products
REGIONS = ("off", "bfloat16", "float16", "nested")
CONSTRUCTS = ("jit", "remat", "custom_jvp", "custom_vjp", "scan", "fori", "while", "switch", "vmap")


def apply(name: str, number: float, args: list[Any]) -> Any:
    return FORMULAS[name](*args, number) if name in NUMBERS else FORMULAS[name](*args)


def arguments(program: Program) -> Env:
    rng = np.random.default_rng(program.seed)

    def normal(*shape: int, size: float = 0.5) -> Any:
        return jnp.asarray(size * rng.normal(size=shape), jnp.float32)

    return {
        "r0": normal(3, 4, size=1.0),
        "r1": normal(3, 4, size=1.0),
        "m0": normal(4, 4),
        "m1": normal(4, 4),
        LAYERS: normal(2, 4, 4),
        "v0": normal(4),
        "s0": normal(),
        INDEX: jnp.asarray(rng.integers(0, 3), jnp.int32),
    }


# Read as a plain function


def plain(program: Program, polymp: Any) -> Callable[[Env], list[Any]]:
    """The function as a user writes it, in float32."""
    return lambda env: _run(program.block, env, polymp)


def _run(block: Block, env: Env, polymp: Any) -> list[Any]:
    env = dict(env)
    for step in block.steps:
        if isinstance(step, Op):
            args = [env[a] for a in step.args]
            if step.name in ("upper", "lower"):
                env[step.target] = getattr(polymp, step.name)(args[0])
            else:
                env[step.target] = apply(step.name, step.number, args)
        else:
            env.update(zip(step.targets, _do(step, env, polymp), strict=True))
    return [env[name] for name in block.results]


def _do(step: Do, env: Env, polymp: Any) -> Any:
    args = [env[a] for a in step.args]
    block = step.blocks[0]
    if step.kind == "while":  # no derivative goes backward through it, so none goes in
        env = {**env, **{name: lax.stop_gradient(env[name]) for name in free(block)}}
        args = [lax.stop_gradient(x) for x in args]

    def body(*given: Any) -> list[Any]:
        return _run(block, {**env, **dict(zip(block.params, given, strict=True))}, polymp)

    def closed(*read: Any) -> list[Any]:
        return _run(block, dict(zip(free(block), read, strict=True)), polymp)

    if step.kind in REGIONS:
        if step.kind == "nested":
            return polymp.autocast(body, dtype=step.option)(*args)
        off = step.kind == "off"
        with polymp.autocast(enabled=False) if off else polymp.autocast(dtype=step.kind):
            return body(*args)
    if step.kind == "vmap":
        return jax.vmap(body)(*args)
    if step.kind == "switch":
        branches = [lambda b=b: tuple(_run(b, env, polymp)) for b in step.blocks]
        return lax.switch(env[INDEX], branches)
    if step.kind in LOOPS:
        return LOOPS[step.kind](step, args, env, body)
    return called(step, closed)(*[env[name] for name in free(block)])


def halved_jvp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a rule that gives half of its derivative."""
    ruled = jax.custom_jvp(function)

    @ruled.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        outs, moved = jax.jvp(function, primals, tangents)
        return outs, [0.5 * t for t in moved]

    return ruled


def halved_vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a rule that gives half of its gradient."""
    ruled = jax.custom_vjp(function)

    def forward(*args: Any) -> Any:
        return function(*args), args

    def backward(args: Any, cotangents: Any) -> Any:
        grads = jax.vjp(function, *args)[1](cotangents)
        return tuple(g if g.dtype == jax.dtypes.float0 else 0.5 * g for g in grads)

    ruled.defvjp(forward, backward)
    return ruled


def called(step: Do, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, jitted, to compute again, or with a rule of its own."""
    if step.kind in WITH_RULES:
        return WITH_RULES[step.kind](function)
    if step.kind == "jit":
        return jax.jit(function)
    return jax.checkpoint(function, policy=POLICIES[step.option])


def _scan(step: Do, args: list[Any], env: Env, body: Callable[..., Any]) -> list[Any]:
    def one(carry: Any, layer: Any) -> Any:
        *after, made = body(*carry, layer)
        return tuple(after), made

    last, made = lax.scan(one, tuple(args), env[LAYERS], reverse=step.option == "reverse")
    return [*last, lax.index_in_dim(made, 1, keepdims=False)]


def _fori(step: Do, args: list[Any], env: Env, body: Callable[..., Any]) -> Any:
    return lax.fori_loop(0, 2, lambda _, carry: tuple(body(*carry)), tuple(args))


def _while(step: Do, args: list[Any], env: Env, body: Callable[..., Any]) -> Any:
    def one(state: Any) -> Any:
        return state[0] + 1, tuple(body(*state[1]))

    return lax.while_loop(lambda state: state[0] < 2, one, (0, tuple(args)))[1]


WITH_RULES = {"custom_jvp": halved_jvp, "custom_vjp": halved_vjp}
LOOPS = {"scan": _scan, "fori": _fori, "while": _while}


# Drawn


class _Drawing:
    """One drawing: what Hypothesis decides, and the names that are taken."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.taken: Counter[str] = Counter(r=2, m=2)

    def name(self, kind: str) -> str:
        self.taken[kind] += 1
        return f"{kind}{self.taken[kind] - 1}"

    def one(self, names: Any) -> Any:
        return self.draw(st.sampled_from(list(names)))

    def of(self, kind: str, scope: list[str]) -> str:
        """A name of a kind; the latest ones first, so that steps build on one another."""
        names = [name for name in scope if name[0] == kind and name != LAYERS][::-1]
        return self.one(names[:4] if self.draw(st.booleans()) else names)

    def op(self, scope: list[str]) -> Op:
        rare = self.draw(st.integers(0, 9)) == 9
        name = self.one(MATRICES if rare else OFTEN)
        kinds = MATRICES[name][0] if rare else ROWS[name][0]
        args = tuple(self.of(kind, scope) for kind in kinds)
        number = self.one(NUMBERS[name]) if name in NUMBERS else 0.0
        return Op(self.name("m" if rare else "r"), name, args, number)

    def block(self, scope: list[str], params: tuple[str, ...], count: int, **how: Any) -> Block:
        """Some steps; `count` results are rows that they have made."""
        scope = [*scope, *params]
        steps: list[Op | Do] = []
        size = self.draw(st.integers(1, 3))
        inner = how["depth"] > 0 and self.draw(st.booleans())
        for at in range(size):
            step = self.do(scope, **how) if inner and at == size // 2 else self.op(scope)
            scope.extend(step.targets if isinstance(step, Do) else (step.target,))
            steps.append(step)
        made = [n for s in steps for n in (s.targets if isinstance(s, Do) else (s.target,))]
        made = [name for name in made if name[0] == "r"]
        if not made:
            steps.append(Op(self.name("r"), "tanh", (self.of("r", scope),)))
            made = [steps[-1].target]  # type: ignore[union-attr]
        return Block(params, tuple(steps), tuple(made[-1 - i % len(made)] for i in range(count)))

    def do(self, scope: list[str], depth: int, flat: bool, kind: str | None = None) -> Do:
        """A construct. Where rows are `flat` vectors, there is nothing to map over."""
        rest = CONSTRUCTS[:-1] if flat else CONSTRUCTS
        kind = kind or self.one(rest + REGIONS)
        how = {"depth": depth - 1, "flat": flat}
        count, option, args = self.draw(st.integers(1, 2)), None, ()
        if kind in LOOPS or kind == "vmap":
            args = tuple(self.of("r", scope) for _ in range(count))
        params = tuple(self.name("r") for _ in args)
        results = count
        if kind == "vmap":  # rows of the outside do not fit the rows of the inside
            scope, how["flat"] = [n for n in scope if n[0] != "r"], True
        if kind == "scan":
            option = self.one(("forward", "reverse"))
            params, results = (*params, self.name("m")), count + 1
        if kind == "remat":
            option = self.one(POLICIES)
        if kind == "nested":
            option = self.one(("bfloat16", "float16"))
        number = 2 + self.draw(st.booleans()) if kind == "switch" else 1
        blocks = tuple(self.block(scope, params, results, **how) for _ in range(number))
        return Do(tuple(self.name("r") for _ in range(results)), kind, args, blocks, option)


@st.composite
def programs(draw: Any, first: str | None = None) -> Program:
    """Programs with several constructs each, one inside another at times; `first` is among them."""
    drawing = _Drawing(draw)
    scope = ["r0", "r1", "m0", "m1", "v0", "s0"]
    steps: list[Op | Do] = []
    chosen = draw(st.integers(0, 2**32))
    assume(chosen)  # Hypothesis begins with the simplest of all draws, whatever its seed
    shuffled = Random(chosen)  # it would repeat itself
    kinds = shuffled.sample(CONSTRUCTS + REGIONS, draw(st.integers(2, 3)))
    for kind in (*([first] if first else []), *kinds):
        for _ in range(draw(st.integers(0, 1))):
            steps.append(drawing.op(scope))
            scope.append(steps[-1].target)  # type: ignore[union-attr]
        steps.append(drawing.do(scope, depth=1, flat=False, kind=kind))
        scope.extend(steps[-1].targets)  # type: ignore[union-attr]
    steps.append(drawing.op(scope))
    made = [n for s in steps for n in (s.targets if isinstance(s, Do) else (s.target,))]
    made = [name for name in made if name[0] == "r"]
    low = draw(st.sampled_from(("bfloat16", "float16")))
    seed = draw(st.integers(0, 2**16))
    return Program(Block((), tuple(steps), tuple(made[-3:])), low, seed)


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
    """A block whose dtypes are decided."""

    params: tuple[str, ...]  # its parameters
    steps: list[Step]  # in order, those of vmaps and regions among the others
    results: tuple[str, ...]  # names of the results
    kinds: Kinds  # of all values
    wanted: tuple[str, ...] | None = None  # dtypes that the results take; None leaves them

    def outs(self) -> list[Kind]:
        kinds = [self.kinds[name] for name in self.results]
        if self.wanted is None:
            return kinds
        return [Kind(w) for w in self.wanted]


class _Planner:
    """Decides the dtypes of a program by the documented rules."""

    def __init__(self) -> None:
        self.alias: dict[str, str] = {}  # names of what vmaps and regions take and hand on

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
        self.pull(steps, zip(results, wanted or [None] * len(results), strict=True), kinds)
        return Planned(block.params, steps, results, kinds, wanted)

    def op(self, step: Op, region: Region, kinds: Kinds) -> Step:
        args = [kinds[self.name(a)] for a in step.args]
        run = self.run(step, region, args)
        kinds[step.target] = self.result(step, region, run, args)
        return Step(step, region, run)

    def do(self, step: Do, region: Region, kinds: Kinds) -> Step:
        inside = dict(kinds)
        if step.kind in LOOPS:
            return self.loop(step, region, inside, kinds)
        blocks = tuple(self.plan(block, region, inside) for block in step.blocks)
        outs = blocks[0].outs()
        if step.kind == "switch":
            dtypes = tuple(
                self.widest([k.dtype for k in some])
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
            wider = self.joined(carry, planned.outs())
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


def by_hand(program: Program) -> Callable[[Env], list[Any]]:
    """The function with casts. With `noise` among the arguments, under its name, a noisy one."""
    planner = _Planner()
    kinds = {name: Kind("float32", "given") for name in ("r0", "r1", "m0", "m1", LAYERS, "v0")}
    kinds["s0"], kinds[INDEX] = Kind("float32", "number"), Kind("int32")
    planned = planner.plan(program.block, program.low, kinds)
    return lambda env: _Casts(planner, program.low).block(planned, {NOISE: None, **env})


class _Casts:
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

        return called(do, function)(*[env[n] for n in reads])

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
