"""`hold_casts`: what is cast and what is not, who may use it, what it keeps, and what it says.

That no history of a weight changes a bit is in test_hold_histories.py.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.autocast import held_casts
from polymp.torch import autocast, bake, hold_casts, pin, scoped
from tests.support import forks
from tests.support.torch.held_models import Net, loss_of
from tests.support.torch.held_ranks import CUTS
from tests.support.torch.ranks import launch
from tests.support.torch.version_changes import VERSION

pytestmark = pytest.mark.usefixtures("left_as_found", "nodes")
BF16 = torch.bfloat16


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "SMALL", 0)


@pytest.fixture
def model() -> Net:
    return Net()


def casts_in(body: Callable[[], Any], shapes: tuple[Any, ...] = ([8, 8], [8])) -> int:
    """How many float32 tensors of such shapes were copied to a low dtype, as the profiler saw."""
    with torch.profiler.profile(record_shapes=True) as profile:
        body()
    return sum(e.name == "aten::_to_copy" and e.input_shapes[0] in shapes for e in profile.events())


def blocks(model: nn.Module, held: bool) -> Any:
    return hold_casts(model) if held else contextlib.nullcontext()


# What is cast, and how often.


@pytest.mark.parametrize(
    "kind", ["ours", "torch", "amp", "lean", "matmul", "no_grad", "inference", "decorated"]
)
def test_weights_are_cast_once(model: Net, x: torch.Tensor, kind: str) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "torch": torch.no_grad}
    policy = kind if kind in ("amp", "lean", "matmul") else None

    def forward() -> torch.Tensor:
        region: Any = autocast("cpu", policy=policy)
        if kind == "torch":
            region = torch.autocast("cpu", BF16)
        with modes.get(kind, contextlib.nullcontext)():
            if kind == "decorated":
                return region(model)(x)  # type: ignore[no-any-return]
            with region:
                return model(x)

    plain, every = forward(), casts_in(forward)
    assert every == 6
    with hold_casts(model) as hold:
        assert casts_in(forward) == 6 == hold.made
        assert casts_in(forward) == 0 == hold.made - 6
        assert hold.saved == 6
        assert torch.equal(forward(), plain)
        assert hold.bytes == 2 * (4 * 64 + 2 * 8)
    assert casts_in(forward) == every


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_step_what_was_trained_is_cast_once(
    model: Net, x: torch.Tensor, fused: bool
) -> None:
    optimizer = torch.optim.AdamW([*model.a.parameters(), *model.b.parameters()], fused=fused)
    with hold_casts(model) as hold:
        for step in range(3):
            for part in range(3):
                made = hold.made
                assert casts_in(lambda: loss_of(model, x)) == hold.made - made
                assert hold.made - made == (0 if part else 3 if step else 6)
                loss_of(model, x).backward()
            optimizer.step()


def test_the_count_can_fail(model: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "find", lambda t, dtype: None)
    with hold_casts(model) as hold:
        assert casts_in(lambda: loss_of(model, x)) == casts_in(lambda: loss_of(model, x)) == 6
        assert (hold.made, hold.saved) == (0, 0)


def test_small_weights_are_cast_again_where_gradients_are_wanted(
    model: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_casts, "SMALL", 65)
    with hold_casts(model) as hold:
        loss_of(model, x)
        assert casts_in(lambda: loss_of(model, x)) == 3
        with torch.no_grad():
            loss_of(model, x)
            assert casts_in(lambda: loss_of(model, x)) == 0
        assert hold.made == 6


# With the rest of torch: numbers and gradients are those without a block.


def double_backward(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    params = [*model.a.parameters(), *model.b.parameters()]
    grads = torch.autograd.grad(loss_of(model, x), params, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in grads), params))


def batched_backward(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu"):
        y = model(x)
    ways = torch.eye(4, dtype=y.dtype)[:, :, None].expand(4, 4, 8)
    return list(torch.autograd.grad(y, [model.b.weight], ways, is_grads_batched=True))


def functional(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    params = dict(model.named_parameters())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu"):
            return torch.func.functional_call(model, params, (x,)).float().square().mean()  # type: ignore[no-any-return]

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x[:, None])
    return [*torch.func.grad(loss)(params, x).values(), *each.values()]


def vmap(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu"):
        return [torch.func.vmap(model)(x)]


def forward_ad(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autograd.forward_ad.dual_level(), autocast("cpu"):
        y = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        y, tangent = torch.autograd.forward_ad.unpack_dual(y)
        return [y.detach().clone(), tangent.detach().clone()]


def compiled(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = loss_of(fast, x)
    loss.backward()
    with torch.no_grad():
        model.b.weight.mul_(2)
        return [loss, loss_of(fast, x), *(p.grad for p in model.parameters() if p.grad is not None)]


def exported(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad(), autocast("cpu"):
        graph = torch.fx.experimental.proxy_tensor.make_fx(model)(x)  # type: ignore[attr-defined]
        baked = bake(model, (x,))
    assert BF16 not in {t.dtype for t in [*graph.parameters(), *graph.buffers()]}
    assert BF16 not in {t.dtype for t in baked.state_dict.values()}
    return [graph(x), baked.module()(x)]


def copied(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.b.weight.mul_(2)
    return [loss_of(twin, x) for twin in twins]


def scoped_regions(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    handle = scoped(model, "lean")
    try:
        with torch.autocast("cpu", BF16):
            y = model(x)
        y.float().sum().backward()
        return [y, loss_of(model, x), *(p.grad for p in model.b.parameters() if p.grad is not None)]
    finally:
        handle.remove()


def pinned(model: Net, x: torch.Tensor) -> list[torch.Tensor]:
    pin(model.a, torch.float32)
    return [loss_of(model, x)]


@pytest.mark.parametrize(
    "way",
    [
        double_backward,
        batched_backward,
        functional,
        vmap,
        forward_ad,
        compiled,
        exported,
        copied,
        scoped_regions,
        pinned,
    ],
    ids=lambda way: way.__name__,
)
@pytest.mark.filterwarnings("ignore:.*(compile|export|deprecated|dynamo|LeafSpec).*")
def test_the_rest_of_torch_sees_no_block(way: Any, x: torch.Tensor) -> None:
    found = []
    for held in (False, True):
        model = Net()
        with blocks(model, held):
            if held:
                loss_of(model, x)  # what is held now may not go into any program
            found.append([t.detach().clone() for t in way(model, x)])
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.*(Profiler|torch.jit|deprecated).*")
def test_a_compiled_fused_step_leaves_no_stale_cast(x: torch.Tensor) -> None:
    """Compiled before the block, and again in it."""
    found = []
    for held in (False, True):
        torch._dynamo.reset()
        model, losses = Net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = torch.compile(optimizer.step, backend="eager")
        with contextlib.ExitStack() as stack:
            for at in range(3):
                if at == 1:
                    stack.enter_context(blocks(model, held))
                losses.append(loss_of(model, x))
                losses[-1].backward()
                step()
        losses.append(loss_of(model, x))
        found.append([loss.detach().item() for loss in losses])
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
    torch._dynamo.reset()


def test_torch_s_regions_alone() -> None:
    """Steps are noticed though no region of ours was ever entered."""
    program = (
        "import torch\n"
        "from polymp.torch import hold_casts\n"
        "from polymp.backends.torch.autocast import held_casts, kernel_registry\n"
        "held_casts.SMALL = 0\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)\n"
        "seen = []\n"
        "with hold_casts(model):\n"
        "    for _ in range(2):\n"
        "        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):\n"
        "            seen.append(model(torch.ones(2, 8)))\n"
        "        model(torch.ones(2, 8)).sum().backward()\n"
        "        optimizer.step()\n"
        "    assert kernel_registry.installed('cpu') == ()\n"
        "assert kernel_registry.installed('cpu') == (), kernel_registry.installed('cpu')\n"
        "assert not torch.equal(*seen)\n"
    )
    forks.program(program, strict=True)


def test_models_that_torch_cuts_up(tmp_path: Path) -> None:
    for notes in launch("tests.support.torch.held_ranks", 2, tmp_path):
        for how in CUTS:
            for late in (False, True):
                held, plain = (notes[how, late, held] for held in (True, False))
                assert len(plain) >= 15
                assert held == plain, (how, late)
        # Buffers that DDP sends are held, which is wrong where it does not show that it wrote them.
        assert (notes["fault"] != notes["ddp", False, False]) is notes["sends unseen"]
        assert notes["sends unseen"] or VERSION < (2, 13)


def test_torch_jit_trace_records_the_casts() -> None:
    model, x = nn.Linear(8, 8).requires_grad_(False), torch.randn(2, 8)
    with torch.no_grad(), hold_casts(model), autocast("cpu", BF16, cache_enabled=False):
        model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, x, check_trace=False)
        before = traced(x)
        model.weight.mul_(2)
        assert not torch.equal(traced(x), before)


# Casts that are made again in one call, as on GPUs.


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "TOGETHER", {"cpu"})


def memory_of(hold: hold_casts) -> int:
    """Bytes of all memory that the held casts keep."""
    lows = [held.low for weight in hold._held for held in weight.casts.values()]
    storages = {low.untyped_storage()._cdata: low.untyped_storage() for low in lows}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.usefixtures("together")
def test_casts_that_are_made_together_keep_no_memory_of_older_ones() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    x = torch.ones(2, 64)
    with torch.no_grad(), hold_casts(model) as hold, autocast("cpu"):
        for some in (model, model[1:], model[:1], model[3:5]):
            model(x)
            assert memory_of(hold) == hold.bytes == 2 * 8 * (64 * 64 + 64)
            for p in some.parameters():
                p.mul_(2)
        with torch.profiler.profile() as profile:
            model(x)
        assert memory_of(hold) == hold.bytes == 2 * 8 * (64 * 64 + 64)
        assert hold.made == 16 + 16 + 14 + 2 + 4
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_foreach_copy_"] == 1


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("dims", [2, 3])
def test_weights_of_channels_last_are_cast_together_too(dims: int) -> None:
    kinds = {2: (nn.Conv2d, torch.channels_last), 3: (nn.Conv3d, torch.channels_last_3d)}
    conv, memory_format = kinds[dims]
    model = nn.Sequential(*[conv(4, 4, 3, padding=1) for _ in range(3)])
    model = model.to(memory_format=memory_format)
    x = torch.randn(1, 4, *[6] * dims).to(memory_format=memory_format)
    with torch.no_grad(), hold_casts(model) as hold:
        with autocast("cpu"):
            model(x)
            for p in model.parameters():
                p.mul_(2)
        with autocast("cpu"), torch.profiler.profile() as profile:
            got = model(x)
        for weight in hold._held:
            (held,) = weight.casts.values()
            assert held.low.stride() == weight.tensor.to(BF16).stride()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_foreach_copy_"] == 1
    assert calls["aten::_to_copy"] == 1, "the input alone"
    with torch.no_grad(), autocast("cpu"):
        assert torch.equal(got, model(x))
