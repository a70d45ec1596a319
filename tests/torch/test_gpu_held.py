"""On a real GPU: held casts under streams, CUDA graphs and the one call that makes many again.

Everything here is skipped without CUDA; what needs no GPU is in test_hold_casts.py.
"""

from __future__ import annotations

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


def test_stale_casts_are_made_again_in_one_call() -> None:
    model, x = net(), torch.randn(4, 512, device=DEVICE)
    with torch.no_grad(), hold_casts(model) as hold:
        with autocast(DEVICE, torch.bfloat16):
            model(x)
        torch._foreach_mul_(list(model.parameters()), 2)
        with autocast(DEVICE, torch.bfloat16), torch.profiler.profile() as profile:
            got = model(x)
        assert hold.made == 10
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
