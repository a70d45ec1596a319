"""The cost of `explain`, `audit`, `locate`, `catch` and `record`, beside a training step.

In JAX nothing runs for `explain`: it traces the example's loss and gradient, and reads what it
finds off the trace; the base is `jax.make_jaxpr` of the same function. In torch the step runs; the
base is the step without anybody looking.

`audit` is of the example's whole training steps, with its optimizer and scaler, in processor time
on one core: of a step inside the block in torch, of a call in JAX, with its twin compiled. What it
takes to enter the block, and to read all when it ends, is a row of its own. In torch the same is
measured of a 24-layer BERT, `locate` where nothing is wrong, and `record` without probes; beside
them is a mode that sees every op and does nothing. In JAX the first calls of `audit` and `locate`,
which compile, are compared with the first call of the step. The sizes are those that the example
has on this machine, but for float16 in torch its small ones: a step of the others takes seconds
there on a CPU. The record has them. `make bench` runs it.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from pairing import Row, Timed, machine, measure, missed, row, save, show, timed
from torch.utils._python_dispatch import TorchDispatchMode

import polymp
import polymp.jax
import polymp.torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import job
import train_jax
import train_torch

BAR = 2.0  # explain in JAX, against make_jaxpr
AUDIT_BAR = {"torch": 2.0, "JAX": 2.5}
BERT_BAR = 4.0  # audit
LOCATE_BAR = 6.0  # of the same BERT
RECORD_BAR = 2.0  # likewise, and of the examples
PROBES = 8  # that `record` has without an option
PROBED_BAR = PROBES + 4.0  # likewise, with them
FIRST_BAR = 3.0  # audit and locate in JAX, against a first step
CATCH_BAR = 1.03
LAYERS = (2, 8)  # of the model explained in JAX
EVERY = 100  # steps from one copy of `catch` to the next
STEPS = 4  # in a block
WIDE = 512  # of a BERT whose ops are not tiny
BATCH = 8, 128  # texts and tokens of a batch that is not tiny, either
DTYPES = ("fp32", "bf16", "fp16")
ALPHABET = 100

Program = Callable[[], Any]


def sizes_of(framework: str, name: str) -> job.Sizes:
    """The example's sizes for a dtype on this machine."""
    return job.SMALL if (framework, name) == ("torch", "fp16") else job.default_sizes()


def arguments(framework: str, name: str) -> argparse.Namespace:
    """The example's arguments for a dtype on this machine."""
    return job.arguments(job.parser("train.py", "", sizes_of(framework, name)), [])


def in_jax(layers: int) -> dict[str, Program]:
    """The example's loss and gradient: traced, and explained to the last row."""
    args = arguments("JAX", "bf16")
    model = train_jax.Transformer(
        ALPHABET, args.context, args.width, layers, args.heads, nnx.Rngs(0)
    )
    graph, params = nnx.split(model)
    tokens = jnp.zeros((args.batch, args.context + 1), "int32")

    def step() -> Any:
        """A new function each time: what was traced before is kept by the function."""

        def loss(params: Any, tokens: Any) -> Any:
            return train_jax.loss_on(nnx.merge(graph, params), tokens)

        return jax.value_and_grad(polymp.jax.autocast(loss, dtype=jnp.bfloat16))

    return {
        "make_jaxpr": lambda: jax.make_jaxpr(step())(params, tokens),
        "explain": lambda: polymp.explain(step(), params, tokens).calls,
    }


def in_torch(name: str, device: str = "cpu") -> dict[str, Program]:
    """The example's training step, without an optimizer: alone, and explained."""
    args, dtype = arguments("torch", name), train_torch.DTYPES[name]
    torch.manual_seed(args.seed)
    with torch.device(device):
        model = train_torch.Transformer(ALPHABET, args.context, args.width, args.layers, args.heads)
        tokens = torch.randint(ALPHABET, (args.batch, args.context + 1))

    def step() -> None:
        model.zero_grad()
        with polymp.torch.autocast(device, dtype):
            loss = train_torch.loss_on(model, tokens)
        loss.backward()

    def explained() -> Any:
        with polymp.torch.explain(model=model) as report:
            step()
        return report.calls

    return {"step": step, "explain": explained}


Training = tuple[torch.nn.Module, polymp.torch.GradScaler, Callable[[], torch.Tensor]]


def training_in_torch(name: str, device: str = "cpu") -> Training:
    """The example's model, its scaler, and its training step."""
    args = arguments("torch", name)
    torch.manual_seed(args.seed)
    with torch.device(device):
        model = train_torch.Transformer(ALPHABET, args.context, args.width, args.layers, args.heads)
        tokens = torch.randint(ALPHABET, (args.batch, args.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    scaler = polymp.torch.GradScaler(device, enabled=name == "fp16")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with polymp.torch.autocast(device, train_torch.DTYPES[name], enabled=name != "fp32"):
            loss = train_torch.loss_on(model, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, scaler, step


def bert(width: int = 64, texts: int = 4, tokens: int = 32) -> Training:
    """A BERT of 24 layers, narrow ones as a rule, no scaler, and a training step in bfloat16.

    Args:
        width: of its layers.
        texts: in a batch.
        tokens: in each text.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=width, num_hidden_layers=24, num_attention_heads=4,
        intermediate_size=4 * width,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = polymp.torch.GradScaler("cpu", enabled=False)
    ids, labels = torch.randint(512, (texts, tokens)), torch.randint(2, (texts,))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with polymp.torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, scaler, step


class Nothing(TorchDispatchMode):
    """Sees every op, and does nothing: the least that an audit of all ops can cost."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        return op(*args, **(kwargs or {}))


def clocked(run: Program, device: str = "cpu") -> Timed:
    """The processor time of a program; on a GPU, the time until the device has ended, too."""
    if device == "cuda":
        return timed(run, finish=torch.cuda.synchronize)
    return timed(run, clock=time.process_time)


def seen_in_torch(training: Training, device: str = "cpu") -> dict[str, Timed]:
    """A training step: alone, with a mode that does nothing, and replayed by `locate`."""
    model, _, step = training

    def watched() -> None:
        with Nothing():
            step()

    programs: dict[str, Program] = {
        "step": step,
        "nothing": watched,
        "locate": lambda: polymp.torch.locate(step, model=model),
    }
    return {name: clocked(run, device) for name, run in programs.items()}


def recorded_in_torch(training: Training, *probes: int, device: str = "cpu") -> dict[str, Timed]:
    """A training step: alone, and recorded with some numbers of probes."""
    model, _, step = training

    def recorded(count: int) -> Program:
        recorder = polymp.torch.record(None, model, probes=count)

        def once() -> None:
            with recorder:
                step()

        return once

    programs: dict[str, Program] = {"step": step} | {str(n): recorded(n) for n in probes}
    return {name: clocked(run, device) for name, run in programs.items()}


def audited_in_torch(training: Training, device: str = "cpu") -> dict[str, Timed]:
    """A training step: alone, in an audit of several, and by the whole of it."""
    model, scaler, step = training

    def several() -> None:
        for _ in range(STEPS):
            step()

    def steps() -> float:
        return clocked(several, device)() / STEPS

    def inside() -> float:
        with polymp.torch.audit(model, scaler):
            return steps()

    def whole() -> float:
        return clocked(inside, device)() / STEPS

    return {"step": steps, "inside": inside, "whole": whole}


def caught_in_torch(name: str, device: str = "cpu") -> dict[str, Timed]:
    """A step, and a step of a training of its own with `catch`."""
    (_, _, plain), (_, _, step) = (training_in_torch(name, device) for _ in range(2))
    caught = polymp.torch.catch(step, every=EVERY)
    programs: dict[str, Program] = {"step": plain, "caught": caught}
    return {name: clocked(run, device) for name, run in programs.items()}


def training_in_jax(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The example's training step, and its arguments."""
    args = arguments("JAX", name)
    shape = args.context, args.width, args.layers, args.heads
    graph, params = nnx.split(train_jax.Transformer(ALPHABET, *shape, nnx.Rngs(0)))
    scaler = polymp.jax.GradScaler(enabled=name == "fp16")
    adamw = train_jax.optimizer(1e-3)
    tokens = jnp.zeros((args.batch, args.context + 1), "int32")

    @polymp.jax.autocast(dtype=train_jax.DTYPES[name], enabled=name != "fp32")
    def region(params: Any, tokens: Any) -> Any:
        return train_jax.loss_on(nnx.merge(graph, params), tokens)

    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, state = adamw.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(params: Any, state: Any, scaler: Any, tokens: Any) -> Any:
        def scaled(params: Any) -> Any:
            loss = region(params, tokens)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        (params, state), scaler, _ = scaler.step(grads, update, params, state)
        return params, state, scaler, loss

    return step, (params, adamw.init(params), scaler, tokens)


def caught_in_jax(name: str) -> dict[str, Timed]:
    """A step, and a step of a training of its own with `catch`."""

    def going(step: Any, state: Any, tokens: Any) -> Program:
        def once() -> None:
            nonlocal state
            *state, _ = step(*state, tokens)
            jax.block_until_ready(state)

        return once

    step, (*state, tokens) = training_in_jax(name)
    caught = polymp.jax.catch(step, every=EVERY)
    programs = {"step": going(step, state, tokens), "caught": going(caught, state, tokens)}
    return {name: timed(run, clock=time.process_time) for name, run in programs.items()}


def audited_in_jax(name: str) -> dict[str, Timed]:
    """The example's training step: alone, and audited."""
    step, given = training_in_jax(name)
    audited = polymp.jax.audit(step)
    programs: dict[str, Program] = {
        "step": lambda: jax.block_until_ready(step(*given)),
        "call": lambda: jax.block_until_ready((audited(*given), audited._measured.pop()[1])),
    }
    return {name: timed(run, clock=time.process_time) for name, run in programs.items()}


def recorded_in_jax(name: str) -> dict[str, Timed]:
    """The example's training step: alone, and recorded, without and with probes."""
    step, given = training_in_jax(name)

    def recorded(count: int) -> Program:
        recorder = polymp.jax.record(None, step, probes=count)
        return lambda: jax.block_until_ready(recorder(*given))

    programs: dict[str, Program] = {"step": lambda: jax.block_until_ready(step(*given))}
    programs |= {str(count): recorded(count) for count in (0, PROBES)}
    return {name: timed(run, clock=time.process_time) for name, run in programs.items()}


def records(rounds: int) -> Iterator[Row]:
    """Recorded steps beside plain ones."""
    for name in ("fp32", "bf16"):
        for framework in ("torch", "JAX"):
            if framework == "torch":
                programs = recorded_in_torch(training_in_torch(name), 0, PROBES)
            else:
                programs = recorded_in_jax(name)
            base, plain, probed = measure(programs, rounds, warm=1).values()
            what = f"record, {framework}, {name}"
            yield row(f"{what}: no probes / step", base, plain, RECORD_BAR)
            yield row(f"{what}: {PROBES} probes / step", base, probed, PROBED_BAR)


def audits(rounds: int) -> Iterator[Row]:
    """Audited steps beside plain ones, in each dtype."""
    for name in DTYPES:
        base, inside, whole = measure(audited_in_torch(training_in_torch(name)), rounds).values()
        yield row(f"audit, torch, {name}: step / plain step", base, inside, AUDIT_BAR["torch"])
        yield row(f"audit, torch, {name}: {STEPS} steps, entered and read / plain", base, whole)
    plain = {}
    for name in DTYPES:
        plain[name], inside = measure(audited_in_jax(name), rounds).values()
        yield row(f"audit, JAX, {name}: call / plain step", plain[name], inside, AUDIT_BAR["JAX"])
    least = [2 * half + wide for half, wide in zip(plain["fp16"], plain["fp32"], strict=True)]
    yield row("audit, JAX, fp16: the plain step twice, and once in fp32 / plain step",
              plain["fp16"], least)  # fmt: skip


def of_bert(rounds: int) -> Iterator[Row]:
    """A 24-layer BERT in torch: audited, seen by a mode that does nothing, and located."""
    training = bert()
    base, inside, whole = measure(audited_in_torch(training), rounds, warm=1).values()
    yield row("audit, torch, 24-layer BERT: step / plain step", base, inside, BERT_BAR)
    yield row(f"audit, torch, 24-layer BERT: {STEPS} steps, entered and read / plain", base, whole)
    base, nothing, located = measure(seen_in_torch(training), rounds, warm=1).values()
    yield row("a mode that does nothing, torch, 24-layer BERT: step / plain step", base, nothing)
    yield row("locate, torch, 24-layer BERT, nothing wrong / step", base, located, LOCATE_BAR)
    base, recorded = measure(recorded_in_torch(training, 0), rounds, warm=1).values()
    yield row("record, torch, 24-layer BERT, no probes / step", base, recorded, RECORD_BAR)
    wide = bert(WIDE)
    base, inside, _ = measure(audited_in_torch(wide), rounds, warm=1).values()
    yield row(f"audit, torch, 24-layer BERT of width {WIDE}: step / plain step",
              base, inside, BERT_BAR)  # fmt: skip
    base, _, located = measure(seen_in_torch(wide), rounds, warm=1).values()
    yield row(f"locate, torch, 24-layer BERT of width {WIDE}, nothing wrong / step",
              base, located, LOCATE_BAR)  # fmt: skip
    base, recorded = measure(recorded_in_torch(wide, 0), rounds, warm=1).values()
    yield row(f"record, torch, 24-layer BERT of width {WIDE}, no probes / step",
              base, recorded, RECORD_BAR)  # fmt: skip
    full = recorded_in_torch(bert(WIDE, *BATCH), 0)
    base, recorded = measure(full, rounds, warm=1).values()
    yield row(f"record, torch, the same with {math.prod(BATCH):,} tokens, no probes / step",
              base, recorded, RECORD_BAR)  # fmt: skip


def first_calls(rounds: int) -> Iterator[Row]:
    """The first calls of the step, of its audit and of `locate` in JAX, each of a new function."""

    def first(call: Callable[..., Any]) -> Timed:
        def once() -> float:
            step, given = training_in_jax("bf16")
            return timed(
                lambda: jax.block_until_ready(call(step, given)), clock=time.process_time
            )()

        return once

    def audited(step: Any, given: Any) -> Any:
        audit = polymp.jax.audit(step)
        return audit(*given), audit._measured[0][1]

    programs = {
        "step": first(lambda step, given: step(*given)),
        "audit": first(audited),
        "locate": first(lambda step, given: polymp.jax.locate(step, *given)),
    }
    base, *others = measure(programs, rounds, warm=0).values()
    for name, found in zip(("audit", "locate"), others, strict=True):
        yield row(f"{name}, JAX, bf16: first call / first step", base, found, FIRST_BAR)


def catches(rounds: int) -> Iterator[Row]:
    """Steps with `catch` beside plain ones, in each dtype.

    The steps are taken in turn; a figure is the mean of as many as from one copy to the next.
    """
    for framework, programs in (("torch", caught_in_torch), ("JAX", caught_in_jax)):
        for name in DTYPES:
            steps = measure(programs(name), rounds * EVERY).values()
            base, caught = (
                [statistics.mean(each[at : at + EVERY]) for at in range(0, len(each), EVERY)]
                for each in steps
            )
            yield row(f"catch, {framework}, {name}: step / plain step", base, caught, CATCH_BAR)


def compared(what: str, programs: dict[str, Program], rounds: int, bar: float | None = None) -> Row:
    """The second program against the first."""
    times = measure({name: timed(run) for name, run in programs.items()}, rounds)
    base, ours = times.values()
    return row(what, base, ours, bar)


def explains(rounds: int) -> Iterator[Row]:
    """The example explained, in JAX with several numbers of layers."""
    for layers in LAYERS:
        what = f"explain, JAX, {layers} layers: explain / make_jaxpr"
        yield compared(what, in_jax(layers), rounds, BAR)
    for name in ("bf16", "fp16"):
        yield compared(f"explain, torch, {name}: explain / step", in_torch(name), rounds)


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "explain": explains,
    "audit": audits,
    "bert": lambda rounds: of_bert(max(rounds // 4, 1)),
    "record": lambda rounds: records(max(rounds // 10, 1)),
    "first": lambda rounds: first_calls(max(rounds // 10, 1)),
    "catch": lambda rounds: catches(max(rounds // 5, 1)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons, print the table, save it as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="paired rounds")
    parser.add_argument("--only", nargs="*", default=[*PARTS], choices=[*PARTS], help="what to run")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [each for part in args.only for each in PARTS[part](args.rounds)]
    title = "explain, audit, locate, catch and record, compared with the step that they examine"
    show(title, rows)
    print(f"Bars missed: {', '.join(missed(rows)) or 'none'}.")
    record = {
        "machine": machine("torch", "jax", "jaxlib", "flax"),
        "rounds": args.rounds,
        "sizes": {
            f"{framework}, {name}": sizes_of(framework, name)._asdict()
            for framework in ("torch", "JAX")
            for name in DTYPES
        },
        "tables": {title: rows},
        "notes": [
            "In JAX, the time of `explain` includes making all rows of the report.",
            "The times of audits are processor time on one core.",
        ],
    }
    save("seeing", "cpu", record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
