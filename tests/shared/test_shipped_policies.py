"""Every shipped policy on every shared op, in both frameworks: the dtype it ran in, and came out.

The ops are those of `cases`. What ran is what the frameworks recorded, what came out is looked at,
and what should be is `Policy.decide`'s answer. Why the frameworks differ, where they do, the policy
says itself, by other rules for what an op is made of; or else `policies_shared` does.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, NamedTuple

import pytest

import polymp
from polymp.dtypes import FORMATS, widest
from polymp.rules import policy_files
from polymp.rules.policy import Region
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary
from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks
from tests.support.decisions import recording
from tests.support.regions import region
from tests.support.sizes import LONG

# Ops that only move numbers, or choose among them, run in whatever comes in.
NEUTRAL = frozenset({"layout", "indexing", "comparison", "sorting", "random"})

# One op in both frameworks, which JAX takes apart where its rule is "lower": products round a
# softmax, each by its own rule, as in torch's kernel, whose softmax is float32 inside.
TAKEN_APART = frozenset({"attention"})

# By reason, the shared ops of `cases` whose frameworks differ for it.
REASONS: dict[str, frozenset[str]] = {
    "torch has no low kernel of it": frozenset(
        {"det", "lu_solve", "pdist", "slogdet", "solve_triangular", "zeta"}
    ),
    "JAX has no kernel for the cell: a state in float32 meets low gates and stays float32":
        frozenset({"gru_cell", "lstm_cell"}),
    "made of ops in JAX, of which one meets a parameter in float32": frozenset(
        {"layer_norm", "rms_norm"}
    ),
    "made of ops in JAX, of which one computes in float32 with a number that is an array there":
        frozenset({"var"}),
    "torch.where makes a float32 tensor of two numbers; in JAX they follow what they meet":
        frozenset({"x * chosen numbers"}),
    "its order is an array in JAX, and one of ones is float32 as written": frozenset({"polygamma"}),
    "a number that float16 cannot hold takes float32 in JAX": frozenset({"x - tiny number"}),
    "a gather in JAX, where only libraries' modules are an embedding": frozenset({"embedding"}),
    "JAX's scatter-add, which gradients of reading are made of, rounds once": frozenset(
        {"scatter_add"}
    ),
    "torch adds its products up in the dtype of the arguments": frozenset({"bilinear"}),
}  # fmt: skip


pytestmark = pytest.mark.sized  # `rows` are of every op then

POLICIES = tuple(policy_files.shipped())
# Every op has this row: what is called under it shows of which ops a shared op is made.
KEEP = polymp.policy({"name": "keep", "rules": {"default": "keep"}})
RAISES = "raises"


def lows(policy: str) -> tuple[str, ...]:
    """The dtypes of regions that a policy may have."""
    return ("bfloat16",) if policy_files.load(policy).fp8 else LOW


class Part(NamedTuple):
    """An op that a row decided for, in a call."""

    op: str
    rule: Rule
    dtypes: tuple[str, ...]
    run: str


class Seen(NamedTuple):
    """One call in one framework."""

    parts: tuple[Part, ...]  # the ops that rows decided for, without those that only move numbers
    dtypes: tuple[str, ...]  # of the float arguments as they arrived
    out: str  # dtype of the result; "raises" if there is none

    @property
    def ran(self) -> frozenset[str]:
        """The dtypes that arithmetic was done in."""
        return frozenset(p.run for p in self.parts) or frozenset({widest(self.dtypes)})


class Row(NamedTuple):
    """A shared op under a policy in a region, seen in both frameworks."""

    op: str
    policy: str
    low: str
    inputs: str
    torch: Seen
    jax: Seen

    def __str__(self) -> str:
        return f"{self.op}({self.inputs}), {self.policy}, {self.low}"

    @property
    def agree(self) -> bool:
        return (self.torch.ran, self.torch.out) == (self.jax.ran, self.jax.out)

    @property
    def ruled_otherwise(self) -> bool:
        """True if other ops ran in the other framework, for which the policy has other rules.

        So it is where one framework composes what is one op in the other. No row is as good as
        "keep". One op with a row of its own is no composition.
        """
        sides = self.torch.parts, self.jax.parts
        ops, rules = ([{part[at] for part in side} for side in sides] for at in (0, 1))
        rules = [its or {Rule.KEEP} for its in rules]
        return ops[0] != ops[1] and rules[0] != rules[1] and decision(self) is None


def call(framework: str, op: str, region: Any, case: cases.Case, report: Any) -> Seen:
    """Call an op in a region; in JAX, trace it."""
    fw = frameworks.load(framework)
    arrays = [fw.array(v, f) for v, f in zip(cases.values(op), case.dtypes, strict=True)]
    start: list[int] = []

    def run(*arrays: Any) -> Any:
        made = zip(arrays, case.made, strict=True)
        arrived = [fw.product(x) if m else x for x, m in made]
        start.append(len(report))
        return fw.ops[op](*arrived)

    try:
        if framework == "torch":
            with region:
                out = fw.dtype(run(*arrays))
        else:
            import jax

            out = fw.dtype(jax.eval_shape(region(run), *arrays))
            start.append(len(report) - len(report.entries[start[0] :]) + sum(case.made))
    except Exception:
        out = RAISES
    entries = report.entries[start[-1] :]
    if out == RAISES and framework == "jax":
        entries = entries[sum(case.made) :]
    return Seen(tuple(parts(entries)), cases._floats(case), out)


def parts(entries: Any) -> Any:
    ops = vocabulary().ops
    for entry in entries:
        if entry.op and ops[entry.op].kind in NEUTRAL:
            continue
        floats = [f for f in entry.dtypes if f in FORMATS]  # none in arithmetic on indices
        if entry.decision.rule is not Rule.PARTS and floats:
            run = entry.decision.run or widest(floats)
            yield Part(entry.op, entry.decision.rule, entry.dtypes, run)


def case_of(op: cases.Op, policy: str, low: str) -> cases.Case:
    """With arguments in float32, or made low by a product: one of both, for it is traced anew."""
    inputs = ("made", "float32")[zlib.crc32(f"{op.name} {policy} {low}".encode()) % 2]
    if op.only and inputs not in op.only:
        inputs = op.only[0]
    return cases.Case(op.name, inputs, low, "on", "", "", "")


@cache
def made_of(framework: str) -> dict[str, tuple[str, ...]]:
    """For each shared op, the ops that it calls."""
    found = {}
    keep = region(framework, "bfloat16", KEEP)
    with recording() as report:
        for op in cases.OPS:
            case = cases.Case(op.name, "float32", "bfloat16", "on", "", "", "")
            found[op.name] = tuple(p.op for p in call(framework, op.name, keep, case, report).parts)
    return found


# A row of one of these says why its frameworks differ, or that it is needed for that.
SPECIAL = TAKEN_APART.union(*REASONS.values())


def asked(op: cases.Op, policy: str) -> bool:
    """True for every op and policy in `make test-long`; in `make test` for an eighth of them."""
    turn = cases.OPS.index(op) + POLICIES.index(policy)
    return LONG or turn % 8 == 0 or op.name in SPECIAL


@cache
def rows() -> tuple[Row, ...]:
    """The rows of the ops that are asked under each policy, in both low dtypes."""
    need(*FRAMEWORKS)
    import jax

    jax.clear_caches()  # a jitted function of jax.numpy that was planned before has its plan
    opened_by = {  # before the record begins, which is of the backends that are imported by then
        (policy, low): [region(name, low, policy) for name in FRAMEWORKS]
        for policy in POLICIES
        for low in lows(policy)
    }
    found = []
    with recording() as report:
        for (policy, low), regions in opened_by.items():
            for op in (op for op in cases.OPS if asked(op, policy)):
                case = case_of(op, policy, low)
                pairs = zip(FRAMEWORKS, regions, strict=True)
                both = [call(name, op.name, opened, case, report) for name, opened in pairs]
                found.append(Row(op.name, policy, low, case.inputs, *both))
    return tuple(found)


def one_op(name: str) -> str:
    """The op of the vocabulary that a shared op is in both frameworks; "" if it is several."""
    here, there = (made_of(framework)[name] for framework in FRAMEWORKS)
    one = here == there and len(here) == 1 and name not in TAKEN_APART
    return here[0] if one else ""


def decision(row: Row, side: str = "torch") -> Any:
    """Return the policy's decision for an op of both frameworks; None if it has no row for it."""
    op, dtypes = one_op(row.op), getattr(row, side).dtypes
    inside = Region(side, "cpu", enabled=True, dtype=row.low, cache=True)
    names = vocabulary().ops[op].jax if op and side == "jax" else ()
    spelled = f"jax:{names[0]}" if names else ""
    decided = polymp.policy(row.policy).decide(op, dtypes, inside, spelled) if op else None
    return None if decided is None or decided.rule is Rule.PARTS else decided


def wrong(row: Row, side: str) -> str:
    """In what a call departs from the decision; nothing if it does not, or there is none."""
    decided, seen = decision(row, side), getattr(row, side)
    if decided is None:
        return ""
    run = decided.run or widest(seen.dtypes)
    out = RAISES if decided.rule is Rule.FORBID else decided.out or run
    same = [(p.rule, p.run) for p in seen.parts] == [(decided.rule, run)]
    if same and seen.out in (out, "bool", "int"):
        return ""
    return f"{row} in {side}: {decided}, but {seen}"


def test_the_frameworks_agree_or_a_row_says_why_not() -> None:
    listed = frozenset().union(*REASONS.values())
    differ = [r for r in rows() if not (r.agree or r.ruled_otherwise)]
    assert [f"{r}: torch {r.torch}, jax {r.jax}" for r in differ if r.op not in listed] == []
    assert listed - {r.op for r in differ} == frozenset(), "reasons that no row needs"
    apart = {row.op for row in rows() if len(row.torch.parts) == 1 < len(row.jax.parts)}
    assert apart >= TAKEN_APART


@pytest.mark.parametrize("side", FRAMEWORKS)
def test_an_op_runs_as_the_policy_decides(side: str) -> None:
    judged = [row for row in rows() if decision(row, side) is not None]
    assert len({one_op(row.op) for row in judged}) > (60 if LONG else 50)
    assert len({(row.policy, row.low) for row in judged}) == sum(
        len(lows(policy)) for policy in POLICIES
    )
    assert [found for row in judged if (found := wrong(row, side))] == []


@pytest.mark.parametrize("side", FRAMEWORKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrong_policy_and_a_wrong_dtype_are_noticed(policy: str, side: str) -> None:
    its = [row for row in rows() if row.policy == policy]
    other = "lean" if policy in ("matmul", "torch-xpu") else "matmul"
    assert any(wrong(row._replace(policy=other), side) for row in its)
    assert any(wrong(row._replace(low=cases.OTHER[row.low]), side) for row in its)


# Ops of JAX with a row of their own in `amp` that no shared op calls: as elu, of no dimensions or
# of more than three, and in jax.numpy made of log.
UNSHARED = {"celu", "selu", "convolution", "log2"}


def test_every_op_of_jax_with_a_row_of_its_own_is_met_or_excused() -> None:
    """Functions of other libraries aside, which tests/jax/autocast/test_libraries.py has."""
    need("jax")
    import jax

    jax.clear_caches()  # see `rows`
    policy, ops = polymp.policy("amp"), vocabulary().ops.values()
    in_jax = [op for op in ops if op.jax or any(f.startswith("jax.") for f in op.functions)]
    winners = {
        op.name: policy.winner(op.name, "float16") for op in in_jax if op.kind not in NEUTRAL
    }
    table = {op for op, row in winners.items() if row is not None and row.of == op}
    met = {op for ops in made_of("jax").values() for op in ops}
    assert table - met == UNSHARED
