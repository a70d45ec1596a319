"""Random policies and random programs, and what a program must do under a policy.

    program(seed)          calls of ops inside nested modules, the same for both frameworks
    policy(seed)           rows by op, class, dtype of the region, and scope
    judged(...)            the mistakes of a run, call by call

A run returns every value that it made. Each call is judged by itself: from the values that the run
made before it, cast by hand as `Policy.decide` says, with no autocast in sight. A value that a call
gets wrong is not held against those that follow. Nothing here knows a framework: it comes with its
verbs, as a `Framework`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import polymp
from polymp import Policy
from polymp.dtypes import widest
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.rules.policy import Decision, Region
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary

MINE = "random_policies_mine"  # an op of the user's own, registered in both frameworks
UNARY = ("exp", "tanh", "sigmoid", "relu", "neg", "sin", "softmax", "cumsum")
BINARY = ("add", "mul", "maximum", "atan2", MINE)
OPS = (*UNARY, *BINARY, "linear")
# Functions in JAX: without a row, their parts would follow rows of their own. So would linear's in
# torch, where it is made of matmul.
FUNCTIONS = ("softmax", "relu", MINE)
X, W = 0, 1  # the first two values: the argument and the weight, as the user gave them
SIZE = 8  # all values have SIZE rows of SIZE numbers


class Call(NamedTuple):
    """An op on values that are there already; its result becomes the next value."""

    op: str
    args: tuple[int, ...]


class Module(NamedTuple):
    """A named module and what runs in it: calls, and modules inside."""

    name: str
    body: tuple[Call | Module, ...]


def program(seed: int) -> Module:
    """Four modules, "", "a", "b" and "b.c", in each of them a few calls."""
    rng, count = random.Random(f"program {seed}"), [2]

    def calls(least: int) -> Iterator[Call]:
        for _ in range(rng.randint(least, least + 1)):
            made = range(2, count[0])
            op = rng.choice(OPS) if len(made) > 1 else rng.choice(UNARY)
            if op in BINARY:  # of the user's own arguments, JAX would take one for a bias
                args = rng.choice(made), rng.choice(made)
            else:
                args = (rng.choice((*made, X)), *([W] if op == "linear" else []))
            yield Call(op, args)
            count[0] += 1

    head = tuple(calls(2))
    a = Module("a", tuple(calls(1)))
    before = tuple(calls(1))
    c = Module("c", tuple(calls(1)))
    return Module("", (*head, a, Module("b", (*before, c)), *calls(1)))


def calls(module: Module, path: str = "") -> Iterator[tuple[str, Call]]:
    """The calls of a program in order, each with the path of its module."""
    for item in module.body:
        if isinstance(item, Call):
            yield path, item
        else:
            yield from calls(item, f"{path}.{item.name}".lstrip("."))


PATTERNS = ("a", "b", "b.c", "*.c", "*", "b.*", "?", "[ab]")
RULES = ("lower", "lower", "fp32", "fp32", "fp32_keep", "widest", "keep")
CLASSES = ("matmul", "power", "elementwise", "activation", "softmax", "reduction", "comparison")


def policy(seed: int) -> Policy:
    """A policy; its own rows on top of a shipped one's, or of one row each for what needs one."""
    rng = random.Random(f"policy {seed}")
    names = [*OPS, *OPS, *(f"class:{kind}" for kind in (*CLASSES, "custom"))]

    def rule(of: str) -> str:
        if rng.random() < 0.03:
            return "forbid"
        if of not in (*FUNCTIONS, "linear") and ":" not in of and rng.random() < 0.08:
            return "parts"
        return rng.choice(RULES)

    def rows(least: int, most: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for of in rng.sample(names, rng.randint(least, most)):
            kind = rng.random()
            if kind < 0.6:
                found[of] = rule(of)
            elif kind < 0.8:
                found[of] = {low: rule(of) for low in LOW}
            else:
                found[of] = {rng.choice(LOW): rule(of)}
        return found

    data: dict[str, Any] = {"name": "random", "rules": rows(2, 7)}
    base = rng.choice(("", "amp", "lean", "matmul", "torch-cuda"))
    if base:
        data["extends"] = base
    rules = data["rules"]
    for op, least in {"softmax": "fp32", "relu": "keep", "linear": "lower"}.items():
        if isinstance(own := rules.get(op, {}), dict):
            rules[op] = dict.fromkeys(LOW, least) | own
    if rng.random() < 0.6:
        patterns = rng.sample(PATTERNS, rng.randint(1, 3))
        data["scopes"] = {pattern: rows(1, 3) for pattern in patterns}
    return polymp.policy(data)


# --- what must happen -----------------------------------------------------------------------------


class Framework(NamedTuple):
    ops: Mapping[str, Callable[..., Any]]  # by name, functions of arrays
    dtype: Callable[[Any], str]  # array -> "float32",
    cast: Callable[[Any, str], Any]  # (array, dtype) -> array
    # True if an op without a rule takes arrays in several dtypes as they are; else they are
    # brought to the widest first
    mixed: bool
    # (array, array, op) -> True if the values are as equal as they have to be
    same: Callable[[Any, Any, str], bool]


# Arrays of which only the dtypes are known: their names.
NAMES = Framework(
    dict.fromkeys(OPS, lambda *dtypes: widest(dtypes)),
    dtype=lambda name: name,
    cast=lambda name, dtype: dtype,
    mixed=False,
    same=lambda one, other, op: True,
)

# (policy, op, dtypes, region) -> what is decided.
Decide = Callable[[Policy, str, Sequence[str], Region], Decision]


def decide(policy: Policy, op: str, dtypes: Sequence[str], region: Region) -> Decision:
    return policy.decide(op, dtypes, region)


class Judged(NamedTuple):
    mistakes: list[str]  # one sentence for each call that did something else
    # op and decision of each call that a row decides for, in order
    decisions: list[tuple[str, Decision]]
    ends: str  # "" if the run comes to its end; else the rule or the error that stops it


def judged(
    program: Module,
    policy: Policy,
    low: str,
    values: Sequence[Any],
    fw: Framework,
    decide: Decide = decide,
) -> Judged:
    """Judge a run, call by call."""
    mistakes, decisions, made = [], [], list(values)
    for at, (path, call) in enumerate(calls(program), start=2):
        region = Region("any", "cpu", True, low, True, policy, path)
        args = [made[i] for i in call.args]
        decided = decide(policy, call.op, [fw.dtype(x) for x in args], region)
        if decided.rule is not Rule.PARTS:
            decisions.append((call.op, decided))
        if decided.rule is Rule.FORBID:
            return Judged(mistakes, decisions, "forbid")
        run = decided.run or ("" if fw.mixed else widest(fw.dtype(x) for x in args))
        if run:
            args = [fw.cast(x, run) for x in args]
        try:
            wanted = fw.ops[call.op](*args)
        except RuntimeError as error:  # torch multiplies no matrices of different dtypes
            return Judged(mistakes, decisions, str(error))
        if decided.out:
            wanted = fw.cast(wanted, decided.out)
        if at >= len(made):
            made.append(wanted)
        elif fw.dtype(made[at]) != fw.dtype(wanted):
            mistakes.append(f"{call} at {path!r}: {fw.dtype(made[at])}, not {fw.dtype(wanted)}")
        elif not fw.same(made[at], wanted, call.op):
            mistakes.append(f"{call} at {path!r}: other numbers than {decided} gives")
    return Judged(mistakes, decisions, "")


def contradicts(policy: Policy, program: Module) -> bool:
    """True if two of the policy's scopes rule one op of one module, and neither says more."""
    try:
        for path in {path for path, _ in calls(program)} | {""}:
            policy.at(path)
    except PolicyError:
        return True
    return False


def mistakes(
    seed: int,
    policy: Policy,
    low: str,
    found: Any,
    verbs: Framework,
    arguments: Callable[[int], list[Any]],
    decide: Callable[..., Decision] = decide,
) -> list[str]:
    """The mistakes of a run of a program; `found` are its values, or the error that ended it."""
    it = program(seed)
    if contradicts(policy, it):
        refused = isinstance(found, PolicyError)
        return [] if refused else [f"{seed}: a contradiction was not refused"]
    is_error = isinstance(found, Exception)
    ran = judged(it, policy, low, arguments(seed) if is_error else found, verbs, decide)
    said = [f"{seed} ({low}): {text}" for text in ran.mistakes]
    if ran.ends == "forbid" and not isinstance(found, ForbiddenOpError):
        said.append(f"{seed} ({low}): a forbidden op ran")
    elif ran.ends not in ("", "forbid") and type(found) is not RuntimeError:
        said.append(f"{seed} ({low}): no error, but {ran.ends}")
    elif not ran.ends and is_error:
        said.append(f"{seed} ({low}): {type(found).__name__}: {found}")
    return said


def no_scopes(policy: Policy, op: str, dtypes: Sequence[str], region: Region) -> Decision:
    """Decide without the rows of scopes: a planted fault."""
    outside = Region(region.backend, region.device, region.enabled, region.dtype, region.cache,
                     region.policy)  # fmt: skip
    return policy.decide(op, dtypes, outside)


WRONG: dict[str, Decide] = {"no scopes": no_scopes}


@contextmanager
def vocabulary_put_back() -> Iterator[None]:
    """Remove the ops that a test registers, so that later tests do not see them.

    The count of registered ops stays: caches go by it.
    """
    words = vocabulary()
    parts: list[Any] = [words.ops, words.kinds, *words._names.values()]
    kept = [dict(part) for part in parts]
    in_jax = sys.modules.get("polymp.backends.jax.autocast.known_functions")
    functions = dict(in_jax.FUNCTIONS.ops) if in_jax is not None else {}
    try:
        yield
    finally:
        for now, before in zip(parts, kept, strict=True):
            now.clear()
            now.update(before)
        in_jax = sys.modules.get("polymp.backends.jax.autocast.known_functions")
        for code in set(in_jax.FUNCTIONS.ops) - set(functions) if in_jax is not None else ():
            if in_jax.FUNCTIONS.ops[code] not in words.ops:
                del in_jax.FUNCTIONS.ops[code]
