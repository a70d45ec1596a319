"""The stack of regions, against a plain model of what restoring means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.rules.policy import Policy
from polymp.rules.region import Region, Stack
from polymp.rules.row import Row, Rule
from tests.support.processes import in_thread


def make(device, low):
    return Region("torch", device, True, low, True)


A, B, C = make("cpu", "float16"), make("cpu", "bfloat16"), make("cuda", "float16")


def test_regions_of_another_policy_or_scope_are_others():
    fp32, low = (Policy("p", (Row("mm", rule),)) for rule in (Rule.FP32, Rule.LOWER))
    plain, other, inner = (
        Region("torch", "cpu", True, "float16", True, policy, scope)
        for policy, scope in ((fp32, ""), (low, ""), (fp32, "head"))
    )
    stack: Stack[tuple[Region, str]] = Stack()
    stack.frames += [(plain, "outside"), (other, "plain"), (inner, "other")]
    again = Region("torch", "cpu", True, "float16", True, Policy("p", low.rows))
    assert stack.pull(again) is None, "the second one was left, the third stays in force"
    assert stack.frames == [(plain, "outside"), (inner, "plain")]
    with pytest.raises(RuntimeError, match="it is not open in this thread"):
        stack.pull(other)
    assert stack.pull(inner) == (inner, "plain")
    assert stack.pull(plain) == (plain, "outside")


def test_leaving_what_is_not_open():
    stack: Stack[tuple[Region, str]] = Stack()
    stack.frames.append((A, "x"))
    with pytest.raises(RuntimeError) as error:
        stack.pull(B)
    assert str(error.value) == f"cannot leave {B}: it is not open in this thread"
    assert stack.frames == [(A, "x")]


def test_every_thread_has_its_own():
    stack: Stack[tuple[Region, str]] = Stack()
    stack.frames.append((A, "x"))
    assert in_thread(lambda: list(stack.frames)) == []


@given(st.data())
def test_whatever_the_order_of_leaving_the_first_state_comes_back(data):
    stack: Stack[tuple[Region, str]] = Stack()
    state = {"cpu": "cpu outside", "cuda": "cuda outside"}
    start = dict(state)
    entered = []

    def leave(region):
        entered.remove(region)
        frame = stack.pull(region)
        if frame is not None:
            state[region.device] = frame[1]

    for _ in range(data.draw(st.integers(0, 12))):
        if entered and data.draw(st.booleans()):
            leave(data.draw(st.sampled_from(entered)))
        else:
            region = data.draw(st.sampled_from([A, B, C]))
            stack.frames.append((region, state[region.device]))
            state[region.device] = region.dtype
            entered.append(region)
        for device in state:
            if not any(r.device == device for r in entered):
                assert state[device] == start[device]
    for region in data.draw(st.permutations(entered)):
        leave(region)
    assert state == start
