"""`polymp.accelerate.use`, beside an `Accelerator` as it comes."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import need

need("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    TorchDynamoPlugin,
)

import polymp.torch  # noqa: E402
from polymp.accelerate import use  # noqa: E402
from polymp.errors import BadStepError  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402
from tests.support.torch.models import through_file  # noqa: E402
from tests.support.torch.trainer_models import reset  # noqa: E402

pytestmark = pytest.mark.usefixtures("left_as_found", "fresh_accelerate")

FP32 = {"name": "mine", "rules": {"linear": "fp32"}}


def make(mode: str = "bf16", policy: Any = None, own: bool = True, **settings: Any) -> Any:
    reset()
    scaler = settings.pop("scaler", None)
    accelerator = Accelerator(mixed_precision=mode, cpu=True, **settings)
    return use(accelerator, policy, scaler=scaler) if own else accelerator


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def batches(spoiled: int = -1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 8, 16, generator=made)
    targets = inputs @ torch.randn(16, 4, generator=made) / 4
    targets[spoiled if spoiled >= 0 else slice(0), 0] = 1e6
    return list(zip(inputs, targets, strict=True))


class Run:
    def __init__(self, accelerator: Any, fused: bool = False) -> None:
        self.accelerator = accelerator
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(net, optimizer, scheduler)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []

    def train(self, clip: float | None = None, spoiled: int = -1) -> Run:
        accelerator = self.accelerator
        for x, y in batches(spoiled):
            with accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.skipped.append(accelerator.optimizer_step_was_skipped)
        return self


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_losses_and_norms_are_accelerates_bit_for_bit(every: int, clip: float | None) -> None:
    settings = {"gradient_accumulation_steps": every}
    expected = Run(make(own=False, **settings)).train(clip)
    for policy in (None, "torch-cpu"):
        run = Run(make(policy=policy, **settings)).train(clip)
        assert (run.losses, run.norms) == (expected.losses, expected.norms)
    changed = Run(make(policy=FP32, **settings)).train(clip)
    assert changed.losses != expected.losses, "the comparison above could not fail"


def test_the_policy_holds_in_the_model_and_in_autocast() -> None:
    accelerator = make("bf16", FP32)
    model = accelerator.prepare(make_net())
    x = batches()[0][0]
    with polymp.torch.explain() as report:
        model(x)
        with accelerator.autocast():
            assert (x @ x.T).dtype == torch.float32  # no row in the policy
            model(x)
            low = nn.functional.linear(x.bfloat16(), torch.ones(2, 16))
    assert low.dtype == torch.float32
    calls = [call for call in report.of("linear") if call.direction == "forward"]
    assert {call.rule for call in calls} == {"fp32"}
    assert sum(call.times for call in calls) == 5


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_trains_on_the_cpu_and_says_which_step_was_skipped(fused: bool) -> None:
    run = Run(make("fp16", scaler=GradScaler("cpu", init_scale=2.0**10)), fused).train(0.1, 5)
    assert run.skipped == [at == 5 for at in range(12)]
    assert run.accelerator.scaler.get_scale() == 2.0**9
    assert run.scheduler.scheduler.last_epoch == 11  # it was not stepped for the skipped one
    exact = Run(make("bf16", {"name": "none", "rules": {}}), fused).train(0.1)
    assert run.norms[:5] == pytest.approx(exact.norms[:5], rel=0.02), "true gradients"


def test_fp16_on_the_cpu_is_torch_amps_bit_for_bit() -> None:
    run = Run(make("fp16", "torch-cpu", scaler=GradScaler("cpu", init_scale=2.0**10))).train()
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for x, y in batches():
        with torch.autocast("cpu", torch.float16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert run.losses == losses


def test_clipping_while_gradients_accumulate_is_refused() -> None:
    accelerator = make("fp16", gradient_accumulation_steps=2)
    run = Run(accelerator)
    x, y = batches()[0]
    with accelerator.accumulate(run.model):
        accelerator.backward(nn.functional.mse_loss(run.model(x), y))
        with pytest.raises(RuntimeError) as refused:
            accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
    assert str(refused.value) == (
        "gradients are accumulated here, and those that come later are scaled. Clip once, before "
        "the step: if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)."
    )


def test_lbfgs() -> None:
    accelerator = make("fp16", scaler=GradScaler("cpu", init_scale=2.0**10))
    net = make_net()
    model, optimizer = accelerator.prepare(
        net, torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    )
    losses: list[float] = []
    for x, y in batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    assert not optimizer.step_was_skipped
    assert losses[-1] < losses[0] / 2


def two_optimizers(accelerator: Any, by_part: bool) -> list[torch.Tensor]:
    """Weights after steps of two optimizers; gradients are clipped together, or before each."""
    net = make_net()
    parts = net[:2], net[2:]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    model, *optimizers = accelerator.prepare(net, *optimizers)
    for x, y in batches():
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if not by_part:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        for part, optimizer in zip(parts, optimizers, strict=True):
            if by_part:
                accelerator.clip_grad_norm_(part.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [net[0].weight.detach(), net[3].weight.detach()]


@pytest.mark.parametrize("by_part", [False, True])
def test_two_optimizers_that_share_a_backward_pass_get_true_gradients(by_part: bool) -> None:
    """The scale grows after every step, and is used for both."""
    scaler = GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    found = two_optimizers(make("fp16", scaler=scaler), by_part)
    exact = two_optimizers(make("bf16", {"name": "none", "rules": {}}), by_part)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)
    assert scaler.get_scale() == 2.0 ** (4 + 12)


@pytest.mark.parametrize("first_own", [True, False])
def test_states_are_saved_and_loaded(first_own: bool, tmp_path: Path) -> None:
    """Also one that torch's scaler has saved, as accelerate writes it on a GPU."""
    run = Run(make("fp16", scaler=GradScaler("cpu", init_scale=2.0**10))).train(0.1, 5)
    run.accelerator.save_state(str(tmp_path))
    if not first_own:
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(run.accelerator.scaler.state_dict())
        torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    expected = run.train(0.1).losses[12:]
    again = Run(make("fp16"))
    again.accelerator.load_state(str(tmp_path))
    assert again.accelerator.scaler.get_scale() == 2.0**9
    assert again.train(0.1).losses == expected


def test_the_accelerators_own_settings_hold() -> None:
    accelerator = make("fp16", kwargs_handlers=[GradScalerKwargs(init_scale=32.0)])
    assert accelerator.scaler.get_scale() == 32.0
    accelerator = make("bf16", FP32, kwargs_handlers=[AutocastKwargs(enabled=False)])
    with accelerator.autocast():
        x = torch.ones(4, 4)
        assert (x @ x).dtype == torch.float32


def test_the_scale_and_the_skipped_steps_are_logged() -> None:
    seen: list[dict[str, Any]] = []

    class Tracker:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def log(self, values: dict[str, Any], step: Any = None, **_: Any) -> None:
            seen.append(values)

    for mode in ("fp16", "bf16"):
        accelerator = make(mode)
        accelerator.trackers = [Tracker()]
        run = Run(accelerator).train()
        accelerator.log({"loss": run.losses[-1]}, step=12)
    assert seen[0].keys() - seen[1].keys() == {"loss_scale", "skipped_steps"}
    assert (seen[0]["loss_scale"], seen[0]["skipped_steps"]) == (2.0**16, 0.0)


def test_models_are_copied_pickled_and_unwrapped() -> None:
    accelerator = make("bf16", FP32)
    model = accelerator.prepare(make_net())
    x = batches()[0][0]
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert accelerator.prepare(model) is model
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(through_file(plain, weights_only=False)(x), plain(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what dynamo imports
@pytest.mark.parametrize("by", ["accelerate", "the user"])
def test_a_compiled_model_is_one_graph_with_the_policy(by: str, count: Any) -> None:
    expected = make("bf16", FP32).prepare(make_net())(batches()[0][0])
    if by == "accelerate":
        plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
        model = make("bf16", FP32, dynamo_plugin=plugin).prepare(make_net())
    else:
        net = torch.compile(make_net(), backend=count, fullgraph=True)
        model = make("bf16", FP32).prepare(net)
    assert torch.equal(model(batches()[0][0]), expected)


def test_fsdp2_has_one_region_however_often_it_is_prepared(monkeypatch: Any) -> None:
    def prepare(_: Any, model: Any) -> None:
        model._is_accelerate_prepared = True

    accelerator, net = make("bf16", "lean"), make_net()
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    monkeypatch.setattr(Accelerator, "prepare", prepare)
    accelerator.prepare(net)
    once = net.forward
    accelerator.prepare(net)
    assert net.forward is once


# --- accelerate in two processes, with polymp's scaler and policy: DDP, FSDP1 and FSDP2 -----------


OVERFLOW = 2  # the batch in which the gradients of rank 1 overflow


def make_accelerate_ranks(strategy: str, mode: str) -> Any:
    """An `Accelerator`; accelerate has FSDP for accelerators only, so here its state is told."""
    reset()
    accelerator = Accelerator(mixed_precision=mode, cpu=True)
    if strategy != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(strategy[-1]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            cpu_ram_efficient_loading=False,
            use_orig_params=True if strategy == "fsdp1" else None,
        )
        plugin.set_mixed_precision(mode)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def train(accelerator: Any, rank: int) -> dict[str, Any]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    made = torch.Generator().manual_seed(10 + rank)
    notes: dict[str, Any] = {"losses": [], "skipped": [], "norms": []}
    for at in range(6):
        x, y = torch.randn(4, 16, generator=made), torch.randn(4, 4, generator=made)
        if accelerator.scaler is not None and (at, rank) == (OVERFLOW, 1):
            y[0] = 1e6
        loss = nn.functional.mse_loss(model(x).float(), y)
        accelerator.backward(loss)
        notes["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        notes["losses"].append(loss.item())
        notes["skipped"].append(accelerator.optimizer_step_was_skipped)
    return notes


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, ...], Any]:
    # The process group is there already, so that nothing is at this address.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    notes: dict[tuple[str, ...], Any] = {}
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        notes[strategy, "theirs"] = train(make_accelerate_ranks(strategy, "bf16"), rank)
        for policy in (None, "lean"):
            accelerator = use(make_accelerate_ranks(strategy, "bf16"), policy)
            notes[strategy, str(policy)] = train(accelerator, rank)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        accelerator = use(make_accelerate_ranks(strategy, "fp16"), "lean", scaler=scaler)
        notes[strategy, "fp16"] = train(accelerator, rank)
        notes[strategy, "scale"] = scaler.get_scale()
    return notes


STRATEGIES = ("ddp", "fsdp1", "fsdp2")


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_accelerates_bit_for_bit(ranks: Any, strategy: str) -> None:
    for notes in ranks:
        assert notes[strategy, "None"] == notes[strategy, "theirs"]
        assert notes[strategy, "None"]["losses"] != notes[strategy, "fp16"]["losses"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lean", "fp16"])
def test_with_a_policy_every_strategy_computes_the_same(ranks: Any, mode: str) -> None:
    """FSDP gathers the weights in float32, and the policy casts them."""
    for notes in ranks:
        first, *others = (notes[strategy, mode] for strategy in STRATEGIES)
        for other in others:
            assert other["losses"] == pytest.approx(first["losses"], rel=1e-6)
            assert other["norms"] == pytest.approx(first["norms"], rel=1e-5, nan_ok=True)
        assert notes["fsdp1", "None"]["losses"] != first["losses"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_the_step_in_which_one_overflows(ranks: Any, strategy: str) -> None:
    for notes in ranks:
        assert notes[strategy, "fp16"]["skipped"] == [at == OVERFLOW for at in range(6)]
        assert notes[strategy, "scale"] == 2.0**9
        assert not math.isfinite(notes[strategy, "fp16"]["norms"][OVERFLOW])


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
def test_catch_stops_a_loop_at_the_bad_step(mode: str) -> None:
    """A method that steps with what `prepare` returned: all of it is put back and replayed."""

    class Training(Run):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            return loss

        def run(self) -> None:
            loader = torch.utils.data.DataLoader(torch.randn(12, 16), batch_size=2)
            self.loader = self.accelerator.prepare(loader)
            step = polymp.torch.catch(self.step)
            for at, x in enumerate(self.loader):
                step(x * float("nan") if at == 4 else x)

    training = Training(make(mode, own=mode != "no"))
    with pytest.raises(BadStepError) as raised:
        training.run()
    report = raised.value.report
    assert (report.step, report.found) == (4, "the loss is NaN")
    assert "an argument (float32 2x16) is not finite before any op runs" in str(report)
    assert all(p.isfinite().all() for p in training.model.parameters())
