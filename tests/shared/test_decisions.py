"""Recording a run: what is in the report is what ran, and recording leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.dtypes import widest
from polymp.errors import ForbiddenOpError, PolicyWarning
from polymp.rules import decision_log
from polymp.rules.row import LOW, Rule
from tests.conftest import FRAMEWORKS, need
from tests.support import frameworks, processes

X = np.linspace(0.1, 1.2, 12).reshape(3, 4)
POLICY = polymp.policy(
    {
        "name": "reported",
        "rules": {
            "class:matmul": "lower",
            "exp": "fp32",
            "softmax": {"float16": "fp32", "bfloat16": "fp32_keep"},
            "add": "widest",
            "class:reduction": "fp32_keep",
            "tanh": "keep",
            "fft_fft": "parts",
            "erfinv": "fp32",
        },
    }
)
# Ops of which the vocabulary has one in both frameworks, here in a row, with a value each.
STEPS = ("linear without bias", "exp", "softmax", "tanh", "add", "sum of rows")


def region(fw: Any, low: str, policy: Any) -> Callable[..., Any]:
    """Return a function that runs a function of arrays in a region."""
    if fw.name == "torch":
        import torch

        from polymp.torch import autocast

        opened = autocast("cpu", getattr(torch, low), policy=policy)

        def run(fn: Callable[..., Any]) -> Callable[..., Any]:
            return opened(fn)

        return run
    from polymp.jax import autocast as transformed

    return lambda fn: transformed(fn, dtype=low, policy=policy)


def steps(fw: Any) -> Callable[[Any, Any], list[Any]]:
    """A function that returns the result of every step."""

    def run(x: Any, w: Any) -> list[Any]:
        made = [fw.ops["linear without bias"](x, w)]
        for name in STEPS[1:]:
            args = [made[-1], made[0]] if name == "add" else [made[-1]]
            made.append(fw.ops[name](*args))
        return made

    return run


def arguments(fw: Any) -> list[Any]:
    return [fw.array(X, "float32"), fw.array(X[:, :4], "float32")]


def ruled(found: decision_log.Decisions) -> list[decision_log.Entry]:
    return [entry for entry in found.entries if entry.decision.rule is not Rule.PARTS]


@pytest.mark.parametrize("low", LOW)
def test_entries_are_what_ran(fw: Any, low: str) -> None:
    run = region(fw, low, POLICY)(steps(fw))
    before = [fw.dtype(y) for y in run(*arguments(fw))]
    with polymp.recording() as found:
        results = [fw.dtype(y) for y in run(*arguments(fw))]
    assert results == before, "recording changed what runs"
    entries = ruled(found)
    assert [e.op for e in entries] == ["linear", "exp", "softmax", "tanh", "add", "sum"]
    for entry, result in zip(entries, results, strict=True):
        out = entry.decision.out or entry.decision.run or widest(entry.dtypes)
        assert (entry.op, out) == (entry.op, result)
        assert (entry.backend, entry.low, entry.scope) == (fw.name, low, "")
        assert entry.row == POLICY.winner(entry.op, low)
        assert entry.decision == POLICY.apply(entry.row, entry.dtypes, low)
        assert entry in found.of(entry.op)
    arrived = [e.dtypes for e in entries]
    assert arrived[1:4] == [(low,), ("float32",), (results[2],)]
    assert arrived[0] == ("float32", "float32")
    assert repr(found) == f"Decisions({len(found.entries)} entries, {len(found.rows())} rows)"
    assert len(found) == len(found.entries)


def test_an_op_is_recorded_as_often_as_it_is_there(fw: Any) -> None:
    def run(x: Any) -> Any:
        for _ in range(3):
            x = fw.ops["exp"](x)
        return x

    with polymp.recording() as found:
        region(fw, "bfloat16", POLICY)(run)(fw.array(X, "float32"))
    assert [e.op for e in found.entries] == ["exp"] * 3


def test_unused_rows_are_those_that_ruled_nothing(fw: Any) -> None:
    with polymp.recording() as found:
        region(fw, "float16", POLICY)(steps(fw))(*arguments(fw))
    unused = {(row.of, row.dtype) for row in POLICY.unused(found)}
    assert unused == {("erfinv", ""), ("fft_fft", ""), ("softmax", "bfloat16")}
    with polymp.recording() as nothing:
        pass
    assert POLICY.unused(nothing) == POLICY.rows
    other = POLICY.override(name="other", fp32=["erfinv"])
    assert len(other.unused(found)) >= len(unused) - 1


def test_a_scope_that_never_matched_is_unused() -> None:
    """A typo in a pattern."""
    policy = POLICY.override(
        name="scoped", scopes={"*.head": {"exp": "lower"}, "*.haed": {"exp": "lower"}}
    )
    unused = {}
    for name in FRAMEWORKS:
        need(name)
        fw = frameworks.load(name)
        unused[name] = _unused_in_torch(policy) if name == "torch" else _unused_in_jax(fw, policy)
    for rows in unused.values():
        assert "*.haed" in {row.scope for row in rows}
        assert "*.head" not in {row.scope for row in rows}


def _unused_in_torch(policy: polymp.Policy) -> Any:
    import torch
    from torch import nn

    from polymp.torch import autocast, scoped

    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    model = nn.Sequential()
    model.add_module("head", Head())
    with pytest.warns(PolicyWarning, match=r"'\*\.haed': did you mean '\*\.head'\?"):
        handle = scoped(model, policy)
    with handle, polymp.recording() as found, autocast("cpu"):
        assert model(torch.ones(3)).dtype is torch.bfloat16
    return policy.unused(found)


def _unused_in_jax(fw: Any, policy: polymp.Policy) -> Any:
    import jax

    def run(x: Any) -> Any:
        with jax.named_scope("head"):
            return fw.ops["exp"](x)

    with polymp.recording() as found:
        with pytest.warns(PolicyWarning, match=r"'\*\.haed': did you mean '\*\.head'\?"):
            out = region(fw, "bfloat16", policy)(run)(fw.array(X, "float32"))
    assert out.dtype == "bfloat16"
    (entry,) = found.of("exp")
    assert entry.scope == "head"
    return policy.unused(found)


def test_a_disabled_region_and_no_region_decide_nothing(fw: Any) -> None:
    x = fw.array(X, "float32")
    with polymp.recording() as found:
        fw.ops["exp"](x)
        fw.run(fw.ops["exp"], [x], ("off",))
    assert found.entries == []


def test_recordings_nest(fw: Any) -> None:
    """A decision belongs to the innermost recording."""
    run = region(fw, "bfloat16", POLICY)(fw.ops["exp"])
    tanh = region(fw, "bfloat16", POLICY)(fw.ops["tanh"])
    x = fw.array(X, "float32")
    with polymp.recording() as outer:
        run(x)
        with polymp.recording() as inner:
            assert decision_log.current().record is inner
            tanh(x)
        run(x)
        assert decision_log.current().record is outer
    assert decision_log.current() is None
    assert [e.op for e in outer.entries] == ["exp", "exp"]
    assert [e.op for e in inner.entries] == ["tanh"]


def test_an_error_ends_a_recording(fw: Any) -> None:
    forbids = {"name": "no", "rules": {"exp": "forbid", "tanh": "fp32"}}
    tanh, exp = (region(fw, "bfloat16", forbids)(fw.ops[name]) for name in ("tanh", "exp"))
    x = fw.array(X, "float32")

    def run() -> decision_log.Decisions:
        with polymp.recording() as found:
            kept.append(found)
            tanh(x)
            exp(x)
        return found

    kept: list[decision_log.Decisions] = []
    with pytest.raises(ForbiddenOpError):
        run()
    assert decision_log.current() is None
    assert [(e.op, e.decision.rule) for e in kept[0].entries] == [
        ("tanh", Rule.FP32),
        ("exp", Rule.FORBID),
    ]
    tanh(x)
    assert len(kept[0]) == 2, "it went on recording"


def test_each_thread_records_its_own(fw: Any) -> None:
    names = ("exp", "tanh")
    runs = {name: region(fw, "bfloat16", POLICY)(fw.ops[name]) for name in names}
    x, found = fw.array(X, "float32"), {}
    recording, ran = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def work(name: str, records: bool) -> None:
        if not records:
            recording.wait()
            assert decision_log.current() is None
            runs[name](x)
            ran.wait()
            return
        with polymp.recording() as its:
            recording.wait()
            runs[name](x)
            ran.wait()
        found[name] = [e.op for e in its.entries]

    for records in (False, True):
        threads = [
            threading.Thread(target=work, args=(names[0], True)),
            threading.Thread(target=work, args=(names[1], records)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wanted = {"exp": ["exp"]} | ({"tanh": ["tanh"]} if records else {})
        assert found == wanted
        found.clear()


# --- torch: nothing of ours stays -----------------------------------------------------------------


NATIVE = """
import sys
import polymp, torch
from polymp.torch import autocast
from polymp.backends.torch.compat import dispatcher
from polymp.backends.torch.autocast import kernel_registry, torch_table

def ours():
    called = []
    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "kernel":
            called.append(frame.f_code.co_filename.rpartition("/")[2])
    sys.setprofile(note)
    try:
        torch.mm(x, x)
    finally:
        sys.setprofile(None)
    return called

x = torch.ones(3, 3)
with autocast("cpu"):
    before = dispatcher.registered(dispatcher.autocast_key("cpu"))
    print(kernel_registry.installed("cpu"), ours())
    for _ in range(2):
        with polymp.recording() as found:
            print(ours(), [entry.op for entry in found.entries])
        print(kernel_registry.installed("cpu"), ours())
        print(dispatcher.registered(dispatcher.autocast_key("cpu")) == before)
"""


def test_torch_runs_its_own_kernels_again() -> None:
    """In a fresh process, where none of ours is on an op."""
    need("torch")
    again = ["['autocast_kernel.py'] ['mm']", "() []", "True"]
    assert processes.run(NATIVE).splitlines() == ["() []", *again, *again]


def test_a_policy_first_used_in_a_recording_works_after_it() -> None:
    need("torch")
    import torch

    from polymp.torch import autocast

    x = torch.tensor(X, dtype=torch.bfloat16)
    low = torch.bfloat16
    first = {"name": "first", "rules": {"bmm": "fp32", "cdist": "keep", "quantile": "keep"}}
    with polymp.recording() as found, autocast("cpu", policy=first):
        assert torch.bmm(x[None], x.t()[None]).dtype is torch.float32
    assert len(found.of("bmm")) == 1
    for policy, dtype in ((first, torch.float32), ("torch-cpu", low), (None, low), ("amp", low)):
        with autocast("cpu", policy=policy):
            assert torch.bmm(x[None], x.t()[None]).dtype is dtype
            assert torch.cdist(x.float(), x.float()).dtype is torch.float32


def test_a_number_beside_a_tensor_is_recorded_like_any_op() -> None:
    """A kernel of ours is given the number, where a compiled one is given a tensor."""
    need("torch")
    import torch

    from polymp.torch import autocast

    x = torch.tensor(X, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "x % 2": lambda: x % 2,
        "x % 0.3": lambda: x % 0.3,
        "fmod": lambda: torch.fmod(x, 2),
        "copysign": lambda: torch.copysign(x, -1.0),
        "xlogy": lambda: torch.xlogy(2, x),
        "take_along_dim": lambda: torch.take_along_dim(x, torch.tensor([[0], [1], [-1]]), 1),
        "integers": lambda: torch.arange(5) % 2,
    }
    for name, call in calls.items():
        with autocast("cpu"):
            wanted = call()
            with polymp.recording():
                got = call()
        assert got.dtype is wanted.dtype, name
        assert torch.equal(got, wanted), name
