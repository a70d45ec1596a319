"""`hold_casts` in compiled code: its graphs read held casts, and no write is missed.

`backend="eager"` runs the ops as they are, so that the results must have the bits of eager code
without a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.autocast import held_casts
from polymp.backends.torch.weights import held_modules
from polymp.torch import autocast, hold_casts
from tests.support.torch.held_histories import bits

pytestmark = pytest.mark.usefixtures("left_as_found", "fresh_dynamo")
BF16 = torch.bfloat16


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Conv1d(2, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16, 8, bias=False),
        nn.GELU(),
        nn.Linear(8, 8),
    )


def used(model: Any, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[Any]:
    """Calls with all that may happen between them: what they gave."""
    found: list[torch.Tensor] = []
    last = model[5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def again(region: Any) -> None:
        with region:
            found.append(call(x))

    with torch.no_grad():
        again(autocast("cpu"))
        again(autocast("cpu"))
        last.weight.mul_(2)  # outside of regions
        again(autocast("cpu"))
        with autocast("cpu"):
            found.append(call(x))
            last.weight.mul_(2)  # inside
            found.append(call(x))
            model[3].weight[0].zero_()  # through a view
            found.append(call(x))
        last.requires_grad_(False)
        with autocast("cpu"):
            found.append(call(x))
            last.weight.mul_(2)  # frozen
            found.append(call(x))
        last.weight.data = last.weight.data * 0.5
        again(autocast("cpu"))
        again(autocast("cpu", torch.float16))
        last.bias.add_(1)
        again(torch.autocast("cpu", BF16))
        last.weight.mul_(2)
        again(torch.autocast("cpu", BF16))
        again(autocast("cpu", enabled=False))
        again(contextlib.nullcontext())
    last.requires_grad_(True)
    for _ in range(2):
        with autocast("cpu"):
            loss = call(x).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters()]
    with torch.no_grad():
        again(autocast("cpu"))
    return [bits(t) for t in found]


def played(x: torch.Tensor, held: bool) -> list[Any]:
    torch._dynamo.reset()
    model = layers()
    call = torch.compile(model, backend="eager", fullgraph=True) if held else model
    with hold_casts(model) if held else contextlib.nullcontext():
        return used(model, call, x)


def test_no_write_is_missed(x: torch.Tensor) -> None:
    assert played(x, True) == played(x, False)


def test_a_missed_write_is_noticed(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "written", lambda _: None)
    assert played(x, True) != played(x, False)
    monkeypatch.undo()
    monkeypatch.setattr(held_modules, "_looked_up", _first_of(held_modules._looked_up))
    assert played(x, True) != played(x, False)


def _first_of(look_up: Any) -> Any:
    known: dict[Any, Any] = {}

    def looked_up(t: torch.Tensor, dtype: torch.dtype, device: str) -> Any:
        return known.setdefault((id(t), dtype), look_up(t, dtype, device))

    return looked_up


def test_graphs_have_no_casts_of_weights(x: torch.Tensor) -> None:
    """One in the region around the call; none is held where the graph opens its own."""
    from torch._dynamo.backends.common import aot_autograd

    casts: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        casts.append(sum("_to_copy" in str(node.target) for node in graph.graph.nodes))
        return graph

    model = layers()

    def in_a_region(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu"):
            return model(x)  # type: ignore[no-any-return]

    with torch.no_grad(), hold_casts(model):
        for call in (model, in_a_region):
            fast = torch.compile(call, backend=aot_autograd(fw_compiler=count), fullgraph=True)
            for _ in range(3):
                with autocast("cpu") if call is model else contextlib.nullcontext():
                    fast(x)
    assert casts == [1, 6]
