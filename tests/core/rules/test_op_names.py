"""Names of ops in rows: spellings, classes, and ops that users register."""

import pytest

from polymp.errors import PolicyError
from polymp.rules.vocabulary import Op, Vocabulary
from tests.support.policy_rows import refusal

WORDS = Vocabulary(
    {"matmul": "Products.", "softmax": "Exponentials."},
    [
        Op("linear", "matmul", aten=("linear",), jax=("dot_general:unbatched",)),
        Op("mm", "matmul", aten=("mm",), traces=("linear",)),
        Op("softmax", "softmax", aten=("softmax.int",), functions=("jax.nn.softmax",)),
    ],
)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("mm", "mm", True),
        ("mm", "class:matmul", True),
        ("aten:mm", "mm", True),
        ("aten:mm", "class:matmul", True),
        ("jax:dot_general:unbatched", "linear", True),
        ("class:matmul", "mm", False),
        ("mm", "aten:mm", False),
        ("mm", "class:softmax", False),
        ("aten:mm", "linear", False),
        ("mm", "default", False),
        ("default", "default", True),
        ("aten:brand_new", "default", False),
        ("aten:brand_new", "aten:brand_new", True),
    ],
)
def test_which_names_a_row_covers(inner, outer, expected):
    assert WORDS.within(inner, outer) is expected


def test_an_op_by_each_of_its_names():
    assert WORDS.of_aten("softmax.int") == "softmax"
    assert WORDS.of_aten("softmax") == ""
    assert WORDS.of_jax("dot_general:unbatched") == "linear"
    assert WORDS.functions == {"jax.nn.softmax": "softmax"}
    assert WORDS.op_of("aten:softmax.int") is WORDS.ops["softmax"]
    assert WORDS.op_of("class:softmax") is None
    assert [op.name for op in WORDS.members("matmul")] == ["linear", "mm"]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            Op("mm", "custom"),
            "op 'mm' is in the vocabulary already: it cannot be registered as 'mm'. "
            "Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", aten=("lib::mine", "mm")),
            "aten op 'mm' is in the vocabulary already, as 'mm': it cannot be registered as "
            "'mine'. Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", jax=("dot_general:unbatched",)),
            "primitive 'dot_general:unbatched' is in the vocabulary already, as 'linear': it "
            "cannot be registered as 'mine'. Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", functions=("jax.nn.softmax",)),
            "function 'jax.nn.softmax' is in the vocabulary already, as 'softmax': it cannot be "
            "registered as 'mine'. Give it a rule in a policy instead.",
        ),
    ],
)
def test_nothing_is_registered_twice(op, message):
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    assert refusal(words.register, op) == message
    assert (words.ops, words.registered) == (WORDS.ops, []), "a part of it was registered"
    assert words.of_aten("lib::mine") == ""


def test_a_registered_op_is_an_op():
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    words.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    assert words.registered == ["mine"]
    assert words.of_aten("lib::mine") == "mine"
    assert words.within("aten:lib::mine", "class:custom")
    words.check("class:custom", "here")
    assert refusal(words.check, "min", "here") == "here: no op 'min'. Did you mean mine?"


def test_an_op_is_registered_in_one_framework_after_the_other():
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    words.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    words.register(Op("mine", "custom", jax=("mine_p",), rule="lower"))
    both = Op("mine", "custom", aten=("lib::mine",), jax=("mine_p",), rule="lower")
    assert words.op_of("aten:lib::mine") == words.op_of("jax:mine_p") == words.ops["mine"] == both
    for other in (
        Op("mine", "custom", functions=("lib.mine",), rule="lower"),  # a second one in JAX
        Op("mine", "custom", aten=("lib::other",), rule="fp32"),
    ):
        with pytest.raises(PolicyError, match=r"^op 'mine' is in the vocabulary already: "):
            words.register(other)
    half = Vocabulary(WORDS.kinds, WORDS.ops.values())
    half.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    with pytest.raises(PolicyError, match="as 'mine'"):
        half.register(Op("mine", "custom", jax=("mine_p",), rule="fp32"))
