"""On a real GPU: held casts under streams, CUDA graphs and the one call that makes many again.

Everything here is skipped without CUDA; what needs no GPU is in test_hold_casts.py.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from polymp.torch import autocast, hold_casts

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("left_as_found"),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512, bias=False), nn.Linear(512, 8)]
    return nn.Sequential(*layers).to(DEVICE)


@pytest.mark.parametrize("fused", [False, True])
def test_accumulation_bit_for_bit(fused: bool) -> None:
    held = net()
    plain = copy.deepcopy(held)
    for model in (held, plain):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        torch.manual_seed(1)
        with hold_casts(held):  # around the other one it holds nothing
            for _ in range(3):
                for _ in range(4):
                    with autocast(DEVICE, torch.bfloat16):
                        loss = model(torch.randn(16, 512, device=DEVICE)).float().square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(held.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_stale_casts_are_made_again_in_one_call(layout: str) -> None:
    model, x = net(), torch.randn(4, 512, device=DEVICE)
    if layout == "channels last":
        x = torch.randn(2, 64, 16, 16, device=DEVICE).to(memory_format=torch.channels_last)
        model = convolutions()
    with torch.no_grad(), hold_casts(model) as hold:
        with autocast(DEVICE, torch.bfloat16):
            model(x)
        torch._foreach_mul_(list(model.parameters()), 2)
        with autocast(DEVICE, torch.bfloat16), torch.profiler.profile() as profile:
            got = model(x)
        assert hold.made == 2 * len(list(model.parameters()))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::_foreach_copy_") == 1
    with torch.no_grad(), autocast(DEVICE, torch.bfloat16):
        assert torch.equal(model(x), got)


def test_another_stream_makes_casts_of_its_own() -> None:
    model, x = net(), torch.randn(4, 512, device=DEVICE)
    with torch.no_grad(), hold_casts(model) as hold, autocast(DEVICE, torch.bfloat16):
        first = model(x)
        made = hold.made
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            second = model(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert hold.made == 2 * made
        assert torch.equal(first, second)


def test_a_cuda_graph_casts_for_itself() -> None:
    model, x = net(), torch.randn(4, 512, device=DEVICE)
    with torch.no_grad(), hold_casts(model), autocast(DEVICE, torch.bfloat16):
        model(x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph), autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            captured = model(x)
        torch._foreach_mul_(list(model.parameters()), 2)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, model(x))


def test_a_training_loop_does_not_wait() -> None:
    model, x = net(), torch.randn(16, 512, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with hold_casts(model):
        for turn in range(3):
            torch.cuda.set_sync_debug_mode("error" if turn else "default")
            try:
                with autocast(DEVICE, torch.bfloat16):
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


@pytest.mark.parametrize("part", [7, 4, 1])
def test_casts_made_again_in_one_call_keep_no_memory_of_older_ones(part: int) -> None:
    """After a step of some layers; the allocator counts what the casts' own count does not see."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)]).to(DEVICE)
    x = torch.randn(4, 512, device=DEVICE)
    one = 512 * 512 * 2

    def forward() -> None:
        with torch.no_grad(), autocast(DEVICE, torch.bfloat16):
            model(x)

    forward()  # libraries get their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with hold_casts(model) as hold:
        forward()
        for at in range(3):
            torch._foreach_mul_([layer.weight.detach() for layer in model[:part]], 1.5)
            forward()
            assert hold.made == 8 + (at + 1) * part
            assert hold.bytes == 8 * one
            assert torch.cuda.memory_allocated() - before <= 8 * one + 2**16
    assert torch.cuda.memory_allocated() - before <= 2**16


def two_streams(model: nn.Module, held: bool) -> list[torch.Tensor]:
    """Gradients of two losses, of which one is computed, and differentiated, on another stream.

    The weights change between the first forward and the backwards: casts that a backward waits for
    are old, and those of the second forward are new.
    """
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    weights = list(model.parameters())
    with hold_casts(model) if held else contextlib.nullcontext():
        for _ in range(4):
            side.wait_stream(main)
            with torch.cuda.stream(side), autocast(DEVICE, torch.bfloat16):
                there = model(x).float().square().mean()
            main.wait_stream(side)  # its casts are made before the weights change
            with torch.no_grad():
                torch._foreach_mul_(weights, 1.01)
            with autocast(DEVICE, torch.bfloat16):
                here = model(x * 2).float().square().mean()
            here.backward()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)  # until then the main stream could take memory over
                there.backward()
            with autocast(DEVICE, torch.bfloat16), torch.no_grad():
                model(x)
            main.wait_stream(side)
    torch.cuda.synchronize()
    return [p.grad for p in weights if p.grad is not None]


# torch's own: the two losses meet in the gradients of the weights.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_backward_on_a_second_stream_bit_for_bit() -> None:
    held, plain = net(), net()
    ours, theirs = two_streams(held, True), two_streams(plain, False)
    assert len(ours) == len(theirs) == len(list(held.parameters()))
    assert all(map(torch.equal, ours, theirs))


def test_recurrent_layers_are_left_to_cudnn() -> None:
    """Their weights are cast into one buffer by torch's kernel; a block changes nothing."""
    found = []
    for held in (True, False):
        torch.manual_seed(0)
        layer = nn.GRU(64, 128, 2).to(DEVICE)
        x = torch.randn(5, 4, 64, device=DEVICE)
        with hold_casts(layer) if held else contextlib.nullcontext():
            for _ in range(3):
                with autocast(DEVICE, torch.float16):
                    y, _ = layer(x)
                y.float().square().mean().backward()
        found.append([y, *(p.grad for p in layer.parameters())])
    assert all(map(torch.equal, *found))
