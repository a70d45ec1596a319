"""`polymp.torch.torchtitan`: a converter in a trainer that opens no region, as torchtitan's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_s_fully_shard

import polymp
from polymp.errors import PolicyError
from polymp.torch import autocast
from polymp.torch.torchtitan import Converter
from tests.support.torch.fsdp_models import BF16, HEAD_FULL, Model, data, loss_of, made

# FSDP's, of outputs that a dropped alias would spoil; nothing is written in place here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


# The protocol of its model converters, and a trainer of the shape of its own.
REGISTERED: dict[str, Callable[[Any, Any], Any]] = {
    "table": lambda *_: Converter(device="cpu"),
    "lean": lambda *_: Converter("lean", device="cpu"),
    "head full": lambda *_: Converter(HEAD_FULL, device="cpu"),
}


class Trainer:
    """Builds registered converters by name, converts, shards, trains: torchtitan 0.2's order."""

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        job_config, parallel_dims = object(), object()
        self.converters = [REGISTERED[name](job_config, parallel_dims) for name in names]
        for converter in self.converters:
            converter.convert(model)
        for block in model.blocks:
            torch_s_fully_shard(block)
        self.model = torch_s_fully_shard(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, data())
            loss.backward()
            self.optimizer.step()
            for converter in self.converters:
                converter.post_optimizer_hook([self.model])
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize(
    ("name", "policy"), [("table", None), ("lean", "lean"), ("head full", HEAD_FULL)]
)
def test_a_converter_opens_the_region_of_a_trainer_that_opens_none(
    alone: None, name: str, policy: Any
) -> None:
    plain = made()
    scopes = policy is HEAD_FULL
    if scopes:
        polymp.torch.scoped(plain, policy)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()

        def call(ids: torch.Tensor) -> torch.Tensor:
            with autocast("cpu", BF16, policy=None if scopes else policy):
                return plain(ids)

        loss = loss_of(call, data())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trainer = Trainer(made(), [name])
    assert trainer.train(3) == losses
    assert losses != Trainer(made(), []).train(3)
    assert [*trainer.model.state_dict()] == [*plain.state_dict()]


def test_a_converted_model_is_copied_with_its_region() -> None:
    model = made()
    converter = Converter("lean", device="cpu")
    converter.convert(model)
    with autocast("cpu", BF16, policy="lean"):
        expected = made()(data())
    assert torch.equal(copy.deepcopy(model)(data()), expected)
    with pytest.raises(PolicyError) as error:
        converter.convert(model)
    assert str(error.value) == (
        "Converter(): Model: its calls open a region already. Give one converter alone."
    )
