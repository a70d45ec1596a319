"""Parameters stored in the dtypes that a program reads them in, for serving.

    serve, served = freeze(autocast(apply), params, tokens)
    logits = jax.jit(serve)(served, tokens)       # the bits of autocast(apply)(params, tokens)

A float32 parameter that the planned program reads with casts to the region's dtype, and in no other
way, is stored in that dtype: half the memory, and no cast at each call. Which those are is read
from the plan for some arguments, and checked again for every new trace.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import Rest, apart, is_typed
from polymp.backends.jax.autocast import known_functions, regions
from polymp.backends.jax.autocast.api import (
    AutocastFunction,
    PlannedCall,
    trace,
    transformed,
)
from polymp.backends.jax.autocast.frame import (
    Cast,
    Inside,
    Kind,
    Operand,
    Plan,
    Plans,
    Step,
    ValueFacts,
    declared,
)
from polymp.backends.jax.autocast.function_calls import FUNCTION_CALL, FunctionCall
from polymp.backends.jax.compat import Atom, Equation
from polymp.backends.jax.jaxprs import RULED, Inner, inside, where_written
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.modules.scoped import naming
from polymp.errors import PolicyError
from polymp.rules.policy import Region

T = TypeVar("T")


def freeze(
    fn: Callable[..., object], params: T, *args: object, **kwargs: object
) -> tuple["Frozen", T]:
    """Store the parameters of an autocast function for serving, in the dtypes that it reads.

        float32, every read a cast to the region's dtype    stored in that dtype
        anything else                                       as it is

    Reads are those of the planned program, also in the bodies of jit, scan, while, cond, remat and
    shard_map, through reshapes, slices, gathers and other moves; a function with a derivative rule
    of its own reads its arguments in float32. Results, and gradients with respect to other
    arguments, are those of `fn` on the float32 parameters: the same bits, the same dtypes. A
    gradient with respect to a stored parameter comes in the dtype that it is stored in.

    Args:
        fn: what `autocast(...)` returned; or what `freeze` returned, to serve other arguments as
            well: stored is then what both allow. Its first argument are the parameters.
        params: a pytree of arrays; or of `jax.ShapeDtypeStruct`, for an answer without arrays. It
            is left as it is. Arrays over several devices keep their sharding. Of a flax nnx module,
            its state: `graph, params = nnx.split(model)`.
        args: the other arguments, or their shapes, as they will be; nothing is run.
        kwargs: the same, by name.

    Returns:
        A function of the stored parameters and the other arguments, with a record of what is
        stored; and those parameters, in the structure of `params`.

    Raises:
        TypeError: `fn` is no autocast function, or holds its parameters itself; or an argument is a
            flax nnx module.
        RuntimeError: called inside an autocast function.
    """
    if regions.AMBIENT.value is not None:
        raise RuntimeError(
            "freeze(fn, params, ...) was called inside an autocast function. Call it outside, "
            "before serving."
        )
    before = fn if isinstance(fn, Frozen) else None
    autocast = before.function if before else autocast_function(fn)
    _refuse_modules((params, args, kwargs))
    leaves, tree = jax.tree.flatten(params)
    paths = _paths(params)
    typed = [i for i, leaf in enumerate(leaves) if is_typed(leaf)]
    for i in typed:
        low = before.stored.get(paths[i]) if before else None
        if low and _dtype_of(leaves[i]) == low:
            raise TypeError(
                f"freeze(serve, params, ...): {paths[i]} is {low}, as it was stored "
                "before. Pass the float32 parameters, from which both are made."
            )
    arrays, rest = apart(((params, *args), kwargs), is_typed)
    places = {i: place for place, i in enumerate(typed)}  # among all arrays: the first of them
    others = before.kept if before else {}
    why = {i: _reason(leaves[i]) or others.get(paths[i]) for i in typed}
    with naming(regions.is_inside):
        traced = trace(autocast.fn, autocast.region, arrays, rest, {})
    candidates = [places[i] for i, text in why.items() if text is None]
    found, wide = _decided(traced, candidates, autocast.region.dtype)

    stored = {i: autocast.region.dtype for i in typed if places[i] in found}
    cast: dict[int, object] = {}  # tied parameters stay one array
    served = list(leaves)
    for i, low in stored.items():
        if id(leaves[i]) not in cast:
            cast[id(leaves[i])] = _stored_leaf(leaves[i], low)
        served[i] = cast[id(leaves[i])]
    each = ({id(xs[i]): xs[i] for i in typed}.values() for xs in (leaves, served))
    size = [sum(int(x.size) * x.dtype.itemsize for x in arrays) for arrays in each]
    frozen = Frozen(
        autocast,
        {paths[i]: low for i, low in stored.items()},
        {paths[i]: why[i] or wide[places[i]].why for i in typed if i not in stored},
        size[0],
        size[1],
        tree,
        paths,
        {i: _dtype_of(served[i]) for i in typed},
    )
    return frozen, jax.tree.unflatten(tree, served)


@dataclass(eq=False, repr=False)
class Frozen:
    """A function for serving: of parameters as they are stored, and other arguments.

    Attributes:
        function: the autocast function.
        stored: by the path of a parameter, the dtype that it is stored in.
        kept: by the path of each other array among the parameters, why it is as it was.
        bytes_before: of the parameters as they came.
        bytes_after: of the parameters as they are stored.
    """

    function: AutocastFunction
    stored: Mapping[str, str]
    kept: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    _tree: jax.tree_util.PyTreeDef  # of the parameters
    _paths: Sequence[str]  # of its leaves
    _dtypes: Mapping[int, str]  # of the arrays, by numbers of leaves

    def __post_init__(self) -> None:
        own = dict(vars(self))
        functools.update_wrapper(self, self.function.call)
        vars(self).update(own)  # the function may have attributes of these names
        self._call = transformed(self.function.fn, self.function.region, self._traced)

    def __call__(self, served: object, /, *args: object, **kwargs: object) -> Any:
        """Call the autocast function with the stored parameters.

        Args:
            served: the parameters that `freeze` returned, or others of their structure and dtypes.
            args: the other arguments.
            kwargs: the same, by name.

        Returns:
            What the autocast function returns for the float32 parameters, bit for bit.

        Raises:
            TypeError: `served` has another structure or other dtypes, or an argument is a flax nnx
                module.
            PolicyError: with these arguments, the program reads a parameter in float32 that is
                stored in a low dtype.
            RuntimeError: called inside an autocast function.
        """
        if regions.AMBIENT.value is not None:
            raise RuntimeError(
                f"{self!r} was called inside an autocast function, but its dtypes are settled. "
                "Call it outside, or freeze the autocast function around it instead."
            )
        _refuse_modules((served, args, kwargs))
        self._check(served)
        return self._call(served, *args, **kwargs)

    def _check(self, served: object) -> None:
        """Refuse parameters that are not of the structure and the dtypes of the frozen ones."""
        leaves, tree = jax.tree.flatten(served)
        paths = self._paths
        if tree != self._tree:
            ours, theirs = set(paths), set(_paths(served))
            raise TypeError(
                "The first argument has another structure than the parameters that freeze "
                f"returned. {_some('Missing', ours - theirs)}{_some('New', theirs - ours)}"
                f"Frozen: {self._tree}. Given: {tree}."
            )
        have = {i: _dtype_of(leaves[i]) for i in self._dtypes}
        other = [i for i, dtype in self._dtypes.items() if have[i] != dtype]
        if other:
            i = other[0]
            raise TypeError(
                f"{paths[i]} is {have[i]}, but was frozen as "
                f"{self._dtypes[i]}; {len(other)} of {len(self._dtypes)} arrays differ. Pass the "
                "parameters that freeze returned."
            )

    def __repr__(self) -> str:
        name = getattr(self.function.fn, "__name__", repr(self.function.fn))
        dtypes = ", ".join(sorted(set(self.stored.values()))) or "a low dtype"
        return (
            f"<frozen {name}: {len(self.stored)} of {len(self.stored) + len(self.kept)} arrays in "
            f"{dtypes}, {self.bytes_before:,} bytes before, {self.bytes_after:,} after>"
        )

    def _traced(
        self,
        fn: Callable[..., object],
        region: Region,
        arrays: Sequence[object],
        rest: Rest[Any],
        kept: Plans,
    ) -> PlannedCall:
        """The function traced as if its parameters were float32, and planned for what they are."""
        paths = (self._paths[i] for i in self._dtypes)
        low = {place: path for place, path in enumerate(paths) if path in self.stored}
        wide = np.dtype("float32")
        avals = [jax.typeof(x).update(dtype=wide) if i in low else x for i, x in enumerate(arrays)]
        traced = trace(fn, region, avals, rest, kept)
        lowered = plan_low(traced.plan, region.dtype, low)
        for i, read in lowered.wide.items():
            raise PolicyError(
                f"{low[i]} is stored in {region.dtype}, but with these arguments {read.why}. "
                "Freeze with these arguments as well: polymp.jax.freeze(serve, params, ...), where "
                "serve is this function and params are the float32 parameters, keeps it in float32."
            )
        return traced._replace(plan=lowered.plan)


def autocast_function(
    fn: object,
    called: str = "freeze({}, params, ...)",
    then: str = ", and put jax.jit and other transformations around what freeze returns",
) -> AutocastFunction:
    """The autocast function that a user gave, in a call of this form, or an error that shows it."""
    autocast = getattr(fn, "polymp", None)
    if not isinstance(autocast, AutocastFunction) or autocast.call is not fn:
        raise TypeError(
            f"{called.format('fn')} needs a function that polymp.jax.autocast returned, got "
            f"{_short(fn)}. Write {called.format('autocast(fn)')}{then}."
        )
    if nnx.owned(autocast.fn, ())[1]:
        raise TypeError(
            f"{called.format('fn')} needs the parameters as first argument, but "
            f"{_short(autocast.fn)} holds them itself. {_WITHOUT_MODULES}"
        )
    return autocast


_WITHOUT_MODULES = (
    "Write graph, params = nnx.split(model), and as its function autocast(lambda params, *args: "
    "nnx.merge(graph, params)(*args))."
)


def _refuse_modules(args: object) -> None:
    if nnx.among(args):
        raise TypeError(f"freeze takes no flax nnx modules as arguments. {_WITHOUT_MODULES}")


def _paths(tree: object) -> list[str]:
    """The paths of a tree's leaves."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


class Wide(NamedTuple):
    """Why an input cannot come in a low dtype."""

    dtype: str | None  # in which it is read; None for no read
    why: str  # who reads it, as a clause


def _decided(
    traced: PlannedCall, candidates: Iterable[int], dtype: str
) -> tuple[set[int], dict[int, Wide]]:
    """The places of arrays that can be stored in a dtype, and why the others cannot."""
    tried, wide = set(candidates), dict[int, Wide]()
    while tried:
        lowered = plan_low(traced.plan, dtype, tried)
        unread = dict.fromkeys(tried - lowered.read, Wide(None, "nothing reads it"))
        if not (new := lowered.wide or unread):
            break
        wide.update(new)
        tried -= new.keys()
    return tried, wide


def _short(x: object) -> str:
    """A name of an object for a message: never all of its arrays."""
    name = getattr(x, "__qualname__", None)
    return name if isinstance(name, str) else f"an object of {type(x).__name__}"


def _reason(leaf: jax.Array) -> str | None:
    """Why an array cannot be stored low, whatever reads it."""
    if leaf.dtype != np.float32:
        return f"it is {leaf.dtype.name}, not float32"
    if getattr(leaf, "weak_type", False):
        return "it is a number without a dtype of its own"
    return None


def _stored_leaf(x: jax.Array, dtype: str) -> object:
    """The array, or what stands for one, in a dtype, on the same devices."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.dtype(dtype), sharding=x.sharding)
    cast = functools.partial(jax.lax.convert_element_type, new_dtype=np.dtype(dtype))
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return cast(x)
    return jax.jit(cast, out_shardings=x.sharding)(x)


def _some(word: str, paths: set[str]) -> str:
    shown = ", ".join(sorted(paths)[:4])
    return f"{word}: {shown}. " if shown else ""


def _dtype_of(leaf: object) -> str:
    """The name of an array's dtype as jax has it, without float64 say; of others, their type's."""
    if not is_typed(leaf):
        return type(leaf).__name__
    numpy = isinstance(leaf, (np.ndarray, np.generic))
    return str((jax.dtypes.canonicalize_dtype(leaf.dtype) if numpy else leaf.dtype).name)


# `plan_low` changes a plan to one for inputs that come in a low dtype already: casts fall away,
# nothing else changes.
#
#     planned     w float32 -> reshape -> cast to bfloat16 -> product
#     stored      w bfloat16 -> reshape -> product
#
# A low value goes where its float32 original went, as long as numbers are only moved, with which
# rounding commutes, until it is read with a cast to its own dtype, which is then nothing to do.
# Anything else reads the value in float32, and is reported with the row that makes it do so.


# The inputs of the program that a low value is made of, by their numbers; none for other values.
Low = frozenset[int]
NONE: Low = frozenset()


def plan_low(
    plan: Plan, dtype: str, inputs: Iterable[int], allowed: Iterable[int] = ()
) -> "LowPlan":
    """A planned program, with everything inside it, where these inputs come in a low dtype."""
    key = plan_low, dtype, frozenset(inputs), frozenset(allowed)
    if key not in plan.cache:
        plan.cache[key] = LowPlan(plan, *key[1:])
    lowered: LowPlan = plan.cache[key]
    return lowered


# These move numbers and change none of them, in any dtype.
_MOVES = known_functions.LAYOUT | {"concatenate", "gather", "split", "stack", "unstack"}

# These too, each operand to the result in its place.
_EACH = frozenset(
    """
    all_gather all_gather_invariant all_to_all device_put optimization_barrier pbroadcast pcast
    ppermute pvary
    """.split()
)


class LowPlan:
    """A plan with low inputs."""

    def __init__(self, plan: Plan, dtype: str, inputs: Low, allowed: Low) -> None:
        self.dtype = dtype
        places = enumerate(compat.binders(plan.jaxpr)[1])
        self.env: dict[Atom, Low] = {v: frozenset({i}) for i, v in places if i in inputs}
        self.wide: dict[int, Wide] = {}  # by input, the first read that is not in the low dtype
        self.read: set[int] = set()  # inputs that are read in it
        steps = [self.step(step) for step in plan.steps]
        self.outs = [self.held(operand) for operand in plan.results]
        for i, low in enumerate(self.outs):
            if i not in allowed:
                self.reads(low, "float32", "it is handed on in float32, as a result")
                self.outs[i] = NONE
        known = self.lowered(plan.known, [i in inputs for i in range(len(plan.known))])
        outs = self.lowered(plan.outs, self.outs)
        # Sound if nothing is read wide.
        self.plan = replace(plan, known=known, steps=steps, outs=outs, as_written=False, cache={})

    def lowered(self, facts: Sequence[ValueFacts], low: Iterable[object]) -> tuple[ValueFacts, ...]:
        pairs = zip(facts, low, strict=True)
        return tuple(k._replace(dtype=self.dtype) if is_low else k for k, is_low in pairs)

    def held(self, operand: Operand, step: Step | None = None) -> Low:
        """The low value that an operand hands on; one that is cast is read."""
        atom = operand.atom if type(operand) is Cast else operand
        low = NONE if type(atom) is Literal else self.env.get(atom, NONE)
        if type(operand) is not Cast or operand.dtype is None:
            return low
        self.reads(low, operand.dtype, step or f"it is read in {operand.dtype}")
        return NONE

    def reads(self, low: Low, dtype: str | None, who: Step | str) -> None:
        """Note who reads a value in a dtype; of the reads in another than its own, the first."""
        if dtype == self.dtype:
            self.read |= low
        elif new := low - self.wide.keys():
            why = who if isinstance(who, str) else self.reader(who, dtype)
            self.wide.update(dict.fromkeys(new, Wide(dtype, why)))

    def step(self, step: Step) -> Step:
        lows = [self.held(operand, step) for operand in step.operands]
        if not any(lows):
            return step
        made, outs = self.through(step, lows)
        self.env.update((v, low) for v, low in zip(step.eqn.outvars, outs, strict=True) if low)
        return made

    def through(self, step: Step, lows: list[Low]) -> tuple[Step, list[Low]]:
        """The step for low operands, and which of its results are low."""
        eqn, name = step.eqn, step.eqn.primitive.name
        if step.inside is not None:
            return self.inside(step, step.inside, lows)
        bound = step.kind is Kind.BIND and step.returns is None
        if step.kind is Kind.CAST or (bound and name in _EACH):
            return self.moved(step, lows)
        floats = [low for low, atom in zip(lows, eqn.invars, strict=True) if declared(atom)]
        if bound and name in _MOVES and all(floats) and _fills_alike(eqn, self.dtype):
            return self.moved(step, [NONE.union(*floats)] * len(eqn.outvars))
        as_written = step.kind is Kind.BIND and name == "convert_element_type"
        for low in lows:
            dtype: str | None = "float32"
            if step.spec is not None and step.in_8_bits is None:
                dtype = step.spec.run
            elif as_written and eqn.params["new_dtype"] == self.dtype:
                dtype = self.dtype
            self.reads(low, dtype, step)
        return step, [NONE] * len(eqn.outvars)

    def moved(self, step: Step, outs: list[Low]) -> tuple[Step, list[Low]]:
        writes = tuple(self.dtype if low else f for low, f in zip(outs, step.writes, strict=True))
        return step._replace(writes=writes), outs

    def inside(self, step: Step, whole: Inside, lows: list[Low]) -> tuple[Step, list[Low]]:
        """The same of a step with programs inside; what loops carry or branches give is wide."""
        eqn, name = step.eqn, step.eqn.primitive.name
        programs, where = inside(eqn), where_written(eqn)
        if isinstance(eqn, FunctionCall):
            programs = [Inner(eqn, range(len(lows)))]
        if name in RULED:
            why = f"a function with a derivative rule takes it in float32 ({where})"
            for low in lows:
                self.reads(low, "float32", why)
            return step, [NONE] * len(eqn.outvars)
        for at in dict.fromkeys(at for program in programs for at in program.carried):
            self.reads(lows[at], "float32", f"a {name} carries it in float32 ({where})")
            lows[at] = NONE
        passed = () if name == "cond" else range(len(whole.plans[0].outs))
        allowed = [i for i in passed if i >= programs[0].carries]
        plans, results = [], []
        for program, plan in zip(programs, whole.plans, strict=True):
            mine = program.of(lows)
            taken = [i for i, low in enumerate(mine) if low]
            lowered = plan_low(plan, self.dtype, taken, allowed if program.gives else ())
            for i, wide in lowered.wide.items():  # in a function call it is the op that decides
                self.reads(mine[i], wide.dtype, step if name == FUNCTION_CALL else wide.why)
            for i in lowered.read:
                self.read |= mine[i]
            plans.append(lowered.plan)
            if program.gives:
                results.append([NONE.union(*(mine[i] for i in out)) for out in lowered.outs])
        outs = [NONE.union(*several) for several in zip(*results, strict=True)]
        moved, made = self.moved(step, outs)
        for i, dtype in enumerate(step.returns or ()):
            if dtype is not None:  # the step casts what comes of the program inside
                self.reads(made[i], dtype, f"it is returned in {dtype}")
                made[i] = NONE
        return moved._replace(inside=whole._replace(plans=plans)), made

    def reader(self, step: Step, dtype: str | None) -> str:
        """Who reads, in which dtype, and where it is written; as a clause."""
        eqn, where = step.eqn, where_written(step.eqn)
        if eqn.primitive.name == "convert_element_type":
            return f"a cast to {eqn.params['new_dtype'].name} reads it ({where})"
        name = eqn.op if isinstance(eqn, FunctionCall) else eqn.primitive.name
        does = f"reads it in {dtype}" if step.in_8_bits is None else "quantises it to 8 bits"
        return f"{name!r} {does} ({where})"


def _fills_alike(eqn: Equation, dtype: str) -> bool:
    """True unless a number fills up what is missing that the dtype would round."""
    fill = eqn.params.get("fill_value")
    if fill is None:
        return True
    number = np.float32(fill)
    return bool(np.isnan(number) or number.astype(np.dtype(dtype)).astype(np.float32) == number)
