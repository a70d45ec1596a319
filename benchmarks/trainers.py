"""The cost of the adapters of training frameworks, beside the frameworks' own mixed precision.

For each framework one of its documented examples: the autoencoder of Lightning's guide, BERT that
classifies pairs of sentences as in accelerate's, a causal language model as in the guide of the
Trainer. Models are made from configs, and data on the spot. A run is a whole training with the
framework's own loop; its first steps do not count. The losses of the adapter with the framework's
own rules, `policy="torch-cpu"`, have to be those of the framework, bit for bit.

    pip install -e '.[torch,lightning,accelerate,transformers]' rich
    python benchmarks/trainers.py                     # about 6 minutes on a core
    python benchmarks/trainers.py --only Lightning --rounds 4 --out some.json
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pairing import Row, machine, measure, missed, row, save, show
from torch import nn

BAR = 1.02
WARM, EVERY = 2, 4  # optimizer steps of a run that do not count, microbatches of a step
THEIRS = "the framework's own"
WAYS: dict[str, Any] = {  # the policy of each
    THEIRS: False,
    "polymp": None,
    "torch-cpu": "torch-cpu",
    "lean": "lean",
}
CLOCK = time.process_time


class Run(NamedTuple):
    """A training.

    Attributes:
        seconds: of processor time, for the steps that count.
        losses: of all microbatches.
    """

    seconds: float
    losses: list[float]


class Clock:
    """Takes the time from the end of the warm steps to the end of the last one."""

    def __init__(self) -> None:
        self.steps = 0
        self.start = self.end = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM:
            self.start = CLOCK()
        self.end = CLOCK()

    def run(self, losses: list[float]) -> Run:
        return Run(self.end - self.start, losses)


def images(count: int, rows: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return list(torch.rand(count, rows, 28 * 28, generator=made))


def sentences(count: int, rows: int, vocabulary: int = 512) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return list(torch.randint(1, vocabulary, (count, rows, 64), generator=made))


def with_lightning(way: str, mode: str, every: int, steps: int) -> Run:
    """The autoencoder of "Lightning in 15 minutes", wider."""
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    from polymp.lightning import Precision

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock, losses = Clock(), []

    class AutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 64))
            self.decoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            if len(losses) % every == 0:
                clock.step()

    precision = f"{mode.removeprefix('fp')}-mixed"
    if WAYS[way] is False:
        scaler = torch.amp.GradScaler("cpu") if mode == "fp16" else None
        plugin: Any = MixedPrecision(precision, "cpu", scaler)  # type: ignore[arg-type]
    else:
        plugin = Precision(precision, WAYS[way])
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        plugins=[plugin], max_epochs=1, accelerator="cpu", accumulate_grad_batches=every,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    # Without units for float16, a processor is slow in it.
    data = images(steps * every, 64 if mode == "fp16" else 512)
    trainer.fit(AutoEncoder(), torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return clock.run(losses)


def with_accelerate(way: str, mode: str, every: int, steps: int) -> Run:
    """BERT on pairs of sentences, as in accelerate's nlp_example."""
    import transformers
    from accelerate import Accelerator

    import polymp.accelerate

    settings: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": every}
    accelerator = Accelerator(mixed_precision=mode, **settings)
    if WAYS[way] is not False:
        polymp.accelerate.use(accelerator, WAYS[way])
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=192, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    clock, losses = Clock(), []
    for ids in sentences(steps * every, 4):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % every == 0:
            clock.step()
    return clock.run(losses)


def with_transformers(way: str, mode: str, every: int, steps: int) -> Run:
    """A causal language model, as in the Trainer's guide."""
    import transformers

    import polymp.transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=192, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    clock, losses = Clock(), []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=every, logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False, **{mode: True},
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in torch.cat(sentences(steps * every, 4))]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Watch()])  # type: ignore[arg-type]
        trainer.remove_callback(transformers.PrinterCallback)
        if WAYS[way] is not False:
            polymp.transformers.use(trainer, WAYS[way])
        trainer.train()
    return clock.run(losses)


class Program(NamedTuple):
    """A framework's example.

    Attributes:
        train: runs it: the way, the mode, microbatches of a step, steps.
        modes: that it has on a CPU.
        steps: optimizer steps of a run: few, for many short runs in turn differ less by chance than
            few long ones.
    """

    train: Callable[[str, str, int, int], Run]
    modes: tuple[str, ...]
    steps: int


PROGRAMS = {
    "Lightning": Program(with_lightning, ("bf16", "fp16"), 8),
    "accelerate": Program(with_accelerate, ("bf16",), 6),
    "transformers": Program(with_transformers, ("bf16",), 6),
}


def compare(name: str, mode: str, every: int, rounds: int) -> tuple[list[Row], dict[str, bool]]:
    """Every way of a framework in turn: ratios to its own, and whose losses are its own.

    Args:
        name: of the framework.
        mode: "bf16" or "fp16".
        every: microbatches of a step.
        rounds: trainings of each way.
    """
    program = PROGRAMS[name]
    ways = list(WAYS)
    losses: dict[str, list[float]] = {}

    def timed(way: str) -> Callable[[], float]:
        def once() -> float:
            run = program.train(way, mode, every, program.steps)
            assert losses.setdefault(way, run.losses) == run.losses, "a run differs from the last"
            return run.seconds / (program.steps - WARM)

        return once

    times = measure({way: timed(way) for way in ways}, rounds, warm=1)
    loop = f"{name}, {mode}" + (f", {every} microbatches" if every > 1 else "")
    rows = [
        row(
            f"{loop}: {way} / own", times[THEIRS], times[way],
            BAR if way in ("polymp", "torch-cpu") else None,
        )
        for way in ways[1:]
    ]  # fmt: skip
    return rows, {f"{loop}: {way}": losses[way] == losses[THEIRS] for way in ways[1:]}


def main() -> int:
    """Measure, print and save.

    Returns:
        0; 1 if losses that have to be the framework's are not.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="one framework")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, help="the file; by default one in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables: dict[str, list[Row]] = {}
    equal: dict[str, bool] = {}
    for name in args.only or PROGRAMS:
        for mode in PROGRAMS[name].modes:
            for every in (1, EVERY):
                rows, same = compare(name, mode, every, args.rounds)
                tables.setdefault(name, []).extend(rows)
                equal |= same
    for title, rows in tables.items():
        show(title, rows)
    every_row = [r for rows in tables.values() for r in rows]
    record = {
        "machine": machine("torch", *map(str.lower, PROGRAMS)),
        "rounds": args.rounds,
        "tables": tables,
        "equal_losses": equal,
        "notes": ["Processor time of one thread, for an optimizer step."],
    }
    path = save("trainers", "cpu", record, args.out)
    unlike = [what for what, same in equal.items() if what.endswith(": torch-cpu") and not same]
    print(f"Saved {path}. Missed: {', '.join(missed(every_row)) or 'none'}.")
    print(f"Losses that differ from the framework's: {', '.join(unlike) or 'none'}.")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
