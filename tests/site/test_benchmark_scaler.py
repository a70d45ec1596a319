"""The programs of benchmarks/scaler.py compute the same, and its rows keep their bars."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def scaler() -> ModuleType:
    for name in ("torch", "jax", "flax", "optax", "rich"):
        need(name)
    return benchmark("scaler")


OPTIMIZERS = (
    "SGD, fused",
    "SGD, foreach",
    "AdamW, fused",
    "AdamW, foreach",
    "AdamW, one by one",
    "one foreach add",
    "an empty step",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_scalers_give_the_same_parameters_bit_for_bit(scaler: ModuleType, name: str) -> None:
    import torch

    after = []
    for stepping in scaler.steppings(name, "cpu", 7).values():
        first = [p.detach().clone() for p in stepping.params]
        for _ in range(3):
            assert stepping() > 0
        assert stepping.scaler.get_scale() == 2.0**16
        assert stepping.scaler._get_growth_tracker() == 3
        # The time counts one division by the scale, of fresh gradients.
        for param, grad in zip(stepping.params, stepping.grads, strict=True):
            assert torch.equal(param.grad, grad / 2**16)
        moved = [not torch.equal(a, b) for a, b in zip(first, stepping.params, strict=True)]
        assert all(moved) != (name == "an empty step")
        after.append([p.detach().numpy().tobytes() for p in stepping.params])
    assert len(after) == 2
    assert after[0] == after[1]


def test_every_optimizer_is_measured(scaler: ModuleType) -> None:
    assert tuple(scaler.OPTIMIZERS) == OPTIMIZERS


def test_the_jax_programs_give_the_same_parameters(scaler: ModuleType) -> None:
    import jax

    after: dict[str, Any] = {}
    for name, training in scaler.trainings(2, 64).items():
        for _ in range(3):
            assert training() > 0
        after[name] = jax.device_get(training.state)
    params, opt, _ = after["without a scaler"]
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((params, opt)))
    for name, (ours, ours_opt, scale) in after.items():
        for a, b in zip(
            jax.tree.leaves((ours, ours_opt)), jax.tree.leaves((params, opt)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=name)
        if name != "without a scaler":
            counts = [float(x) for x in jax.tree.leaves(scale)]
            assert 2.0**16 in counts
            assert 3 in counts


@pytest.mark.parametrize("name", ["flax", "step", "value_and_grad"])
def test_the_jax_programs_skip(scaler: ModuleType, name: str) -> None:
    import jax
    import jax.numpy as jnp

    training = scaler.trainings(2, 64)[name]
    before = jax.device_get(training.state)
    training.data[1] = training.data[1].at[0, 0].set(jnp.inf)
    training()
    after = jax.device_get(training.state)
    for a, b in zip(jax.tree.leaves(before[:2]), jax.tree.leaves(after[:2]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_runs_and_says_which_bars_are_missed(
    scaler: ModuleType, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "record.json"
    command = "scaler.py --rounds 4 --jax-rounds 4 --parameters 3 --millions 0.001 --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(path)])
    monkeypatch.setattr(scaler, "TORCH_BAR", 0.0)
    monkeypatch.setattr(scaler.torch, "set_num_threads", lambda _: None)  # of this process
    monkeypatch.setattr(scaler, "BARS", {"step": 1e9})
    assert scaler.main() == 1
    record = json.loads(path.read_text())
    assert record["missed"] == [f"{name} / torch.amp" for name in OPTIMIZERS]
    in_torch, in_jax = record["tables"].values()
    assert [row["what"] for row in in_torch[:-1]] == record["missed"]
    assert in_jax[0]["what"] == "step / flax"
    assert [row["bar"] for row in in_jax] == [1e9, None, None, None, None]
    assert set(record) == {"part", "device", "date", "machine", "rounds", "tables", "missed"}
    assert set(record["machine"]["versions"]) == {"torch", "jax", "flax", "optax", "polymp"}
    assert "Bars missed: SGD, fused / torch.amp" in capsys.readouterr().out
