"""A policy with a row of every rule, random policies, and which of their rows has to win.

`expected` is a second answer to the question that `Policy.winner` answers.
"""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from polymp.dtypes import FORMATS
from polymp.errors import PolicyError
from polymp.rules.policy import Policy, Region
from polymp.rules.policy_files import load
from polymp.rules.row import LOW, Row, Rule

DTYPE = st.sampled_from(LOW)
NAMES = st.sampled_from([*FORMATS, "float8_e4m3fnuz"])  # the last one dtypes lacks

MINE = Policy(
    "mine",
    (
        Row("mm", Rule.LOWER),
        Row("linear", Rule.FP8, "bfloat16"),
        Row("exp", Rule.FP32),
        Row("layer_norm", Rule.FP32_KEEP),
        Row("add", Rule.WIDEST),
        Row("index_copy", Rule.FIRST),
        Row("relu", Rule.KEEP),
        Row("sigmoid", Rule.PARTS),
        Row("binary_cross_entropy", Rule.FORBID, instead="mse_loss"),
    ),
)


# Of messages.
RULES = "lower, fp8, fp32, fp32_keep, widest, first, keep, forbid, parts"
PATTERN = (
    "is no pattern of module paths. Write names joined by dots, such as "
    '"*.lm_head" or "blocks.*.attn"; * stands for any characters.'
)


def region(low="float16", *, enabled=True, scope=""):
    return Region("torch", "cpu", enabled, low, True, MINE, scope)


def as_data(policy):
    """A policy as the data of a file, which `load` reads back, equal row by row."""
    head = {"name": policy.name, "halves": policy.halves, "few_rows": policy.few_rows}
    data = {"rules": {}, "scopes": {}} | head | ({"fp8": policy.fp8} if policy.fp8 else {})
    for row in policy.rows:
        own = {"rule": row.rule.value} | ({"instead": row.instead} if row.instead else {})
        rows = data["scopes"].setdefault(row.scope, {}) if row.scope else data["rules"]
        rows.setdefault(row.of, {}).update({row.dtype: own} if row.dtype else own)
    return data


def over(own, base):
    """The policy `own` as one that extends `base`; the rows of its own have a source."""
    return load(as_data(own) | {"extends": base})


def refusal(call, *args, **kwargs):
    """Return the message of the PolicyError that a call has to raise."""
    with pytest.raises(PolicyError) as error:
        call(*args, **kwargs)
    return str(error.value)


KINDS = {"softmax": "softmax", "log_softmax": "softmax", "sum": "reduction", "mm": "matmul"}
SPELLINGS = {
    "aten:softmax.int": "softmax",
    "aten:log_softmax.int": "log_softmax",
    "aten:sum": "sum",
    "aten:sum.dim_IntList": "sum",
    "jax:reduce_sum": "sum",
    "aten:mm": "mm",
    "aten:brand_new": "",
}
SELECTORS = [*KINDS, *SPELLINGS, *sorted({f"class:{kind}" for kind in KINDS.values()}), "default"]
PATTERNS = ["*", "a", "b", "a.b", "*.b", "a.*", "?.b", "a.?", "*.a.b"]
PATHS = ["", "a", "b", "a.b", "a.c", "a.b.c", "c.a.b", "b.b"]


# What is asked: op, dtype, spelling.
QUESTIONS = [
    *((op, low, "") for op in KINDS for low in LOW),
    *((op, low, spelling) for spelling, op in SPELLINGS.items() for low in LOW),
]


PRODUCTS = ("class:matmul", "mm", "linear", "matmul", "aten:mm", "jax:dot_general")


def a_row(of, rule, low, scope):
    """A row; rule fp8 only where there can be one."""
    if rule is Rule.FP8 and (of not in PRODUCTS or low == "float16"):
        rule = Rule.LOWER
    return Row(of, rule, low, scope)


def a_policy(name, question, scopes):
    """A policy in which nearly all rows are for the ops that are asked about."""
    op, _, spelling = question
    near = [name for name in (op, spelling, f"class:{KINDS.get(op)}") if name in SELECTORS]
    row = st.builds(
        a_row,
        st.sampled_from([*near * 3, "default", *SELECTORS]),
        st.sampled_from(Rule),
        st.sampled_from(["", "", *LOW]),
        scopes,
    )
    rows = st.lists(row, max_size=6, unique_by=lambda row: row.key)
    return rows.map(lambda rows: Policy(name, tuple(rows)))


@st.composite
def cases(draw):
    question, path = draw(st.sampled_from(QUESTIONS)), draw(st.sampled_from(PATHS))
    there = [pattern for pattern in PATTERNS if deepest(list(pattern), path)]
    scopes = st.sampled_from(["", *there, *there, *PATTERNS])
    return draw(a_policy("random", question, scopes)), question, path


CASES = cases()


def rank(row, path):
    """How far in and how exact a row's scope is; None where it does not hold."""
    if not row.scope:
        return 0, 0
    depth = deepest(list(row.scope), path)
    return (depth, sum(c not in "*?" for c in row.scope)) if depth else None


def selects(row, op, spelling):
    """3 for the spelling, 2 for the op, 1 for its class, 0 for what is left; None for others."""
    order = ("default" if op else None, f"class:{KINDS.get(op)}", op or None, spelling or None)
    return order.index(row.of) if row.of in order else None


def expected(policy, question, path):
    """Return `describe` of the strongest row; None for no row, "conflict" for a tie."""
    # An op over a class over the rest; then the scope, a spelling over its op, the dtype.
    op, dtype, spelling = question
    ranks = {row.key: rank(row, path) for row in policy.rows}
    there = [row for row in policy.rows if ranks[row.key]]
    for one in there:
        for two in there:
            same = (one.of, one.dtype, ranks[one.key]) == (two.of, two.dtype, ranks[two.key])
            if same and one.rule is not two.rule:
                return "conflict"
    found = [
        ((min(how, 2), ranks[row.key], how, bool(row.dtype)), describe(row, path))
        for row in there
        if row.dtype in ("", dtype) and (how := selects(row, op, spelling)) is not None
    ]
    return max(found)[1] if found else None


def describe(row, path):
    """All but the dtype: where a row loses one of two dtypes, it may be left with the other."""
    return row.of, row.rule.value, rank(row, path)


def answer(policy, question, path):
    try:
        row = policy.at(path).winner(*question)
    except PolicyError:
        return "conflict"
    return row and describe(row, path)


# A second matcher of patterns, which tries every way.

# A pattern as parts: what one of them stands for, by how it is written.
ONE = {"?": "abc0.", "[ab]": "ab", "[!a]": "b0.", "[0-1]": "0"}
PARTS = st.lists(st.sampled_from(["a", "b", "0", ".", "*", *ONE]), min_size=1, max_size=7)
ANY_PATH = st.lists(st.text("ab0", min_size=1, max_size=2), max_size=4).map(".".join)


def fits(parts: Sequence[str], text: str) -> bool:
    """True if the parts, in order, can stand for the whole text."""
    if list(parts[:2]) == ["*", "."]:
        tails = [text, *(text[at + 1 :] for at, c in enumerate(text) if c == ".")]
        return any(spelled(parts[2:], tail) for tail in tails)
    return spelled(parts, text)


def spelled(parts: Sequence[str], text: str) -> bool:
    if not parts:
        return not text
    if parts[0] == "*":
        return any(spelled(parts[1:], text[at:]) for at in range(len(text) + 1))
    first = ONE.get(parts[0], parts[0])
    return bool(text) and text[0] in first and spelled(parts[1:], text[1:])


def deepest(parts: Sequence[str], path: str) -> int:
    """How many modules, the outermost one with it, lead to the innermost one that fits; 0: none.

    With a star at the end, to the outermost one.
    """
    names = path.split(".") if path else []
    pick = min if parts and parts[-1] == "*" else max
    modules = [".".join(names[:end]) for end in range(len(names) + 1)]
    return pick((at + 1 for at, m in enumerate(modules) if fits(parts, m)), default=0)
