"""`polymp.lightning.FabricPrecision` in Fabric, beside Fabric's own plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import need

need("lightning")

import lightning  # noqa: E402
from lightning.fabric import plugins  # noqa: E402
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision  # noqa: E402

from polymp.lightning import FabricPrecision  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402
from tests.support.torch.lightning_models import OPTIMIZERS, batches, make_net  # noqa: E402
from tests.support.torch.trainer_models import losses_of_closures  # noqa: E402

pytestmark = pytest.mark.usefixtures("left_as_found")


def theirs(precision: str) -> Any:
    if precision == "32-true":
        return plugins.Precision()
    half = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if half else None
    return plugins.MixedPrecision(precision, "cpu", scaler)


def ours(precision: str, policy: Any = None) -> FabricPrecision:
    scaler = GradScaler("cpu", init_scale=2.0**10) if precision == "16-mixed" else None
    return FabricPrecision(precision, policy, scaler=scaler)


def start(plugin: Any, optimizer: str = "sgd") -> tuple[Any, Any, Any]:
    """A fabric, and a model and an optimizer of it."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = make_net()
    return fabric, *fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))


def train(plugin: Any, optimizer: str = "sgd", clip: float | None = None) -> list[float]:
    return epoch(*start(plugin, optimizer), clip)


def epoch(fabric: Any, model: Any, optimizer: Any, clip: float | None = None) -> list[float]:
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true"])
def test_losses_are_fabrics_bit_for_bit(precision: str, clip: float | None) -> None:
    expected = train(theirs(precision), clip=clip)
    assert train(ours(precision), clip=clip) == expected
    if precision == "32-true":  # which takes no policy
        return
    assert train(ours(precision, "torch-cpu"), clip=clip) == expected
    policy = {"name": "mine", "rules": {"linear": "fp32"}}
    assert train(ours(precision, policy), clip=clip) != expected, "this could not fail"


def test_outputs_are_float32_and_the_autocast_of_fabric_has_the_policy() -> None:
    fabric, model, _ = start(ours("bf16-mixed", "lean"))
    x = batches()[0][0]
    assert model(x).dtype == torch.float32
    with fabric.autocast():
        assert model(x).dtype == torch.float32  # the same region once more
        assert model.module(x).dtype == torch.bfloat16
        assert torch.nn.functional.layer_norm(x.bfloat16(), (16,)).dtype == torch.bfloat16


def test_a_fused_optimizer_is_clipped() -> None:
    expected = train(ours("32-true"), "fused", clip=0.01)
    assert train(ours("16-mixed"), "fused", clip=0.01) == pytest.approx(expected, rel=0.02)
    with pytest.raises(NotImplementedError, match="clipping is not implemented"):
        train(theirs("16-mixed"), "fused", clip=0.01)


def test_lbfgs_trains_in_float16() -> None:
    fabric, model, optimizer = start(ours("16-mixed"), "lbfgs")
    losses = losses_of_closures(model, optimizer, fabric.backward, batches())
    assert len(losses) > 2 * len(batches())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(("first", "second"), [(theirs, ours), (ours, theirs), (ours, ours)])
def test_each_resumes_the_other(first: Any, second: Any, tmp_path: Path) -> None:
    plugin = first("16-mixed")
    fabric, model, optimizer = start(plugin)
    epoch(fabric, model, optimizer)
    plugin.scaler.update(2.0**7)
    state = {"model": model, "optimizer": optimizer, "precision": plugin}
    fabric.save(tmp_path / "here.ckpt", state)
    expected = epoch(fabric, model, optimizer)

    plugin = second("16-mixed")
    fabric, model, optimizer = start(plugin)
    state = {"model": model, "optimizer": optimizer, "precision": plugin}
    fabric.load(tmp_path / "here.ckpt", state)
    assert plugin.scaler.get_scale() == 2.0**7
    assert epoch(fabric, model, optimizer) == expected


def test_metrics_are_those_of_the_scaler() -> None:
    plugin = ours("16-mixed")
    train(plugin)
    assert plugin.metrics() == {"loss_scale": 2.0**10, "skipped_steps": 0.0}
    plugin = ours("bf16-mixed")
    train(plugin)
    assert plugin.metrics() == {}


def test_the_scaler_is_made_for_the_device_of_the_model() -> None:
    plugin = FabricPrecision("16-mixed")
    assert (plugin.device, plugin.scaler) == (None, None)
    train(plugin)
    assert plugin.device == "cpu"
    assert plugin.scaler.is_enabled()
    assert FabricPrecision("16-mixed", device="cpu").scaler.is_enabled()


def test_with_a_policy_fsdp_casts_nothing() -> None:
    assert ours("bf16-mixed", "lean").mixed_precision_config is None
    config = FSDPPrecision("bf16-mixed").mixed_precision_config
    assert ours("bf16-mixed").mixed_precision_config == config
