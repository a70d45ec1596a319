"""Corners that are easy to break again: order of leaving, threads that die, kernels on one key."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from polymp import PolicyError, policy
from polymp.backends.torch.autocast import region_casts, regions
from polymp.rules.policy import Policy
from polymp.rules.row import Row, Rule
from polymp.torch import GradScaler, autocast

X = torch.ones(1, 4)


def thread_wide() -> tuple[object, ...]:
    slots = [(torch.is_autocast_enabled(s), torch.get_autocast_dtype(s)) for s in regions.SLOTS]
    return torch.is_autocast_cache_enabled(), *slots


def test_leaving_out_of_order_across_devices_restores_cache_flag_and_policies() -> None:
    before = thread_wide()
    a = autocast("cpu", policy={"name": "a", "rules": {"exp": "fp32"}}, cache_enabled=False)
    b = autocast("xpu", policy={"name": "b", "rules": {"log": "fp32"}})
    a.__enter__()
    b.__enter__()
    a.__exit__()
    left = regions.policy_of("xpu")
    assert left is not None
    assert left.name == "b"
    assert regions.policy_of("cpu") is None
    assert torch.is_autocast_cache_enabled()
    b.__exit__()
    assert thread_wide() == before


def test_a_region_that_cannot_be_entered_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    region = autocast("cpu", policy={"name": "never", "rules": {"exp2": "fp32"}})
    before = thread_wide(), torch.is_autocast_enabled("cpu"), len(regions.stack.frames)

    def full(*_: object) -> None:
        raise PolicyError("no code left")

    monkeypatch.setattr(regions, "code_inside", full)
    with pytest.raises(PolicyError), region:
        pass
    assert (thread_wide(), torch.is_autocast_enabled("cpu"), len(regions.stack.frames)) == before


def test_a_device_that_holds_the_policies_is_refused_once_there_are_any() -> None:
    autocast("cpu", policy={"name": "some", "rules": {"exp": "fp32"}})
    with pytest.raises(PolicyError, match=r"^autocast\('maia'\) cannot be used in a process"):
        autocast("maia", torch.float16).__enter__()


def test_an_object_made_beside_another_threads_region_still_wants_its_casts() -> None:
    made, done = [], threading.Event()
    inside = threading.Event()

    def other() -> None:
        with autocast("cpu"):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()
        made.append(autocast("cpu"))
    done.set()
    thread.join(60)
    with made[0]:
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
        kept = [entry[0]() for entry in region_casts._mine.thread.casts.values()]
        assert len(kept) == 1
        assert kept[0] is v
        assert alive() is w


@pytest.mark.parametrize("op", ["add_.Tensor", "mul_.Tensor", "mm.out", "relu_"])
def test_an_op_that_writes_can_have_no_rule(op: str) -> None:
    with pytest.raises(PolicyError) as error:
        autocast("cpu", policy={"name": "p", "rules": {f"aten:{op}": "keep"}})
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


def test_dtypes_that_the_core_lacks_count_for_nothing() -> None:
    widest = Policy("w", (Row("cat", Rule.WIDEST), Row("exp", Rule.FP32_KEEP)))
    region = regions.prepared.by_ticket[autocast("cpu")._ticket][0]
    assert widest.decide("cat", ["float8_e4m3fnuz", "bfloat16"], region).run == "bfloat16"
    assert widest.decide("exp", ["float8_e4m3fnuz"], region).out is None


@pytest.mark.filterwarnings("ignore:.torch.jit")  # dynamo imports what uses it
def test_a_compiled_optimizer_step_is_compiled_once() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    w = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with autocast("cpu"):
        pass
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(4):
        w.grad = torch.ones(4)
        step()
        with autocast("cpu"):
            torch.mv(torch.eye(4), w)
        region_casts.drop()
    torch._dynamo.reset()
    assert w[0].item() == pytest.approx(0.6)
    assert len(graphs) == 1


def test_scaled_lists_and_an_update_between_backwards() -> None:
    """torch.amp adds up gradients of two scales, and divides them by one; polymp raises."""
    for make in (torch.amp.GradScaler, GradScaler):
        scaler = make("cpu", init_scale=4.0)
        p = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([p], lr=1.0)
        first, second = scaler.scale([p.sum() * 2, p.sum() * 3])
        first.backward(retain_graph=True)
        scaler.step(optimizer)
        scaler.update(8.0)
        if make is GradScaler:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.backward()
            continue
        second.backward()
        assert p.grad is not None
        assert p.grad.item() == 2 + 3 * 4.0


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
