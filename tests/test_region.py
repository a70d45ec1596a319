"""The stack of regions, against a plain model of what restoring means."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.region import Region, Stack


def make(device, low):
    return Region("torch", device, True, low, True)


A, B, C = make("cpu", "float16"), make("cpu", "bfloat16"), make("cuda", "float16")


def test_last_in_first_out():
    stack: Stack[str] = Stack()
    stack.push(A, "before A")
    stack.push(B, "before B")
    assert (len(stack), stack.current("cpu"), stack.current("cuda")) == (2, B, None)
    assert stack.pop(B) == "before B"
    assert stack.current("cpu") is A
    assert stack.pop(A) == "before A"
    assert len(stack) == 0


def test_leaving_the_elder_first_hands_its_state_to_the_younger():
    stack: Stack[str] = Stack()
    stack.push(A, "outside")
    stack.push(B, "inside A")
    assert stack.pop(A) is None, "B stays in force"
    assert stack.pop(B) == "outside"


def test_devices_do_not_mix():
    stack: Stack[str] = Stack()
    stack.push(A, "cpu outside")
    stack.push(C, "cuda outside")
    assert stack.pop(A) == "cpu outside"
    assert stack.pop(C) == "cuda outside"


def test_leaving_what_is_not_open():
    stack: Stack[str] = Stack()
    stack.push(A, "x")
    with pytest.raises(RuntimeError, match="it is not open in this thread"):
        stack.pop(B)
    assert len(stack) == 1


def test_every_thread_has_its_own():
    stack: Stack[str] = Stack()
    stack.push(A, "x")
    seen = []
    thread = threading.Thread(target=lambda: seen.append((len(stack), stack.current("cpu"))))
    thread.start()
    thread.join()
    assert seen == [(0, None)]


@given(st.data())
def test_whatever_the_order_of_leaving_the_first_state_comes_back(data):
    stack: Stack[dict[str, str]] = Stack()
    state = {"cpu": "cpu outside", "cuda": "cuda outside"}
    start = dict(state)
    open_regions = []
    for _ in range(data.draw(st.integers(0, 12))):
        if open_regions and data.draw(st.booleans()):
            region = data.draw(st.sampled_from(open_regions))
            open_regions.remove(region)
            restored = stack.pop(region)
            if restored is not None:
                state[region.device] = restored
        else:
            region = data.draw(st.sampled_from([A, B, C]))
            stack.push(region, state[region.device])
            state[region.device] = region.format
            open_regions.append(region)
        for device in state:
            if not any(r.device == device for r in open_regions):
                assert state[device] == start[device]
    for region in data.draw(st.permutations(open_regions)):
        restored = stack.pop(region)
        if restored is not None:
            state[region.device] = restored
    assert state == start
