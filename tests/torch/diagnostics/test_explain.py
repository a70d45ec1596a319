"""`explain`: its counts against counts by hand, its rows against the policy's own answers."""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import polymp
from polymp.backends.torch.autocast import fp8_product, kernel_registry
from polymp.backends.torch.compat import dispatcher, modes
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.report import Report
from polymp.errors import PolicyError, PolicyWarning
from polymp.rules import decision_log
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary
from polymp.torch import autocast, explain, scoped
from tests.support import random_policies as programs
from tests.support.sizes import size
from tests.support.torch.each_op import EachOp, at_every_line, interrupted
from tests.support.torch.models import MODELS, seen
from tests.support.torch.saved_dtypes import held
from tests.support.torch.version_changes import need_lstm
from tests.torch.autocast.test_random_policies import MINE, Place, arguments, mine
from tests.torch.autocast.test_random_policies import run_of as ran
from tests.torch.conftest import state

pytestmark = pytest.mark.usefixtures("left_as_found")
BF16, FP16 = torch.bfloat16, torch.float16
SHIPPED = ("amp", "lean", "matmul", "torch-cuda", "torch-cpu")
NO_LOW_KERNEL = ("ctc_loss", "quantile")  # on a CPU, of the ops that the models call


def cast(op: Any, args: Any, kwargs: Any) -> int | None:
    """The bytes that a copy from one float dtype to another reads and writes, else None."""
    x, dtype = args[0] if args else None, kwargs.get("dtype")
    if op is not torch.ops.aten._to_copy.default or dtype in (None, x.dtype):
        return None
    floats = x.is_floating_point() and dtype.is_floating_point
    return x.numel() * (x.element_size() + dtype.itemsize) if floats else None


def step(module: nn.Module, inputs: Any, low: torch.dtype, policy: str | None = None) -> None:
    with autocast("cpu", low, policy=policy):
        outputs = module(*inputs)
    sum(t.float().square().mean() for t in tree_leaves(outputs)).backward()


def made(title: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[title]()


COUNTED = [
    ("LSTM", BF16, None),
    ("GRU", BF16, "amp"),
    ("cells", FP16, "lean"),
    ("multi-head attention", BF16, "amp"),
    ("transformer", FP16, "amp"),
    ("convnet", BF16, "matmul"),
    ("convnet, channels last", FP16, "torch-cuda"),
    ("spectral", BF16, "amp"),
    ("complex", FP16, None),
    ("sparse tables", BF16, "lean"),
    ("attention", FP16, "torch-cuda"),
    ("language model", BF16, "matmul"),
    ("speech", BF16, None),
    ("solver", FP16, "lean"),
]


@pytest.mark.parametrize(("title", "low", "policy"), COUNTED)
def test_casts_and_their_bytes_are_those_that_run(
    title: str, low: torch.dtype, policy: str | None
) -> None:
    if title == "LSTM":
        need_lstm(low)
    module, inputs = made(title)
    with EachOp(cast) as found:
        step(copy.deepcopy(module), inputs, low, policy)
    with explain() as report:
        step(module, inputs, low, policy)
    assert len(found.seen) > 3
    assert (report.casts, report.cast_bytes) == (len(found.seen), sum(found.seen))
    forward = sum(call.casts for call in report if call.direction == FORWARD)
    assert forward < report.casts, "those of the backward pass are among them"


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    with programs.vocabulary_put_back():
        polymp.register_op(MINE, "fp32", torch=mine)
        yield


@pytest.mark.usefixtures("registered")
@settings(max_examples=size(5, 15))
@given(st.integers(0, 10_000))
def test_random_programs_under_random_policies(seed: int) -> None:
    """Casts as counted; the rows are those that were decided, and the policy's for the module."""
    policy, low, model = programs.policy(seed), LOW[seed % 2], Place(programs.program(seed))
    values = arguments(seed)
    with EachOp(cast) as counted:
        found = ran(model, policy, low, values, True, model)
    with explain(model=model) as report:
        again = ran(model, policy, low, values, True, model)
    if isinstance(found, Exception):
        assert type(again) is type(found)
        return
    assert all(map(torch.equal, again, found))
    assert (report.casts, report.cast_bytes) == (len(counted.seen), sum(counted.seen))
    calls = [(path, call.op) for path, call in programs.calls(programs.program(seed))]
    for call in report:
        if (call.module, call.op) in calls:
            assert call.row == said(policy, call)
    assert {(c.module, c.op) for c in report} >= {
        (path, op) for path, op in calls if said_of(policy, op, low, path) is not None
    }


def said_of(policy: polymp.Policy, op: str, low: str, module: str, spelling: str = "") -> Any:
    """The policy's row for an op in a module; a row that says "parts" leaves it to its parts.

    torch.amp, and so a policy, knows no op that writes into its first argument. What has no low
    kernel on a CPU has torch's row for CPUs where the policy has none.
    """
    if spelling.partition(".")[0].endswith("_"):
        return None
    row = policy.at(module).winner(op, low, spelling)
    if row is None and op in NO_LOW_KERNEL:
        row = polymp.policy("torch-cpu").winner(op, low, spelling)
    return None if row is None or row.rule is Rule.PARTS else row


def said(policy: polymp.Policy, call: Any) -> Any:
    return said_of(policy, call.op, call.region, call.module, call.spelling)


@pytest.mark.parametrize("policy", SHIPPED)
@pytest.mark.parametrize("title", ["attention", "convnet", "speech"])
def test_rows_are_those_of_the_policy(title: str, policy: str) -> None:
    module, inputs = made(title)
    table = polymp.policy(policy)
    report = explain(module, *inputs, dtype="float16", policy=policy)
    assert (report.low, report.policy) == ("float16", policy)
    ruled = [call for call in report if call.row is not None]
    assert len(ruled) > 2
    for call in report:
        assert call.region == "float16"
        assert call.row == said(table, call), call
        if call.row is not None and ":" not in call.row.of:
            of = "torch-cpu" if table.winner(call.op, "float16") is None else policy
            assert call.row == polymp.policy(of).why(call.op, "float16").row
        assert call.rule == ("no row" if call.row is None else str(call.row.rule))


class Two(nn.Module):
    """One layer in two places, and twice in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        self.second = nn.Sequential(self.first[0], nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.second[0](x).exp()


def test_rows_of_scopes_are_those_of_the_module(x: torch.Tensor) -> None:
    model = Two()
    policy = polymp.policy("amp").override(
        scopes={"first": {"softmax": "keep"}, "first.0": {"linear": "fp32"}}
    )
    with scoped(model, policy), explain(model=model) as report, autocast("cpu", FP16):
        model(x)
    for call in report:
        assert call.row == said(policy, call), call
    assert report.of("softmax")[0].row.scope == "first"
    linears = report.of("linear")
    assert {call.rule for call in linears} == {"fp32"}
    assert {call.module for call in linears} == {"first.0"}, "a module has its first path"
    assert sum(call.times for call in linears) == 3


def two(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


FLOPS: dict[str, tuple[int, Callable[[], Any]]] = {
    "linear": (2 * 4 * 8 * 16, lambda: (nn.Linear(8, 16), torch.randn(4, 8))),
    "matmul": (2 * 3 * 4 * 8 * 5, lambda: (torch.matmul, *two((3, 4, 8), (3, 8, 5)))),
    "bmm": (2 * 3 * 4 * 8 * 5, lambda: (torch.bmm, *two((3, 4, 8), (3, 8, 5)))),
    "conv2d": (
        2 * (2 * 6 * 4 * 4) * (4 // 2) * 9,  # a result is made of 2 of 4 channels, 3 x 3 each
        lambda: (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(2, 4, 8, 8)),
    ),
    "conv_transpose1d": (  # each place, in all examples, meets the weights of its group
        2 * (3 * 8) * (4 * 6 * 3) // 2,
        lambda: (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), torch.randn(3, 4, 8)),
    ),
    "scaled_dot_product_attention": (
        2 * (2 * 3 * 5 * 7 * 8) * 2,
        lambda: (F.scaled_dot_product_attention, *two((2, 3, 5, 8), *[(2, 3, 7, 8)] * 2)),
    ),
}  # fmt: skip


def test_a_gradient_that_nobody_asks_for_has_no_flops() -> None:
    with explain() as report:  # the images need none
        nn.Conv2d(4, 6, 3)(torch.randn(2, 4, 8, 8)).sum().backward()
    forward, backward = (call.flops for call in report if call.flops)
    assert forward == backward


def test_a_part_on_meta_is_no_device_of_the_model(x: torch.Tensor) -> None:
    model = nn.Linear(x.shape[-1], 4)
    model.ghost = nn.Linear(2, 2, device="meta")
    assert [call.run for call in polymp.explain(model, x, dtype="bfloat16")] == ["bfloat16"]


def test_an_op_of_the_name_of_a_product_has_none() -> None:
    with torch.library._scoped_library("polymp_explain", "DEF") as library:
        library.define("bmm(float scale, Tensor a) -> Tensor")
        library.impl("bmm", lambda scale, a: a * scale, "CompositeExplicitAutograd")
        with explain() as report:
            torch.ops.polymp_explain.bmm(2.0, torch.ones(3, 3))
    assert sum(call.flops for call in report) == 0


@pytest.mark.parametrize("region", [False, True], ids=["no region", "region"])
@pytest.mark.parametrize("op", FLOPS)
def test_flops_are_those_of_the_formulas(op: str, region: bool) -> None:
    flops, build = FLOPS[op]
    fn, *inputs = build()
    inputs = [t.requires_grad_() for t in inputs]
    with explain() as report, autocast("cpu", BF16, enabled=region):
        fn(*inputs).sum().backward()
    forward = [call for call in report if call.flops and call.direction == FORWARD]
    (backward,) = {call.run for call in report if call.flops and call.direction == BACKWARD}
    assert [call.flops for call in forward] == [flops]
    assert forward[0].run == backward == ("bfloat16" if region else "float32")
    later = sum(call.flops for call in report if call.direction == BACKWARD)
    # Attention saves no scores: its backward makes them again, five products for two.
    assert later == flops * (2.5 if "attention" in op else 2)
    assert report.flops == {backward: flops + later}


@pytest.mark.parametrize("title", ["convnet", "attention", "language model", "cells"])
@pytest.mark.parametrize("region", [False, True], ids=["no region", "region"])
def test_what_is_kept_is_what_is_saved(title: str, region: bool) -> None:
    module, inputs = made(title)

    def run() -> Any:
        with autocast("cpu", BF16, enabled=region):
            return module(*inputs)

    module.eval()
    saved = [t for t in held(run, list(module.parameters())) if t.dtype is torch.float32]
    each = {memory.data_ptr(): memory for memory in (t.untyped_storage() for t in saved)}
    with explain() as report:
        outputs = run()
    del outputs
    assert report.kept == sum(memory.nbytes() for memory in each.values()) > 0


def everything(module: nn.Module, run: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    outputs = tree_leaves(run())
    gradients = [p.grad for p in module.parameters()]
    return seen([outputs, gradients, torch.get_rng_state(), list(module.buffers())])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("title", "low"), [("transformer", FP16), *((title, BF16) for title in MODELS)]
)
def test_results_are_bit_identical(title: str, low: torch.dtype) -> None:
    module, inputs = made(title)

    def run(module: nn.Module) -> Any:
        with autocast("cpu", low):
            outputs = F.dropout(tree_leaves(module(*inputs))[0], 0.3)
        outputs.float().square().mean().backward()
        return outputs

    def outcome(context: Any) -> Any:
        twin = copy.deepcopy(module)
        with context:
            try:
                return everything(twin, lambda: run(twin))
            except RuntimeError as error:  # a kernel that this machine lacks
                return str(error)

    report = explain()
    explained, plain = outcome(report), outcome(nullcontext())
    assert explained == plain


W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
EIGHT = W.to(torch.float8_e4m3fn)
LSTM = nn.LSTM(16, 16)


@torch.library.custom_op("polymp_test::squared", mutates_args=(), device_types="cpu")
def squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x


CALLING: dict[str, Callable[[], torch.Tensor]] = {
    "pinv": lambda: torch.linalg.pinv(W),
    "sparse": lambda: torch.sparse.mm(W.to_sparse(), W),
    "bilinear": lambda: F.bilinear(W, W, W[None]),
    "einsum": lambda: torch.einsum("ij,kj->ik", W, W),
    "multi_dot": lambda: torch.linalg.multi_dot([W, W, W]),
    "lstm": lambda: LSTM(W[None])[0],
    "custom": lambda: squared(W),
    "fp8": lambda: torch._scaled_mm(EIGHT, EIGHT.t(), W.new_ones(()), W.new_ones(())),
}
TOOLS = {
    "explain": explain,
    "audit": polymp.torch.audit,
    "record": lambda: polymp.torch.record(None, probes=0),
}


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode], ids=["", "inference"])
@pytest.mark.parametrize("region", [autocast, torch.autocast], ids=["polymp", "torch"])
@pytest.mark.parametrize("name", CALLING)
def test_ops_that_a_kernel_calls_are_cast_as_ever(
    monkeypatch: pytest.MonkeyPatch, name: str, region: Any, mode: Any
) -> None:
    """torch has autocast off below a dispatch mode, but for what the tools run there."""
    if name == "lstm":  # of oneDNN there is none in bfloat16 for some CPUs
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)

    def run() -> list[Any]:
        with mode(), region("cpu", BF16):
            low = CALLING[name]()
            with torch.autocast("cpu", enabled=False):
                return seen([low, CALLING[name]()])

    plain = run()
    own = name == "fp8" and fp8_product._onednn_is_slow()  # one kernel with AMX, that calls no op
    assert (plain[0] == plain[1]) == own, "this op is not cast, and tells nothing"
    for tool in TOOLS.values():
        with tool():
            assert run() == plain


def test_an_op_below_is_in_a_report_with_its_dtype() -> None:
    with explain() as report, autocast("cpu", BF16):
        CALLING["pinv"]()
    assert {c.run for c in report.of("matmul")} == {"bfloat16"}


def test_a_frozen_model_and_kept_casts_spare_casts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def casts(run: Callable[[], Any]) -> Report:
        with explain(model=model) as report, autocast("cpu", BF16):
            run()
        return report

    twice = casts(lambda: (model(x), model(x)))
    assert twice.saved == {"cached": 4}, "two weights and two biases, the second time"
    polymp.torch.freeze(model.requires_grad_(False), (x,), dtype=BF16)
    frozen = casts(lambda: model(x))
    assert (frozen.casts, frozen.saved) == (1, {}), "the weights are low already"
    assert frozen.of("linear")[0].inputs == ("float32", "bfloat16", "bfloat16")


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: explain(3), TypeError,
        "explain(fn, *args) needs a module or a function, got 3. Give the function and its "
        "arguments, not what it returned."),
    (lambda: explain(nn.Linear(8, 8), torch.ones(8), dtype="half precision"), ValueError,
        "explain(): dtype 'half precision' is not a float dtype that polymp knows. Write float16 "
        "(fp16), bfloat16 (bf16), or such a dtype of torch, jax or numpy."),
    (lambda: explain(dtype="float16"), TypeError,
        "explain() without a function is a context manager: open the region inside it. "
        "Got args=(), dtype='float16', policy=None, {}."),
    (lambda: explain(nn.Linear(8, 8), torch.ones(8), model="net"), TypeError,
        "explain(model=...) needs a torch.nn.Module, got 'net'."),
    (lambda: polymp.explain(len, []), TypeError,
        "polymp.explain(len, ...) finds no tensor, array or module that says "
        "which framework this is for. Call polymp.torch.explain or polymp.jax.explain."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_modules_of_a_step_have_their_paths_in_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = explain(lambda m, x: m(x).sum(), model, torch.ones(2, 4), model=model)
    assert [call.module for call in found.calls] == ["0", "1", ""]


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


HEAD = polymp.policy("amp").override(scopes={"head": {"all": "fp32"}}, name="head")


def dtypes_by_op(report: Any) -> list[tuple[str, str, str]]:
    return [(call.module, call.op, call.run) for call in report]


@pytest.mark.parametrize("before", [None, {"rules": {"all": "fp32"}}], ids=["plain", "scoped"])
def test_the_policy_asked_for_holds_in_the_model(before: Any) -> None:
    model, x = Headed(), torch.ones(1, 4)
    kinds = [type(module) for module in model.modules()]
    if before is not None:
        scoped(model, before)
        kinds = [type(module) for module in model.modules()]
    own = dtypes_by_op(explain(model, x, dtype="bfloat16"))
    low = [("body", "linear", "bfloat16"), ("", "relu", "bfloat16"), ("head", "linear", "bfloat16")]
    high = [(module, op, "float32") for module, op, _ in low]
    assert own == (low if before is None else high)
    assert dtypes_by_op(explain(model, x, dtype="bfloat16", policy="amp")) == low
    matmul = explain(model, x, dtype="bfloat16", policy="matmul")
    assert dtypes_by_op(matmul) == [low[0], high[1], low[2]]
    assert matmul.policy == "matmul"
    for call in (model, lambda model, x: model(x)):
        given = (x,) if call is model else (model, x)
        named = explain(call, *given, dtype="bfloat16", policy=HEAD)
        assert dtypes_by_op(named) == [low[0], low[1], high[2]]
    assert dtypes_by_op(explain(model, x, dtype="bfloat16")) == own, "scopes are as they were"
    assert [type(module) for module in model.modules()] == kinds


def test_scopes_are_as_they_were_after_an_error() -> None:
    model = Headed()
    scoped(model, {"rules": {"all": "fp32"}})
    with pytest.raises(RuntimeError):
        explain(model, torch.ones(1, 3), dtype="bfloat16", policy="amp")
    with autocast("cpu", BF16):
        assert model(torch.ones(1, 4)).dtype is torch.float32


@pytest.mark.filterwarnings("error")
def test_paths_of_a_policy_are_those_of_one_of_the_modules() -> None:
    model, criterion = Headed(), nn.MSELoss()
    named = explain(
        lambda x: criterion(model(x), x[:, :2]), torch.ones(1, 4), dtype="bfloat16", policy=HEAD
    )
    assert ("head", "linear", "float32") in dtypes_by_op(named)
    with pytest.raises(PolicyWarning, match="no module of MSELoss has"):
        explain(criterion, *torch.ones(2, 3), dtype="bfloat16", policy=HEAD)


def test_a_policy_with_paths_needs_a_module() -> None:
    with pytest.raises(PolicyError, match="has rules for modules"):
        explain(torch.relu, torch.ones(2), dtype="bfloat16", policy=HEAD)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch warns once in a process
@pytest.mark.parametrize("title", MODELS)
def test_inference_mode_counts_as_no_grad_does_that_keeps_no_casts(title: str) -> None:
    if "LSTM" in title or title == "cells":
        need_lstm(BF16)
    counted = []
    ways = torch.no_grad, torch.inference_mode
    for outside, inside in zip((*ways, torch.no_grad), (*ways, torch.inference_mode), strict=True):
        module, inputs = made(title)
        module.eval()
        with autocast("cpu", enabled=False, cache_enabled=False), outside():
            with explain(model=module) as report, inside():
                with autocast("cpu", BF16, policy="amp"):
                    module(*inputs)
        rows = [(c.op, c.run, c.casts, c.cast_bytes, c.saved, c.flops) for c in report]
        counted.append((report.casts, report.cast_bytes, report.saved, sorted(rows, key=str)))
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][3], "nothing is seen"


def all_that_a_record_changes() -> tuple[Any, ...]:
    graph, now = torch.autograd.graph, kernel_registry.now
    return (
        dict(now.everywhere),
        set(now.ops),
        set(now.records),
        set(torch.library._impls),
        decision_log.current(),
        modes.innermost_mode(),
        dict(dispatcher.showing),
        graph.disable_saved_tensors_hooks,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        *state(),
    )


def in_a_block(x: torch.Tensor) -> None:
    with explain():
        x.exp()


def of_a_call(x: torch.Tensor) -> None:
    explain(torch.exp, x, dtype="bfloat16", policy="amp")


def under_inference_mode(x: torch.Tensor) -> None:
    with torch.inference_mode(), explain():
        x.exp()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", [in_a_block, of_a_call, under_inference_mode])
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    program: Callable[[torch.Tensor], None], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: vocabulary().ops[name] for name in ("exp", "linear")}
    monkeypatch.setattr(kernel_registry, "vocabulary", lambda: SimpleNamespace(ops=few))
    program(x)  # what stays for good is registered

    def run(at: int) -> None:
        with autocast("cpu", enabled=False):  # it restores regions that were left inside
            interrupted(lambda: program(x), at)

    gc.collect()  # with a library, torch forgets the names of its kernels
    found, lines = all_that_a_record_changes(), set()
    for line in at_every_line(run):
        lines.add(line)
        assert all_that_a_record_changes() == found, line
    assert len(lines) > 45


@pytest.mark.parametrize("waits", [True, False])
def test_kernels_stay_until_no_other_thread_can_be_in_one(
    waits: bool, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, ours = sys._current_frames, {threading.get_ident()}  # pytest may have more threads
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {at: f for at, f in frames().items() if at in ours}
    )

    def they_stay() -> bool:
        return bool(kernel_registry.now.everywhere)

    def work() -> None:
        while not ended:
            time.sleep(0)

    in_a_block(x)
    assert not they_stay(), "the record is over"
    ended: list[bool] = []
    done = threading.Event()
    thread = threading.Thread(target=done.wait if waits else work)
    thread.start()
    ours.add(thread.ident or 0)
    try:
        in_a_block(x)
        assert they_stay() is not waits
    finally:
        ended.append(True)
        done.set()
        thread.join()
    in_a_block(x)
    assert not they_stay()


def test_an_op_that_was_asked_for_another_dtype_ran_in_it() -> None:
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with explain() as report, autocast("cpu", torch.bfloat16, policy="amp"):
        torch.softmax(x, -1, dtype=torch.bfloat16)
        torch.softmax(x, -1)
    assert [call.run for call in report.of("softmax")] == ["bfloat16", "float32"]
