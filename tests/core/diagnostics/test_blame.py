"""`blame`: graphs by hand with an answer that is known, and random ones with a planted source."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.diagnostics import blame as module
from polymp.diagnostics.blame import Blame, Node, blame
from tests.support.sizes import size


def node(*inputs: int, bad: str = "", run: str = "float16", **more: Any) -> Node:
    return Node(inputs, bad, run, **more)


def who(*nodes: Node) -> tuple[int, str] | None:
    """The node to blame, and the kind."""
    found = blame(nodes)
    return None if found is None else (found.node, found.kind)


def looped(*inputs: int, rounds: int, loop: str = "a", **more: Any) -> Node:
    """A node in a loop, whose result the next round reads."""
    return node(*inputs, bad="Inf", loops=(loop,), first=(rounds,), **more)


def blamed(*nodes: Node) -> Blame:
    found = blame(nodes)
    assert found is not None
    return found


MADE, WIDE = node(bad="Inf"), node(run="float32")
CAST = node(0, bad="Inf", burst=True, cast=True)
BURST = node(0, bad="Inf", burst=True)
# The nodes of a run, who is to blame, and for what.
WHO: dict[str, tuple[list[Node], tuple[int, str] | None]] = {
    "nothing ran": ([], None),
    "all is finite": ([node(), node(0), node(0, 1)], None),
    "the first that is not finite": (
        [node(), node(0, bad="Inf"), node(1, bad="NaN")],
        (1, "operation"),
    ),
    "a mask that a softmax takes up": ([node(), node(0, bad="Inf", given=True), node(1)], None),
    "an Inf of float32, too, that is taken up": ([node(), node(0, bad="Inf"), node(1)], None),
    "an overflow that is taken up: x / Inf is 0": (
        [node(), node(0, bad="Inf", burst=True), node(0, 1)],
        (1, "overflow"),
    ),
    "an overflow that a clamp takes up": ([node(), BURST, node(1, op="clamp")], None),
    "an overflow that a wider clamp makes a number of": (
        [node(), BURST, node(1, op="clamp", run="float32")],
        (1, "overflow"),
    ),
    "an overflow that becomes the largest number": (
        [node(), BURST, node(1, op="minimum", ended=True)],
        (1, "overflow"),
    ),
    "a mask of -1e9 in float32 that is cast and taken up": ([WIDE, CAST, node(1)], None),
    "a cast that is not taken up": ([WIDE, CAST, node(1, bad="NaN")], (1, "overflow")),
    "a spoiled input that leads nowhere": ([node(bad="NaN", spoiled="x"), node(0), node()], None),
    "a value that is only compared": ([MADE, node(0), node(0, value=False, run="")], None),
    "a value that nothing else takes up": ([MADE, node(0, value=False, run="")], (0, "operation")),
    "a value that a scaler checks": (
        [MADE, node(0), node(0, value=False, run="", asks=True)],
        (0, "operation"),
    ),
    # h = c * 2; c = exp(h): exp breaks in round 2, and the product in round 3 by it.
    "an earlier round of a loop": (
        [looped(1, rounds=3), looped(0, rounds=2, burst=True)],
        (1, "overflow"),
    ),
    "the first op of a round": (
        [looped(1, rounds=2, burst=True), looped(0, rounds=2)],
        (0, "overflow"),
    ),
    "the first of two loops": (
        [looped(rounds=5, burst=True), looped(0, rounds=0, loop="b")],
        (0, "overflow"),
    ),
}


@pytest.mark.parametrize("case", WHO)
def test_who_is_to_blame(case: str) -> None:
    nodes, found = WHO[case]
    assert who(*nodes) == found


def test_an_overflow_is_told_from_an_operation_without_a_result() -> None:
    found = blame([node(), node(0, bad="Inf", burst=True)])
    assert found == Blame(
        1, 1, "overflow",
        "its result is beyond float16's largest number, 65504; in float32 it is finite",
    )  # fmt: skip
    found = blamed(node(), node(0, bad="NaN", run="float32"))
    assert found.why == "its inputs are finite and its result is not, in float32 or wider"


@pytest.mark.parametrize(
    ("taken", "expected"), [("softmax", {1, 2}), ("tanh", set()), ("where", set())]
)
def test_an_overflow_is_no_mask_but_for_a_softmax(taken: str, expected: set[int]) -> None:
    ops = [node(), BURST, node(1, bad="Inf", run="float32", op="to"), node(2, op=taken)]
    constants = [*ops[:1], node(0, bad="Inf", given=True), *ops[2:]]
    assert module.meant(constants) == {1, 2}
    ops[1] = ops[1]._replace(cast=True)  # else its Inf is hidden, which `meant` knew
    assert module.meant(ops) == expected


def test_a_mask_is_not_to_blame_for_what_an_op_makes_of_a_whole_row_of_it() -> None:
    """A row that is masked as a whole: -inf, which is meant, and then NaN."""
    masked, softmax, loss = node(bad="Inf", given=True), node(0, bad="NaN"), node(1, bad="NaN")
    found = blamed(masked, softmax, loss)
    assert (found.node, found.first, found.kind) == (1, 1, "operation")
    assert found.why == "its result is NaN, from infinities that the program has as constants"
    assert who(node(bad="Inf", given=False), softmax, loss) == (0, "operation")
    assert who(masked, softmax, node(0), node(1)) is None, "and where that is not used"
    assert who(masked, node(0, bad="Inf")) is None, "infinities that are meant"
    assert who(node(bad="NaN", given=True)) == (0, "operation"), "NaN is not"


def test_what_a_call_was_given_is_the_cause_and_not_a_part_of_it() -> None:
    """An Inf that exp, the first part of a softmax, takes up, and 0 / 0, the last."""
    for own in (1, 2, 3):
        for call in ("softmax", None):
            parts = [node(at, call=call) for at in range(1, own)]
            last = node(own, bad="NaN", call=call)
            seen = bool(call) or own == 1
            made = [node(), node(0, bad="Inf"), *parts, last]
            assert who(*made) == (1 if seen else own + 1, "operation")
            found = blamed(node(), node(0, bad="Inf", given=True), *parts, last)
            assert found.node == own + 1
            assert ("inputs are finite" in found.why) == (not seen)
            argument = [node(), node(0, spoiled="x", call=call), *parts, last]
            assert who(*argument) == (own + 1, "input" if call else "operation")


def test_an_input_that_is_not_finite_is_to_blame_by_its_name() -> None:
    found = blame([node(bad="NaN", spoiled="batch['x']"), node(0, bad="NaN")])
    assert found == Blame(0, 0, "input", "batch['x'] is not finite before any op runs")
    both = node(bad="NaN", spoiled="x", burst=True)
    assert who(both) == (0, "input"), "whatever else is known of it"
    assert who(node(bad="Inf", spoiled="x", given=True)) == (0, "input")


def test_what_divides_by_a_zero_that_float16_made_is_not_to_blame() -> None:
    squares = node(0, vanished=0.9)
    root, quotient = node(1), node(0, 2, bad="NaN")
    found = blamed(node(), squares, root, quotient)
    assert (found.node, found.first, found.kind) == (1, 3, "underflow")
    assert found.why == "90% of its results are zero in float16 and are not in float32"
    given = squares._replace(cast=True, op="div")  # of what `div` reads
    found = blamed(node(), given, root, quotient)
    assert found.why == "90% of an input of it becomes zero when it is cast to float16"


def test_a_number_of_the_program_that_became_zero_is_the_cause() -> None:
    added = node(0, numbers=(1e-8, 1e-12))
    found = blamed(node(), added, node(0, 1, bad="Inf"))
    assert (found.node, found.kind) == (1, "number")
    assert found.why.startswith("the constant 1e-08, 1e-12, which keeps a value from zero, is")


def test_the_nearest_that_lost_most_is_the_cause_else_the_one_that_lost_most() -> None:
    far, near = node(vanished=0.9), node(0, vanished=0.6)
    assert who(far, near, node(1, bad="Inf")) == (1, "underflow")
    near = near._replace(vanished=0.2)
    assert who(far, near, node(1, bad="Inf")) == (0, "underflow")
    far = far._replace(vanished=0.3)
    assert who(far, near, node(1, bad="Inf")) == (0, "underflow")
    assert who(far, near._replace(vanished=0.4), node(1, bad="Inf")) == (1, "underflow")


def test_a_zero_from_too_far_back_is_not_the_cause() -> None:
    def chain(length: int) -> list[Node]:
        links = [node(i) for i in range(length)]
        return [node(vanished=0.9), *links, node(length, bad="Inf")]

    assert who(*chain(module._STEPS - 1)) == (0, "underflow")
    assert who(*chain(module._STEPS)) == (module._STEPS + 1, "operation")


def test_rounds_of_a_loop_inside_another_are_compared_with_those_around_them() -> None:
    def inner(*inputs: int, at: tuple[int, ...], **more: Any) -> Node:
        return node(*inputs, bad="Inf", loops=("out", "in"), first=at, **more)

    assert who(inner(1, at=(0, 3)), inner(0, at=(0, 2), burst=True)) == (1, "overflow")
    assert who(inner(1, at=(1, 0)), inner(0, at=(0, 2), burst=True)) == (1, "overflow")
    outer = node(0, bad="Inf", loops=("out",), first=(0,), burst=True)
    assert who(inner(1, at=(1, 0)), outer) == (1, "overflow")
    assert who(inner(1, at=(0, 3), burst=True), outer._replace(burst=False)) == (0, "overflow")


# Random graphs


@st.composite
def runs(draw: Any) -> tuple[list[Node], int]:
    """A run with one source of Inf; every op that reads what is not finite makes it, too."""
    length = draw(st.integers(1, 25))
    source = draw(st.integers(0, length - 1))
    inputs = [
        tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=3)))) if at else ()
        for at in range(length)
    ]
    bad = {source}
    nodes = []
    for at in range(length):
        if at > source and bad.intersection(inputs[at]):
            bad.add(at)
        nodes.append(node(*inputs[at], bad="Inf" if at in bad else ""))
    return nodes, source


kinds = st.sampled_from([{}, {"burst": True}, {"spoiled": "x"}])


@settings(max_examples=size(60, 200))
@given(runs(), kinds)
def test_the_planted_source_is_the_one_to_blame(
    planted: tuple[list[Node], int], more: dict[str, Any]
) -> None:
    nodes, source = planted
    nodes[source] = nodes[source]._replace(**more)
    found = blamed(*nodes)
    assert (found.node, found.first) == (source, source)
    kind = "overflow" if "burst" in more else "input" if more else "operation"
    assert found.kind == kind


@settings(max_examples=size(30, 100))
@given(runs())
def test_a_planted_zero_is_found_behind_what_it_broke(planted: tuple[list[Node], int]) -> None:
    nodes, source = planted
    zero = node(vanished=0.8)
    moved = [n._replace(inputs=tuple(i + 1 for i in n.inputs)) for n in nodes]
    moved[source] = moved[source]._replace(inputs=(0, *moved[source].inputs))
    found = blamed(zero, *moved)
    assert (found.node, found.first, found.kind) == (0, source + 1, "underflow")


def test_ones_of_a_difference_are_not_the_cause_where_what_it_reads_has_them_too() -> None:
    """1 - p has ones where p is near 0, and zeros where p was rounded to 1."""
    p, one_less, log = (
        node(ones=True, op="sigmoid"),
        node(0, ones=True, op="rsub"),
        node(1, bad="Inf"),
    )
    assert who(p, one_less, log) == (0, "saturation")
    assert who(p._replace(ones=False), one_less, log) == (1, "saturation")


def test_a_test_of_an_input_is_not_its_use_and_a_test_of_a_result_is() -> None:
    """torch.isfinite compares absolute values."""
    size, test = node(bad="NaN", spoiled="x", op="abs"), node(0, value=False)
    assert who(size, test) is None
    assert who(size, test, node(bad="Inf")) == (2, "operation"), "nor does it hide another"
    guarded = node(bad="NaN", spoiled="x"), node(0, bad="NaN", op="abs"), node(1, value=False)
    assert who(*guarded) == (0, "input")


def test_what_bfloat16_was_not_compared_with_is_told() -> None:
    found = blamed(node(bad="NaN", run="bfloat16"))
    assert found.why.endswith("not, in bfloat16; in float32 it was not tried")


def test_values_that_are_read_by_two_ways_are_looked_at_once() -> None:
    """Without that, 60 rounds of where(m, h + x, h) would be followed by 2**60 ways."""
    nodes = [node(op="sigmoid", ones=True)]
    for _ in range(60):
        h = len(nodes) - 1
        nodes += [node(h, op="add"), node(h, h + 1, op="where")]
    assert who(*nodes, node(len(nodes) - 1, bad="NaN")) == (0, "saturation")
