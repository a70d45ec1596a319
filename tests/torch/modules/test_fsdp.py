"""`polymp.torch.fsdp`: what is sent in which dtype, and that nothing else changes.

Two ranks note what they send, and loss and gradients of their batch. On one rank a sharded model
has to give the bits of a region without FSDP.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_s_fully_shard

import polymp
from polymp.backends.torch.diagnostics import perturb
from polymp.diagnostics import rounding
from polymp.torch import audit, autocast, explain
from polymp.torch.fsdp import fully_shard
from tests.support.torch.each_op import EachOp
from tests.support.torch.ranks import launch

BF16, FP32 = torch.bfloat16, torch.float32
LOW = MixedPrecisionPolicy(BF16, FP32, None, cast_forward_inputs=False)
HEAD_FULL = polymp.policy("amp").override(scopes={"head": {"all": "fp32"}})


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        block = partial(nn.TransformerEncoderLayer, 16, 2, 32, 0.0, norm_first=True)
        self.blocks = nn.ModuleList(block(batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied)


def data() -> torch.Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(1))


def shard(model: Model, policy: Any, how: Callable[..., Any] = fully_shard) -> Model:
    for i, block in enumerate(model.blocks):
        how(block, policy, path=f"blocks.{i}")
    return how(model, policy)


def by_torch(module: nn.Module, policy: Any, path: str = "") -> Any:
    return torch_s_fully_shard(module, mp_policy=LOW)


def loss_of(call: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    logits = call(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module, ids: torch.Tensor, policy: Any) -> torch.Tensor:
    with autocast("cpu", BF16, policy=policy):
        loss = loss_of(model, ids)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def sent(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[str, str] | None:
    """The collective that an op is, if it is one, and the dtype of what ranks send by it."""
    if func.namespace != "c10d":
        return None
    of = next(t for t in torch.utils._pytree.tree_leaves(args) if hasattr(t, "dtype"))
    return func.overloadpacket.__name__, str(of.dtype).removeprefix("torch.")


def main(rank: int, ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Notes of a model sharded by polymp's `fully_shard`, and by torch's with polymp's policy."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    ways: dict[str, Callable[..., Any]] = {"polymp": fully_shard, "torch": by_torch}
    return {name: noted(how, rank, ranks) for name, how in ways.items()}


def noted(how: Callable[..., Any], rank: int, ranks: int) -> dict[str, Any]:
    model, mine = shard(made(), "amp", how), data()[rank::ranks]
    loss = step(model, mine, "amp")
    dist.all_reduce(loss)
    notes = {
        "loss": (loss / ranks).numpy(),
        "gradients": [g.numpy() for g in gradients(model)],
    }
    with EachOp(sent) as ops:
        step(model, mine, "amp")
    with explain(model=model) as report:
        step(model, mine, "amp")
    rows = [(c.op, c.module, c.inputs) for c in report if c.direction == "forward"]
    with audit(model) as found:
        step(model, mine, "amp")
    return notes | {"sent": {*ops.seen}, "rows": rows, "audited": {m.op for m in found.results}}


# FSDP's, of outputs that a dropped alias would spoil; nothing is written in place here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.torch.modules.test_fsdp", 2, tmp_path_factory.mktemp("ranks"))


SENT = {"polymp": {"bfloat16", "float32"}, "torch": {"bfloat16"}}  # by whose `fully_shard`


@pytest.mark.parametrize("whose", SENT)
def test_weights_are_gathered_low_and_gradients_added_up_in_float32(notes: Any, whose: str) -> None:
    """By torch's `fully_shard` all weights are, by polymp's those of linear layers."""
    for of_rank in notes:
        sent = of_rank[whose]["sent"]
        gathers = {dtype for name, dtype in sent if "allgather" in name}
        reduces = {dtype for name, dtype in sent if "reduce_scatter" in name}
        assert (gathers, reduces) == (SENT[whose], {"float32"})


def test_explain_shows_the_ops_of_the_model_with_weights_as_they_were_gathered(notes: Any) -> None:
    """Copies that FSDP makes and sends have no rows."""
    plain = made()
    with explain(model=plain) as report:
        step(plain, data(), "amp")
    rows = [(c.op, c.module) for c in report if c.direction == "forward"]
    for of_rank in notes:
        assert [row[:2] for row in of_rank["polymp"]["rows"]] == rows
        assert "linear" in of_rank["polymp"]["audited"]
        assert "copy_" not in of_rank["polymp"]["audited"]
        for whose in SENT:
            linears = [inputs for op, _, inputs in of_rank[whose]["rows"] if op == "linear"]
            assert {weight for _, weight, *_ in linears} == {"bfloat16"}


def loss_of_cast(
    model: Model, sent: torch.dtype, given: Sequence[torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """The loss with all of the parameters in the dtype in which they are sent."""
    cast = {name: p.to(sent) for (name, _), p in zip(model.named_parameters(), given, strict=True)}
    return loss_of(lambda ids: torch.func.functional_call(model, cast, (ids,)), ids)


def tolerated(
    model: Model, ids: torch.Tensor, sent: torch.dtype, probes: int = 4
) -> tuple[Any, Any, Any]:
    """Loss, gradients, and how far rounding moves each, as `polymp.testing` measures it."""
    params = list(model.parameters())

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return loss_of_cast(model, sent, given, ids)

    arrays = tuple(p.detach().numpy() for p in params)
    program = perturb.Program(
        loss, arrays, {}, "bfloat16", "amp", lambda path, shape: np.ones(shape)
    )
    base, runs = program.run(), program.probes(2 * probes)

    def moved(kind: str) -> dict[str, Any]:
        return {
            path: rounding.spread(x, [getattr(run, kind)[path] for run in runs])
            for path, x in getattr(base, kind).items()
        }

    return base, moved("results"), moved("gradients")


def gaps(base: Any, results: Any, grads: Any, loss: Any, found: Sequence[Any]) -> list[Any]:
    both = np.sqrt(2)  # two runs are two sets of roundings
    rows = [("loss", x, loss, results[p]) for p, x in base.results.items()]
    rows += [
        (p, x, other, grads[p]) for (p, x), other in zip(base.gradients.items(), found, strict=True)
    ]
    return [rounding.gap(n, x, np.float64(other), both * s) for n, x, other, s in rows]


@pytest.mark.parametrize(("whose", "sent"), [("polymp", torch.float32), ("torch", BF16)])
def test_two_ranks_compute_what_one_does_up_to_rounding(notes, whose, sent) -> None:
    """Torch's `fully_shard` rounds every parameter; polymp's those that the region casts anyway."""
    measured = tolerated(made(), data(), sent)
    for of_rank in notes:
        found = gaps(*measured, of_rank[whose]["loss"], of_rank[whose]["gradients"])
        assert [str(gap) for gap in found if gap.part] == []
    loss, grads = notes[0][whose]["loss"], notes[0][whose]["gradients"]
    spoiled = [g * 2 for g in grads]  # added up, not averaged
    assert any(gap.part for gap in gaps(*measured, loss, spoiled))
    assert gaps(*measured, loss * 1.1, grads)[0].part  # of one rank's batch, not of both


def test_a_region_that_uses_weights_in_another_dtype_warns(alone: Any) -> None:
    model = made()
    shard(model, "lean")

    def run(low: torch.dtype, policy: Any) -> None:
        with autocast("cpu", low, policy=policy):
            model(data())

    run(torch.bfloat16, "lean")
    run(torch.bfloat16, "amp")  # uses the weights of linear layers in the same dtype
    with pytest.warns(UserWarning, match=r"Write polymp.torch.fsdp.fully_shard\(module, .lean., "):
        run(torch.float16, "lean")
    run(torch.float16, "lean")  # said once


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("policy", [None, "amp", "lean", HEAD_FULL], ids=str)
def test_sharding_changes_no_bit_of_a_region(alone: Any, policy: Any, tied: bool) -> None:
    plain, sharded = made(tied), made(tied)
    if policy is HEAD_FULL:
        polymp.torch.scoped(plain, policy)
        polymp.torch.scoped(sharded, policy)
    shard(sharded, policy)
    region_policy = None if policy is HEAD_FULL else policy
    assert torch.equal(step(plain, data(), region_policy), step(sharded, data(), region_policy))
    assert all(map(torch.equal, gradients(plain), gradients(sharded)))


def test_by_torch_one_rank_gives_the_bits_of_parameters_that_are_all_cast(alone: Any) -> None:
    plain, sharded = made(), shard(made(), "amp", by_torch)
    params = list(plain.parameters())
    with autocast("cpu", BF16, policy="amp"):
        loss = loss_of_cast(plain, BF16, params, data())
    loss.backward()
    assert torch.equal(loss, step(sharded, data(), "amp"))
    assert all(map(torch.equal, gradients(plain), gradients(sharded)))


def test_a_block_with_a_parameter_of_its_own_keeps_it_in_float32(alone: Any) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(16))
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * self.inner(x)

    torch.manual_seed(0)
    plain = Gated()
    sharded = fully_shard(copy.deepcopy(plain), "amp")
    assert isinstance(sharded, FSDPModule)
    assert isinstance(sharded.inner[0], FSDPModule)
    x = torch.randn(2, 3, 16)
    with autocast("cpu", BF16, policy="amp"):
        one, other = plain(x), sharded(x)
    assert torch.equal(one, other)


def test_arguments_are_refused() -> None:
    for given, text in (
        (
            {"mp_policy": LOW},
            "polymp.torch.fsdp.fully_shard() makes mp_policy from policy and dtype. Leave it out, "
            "or call torch.distributed.fsdp.fully_shard(module, mp_policy=...).",
        ),
        (
            {"path": 0},
            "fully_shard(): path is that of the module in the model, such as 'layers.0', got 0",
        ),
        (
            {"module": [1]},
            "polymp.torch.fsdp.fully_shard() takes a torch.nn.Module, got [1].",
        ),
    ):
        with pytest.raises(TypeError) as error:
            fully_shard(**({"module": nn.Linear(2, 2)} | given))
        assert str(error.value) == text
    with pytest.raises(ValueError, match=r"fully_shard\(\): dtype 'float32' is not"):
        fully_shard(nn.Linear(2, 2), dtype="float32")


@pytest.mark.parametrize("frozen", ["", "blocks.0", "blocks.1", "head"])
def test_parameters_that_are_frozen_at_first_and_unfrozen_later(alone: Any, frozen: str) -> None:
    """Though all of a group were frozen in its first forward, the gradients are the region's."""
    ids, plain = data(), made()
    sharded = shard(copy.deepcopy(plain), "lean")
    for model in (plain, sharded):
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        if frozen:
            step(model, ids, "lean")
        else:
            with torch.no_grad(), autocast("cpu", BF16, policy="lean"):
                model(ids[:, :-1])
        for p in model.parameters():
            p.requires_grad_(True)
        model.zero_grad()
        step(model, ids, "lean")
    assert all(map(torch.equal, gradients(sharded), gradients(plain)))
