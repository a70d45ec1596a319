"""Low weights on two ranks of FSDP2 and of DDP, against one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import polymp
from polymp.torch import autocast, low_weights
from tests.support.torch.low_training import batch, loss_of, made
from tests.support.torch.models import seen
from tests.support.torch.sharded_models import BATCH, CUTS, Cut, Toy, data, named, whole

MODES = ("master", "split", "stochastic")
STEPS, SAVED = 6, 3


def optimizer_of(model: nn.Module, mode: str) -> Any:
    return low_weights(torch.optim.AdamW(model.parameters(), lr=0.01), mode)


def go(
    model: nn.Module, optimizer: Any, share: int, shares: int, first: int = 0, last: int = STEPS
) -> None:
    for step in range(first, last):
        x, t = (part.bfloat16().chunk(shares)[share] for part in data(step))
        optimizer.zero_grad()
        model(x, t).backward()
        optimizer.step()


def notes(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The bits of the whole weights and of what stands beside them, as a checkpoint has them."""
    state = optimizer.state_dict()["state"]
    found = {}
    for number, (name, p) in enumerate(named(model).items()):
        own = state[number]
        tensors = [p, *(own[key] for key in ("beside", "exp_avg") if key in own)]
        found[name] = [seen(whole(t)) for t in tensors]
    return found


def alone(mode: str) -> dict[str, Any]:
    model = Toy()
    optimizer = optimizer_of(model, mode)
    go(model, optimizer, 0, 1)
    return notes(model, optimizer)


def fsdp2(mode: str) -> tuple[Cut, Any]:
    """Also with a function in `keep`: it is refused before the model runs, and nothing changes."""
    for kind, name in (("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPToy")):
        cut = CUTS[kind]()
        with pytest.raises(ValueError, match=f"the function runs a {name}, before low_weights"):
            low_weights(adamw(cut.model), keep=partial(cut.model, *data(0)))
    return cut, optimizer_of(cut.model, mode)


def ddp(mode: str) -> dict[str, Any]:
    model = Toy()
    optimizer = optimizer_of(model, mode)
    wrapped = nn.parallel.DistributedDataParallel(model)
    go(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    return notes(model, optimizer)


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    assert BATCH % ranks == 0
    found: dict[Any, Any] = {}
    for mode in MODES:
        cut, optimizer = fsdp2(mode)
        go(cut.model, optimizer, cut.share, cut.shares)
        found["fsdp2", mode] = notes(cut.model, optimizer)
        found["ddp", mode] = ddp(mode)
        found["resumed", mode] = resumed(mode, folder)
    return found


def resumed(mode: str, folder: Path) -> dict[str, Any]:
    """Save after some steps, load in a fresh run, and go on."""
    where = folder / f"checkpoint-{mode}-{dist.get_world_size()}"
    cut, optimizer = fsdp2(mode)
    go(cut.model, optimizer, cut.share, cut.shares, last=SAVED)
    model, state = get_state_dict(cut.model, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=where)
    cut, optimizer = fsdp2(mode)
    model, state = get_state_dict(cut.model, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=where)
    set_state_dict(cut.model, optimizer, model_state_dict=model, optim_state_dict=state)
    go(cut.model, optimizer, cut.share, cut.shares, SAVED)
    return notes(cut.model, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["fsdp2", "ddp", "resumed"])
def test_two_ranks_have_the_bits_of_one_process(how, mode, ranks) -> None:
    """Weights, what is beside them and Adam's state; "resumed": from a checkpoint of the ranks."""
    expected = alone(mode)
    for notes in ranks:
        assert notes[how, mode] == expected


def test_the_comparison_tells_modes_apart(ranks: list[dict[Any, Any]], tmp_path: Path) -> None:
    assert ranks[0]["fsdp2", "stochastic"] != ranks[0]["fsdp2", "split"]


# --- The parameters that stay float32 if `keep` of `low_weights` is a function that runs the model


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def kept(model: nn.Module, found: Any) -> dict[str, str]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: why for p, why in found.items()}


def test_a_function_keeps_what_it_reads_in_float32() -> None:
    model = made("tokens")
    forward = Mock(side_effect=lambda: loss_of("tokens", model, 0))
    optimizer = low_weights(adamw(model), keep=forward)
    found = kept(model, optimizer.kept)
    assert {"embedding.weight", "norm.weight", "last.bias"} <= set(found)
    assert found["norm.weight"].startswith("read in float32 by aten.")
    assert len(optimizer.low) == len(list(model.parameters())) - len(found) > 0
    assert {p.dtype for p in optimizer.kept} == {torch.float32}
    forward.assert_called_once_with()
    again = made("tokens")
    twins = dict(zip(model.parameters(), again.parameters(), strict=True))
    reasons = {twins[p]: why for p, why in optimizer.kept.items()}
    assert low_weights(adamw(again), keep=reasons).kept.keys() == reasons.keys()


def test_the_policy_of_the_region_decides() -> None:
    """Where a policy runs the norms low, their weights are stored low, too."""
    lowered = polymp.policy("torch-cpu").override(lower=["layer_norm"])

    def found(policy: Any) -> set[str]:
        model, tokens = made("tokens"), batch("tokens", 0)[0]
        forward = autocast("cpu", torch.bfloat16, policy=policy)(partial(model, tokens))
        return set(kept(model, low_weights(adamw(model), keep=forward).kept))

    assert found("torch-cpu") == {
        "embedding.weight", "norm.weight", "norm.bias", "last.weight", "last.bias",
    }  # fmt: skip
    assert found(lowered) == {"embedding.weight"}


def test_a_function_stands_beside_parameters_and_modules() -> None:
    model = made("tokens")
    optimizer = low_weights(
        adamw(model), keep=[lambda: loss_of("tokens", model, 0), model.head, model.out.bias]
    )
    found = kept(model, optimizer.kept)
    assert {name: found[name] for name in ("head.weight", "head.bias", "out.bias")} == {
        "head.weight": "is in keep=", "head.bias": "is in keep=", "out.bias": "is in keep=",
    }  # fmt: skip
    assert found["norm.weight"].startswith("read in float32 by aten.")
    loss_of("tokens", model, 0).backward()
    optimizer.step()
    assert model.head.weight.dtype is torch.float32
    assert model.qkv.weight.dtype is torch.bfloat16
