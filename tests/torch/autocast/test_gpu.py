"""On a real GPU: the same bits as torch.autocast, and a scaler that does not make the host wait.

Everything here is skipped without CUDA; the dtypes of CUDA's ops are tested on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from polymp.torch import GradScaler, autocast, custom_bwd, custom_fwd
from tests.support.torch import training
from tests.support.torch.kernels import all_python
from tests.support.torch.models import LOW, MODELS, outcome, seen
from tests.support.torch.training import entries, spoiled
from tests.torch.scaler.test_histories import FUSED, fifty, told

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("left_as_found", "deterministic"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As deterministic as torch can be; what cannot be is found out in the test."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    yield
    cudnn.deterministic, cudnn.benchmark = before


@pytest.mark.parametrize("python", [False, True], ids=["native", "python"])
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("title", MODELS)
def test_whole_models_bit_for_bit(title: str, low: torch.dtype, python: bool) -> None:
    for way in ("train", "backward inside", "inference_mode"):
        theirs, again = (outcome(title, way, low, torch.autocast, DEVICE) for _ in range(2))
        with all_python(DEVICE) if python else contextlib.nullcontext():
            ours = outcome(title, way, low, autocast, DEVICE)
        assert ours.keys() == theirs.keys()
        for part, expected in theirs.items():
            if expected == again[part]:  # else torch does not repeat itself
                assert ours[part] == expected, (way, part)


RECURRENT = {
    "LSTM": lambda: nn.LSTM(32, 48, 2, bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(32, 48, proj_size=16),
    "GRU": lambda: nn.GRU(32, 48, 2, bias=False),
    "RNN": lambda: nn.RNN(32, 48),
}


def recurrent(
    title: str, enter: Callable[[], contextlib.AbstractContextManager[Any]]
) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    layer = RECURRENT[title]().to(DEVICE)
    x = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x.requires_grad_()
    with torch.profiler.profile() as profile:
        with enter():
            y, state = layer(x)
        y.float().square().mean().backward()
    leaves = [x, *layer.parameters()]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [y, *tree_leaves(state), *grads], [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("python", [False, True], ids=["native", "python"])
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("title", RECURRENT)
def test_recurrent_layers_keep_torchs_own_way_to_cudnn(title, low, python) -> None:
    """A warning, such as that weights lie apart, is an error here."""
    theirs, kernels_of_torch = recurrent(title, lambda: torch.autocast(DEVICE, low))
    with all_python(DEVICE) if python else contextlib.nullcontext():
        ours, kernels_of_ours = recurrent(title, lambda: autocast(DEVICE, low))
    assert "aten::_cudnn_rnn" in kernels_of_torch
    assert "aten::_cudnn_rnn" in kernels_of_ours
    assert ours[0].dtype is FP16, "torch's kernel casts to float16 in every region"
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("title", RECURRENT)
def test_recurrent_layers_that_a_policy_lowers(title, low) -> None:
    got, called = recurrent(title, lambda: autocast(DEVICE, low, policy="matmul"))
    assert got[0].dtype is low
    assert {t.dtype for t in got[-2:]} == {FP32}, "gradients of parameters"
    exact, _ = recurrent(title, contextlib.nullcontext)
    for ours, true in zip(got, exact, strict=True):
        assert (ours.float() - true).norm() <= 0.05 * true.norm()
    assert "aten::_cudnn_rnn" in called or low is BF16  # of which older versions of cuDNN have none


@pytest.mark.parametrize("rule", ["fp32", "keep"])
def test_recurrent_layers_that_a_policy_keeps_in_float32_keep_their_buffer(rule: str) -> None:
    policy = {"rules": {"class:recurrent": rule}}
    got, called = recurrent("LSTM", lambda: autocast(DEVICE, FP16, policy=policy))
    exact, _ = recurrent("LSTM", contextlib.nullcontext)
    assert "aten::_cudnn_rnn" in called
    assert all(map(torch.equal, got, exact))


def channels_last(amp: Any, low: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.GroupNorm(4, 32), nn.GELU()),
        *(nn.Conv2d(32, 32, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 8 * 8, 10)),
    ).to(DEVICE, memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32).to(DEVICE, memory_format=torch.channels_last)
    dtypes: list[Any] = []
    for module in model:
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _, inputs, y: dtypes.append((inputs[0].dtype, y.dtype, y.stride()))
            )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with amp(DEVICE, low):
            y = model(x)
        optimizer.zero_grad()
        y.float().square().mean().backward()
        optimizer.step()
    return {
        "dtypes": dtypes,
        "output": seen(y),
        "gradients": [seen(p.grad) for p in model.parameters()],
        "state": [seen(t) for t in model.state_dict().values()],
    }


@pytest.mark.parametrize("python", [False, True], ids=["native", "python"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_channels_last_bit_for_bit(low: torch.dtype, python: bool) -> None:
    theirs, again = (channels_last(torch.autocast, low) for _ in range(2))
    with all_python(DEVICE) if python else contextlib.nullcontext():
        ours = channels_last(autocast, low)
    assert ours["dtypes"] == theirs["dtypes"], "another memory format, or dtype"
    for part, expected in theirs.items():
        if expected == again[part]:  # else torch does not repeat itself
            assert ours[part] == expected, part


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril()},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 64 * 64).reshape(64, 64)},
}


def attention(backend: Any, mask: str, amp: Any, low: torch.dtype) -> dict[str, Any]:
    """Result and gradients of attention by one backend, or the error that there is no kernel."""
    dice = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 64, 128, generator=dice), torch.randn(128, 384, generator=dice) / 11
    x, w = (t.to(DEVICE).requires_grad_() for t in (x, w))
    options = {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in MASKS[mask].items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of each backend why it cannot be used
        try:
            with amp(DEVICE, low), sdpa_kernel([backend]):
                q, k, v = ((x @ w).unflatten(-1, (3, 4, 32))).permute(2, 0, 3, 1, 4)
                low_ones = nn.functional.scaled_dot_product_attention(q, k, v, **options)
                # In float32 as they come: the op is cast as a whole.
                wide = [t.float() for t in (q, k, v)]
                wide_ones = nn.functional.scaled_dot_product_attention(*wide, **options)
        except RuntimeError as error:
            return {"error": str(error).partition("\n")[0]}
    (low_ones.float().square().mean() + wide_ones.float().square().mean()).backward()
    return {
        "dtypes": (low_ones.dtype, wide_ones.dtype),
        "results": [seen(low_ones), seen(wide_ones)],
        "gradients": [seen(x.grad), seen(w.grad)],
    }


BACKENDS = {
    name: getattr(SDPBackend, name)
    for name in ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
}


@pytest.mark.parametrize("python", [False, True], ids=["native", "python"])
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_of_attention_bit_for_bit(backend, mask, low, python) -> None:
    run = functools.partial(attention, BACKENDS[backend], mask)
    theirs, again = run(torch.autocast, low), run(torch.autocast, low)
    with all_python(DEVICE) if python else contextlib.nullcontext():
        ours = run(autocast, low)
    assert ours.keys() == theirs.keys(), (ours.get("error"), theirs.get("error"))
    assert ours.get("dtypes") == theirs.get("dtypes")
    for part, expected in theirs.items():
        if expected == again[part]:
            assert ours[part] == expected, part


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backend_of_attention_ran_for_some_mask(backend: str) -> None:
    """Else the test above compared errors alone."""
    found = [attention(BACKENDS[backend], mask, torch.autocast, FP16) for mask in MASKS]
    if all("error" in each for each in found):
        pytest.skip(f"this GPU or this torch has no {backend}: {found[0]['error']}")


def test_backward_of_a_custom_function_in_autograd_s_own_thread() -> None:
    seen: list[Any] = []

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=DEVICE)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return torch.mm(a, b)

        @staticmethod
        @custom_bwd(device_type=DEVICE)
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            seen.append((torch.get_autocast_dtype(DEVICE), torch.mm(g, b.mT).dtype))
            return torch.mm(g, b.mT), torch.mm(a.mT, g)

    a, b = (torch.ones(4, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    with autocast(DEVICE, dtype=BF16):
        y = Product.apply(a, b)
    y.sum().backward()
    assert seen == [(BF16, BF16)]


def train(scaler_class: Any, amp: Any, fused: bool, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler, log = scaler_class(DEVICE, init_scale=2.0**10, growth_interval=2), []
    for step in range(6):
        optimizer.zero_grad()
        with amp(DEVICE, dtype=dtype):
            loss = model(torch.ones(3, 8, device=DEVICE) * step).float().square().mean()
        scaler.scale(spoiled(loss, float("inf") if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append((entries(scaler.state_dict()), [p.tolist() for p in model.parameters()]))
    return log


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_training_with_the_scaler_bit_for_bit(dtype: torch.dtype, fused: bool) -> None:
    ours = train(GradScaler, autocast, fused, dtype)
    assert ours == train(torch.amp.GradScaler, torch.autocast, fused, dtype)
    assert [state["scale"] for state, _ in ours] == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert ours[2][1] == ours[3][1]
    assert ours[3][1] != ours[4][1]


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_optimizers_wait_once() -> None:
    """That the mode above sees a wait, and where the only one is."""
    model, x = nn.Linear(8, 4).to(DEVICE), torch.ones(3, 8, device=DEVICE)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler(DEVICE)
    with autocast(DEVICE, dtype=FP16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    with no_sync():
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="synchronizing"):
            scaler.step(optimizer)
        scaler.update()


# --- the scaler, more than a few steps at a time -------------------------------------------------

INF, NAN = float("inf"), float("nan")
STEPS = 60
SPOILS = {7: 1e38, 8: INF, 9: NAN, 30: INF, 51: 1e38}  # what the input is multiplied by


Loop = functools.partial(training.Loop, device=DEVICE)
MAKES = {
    "SGD, fused": lambda w: torch.optim.SGD(w, lr=0.1, fused=True),
    "Adam, fused": lambda w: torch.optim.Adam(w, 0.01, eps=1e-3, fused=True, capturable=True),
    "AdamW, fused": lambda w: torch.optim.AdamW(w, 0.01, eps=1e-3, fused=True, capturable=True),
}


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_sixty_steps_never_wait(name: str, dtype: torch.dtype) -> None:
    """Of which four and more send the state to the host, where it is read once it is there."""
    options = {"allow_fp16": True} if dtype is FP16 else {"on_stuck": "raise"}
    loop = Loop(MAKES[name], dtype=dtype, **options)
    spoils = {step: torch.tensor(value, device=DEVICE) for step, value in SPOILS.items()}
    one = torch.ones((), device=DEVICE)
    for _ in range(2):  # states are made, libraries are loaded
        loop.iterate()
    with no_sync():
        for step in range(STEPS):
            loop.spoil.copy_(spoils.get(step, one))
            loop.iterate()
            assert loop.scaler.step_skipped(loop.optimizer).device.type == DEVICE
    state, _ = loop.noted()
    assert state["skipped"] == len(SPOILS)
    assert all(w.isfinite().all() for w in loop.weights)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("factor", [2.0, 1.5])
@pytest.mark.parametrize("kind", sorted(set(FUSED) - {"adagrad"}))  # which is fused on CPUs only
def test_fifty_fused_steps_are_torch_s(kind: str, factor: float, dtype: torch.dtype) -> None:
    """Also in float16, also with a scale that is no power of two, whatever the host knows."""
    run: dict[str, Any] = {"kind": kind, "dtype": dtype, "seed": 5, "device": DEVICE}
    run |= {"init_scale": 1000.0 * factor, "growth_factor": factor, "growth_interval": 4}
    expected = fifty(torch.amp.GradScaler, **run)
    assert fifty(torch.amp.GradScaler, **run) == expected, "torch does not repeat itself"
    for knows in (None, True, False):
        assert fifty(told(knows), **run) == expected


@contextlib.contextmanager
def on_a_side_stream() -> Iterator[None]:
    """Where what is captured next has to be warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def in_a_graph(function: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


ITERATE = [("iterate", name) for name in MAKES]
SCALE = [("forward_and_backward", name) for name in ("SGD, host", *MAKES)]


@pytest.mark.parametrize(("captured", "name"), ITERATE + SCALE)
def test_a_whole_iteration_and_a_scaled_backward_in_a_graph(captured: str, name: str) -> None:
    """Replayed 60 times, with overflows and lost losses that replays tell apart: as eager code."""
    makes = {"SGD, host": lambda w: torch.optim.SGD(w, lr=0.1), **MAKES}

    def run(graphed: bool) -> list[Any]:
        loop, seen = Loop(makes[name]), []
        with on_a_side_stream():
            for _ in range(3):
                loop.iterate()
        # A capture runs nothing: both go on from the same state.
        part = getattr(loop, captured)
        go = in_a_graph(part) if graphed else part
        for step in range(STEPS):
            loop.spoil.fill_(SPOILS.get(step, 1.0))
            go()
            if captured != "iterate":
                loop.finish()
            seen.append(loop.noted())
        return seen

    eager, replayed = run(False), run(True)
    assert [state for state, _ in replayed] == [state for state, _ in eager]
    assert replayed == eager
    last = eager[-1][0]
    assert (last["skipped"], eager[9][0]["skips"], eager[9][0]["spoiled"]) == (5, 3, 2)


def test_the_first_scale_can_be_captured() -> None:
    scaler, x = GradScaler(DEVICE, init_scale=8.0), torch.ones((), device=DEVICE)
    seen = []
    replay = in_a_graph(lambda: seen.append(scaler.scale(x)))
    x.fill_(3.0)
    replay()
    assert seen[0].item() == 24.0


def test_an_update_captured_after_steps_that_the_host_took() -> None:
    """The host's knowledge of the state is no longer valid after replays."""
    loop = Loop(lambda w: torch.optim.SGD(w, lr=0.1), growth_factor=2.0)
    with on_a_side_stream():
        for _ in range(3):
            loop.iterate()
    assert loop.scaler._recall() is not None
    loop.optimizer = torch.optim.SGD(loop.weights, lr=0.1, fused=True)
    with on_a_side_stream():
        for _ in range(2):
            loop.iterate()
    assert loop.scaler.get_scale() == 2000.0
    replay = in_a_graph(loop.iterate)
    for spoil, scale in ((1.0, 2000.0), (1e38, 1000.0), (1e38, 500.0), (NAN, 250.0)):
        loop.spoil.fill_(spoil)
        replay()
        assert loop.scaler.get_scale() == scale
        assert loop.scaler._get_growth_tracker() == (1 if spoil == 1.0 else 0)


@pytest.mark.filterwarnings("ignore")  # torch's own modules, which its compiler imports
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_scaler_that_is_stuck_counts_its_skips(mode: str) -> None:
    """No Python runs with the updates of a graph, and so there is no StuckError."""
    torch._dynamo.reset()
    loop = Loop(lambda w: torch.optim.SGD(w, lr=0.1), on_stuck="raise", stuck_after=20)
    loop.iterate()
    finish = torch.compile(loop.finish, mode=mode)

    def go(steps: int) -> None:
        for _ in range(steps):
            loop.forward_and_backward()
            finish()

    go(5)
    before = [w.tolist() for w in loop.weights]
    loop.spoil.fill_(1e38)
    go(30)
    assert [w.tolist() for w in loop.weights] == before
    assert int(loop.scaler.skipped_steps) == loop.scaler.state_dict()["skips"] == 30
