"""Corners that are easy to break again: order of leaving, threads that die, kernels on one key."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymp import PolicyError, policy
from polymp.backends.torch.autocast import region_casts, regions
from polymp.torch import GradScaler, autocast
from tests.support.processes import in_thread, in_threads
from tests.support.torch.compiled import Count, mm

X = torch.ones(1, 4)


def thread_wide() -> tuple[object, ...]:
    slots = [(torch.is_autocast_enabled(s), torch.get_autocast_dtype(s)) for s in regions.SLOTS]
    return torch.is_autocast_cache_enabled(), *slots


MADE = (
    ("cpu", torch.float16, None),
    ("cpu", torch.bfloat16, policy({"name": "a", "rules": {"exp": "fp32"}})),
    ("xpu", torch.float16, policy({"name": "b", "rules": {"log": "fp32"}})),
)


@given(st.lists(st.sampled_from([*MADE, 0, 1, 2, 3]), max_size=16))
def test_whatever_the_order_of_leaving_the_first_state_comes_back(plan: list[Any]) -> None:
    """Steps of a plan: a region is entered, or that at a place is left.

    The regions of one device keep no casts: the flag for that is the youngest one's.
    """
    entered: list[tuple[Any, autocast]] = []

    def state(device: str) -> tuple[Any, ...]:
        ruled = regions.in_force(device).policy
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), ruled

    outside, before_all = {device: state(device) for device in ("cpu", "xpu")}, thread_wide()
    for step in [*plan, *[0] * len(plan)]:
        if isinstance(step, tuple):
            device, dtype, ruled = step
            region = autocast(device, dtype, cache_enabled=device == "cpu", policy=ruled)
            entered.append((step, region.__enter__()))
        elif entered:
            kind, region = entered[step % len(entered)]
            youngest = max(at for at, (other, _) in enumerate(entered) if other == kind)
            del entered[youngest]
            region.__exit__()
        for device, before in outside.items():
            inside = [ruled for (on, *ruled), _ in entered if on == device]
            assert state(device) == ((True, *inside[-1]) if inside else before)
        keeps = [on == "cpu" for (on, *_), _ in entered]
        assert torch.is_autocast_cache_enabled() == (keeps[-1] if keeps else before_all[0])
    assert thread_wide() == before_all


def test_a_region_that_cannot_be_entered_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    region = autocast("cpu", policy={"name": "never", "rules": {"exp2": "fp32"}})
    before = thread_wide(), torch.is_autocast_enabled("cpu"), len(regions.local.thread.frames)

    def full(*_: object) -> None:
        raise PolicyError("no code left")

    monkeypatch.setattr(regions, "code_inside", full)
    with pytest.raises(PolicyError), region:
        pass
    assert (
        thread_wide(),
        torch.is_autocast_enabled("cpu"),
        len(regions.local.thread.frames),
    ) == before


def test_a_device_that_holds_the_policies_is_refused_once_there_are_any() -> None:
    autocast("cpu", policy={"name": "some", "rules": {"exp": "fp32"}})
    with pytest.raises(PolicyError, match=r"^autocast\('maia'\) cannot be used in a process"):
        autocast("maia", torch.float16).__enter__()


def test_an_object_made_beside_another_threads_region_still_wants_its_casts() -> None:
    def beside() -> autocast:
        with autocast("cpu"):
            assert not torch.is_autocast_cache_enabled()
            return autocast("cpu")

    with autocast("cpu"):
        made = in_thread(beside)
    with made:
        assert torch.is_autocast_cache_enabled()


def test_our_own_casts_do_not_outlive_a_drop() -> None:
    with autocast("cpu", policy={"rules": {"mv": "lower"}}):
        w = torch.eye(4).requires_grad_()
        torch.mv(w, X[0])
        alive = weakref.ref(w)
        with torch.no_grad():
            w.mul_(2)  # drops
        v = torch.eye(4).requires_grad_()
        torch.mv(v, X[0])  # the next cast clears what was dropped
        kept = [entry[0]() for entry in region_casts.local.thread.casts.values()]
        assert len(kept) == 1
        assert kept[0] is v
        assert alive() is w


@pytest.mark.parametrize(
    ("op", "rule"),
    [(op, "keep") for op in ("add_.Tensor", "mul_.Tensor", "mm.out", "relu_")]
    + [("index_put_", rule) for rule in ("lower", "widest")],
)
def test_an_op_that_writes_can_have_no_rule(op: str, rule: str) -> None:
    with pytest.raises(PolicyError) as error:
        autocast("cpu", policy={"name": "p", "rules": {f"aten:{op}": rule}})
    assert str(error.value) == (
        f"policy 'p' has a rule for {op!r}, which writes into an argument: the dtype of its "
        "result is given. Give the rule to the op without '_' or out=."
    )


@pytest.mark.parametrize("rule", ["lower", "fp32", "fp32_keep"])
def test_batch_norm_keeps_its_running_statistics(rule: str) -> None:
    norm = torch.nn.BatchNorm1d(4)
    x = torch.randn(50, 4) + 5
    with autocast("cpu", policy={"rules": {"batch_norm": rule}}):
        norm(x)
    assert torch.allclose(norm.running_mean, 0.1 * x.mean(0), rtol=0.02)  # type: ignore[arg-type]


def test_policies_are_equal_and_hash_alike_after_a_pickle_from_another_process() -> None:
    code = (
        "import pickle, sys; from polymp import policy; p = policy('torch-cpu'); hash(p);"
        "sys.stdout.buffer.write(pickle.dumps(p))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    theirs = pickle.loads(run.stdout)
    assert theirs == policy("torch-cpu")
    assert {theirs: 1}[policy("torch-cpu")] == 1


@pytest.mark.filterwarnings("ignore:.torch.jit")  # dynamo imports what uses it
def test_a_compiled_optimizer_step_is_compiled_once(count: Count) -> None:
    w = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with autocast("cpu"):
        pass
    step = torch.compile(optimizer.step, backend=count)
    for _ in range(4):
        w.grad = torch.ones(4)
        step()
        with autocast("cpu"):
            torch.mv(torch.eye(4), w)
        region_casts.drop()
    assert w[0].item() == pytest.approx(0.6)
    assert count.graphs == 1


def test_a_fused_step_that_raises_leaves_no_scale_behind() -> None:
    class Fails(torch.optim.SGD):
        fail = True

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.fail:
                raise ValueError("not now")
            super().step()

    w = torch.zeros(1, requires_grad=True)
    optimizer = Fails([w], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(w.sum()).backward()
    with pytest.raises(ValueError, match="not now"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.fail = False
    scaler.step(optimizer)
    assert w.item() == -1.0


# --- Regions in threads: a thread starts outside --------------------------------------------------


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.usefixtures("left_as_found")
def test_threads_at_once_keep_to_their_own_regions(x: torch.Tensor, w: torch.Tensor) -> None:
    """One weight, one step at a time for all: nobody may see another's region or another's cast."""
    arguments = ({"dtype": BF16}, {"dtype": FP16}, {"enabled": False}, {"dtype": FP16})
    dtypes = (BF16, FP16, FP32, FP16)
    steps = threading.Barrier(len(arguments), timeout=60)

    def work(given: dict[str, Any]) -> list[torch.Tensor]:
        seen = []
        for _ in range(3):
            steps.wait()
            with autocast("cpu", **given):
                steps.wait()
                seen.append(torch.mm(x, w))
                steps.wait()
                seen.append(torch.mm(x, w))
            steps.wait()
        return seen

    with autocast("cpu", dtype=BF16):
        torch.mm(x, w)
        results = in_threads([lambda given=given: work(given) for given in arguments])
        assert torch.equal(torch.mm(x, w), mm(x, w, BF16))
    for dtype, seen in zip(dtypes, results, strict=True):
        assert len(seen) == 6
        assert all(torch.equal(y, mm(x, w, dtype)) for y in seen)


@pytest.mark.usefixtures("left_as_found")
def test_a_region_is_left_in_the_thread_that_entered_it() -> None:
    region = autocast("cpu", dtype=FP16)
    with region:

        def leave() -> None:
            with pytest.raises(RuntimeError, match="not open in this thread"):
                region.__exit__(None, None, None)

        in_thread(leave)
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError, match="not open in this thread"):
            autocast("cpu", torch.bfloat16).__exit__()


@pytest.mark.usefixtures("left_as_found")
def test_a_thread_that_ends_inside_a_region_harms_nobody(x: torch.Tensor, w: torch.Tensor) -> None:
    def die() -> None:
        autocast("cpu", dtype=FP16).__enter__()
        torch.mm(x, w)

    in_thread(die)
    gc.collect()
    for dtype in (BF16, FP16):
        with autocast("cpu", dtype=dtype):
            assert region_casts.mine()
            assert torch.equal(torch.mm(x, w), mm(x, w, dtype))
            with torch.no_grad():
                w.mul_(2)
            assert torch.equal(torch.mm(x, w), mm(x, w, dtype))
