"""`polymp.transformers.use`, beside a `Trainer` as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import need

need("transformers")

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

import polymp.torch  # noqa: E402
from polymp.errors import BadStepError  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402
from polymp.transformers import use  # noqa: E402
from tests.support.torch.trainer_models import MODELS, examples, reset  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("left_as_found", "fresh_accelerate"),
    # The old versions of transformers know no other name.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*is deprecated:FutureWarning"),
]

FP32 = {"name": "mine", "extends": "amp", "rules": {"linear": "fp32"}}
ALL_FP32 = {"name": "mine", "extends": "amp", "rules": {"all": "fp32"}}
NON_REENTRANT, REENTRANT = (
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind}}
    for kind in (False, True)
)
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.PrinterCallback, "on_log", lambda *_, **__: None)
    monkeypatch.setattr(transformers.ProgressCallback, "on_log", lambda *_, **__: None)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return lambda kind="bert", **settings: made(kind, tmp_path, **settings)


def made(
    kind: str, folder: Path, *, policy: Any = False, scaler: Any = None,
    trainer: Any = Trainer, arguments: Any = TrainingArguments, **settings: Any,
) -> Any:  # fmt: skip
    reset()
    torch.manual_seed(1)
    args = arguments(str(folder), **{**QUIET, **settings})
    data = examples(kind)
    found = trainer(MODELS[kind](), args, train_dataset=data, eval_dataset=data)
    return found if policy is False else use(found, policy, scaler=scaler)


def train(trainer: Any, **settings: Any) -> list[tuple[float, float]]:
    trainer.train(**settings)
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_norms_are_the_trainers_bit_for_bit(make: Any, kind: str) -> None:
    settings = {"gradient_accumulation_steps": 2, "bf16": True}
    expected = train(make(kind, **settings))
    assert train(make(kind, policy="torch-cpu", **settings)) == expected
    assert train(make(kind, policy=FP32, **settings)) != expected, "this could not fail"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MODELS)
def test_checkpointing_keeps_the_policy(make: Any, kind: str) -> None:
    """Of the second kind, the gradients of T5 differ by the order in which some are added up.

    All blocks of the decoder read what the encoder returns. So they do without polymp; in float32
    little comes of it.
    """
    plain = train(make(kind, policy=FP32, bf16=True))
    assert train(make(kind, policy=FP32, bf16=True, **NON_REENTRANT)) == plain
    with polymp.torch.explain() as report:
        again = train(make(kind, policy=FP32, bf16=True, **REENTRANT))
    if kind == "t5":
        close = [pytest.approx(step, rel=1e-5) for step in train(make(kind))]
        assert train(make(kind, policy=ALL_FP32, bf16=True, **REENTRANT)) == close
        assert plain != close, "this could not fail"
    else:
        assert again == plain
    linears = report.of("linear")
    assert {call.rule for call in linears} == {"fp32"}
    again = {call.module for call in linears if call.direction == "recompute"}
    assert len(again) > 4, "nothing was computed again"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MODELS)
def test_fp16_trains_on_the_cpu(make: Any, kind: str) -> None:
    trainer = make(kind, policy="lean", fp16=True)
    losses = train(trainer)
    exact = train(make(kind))
    for (loss, norm), (true_loss, true_norm) in zip(losses[:2], exact, strict=False):
        assert loss == pytest.approx(true_loss, rel=0.01)
        assert norm == pytest.approx(true_norm, rel=0.03)
    assert trainer.state.log_history[0]["loss_scale"] == 2.0**16
    assert trainer.state.log_history[0]["skipped_steps"] == 0


def test_a_skipped_step_is_logged_and_leaves_the_schedule_alone(make: Any) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**30)
    trainer = make("llama", policy=None, scaler=scaler, fp16=True, optim="adamw_torch_fused")
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert logs[0]["skipped_steps"] == 1
    assert logs[0]["loss_scale"] == 2.0**29
    assert trainer.lr_scheduler.last_epoch == 4 - int(logs[-1]["skipped_steps"])


def test_a_loss_of_the_users_is_computed_as_without_polymp(make: Any) -> None:
    """Outside of the model there is no region, as with bf16=True alone."""
    seen = []

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            seen.append((outputs.logits @ outputs.logits.T).dtype)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    expected = train(make(trainer=Own, bf16=True))
    assert train(make(trainer=Own, bf16=True, policy="torch-cpu")) == expected
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("first", [True, False])
def test_evaluation_before_and_after_training(make: Any, first: bool) -> None:
    results = []
    for policy in (False, "torch-cpu"):
        trainer = make("llama", policy=policy, bf16=True)
        if not first:
            trainer.train()
        results.append(trainer.evaluate()["eval_loss"])
    assert results[0] == results[1]


def test_generate(make: Any) -> None:
    """Every call of the model, not only those of the training, has the region and the policy."""
    settings: dict[str, Any] = {
        "trainer": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments,
        "predict_with_generate": True, "generation_max_length": 6, "bf16": True,
    }  # fmt: skip
    trainer = make("t5", policy=FP32, **settings)
    trainer.train()
    with polymp.torch.explain() as report:
        found = trainer.predict(examples("t5")[:8])
    assert found.predictions.shape[0] == 8
    assert {call.rule for call in report.of("linear")} == {"fp32"}

    trainer = make("llama", policy="lean", bf16=True)
    trainer.train()
    ids = examples("llama")[0]["input_ids"][None]
    with trainer.accelerator.autocast():
        inside = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(trainer.model.generate(ids, max_new_tokens=4, do_sample=False), inside)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("first", "second"), [(False, None), (None, False), (None, None)])
def test_each_resumes_the_other(make: Any, first: Any, second: Any, tmp_path: Path) -> None:
    settings = {"bf16": True, "save_strategy": "steps", "save_steps": 2}
    expected = train(make(**settings))
    train(make(policy=first, **settings))
    again = make(policy=second, **settings)
    assert train(again, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == expected


def test_resuming_in_float16_restores_the_scale(make: Any, tmp_path: Path) -> None:
    settings = {"fp16": True, "save_strategy": "steps", "save_steps": 2, "policy": "lean"}
    expected = train(make(scaler=GradScaler("cpu", init_scale=2.0**7), **settings))
    again = make(**settings)
    resumed = train(again, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed == expected
    assert again.accelerator.scaler.get_scale() == 2.0**7


def test_a_new_accelerator_is_used_too(make: Any) -> None:
    """A search for hyperparameters makes one for each trial."""
    expected = train(make("llama", policy=FP32, bf16=True))
    trainer = make("llama", policy=FP32, bf16=True)
    trainer.create_accelerator_and_postprocess()
    assert train(trainer) == expected


def test_the_model_is_saved_under_its_own_name(make: Any, tmp_path: Path) -> None:
    trainer = make("llama", policy="lean", bf16=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)


def test_another_trainer_gives_the_same_model_another_policy(make: Any) -> None:
    def further(model: Any) -> Any:
        args = TrainingArguments("unused", bf16=True, **QUIET)
        return Trainer(model, args, train_dataset=examples("llama"))

    expected = train(further(train_llama(make, "torch-cpu")))
    assert train(use(further(train_llama(make, FP32)), "torch-cpu")) != expected
    changed = train_llama(make, "torch-cpu")
    assert train(use(further(changed), "torch-cpu")) == expected


def train_llama(make: Any, policy: Any) -> Any:
    trainer = make("llama", policy=policy, bf16=True)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("mode", [{"bf16": True}, {"fp16": True}, {}], ids=str)
def test_catch_stops_the_trainer_at_the_bad_step(make: Any, mode: Any) -> None:
    trainer = make(policy=None if mode else False, **mode)
    inner = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        return loss * (float("nan") if trainer.state.global_step == 2 else 1.0)

    trainer.compute_loss = compute_loss
    trainer.training_step = polymp.torch.catch(trainer.training_step, every=1)
    with pytest.raises(BadStepError) as raised:
        trainer.train()
    assert (raised.value.report.step, raised.value.report.found) == (2, "the loss is NaN")
    assert all(p.isfinite().all() for p in trainer.model.parameters())
