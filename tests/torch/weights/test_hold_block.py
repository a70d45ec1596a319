"""`hold_casts` as a block: threads, kernels that are lent, memory, and what it says."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polymp
from polymp.backends.torch.autocast import held_casts, kernel_registry, lent_kernels
from polymp.backends.torch.weights import held_modules
from polymp.errors import StaleCastError
from polymp.torch import autocast, hold_casts
from tests.support.threads import in_threads
from tests.support.torch.held_models import Net, loss_of

pytestmark = pytest.mark.usefixtures("left_as_found", "nodes")
BF16 = torch.bfloat16


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "SMALL", 0)


@pytest.fixture
def model() -> Net:
    return Net()


# Threads, kernels and recordings.


def test_threads_with_one_model_and_with_two(x: torch.Tensor) -> None:
    """Three use one model, one another, in one block and in blocks of their own; steps between."""
    shared, alone = Net(), Net()
    plain = [copy.deepcopy(shared), copy.deepcopy(alone)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (shared, alone)]
    steps = threading.Barrier(4, timeout=60)
    outside = hold_casts(shared)

    def work(at: int) -> list[torch.Tensor]:
        model, found = (alone if at == 3 else shared), []
        dtype = torch.float16 if at == 1 else BF16
        for turn in range(4):
            with hold_casts(model) if at else outside:
                steps.wait()
                with autocast("cpu", dtype):
                    found.append(model(x).detach())
                    if at == 2:
                        steps.wait()  # others leave their blocks while this one is in its region
                    found.append(model(x).detach())
                if at != 2:
                    steps.wait()
            steps.wait()
            if at == 0:
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        for p in group["params"]:
                            p.grad = torch.full_like(p, float(turn - 1))
                    optimizer.step()
            steps.wait()
        return found

    with outside:
        results = in_threads([lambda at=at: work(at) for at in range(4)])
    expected: list[list[torch.Tensor]] = [[], [], [], []]
    others = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in plain]
    for turn in range(4):
        for at in range(4):
            with autocast("cpu", torch.float16 if at == 1 else BF16):
                expected[at] += [plain[at == 3](x).detach()] * 2
        for optimizer in others:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, float(turn - 1))
            optimizer.step()
    for ours, theirs in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(results[0][0], results[0][2])
    assert not held_casts.held.by_id


def test_another_thread_uses_a_layer_in_another_dtype_between_look_up_and_use(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a layer always remembers the cast that the other thread has left there."""
    layer = nn.Linear(8, 8).requires_grad_(False)
    with autocast("cpu", torch.float16):
        expected = layer(x)
    with hold_casts(layer):
        with autocast("cpu", BF16):
            layer(x)
        remembered = layer.__dict__[held_modules._HeldLayer.KEY]
        for name in ("of_weight", "of_bias"):
            left = getattr(remembered, name)
            assert left[1].low.dtype is BF16
            always = property(lambda _, left=left: left, lambda _, found: None)
            monkeypatch.setattr(held_modules.Layer, name, always, raising=False)
        with autocast("cpu", torch.float16):
            assert torch.equal(layer(x), expected)


def test_nested_blocks_and_one_object_again(model: Net, x: torch.Tensor) -> None:
    hold = hold_casts(model)
    with torch.no_grad(), hold:
        loss_of(model, x)
        with hold, hold_casts(model, model.a) as inner:
            loss_of(model, x)
            assert (hold.made, inner.made) == (6, 0)
            assert inner.saved == 6
        loss_of(model, x)
        assert hold.made == 6 == len(held_casts.held.by_id)
    assert (hold.made, hold.bytes, len(held_casts.held.by_id)) == (6, 0, 0)
    assert repr(hold) == "hold_casts(Net): 6 casts made, 12 saved, not open"
    with torch.no_grad(), hold:
        loss_of(model, x)
        assert repr(hold) == "hold_casts(Net): 12 casts made, 12 saved"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other thread ran; the one that runs the tests may have company."""
    monkeypatch.setattr(sys, "_current_frames", dict)


@pytest.mark.usefixtures("one_thread")
def test_kernels_are_lent_and_taken_back(
    model: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_casts(model):
        pass  # takes back what was left by tests with threads
    before = set(kernel_registry.installed("cpu"))
    with hold_casts(model):
        lent = set(kernel_registry.installed("cpu"))
        assert lent == before | lent_kernels.lowered("cpu")
        monkeypatch.setattr(sys, "_current_frames", lambda: {-1: sys._getframe()})
    assert set(kernel_registry.installed("cpu")) == lent, "another thread may be in a kernel"
    plain = loss_of(model, x)
    monkeypatch.setattr(sys, "_current_frames", dict)
    with hold_casts(model), hold_casts(model.a):
        held = loss_of(model, x)
    assert set(kernel_registry.installed("cpu")) == before
    with torch.autocast("cpu", BF16):
        theirs = model(x).float().square().mean()
    assert torch.equal(plain, theirs)
    assert torch.equal(held, theirs)


@pytest.mark.usefixtures("one_thread")
def test_a_policy_in_a_block_keeps_its_kernels(model: Net, x: torch.Tensor) -> None:
    policy = polymp.policy("amp").override(rules={"linear": "fp32", "matmul": "fp32"}, name="wide")
    with hold_casts(model):
        pass
    before = set(kernel_registry.installed("cpu"))
    with hold_casts(model):
        inside = loss_of(model, x, policy=policy)
    after = set(kernel_registry.installed("cpu"))
    assert {"linear", "matmul"} <= after
    if not lent_kernels.lowered("cpu") <= before:  # other policies may have kept them all
        assert after != before | lent_kernels.lowered("cpu")
    assert torch.equal(inside, loss_of(model, x, policy=policy))
    assert not torch.equal(inside, loss_of(model, x))


def test_recordings_in_a_block_and_around_it(model: Net, x: torch.Tensor) -> None:
    with polymp.recording() as plain:
        loss_of(model, x)
    with hold_casts(model):
        loss_of(model, x)
        with polymp.recording() as inside:
            loss_of(model, x)
    with polymp.recording() as around:
        with hold_casts(model):
            loss_of(model, x)
        first = len(around)
        loss_of(model, x)
    assert len(plain) > 3
    assert inside.entries == plain.entries == around.entries[:first] == around.entries[first:]


# Memory.


def test_nothing_outlives_the_block(model: Net, x: torch.Tensor) -> None:
    with hold_casts(model) as hold:
        loss_of(model, x).backward()
        lows = [weakref.ref(h.low) for w in hold._held for h in w.casts.values()]
        assert len(lows) == 6
        assert hold.bytes == sum(low().nbytes for low in lows)
    gc.collect()
    assert [low() for low in lows] == [None] * 6
    assert hold.bytes == 0
    block, kept = weakref.ref(hold), weakref.ref(model)
    del hold, model
    gc.collect()
    assert block() is None
    assert kept() is None or sys.gettrace() is not None or gc.get_referrers(kept())


def test_replaced_memory_is_kept_until_the_next_use(model: Net, x: torch.Tensor) -> None:
    """No other may come to lie at its address; then it goes."""
    for end in (False, True):
        array = np.ones((8, 8), np.float32)
        old = weakref.ref(array)
        with torch.no_grad(), hold_casts(model):
            model.b.weight.data = torch.from_numpy(array)
            loss_of(model, x)
            del array
            model.b.weight.data = torch.zeros(8, 8)
            assert old() is not None
            if not end:
                assert loss_of(model, x) == 0
                assert old() is None
        assert old() is None


def test_an_op_that_returns_its_cast_does_not_give_it_away(model: Net) -> None:
    """einsum of one operand is a view of it, lowered where multiplications are."""
    policy = polymp.policy("amp").override(lower=["mul"])
    with hold_casts(model), torch.no_grad():
        for _ in range(2):
            with autocast("cpu", policy=policy):
                turned = torch.einsum("ij->ji", model.b.weight)
                assert torch.equal(turned, model.b.weight.t().bfloat16())
            turned.zero_()
        with torch.inference_mode(), autocast("cpu", policy=policy):
            torch.einsum("ij->ji", model.b.weight).zero_()
            product = torch.mm(model.b.weight, torch.eye(8))
        assert torch.equal(product, model.b.weight.bfloat16())


# Errors.


@pytest.mark.parametrize(
    ("given", "check", "said"),
    [
        ((), False, "hold_casts() needs a model. Write: with hold_casts(model): ..."),
        ((), "x", "hold_casts() needs a model. Write: with hold_casts(model): ..."),
        (
            (3,),
            False,
            "hold_casts() takes modules, got int: 3. Write: with hold_casts(model): ...",
        ),
        ((nn.Identity(),), 1, "hold_casts(check=...) must be True or False, got 1."),
    ],
)
def test_what_is_no_model(given: Any, check: Any, said: str) -> None:
    with pytest.raises(TypeError) as raised:
        hold_casts(*given, check=check)
    assert str(raised.value) == said


@pytest.mark.parametrize("grad", [False, True])
def test_a_write_that_does_not_show(model: Net, x: torch.Tensor, grad: bool) -> None:
    with torch.set_grad_enabled(grad), hold_casts(model, check=True) as hold:
        loss_of(model, x)
        model.b.weight.data.copy_(torch.zeros(8, 8))
        with pytest.raises(StaleCastError) as raised:
            loss_of(model, x)
        assert str(raised.value) == (
            "hold_casts: the cast of 'b.weight' to bfloat16 is stale. The weight was written in a "
            "way that shows in no version, address or optimizer step, such as "
            "b.weight.data.copy_(...). Call invalidate() of the block after such a write, or write "
            "to the parameter itself under torch.no_grad()."
        )
        hold.invalidate()
        assert loss_of(model, x) == 0


def test_a_check_lets_through_what_shows(model: Net, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with hold_casts(model, check=True) as hold:
        for _ in range(3):
            loss_of(model, x).backward()
            optimizer.step()
            with torch.no_grad():
                model.frozen.weight.mul_(2)
                model.table.data = torch.full((8, 8), float("nan"))
                model.a.bias[0] = -0.0
            assert loss_of(model, x) != loss_of(model, x)  # for it is NaN
            assert hold.saved > 0
            model.load_state_dict(Net().state_dict(), assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        assert loss_of(model, x) == loss_of(Net(), x)


class Broken(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from [*super().named_parameters(*args, **kwargs)][:2]
        raise ZeroDivisionError("no more")


def test_entering_that_fails_leaves_nothing_behind(model: Net, x: torch.Tensor) -> None:
    before = (
        kernel_registry.installed("cpu"),
        {d: loan.blocks for d, loan in kernel_registry.now.loans.items()},
    )
    hold = hold_casts(model, Broken())
    with pytest.raises(ZeroDivisionError):
        hold.__enter__()
    after = (
        kernel_registry.installed("cpu"),
        {d: loan.blocks for d, loan in kernel_registry.now.loans.items()},
    )
    assert before == after
    assert not held_casts.held.by_id
    assert not model._load_state_dict_post_hooks
    with hold_casts(model):
        loss_of(model, x)
        assert len(model._load_state_dict_post_hooks) == 1
    assert not model._load_state_dict_post_hooks


def test_a_thread_that_waits_does_not_keep_the_kernels(model: Net) -> None:
    before, done = set(kernel_registry.installed("cpu")), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with hold_casts(model):
            lent = set(kernel_registry.installed("cpu"))
    finally:
        done.set()
        thread.join()
    if before != lent:  # else others hold casts, or have threads that work
        assert set(kernel_registry.installed("cpu")) == before


def test_left_without_having_been_entered(model: Net, x: torch.Tensor) -> None:
    hold = hold_casts(model)
    with pytest.raises(RuntimeError, match=r"^hold_casts\(Net\): .* left without having been"):
        hold.__exit__(None, None, None)
    with torch.no_grad(), hold:
        loss_of(model, x)
        assert hold.made


def test_a_scripted_module_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"Give it the module that was scripted"):
        hold_casts(scripted)
    assert not held_casts.held.by_id


def test_nothing_is_held_where_entering_fails(
    model: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no hook")

    other = nn.Linear(4, 4)
    monkeypatch.setattr(other, "register_load_state_dict_post_hook", fails)
    before = set(kernel_registry.installed("cpu"))
    with pytest.raises(OSError, match="no hook"), hold_casts(model, other):
        pass
    assert not held_casts.held.by_id
    assert not model._load_state_dict_post_hooks
    assert set(kernel_registry.installed("cpu")) == before


def test_views_are_held_up_to_the_size_of_the_weight() -> None:
    owner = nn.Module()
    owner.register_buffer("cache", torch.zeros(16, 8))
    cache, q = owner.cache, torch.randn(1, 8)
    with torch.no_grad(), hold_casts(owner) as hold, autocast("cpu", BF16):
        for at in range(16):  # a cache of keys: a new view of a new version every time
            cache[at] = torch.randn(8)
            assert torch.equal(q @ cache[: at + 1].T, q.to(BF16) @ cache[: at + 1].to(BF16).T)
            assert hold.bytes <= cache.numel() * 2
        for rows in range(1, 17):
            q @ cache[:rows].T
        assert hold.bytes <= cache.numel() * 2


def test_views_of_one_place_with_another_sign() -> None:
    owner = nn.Module()
    owner.register_buffer("w", torch.randn(8, 8, 2))
    w, x = owner.w, torch.randn(2, 8)
    negative = torch.view_as_complex(w).conj().imag
    with torch.no_grad(), hold_casts(owner), autocast("cpu", BF16):
        assert torch.equal(x @ w[..., 1], -(x @ negative))


def test_a_cast_kept_by_the_region_is_checked_and_dropped(
    model: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_casts, "SMALL", 0)
    weight = next(model.parameters())
    with hold_casts(model, check=True), autocast("cpu", BF16):
        model(x)
        weight.data.mul_(2)
        with pytest.raises(StaleCastError):
            model(x)
    with hold_casts(model) as hold, autocast("cpu", BF16):
        before = model(x)
        weight.data.mul_(2)
        assert torch.equal(model(x), before)
        hold.invalidate()
        assert not torch.equal(model(x), before)


def test_a_recording_outlives_the_block_it_began_in(model: Net, x: torch.Tensor) -> None:
    hold = hold_casts(model)
    with torch.no_grad(), autocast("cpu", BF16):
        hold.__enter__()
        with polymp.recording() as report:
            hold.__exit__(None, None, None)
            model(x)
    assert any(entry.op == "linear" for entry in report.entries)
