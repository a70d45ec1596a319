"""`Precision` in a Trainer of Lightning, beside its plugins; Fabric with a policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from tests.conftest import need

need("lightning")

import lightning  # noqa: E402
from lightning.fabric import plugins as fabric_plugins  # noqa: E402
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision  # noqa: E402
from lightning.pytorch import plugins, strategies  # noqa: E402

from polymp.errors import BadStepError  # noqa: E402
from polymp.lightning import Precision, catch  # noqa: E402
from polymp.torch import GradScaler, scoped  # noqa: E402
from tests.support.torch.lightning_models import (  # noqa: E402
    OPTIMIZERS,
    QUIET,
    Regression,
    StartedRanks,
    batches,
    fit,
    make_net,
)

pytestmark = [
    pytest.mark.usefixtures("left_as_found"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    # Advice on speed and on what may have been forgotten.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


def theirs(precision: str) -> Any:
    if precision == "32-true":
        return plugins.Precision()
    half = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if half else None
    return plugins.MixedPrecision(precision, "cpu", scaler)


def ours(precision: str, policy: Any = None) -> Any:
    scaler = GradScaler("cpu", init_scale=2.0**10) if precision == "16-mixed" else None
    return Precision(precision, policy, scaler=scaler)


MODES = ("bf16-mixed", "16-mixed")
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 4},
    "accumulated and clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_and_norms_are_lightnings_bit_for_bit(precision: str, loop: str) -> None:
    policy = "torch-cpu" if loop == "plain" else None
    expected = fit(theirs(precision), **LOOPS[loop])
    model = fit(ours(precision, policy), **LOOPS[loop])
    assert model.losses == expected.losses
    assert model.norms == expected.norms


MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@pytest.mark.parametrize("precision", MIXED)
def test_the_policy_decides(precision: str) -> None:
    """So that equal losses above are no matter of course."""
    policy = {"name": "mine", "rules": {"linear": "fp32"}}
    assert fit(ours(precision, policy)).losses != fit(ours(precision)).losses
    assert fit(ours(precision, "lean")).dtypes == {MIXED[precision]}


def test_manual_optimization() -> None:
    expected = fit(theirs("16-mixed"), Regression(manual=True))
    model = fit(ours("16-mixed"), Regression(manual=True))
    assert (model.losses, model.norms) == (expected.losses, expected.norms)


class Two(Regression):
    def __init__(self) -> None:
        super().__init__(manual=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[at].parameters(), lr=0.1) for at in (0, 3)]

    def training_step(self, batch: Any, index: int) -> None:
        optimizers: Any = self.optimizers()
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_two_optimizers_that_share_a_backward_pass_get_true_gradients() -> None:
    """The scale grows after every step, and is used for both."""
    scaler = GradScaler("cpu", init_scale=0.25, growth_interval=1)
    losses = fit(Precision("16-mixed", scaler=scaler), Two()).losses
    assert losses == pytest.approx(fit(theirs("32-true"), Two()).losses, rel=0.01)
    assert scaler.get_scale() == 2.0 ** (len(batches()) - 2)


def test_a_fused_optimizer_is_clipped_and_its_hooks_see_true_gradients() -> None:
    expected = fit(theirs("32-true"), Regression("fused"), gradient_clip_val=0.1)
    model = fit(ours("16-mixed"), Regression("fused"), gradient_clip_val=0.1)
    assert model.norms == pytest.approx(expected.norms, rel=0.02)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(theirs("16-mixed"), Regression("fused"), gradient_clip_val=0.1)


def test_lbfgs_trains_in_float16() -> None:
    model = fit(ours("16-mixed"), Regression("lbfgs"))
    exact = fit(theirs("32-true"), Regression("lbfgs"))
    assert len(model.losses) > 2 * len(batches())  # several evaluations a step
    assert len(model.norms) == len(model.losses)
    assert model.losses[:3] == pytest.approx(exact.losses[:3], rel=0.02)
    assert model.losses[-1] < model.losses[0] / 2
    with pytest.raises(Exception, match="LBFGS optimizer are not compatible"):
        fit(theirs("16-mixed"), Regression("lbfgs"))


def test_skipped_steps_and_the_scale_are_logged() -> None:
    data = batches()
    data[3][1][0] = 1e6  # its gradient overflows
    data[5][1][0] = float("inf")  # no scale would help; it is backed off, as by torch.amp
    model = fit(ours("16-mixed"), data=data)
    logged = model.trainer.progress_bar_metrics
    assert logged == {"loss_scale": 2.0**8, "skipped_steps": 2.0}
    assert model.trainer.callback_metrics.keys() == logged.keys()
    assert not fit(ours("bf16-mixed")).trainer.callback_metrics


def test_the_scale_is_logged_in_each_epoch() -> None:
    """Also if the host does not know it, as with fused optimizers, which skip on the device."""
    for epochs in (1, 2):
        trainer = fit(ours("16-mixed"), Regression("fused"), epochs).trainer
        assert trainer.callback_metrics.keys() == {"loss_scale", "skipped_steps"}


def test_barebones_logs_nothing() -> None:
    bare = dict.fromkeys(QUIET, None) | {"barebones": True, "accelerator": "cpu"}
    assert fit(ours("16-mixed"), **bare).losses == fit(theirs("16-mixed")).losses


def test_a_training_step_that_returns_none_is_left_out() -> None:
    class Sometimes(Regression):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return None if index % 2 else loss

    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        model = fit(ours("16-mixed"), Sometimes())
    assert len(model.norms) == len(batches()) / 2
    assert model.trainer.precision_plugin.scaler._get_growth_tracker() == len(model.norms)


@pytest.mark.parametrize(("first", "second"), [(theirs, ours), (ours, theirs), (ours, ours)])
def test_each_resumes_the_other(first: Any, second: Any, tmp_path: Path) -> None:
    data = batches()
    data[2][1][0] = 1e6  # a skip, so that the scale says where it comes from
    whole = fit(theirs("16-mixed"), epochs=2, data=data)
    start = fit(first("16-mixed"), epochs=1, data=data)
    start.trainer.save_checkpoint(tmp_path / "here.ckpt")
    plugin = second("16-mixed")
    rest = fit(plugin, epochs=2, data=data, ckpt_path=tmp_path / "here.ckpt")
    assert start.losses + rest.losses == whole.losses
    assert plugin.scaler.get_scale() == whole.trainer.precision_plugin.scaler.get_scale()
    assert plugin.scaler._get_growth_tracker() == len(data) - 3


def test_validation_runs_in_the_region_without_a_fit() -> None:
    model = Regression()
    trainer = lightning.Trainer(plugins=[ours("bf16-mixed", "lean")], **QUIET)
    trainer.validate(model, DataLoader(batches(), batch_size=None), verbose=False)  # type: ignore[arg-type]
    assert model.dtypes == {torch.bfloat16}


class Poisoned(Regression):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return super().training_step((x * (math.nan if index == 5 else 1.0), y), index)


@pytest.mark.parametrize("precision", ["theirs", *MIXED])
def test_catch_stops_the_trainer_at_the_bad_step(precision: str) -> None:
    mode = {"precision": "bf16-mixed"} if precision == "theirs" else {"plugins": ours(precision)}
    trainer = catch(lightning.Trainer(max_epochs=1, **QUIET, **mode), of=torch.nn.Linear(1, 1))
    model = Poisoned()
    with pytest.raises(BadStepError) as raised:
        trainer.fit(model, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    report = raised.value.report
    assert (report.step, report.found, len(report.losses)) == (5, "the loss is NaN", 5)
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.raises(TypeError, match=r"catch\(\) takes a lightning\.Trainer, got Poisoned"):
        catch(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [theirs, ours])
def test_catch_leaves_gradients_that_overflow_to_the_scaler(make: Any) -> None:
    data, plugin = batches(), make("16-mixed")
    data[3][1][0] = 1e6
    trainer = catch(lightning.Trainer(max_epochs=1, plugins=[plugin], **QUIET))
    trainer.fit(Regression(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert plugin.scaler.get_scale() == 2.0**9


# --- Fabric: its own plugin, with a scaler of polymp's and the policy on the model ----------------


def trained(plugin: Any, policy: Any = None) -> list[float]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net, losses = make_net(), []
    if policy is not None:
        scoped(net, policy)
    model, optimizer = fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))
    for x, y in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fabric_trains_with_a_policy_and_a_scaler() -> None:
    def plugin(scaler: Any) -> Any:
        return fabric_plugins.MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=2.0**10))

    expected = trained(plugin(torch.amp.GradScaler))
    assert trained(plugin(GradScaler)) == trained(plugin(GradScaler), "torch-cpu") == expected
    fp32 = {"name": "mine", "rules": {"linear": "fp32"}}
    assert trained(plugin(GradScaler), fp32) != expected


def test_with_a_policy_fsdp_casts_nothing() -> None:
    assert ours("bf16-mixed", "lean").mixed_precision_config is None
    config = FSDPPrecision("bf16-mixed").mixed_precision_config
    assert ours("bf16-mixed").mixed_precision_config == config


# --- Lightning's strategies in two processes: DDP, FSDP, and ModelParallelStrategy with FSDP2 -----


STRATEGIES = ("ddp", "fsdp", "fsdp2")
OVERFLOW = 3  # the batch in which the gradients of rank 1 overflow


class Sharded(Regression):
    """FSDP2 shards it in the hook that Lightning has for that."""

    def configure_model(self) -> None:
        fully_shard(self.net[0])
        fully_shard(self.net[3])
        fully_shard(self.net)


class FSDPOnCPU(strategies.FSDPStrategy):
    """Lightning refuses its FSDP strategy on a CPU, but not a subclass, which names the device."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def strategy(name: str) -> Any:
    if name == "ddp":
        return strategies.DDPStrategy(process_group_backend="gloo")
    if name == "fsdp":
        return FSDPOnCPU(process_group_backend="gloo", auto_wrap_policy={torch.nn.Linear})
    return strategies.ModelParallelStrategy(2, 1, process_group_backend="gloo")


def theirs_lightning_ranks(name: str) -> Any:
    if name != "fsdp":
        return plugins.MixedPrecision("bf16-mixed", "cpu")
    plugin: Any = plugins.FSDPPrecision("bf16-mixed")
    plugin.forward_context = lambda: torch.autocast("cpu", torch.bfloat16)  # its own is for CUDA
    return plugin


def train(name: str, plugin: Any, rank: int, ranks: int, clip: float | None) -> dict[str, Any]:
    data = batches(rank=rank, ranks=ranks)
    if rank == 1 and plugin.precision == "16-mixed":
        data[OVERFLOW][1][0] = 1e6
    model = fit(
        [plugin, StartedRanks(rank, ranks)], Sharded() if name == "fsdp2" else Regression(),
        data=data, devices=ranks, strategy=strategy(name), gradient_clip_val=clip,
        use_distributed_sampler=False,
    )  # fmt: skip
    metrics = {k: float(v) for k, v in model.trainer.callback_metrics.items()}
    return {"losses": model.losses, "metrics": metrics}


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, ...], Any]:
    notes: dict[tuple[str, ...], Any] = {}
    for name in STRATEGIES:
        for precision in MIXED:
            for policy in (None, "lean"):
                plugin = ours(precision, policy)
                notes[name, precision, str(policy)] = train(name, plugin, rank, ranks, 0.1)
        clip = None if name == "fsdp" else 0.1  # Lightning's plugin for FSDP refuses to clip
        notes[name, "ours"] = train(name, ours("bf16-mixed"), rank, ranks, clip)
        notes[name, "theirs"] = train(name, theirs_lightning_ranks(name), rank, ranks, clip)
    return notes


@pytest.mark.long
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_are_lightnings_bit_for_bit(ranks: Any, name: str) -> None:
    for notes in ranks:
        assert notes[name, "ours"] == notes[name, "theirs"]
        assert notes[name, "ours"]["losses"] != notes[name, "16-mixed", "None"]["losses"]


@pytest.mark.long
@pytest.mark.parametrize("precision", MIXED)
def test_with_a_policy_every_strategy_computes_the_same(ranks: Any, precision: str) -> None:
    """With clipping by norm; FSDP gathers the weights in float32, and the policy casts them."""
    for notes in ranks:
        first, *others = (notes[name, precision, "lean"] for name in STRATEGIES)
        assert others == [first, first]
        assert notes["fsdp", precision, "None"] != first, "FSDP casts by itself without a policy"


@pytest.mark.long
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_skip_the_step_in_which_one_overflows(ranks: Any, name: str) -> None:
    for notes in ranks:
        metrics = notes[name, "16-mixed", "lean"]["metrics"]
        assert metrics == {"loss_scale": 2.0**9, "skipped_steps": 1.0}
