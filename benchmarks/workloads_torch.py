"""The models that torch_speed.py runs, and the process that runs them in one way.

    MLP         Linears of one width, without gradients
    LM          the transformer of examples/train_torch.py: train step, microbatches, decoding;
                and a narrower one of more layers
    convnet     residual blocks with batch norm, channels last: train step, inference
    LoRA        the same transformer, frozen, with trainable adapters on the Linears of attention

A worker is a process of its own for one way (`main`), so that what one way adds to torch, as
kernels that stay, costs no other; the parent has them run in turn. Weights are the same in all.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairing import Timed, machine, timed
from torch import Tensor, nn
from torch.nn import functional as F
from ways_torch import PACKAGES, Job, cross_entropy, plain, run

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_torch import Block, Transformer


@dataclass(frozen=True)
class Size:
    """Sizes of the models; one for all ways."""

    features: int = 2048  # of a Linear of the MLP
    linears: int = 8
    alphabet: int = 256
    width: int = 512
    layers: int = 4
    heads: int = 8
    context: int = 128  # tokens of a sequence
    short: int = 32  # of a short one, as the example has it
    sequences: int = 8  # of a train step
    batch: int = 8  # microbatches of a step, or sequences of a deep model's
    prompt: int = 16  # tokens in the cache before decoding starts
    decoded: int = 32
    rank: int = 8  # of an adapter
    channels: int = 64  # of the convnet's first stage; twice that in the next, and the next
    images: int = 16  # of 3 x 32 x 32
    deep_width: int = 768
    deep_layers: int = 12
    deep_heads: int = 12


# With fewer channels than 8, torch 2.13 crashes on a CPU without AVX-512: in the backward pass of
# convolutions whose memory is laid out as channels last, also in float32.
SMALL = Size(16, 2, 11, 16, 1, 2, 6, 3, 2, 2, 2, 3, 2, 8, 2, 8, 2, 2)
LARGE = Size(
    features=4096, alphabet=32768, width=1024, heads=16, context=512, short=64, sequences=16,
    prompt=64, decoded=64, images=256,
)  # fmt: skip


# --- models --------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A language model that returns its loss: int64 [batch, length + 1] to []."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.model(tokens[:, :-1])
        return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Decoder(nn.Module):
    """One more token: int64 [1, 1] and the cache, to scores [1, 1, alphabet] and the new cache.

    The cache has keys, then values, of every layer: [1, heads, length, width / heads].
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        model, layers = self.model, len(self.model.blocks)
        place = torch.full((1,), cache[0].shape[2], device=token.device)
        x = model.bytes(token) + model.places(place)
        keys, values = [], []
        for i, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            qkv = block.qkv(block.norm1(x)).view(1, 1, 3, block.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            keys.append(torch.cat((cache[i], k), 2))
            values.append(torch.cat((cache[layers + i], v), 2))
            seen = F.scaled_dot_product_attention(q, keys[-1], values[-1])
            x = x + block.out(seen.transpose(1, 2).flatten(2))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        return (model.head(model.norm(x)), *keys, *values)


class Adapted(nn.Module):
    """A frozen Linear, and a trainable product of two thin matrices beside it (LoRA).

    Source: Hu et al., arXiv:2106.09685; the second matrix does not start at zero here, so that
    both have gradients from the first step on.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Pictures(nn.Module):
    """Three stages of residual blocks: float32 [batch, 3, side, side] to scores [batch, 10]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = (3, channels, 2 * channels, 4 * channels)
        strides = (1, 2, 2)
        self.stages = nn.Sequential(*map(Residual, sizes[:-1], sizes[1:], strides))
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))  # type: ignore[no-any-return]


class PictureLoss(nn.Module):
    """`Pictures` that return their loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(self.model(x), wanted)


# --- workloads: what runs once, and what it returns -----------------------------------------------


@dataclass
class Program:
    """A workload in one way: `once` runs it and returns a loss or scores."""

    once: Callable[[], Tensor]
    stack: ExitStack


adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def transformer(size: Size) -> Transformer:
    return Transformer(size.alphabet, size.context, size.width, size.layers, size.heads)


def deep(size: Size) -> Size:
    """The same sizes, with the deep language model in place of the wide one."""
    return replace(size, width=size.deep_width, layers=size.deep_layers, heads=size.deep_heads)


def serving(way: str, model: nn.Module, x: Tensor) -> Program:
    job = Job(model.eval(), (x,))
    made = run(way, job)
    x = x.to(made.dtype) if made.casts_inputs else x

    def once() -> Tensor:
        with torch.no_grad(), made.region():
            return made.call(x)  # type: ignore[no-any-return]

    return Program(once, job.stack)


def training(way: str, model: nn.Module, batches: list[tuple[Tensor, ...]]) -> Program:
    """One step after the backward passes of all batches, each under a region of its own."""
    job = Job(model.train(), batches[0], adamw)
    made = run(way, job)
    if made.casts_inputs:
        batches = [tuple(x.to(made.dtype) if x.is_floating_point() else x for x in b)
                   for b in batches]  # fmt: skip

    def once() -> Tensor:
        total = torch.zeros((), device=batches[0][0].device)
        for batch in batches:
            with made.region():
                loss = made.call(*batch) / len(batches)
            made.backward(loss)
            total += loss.detach()
        made.step()
        return total

    return Program(once, job.stack)


def mlp(way: str, size: Size, device: str, batch: int) -> Program:
    n = size.features
    model = nn.Sequential(*(nn.Linear(n, n) for _ in range(size.linears))).to(device)
    return serving(way, model, torch.randn(batch, n).to(device))


def lm(way: str, size: Size, device: str, sequences: int, length: int, batches: int = 1) -> Program:
    """A step of the language model after so many batches, which share the sequences."""
    tokens = torch.randint(size.alphabet, (sequences, length + 1)).to(device)
    model = Loss(transformer(size)).to(device)
    return training(way, model, [(t,) for t in tokens.chunk(batches)])


def accumulation(way: str, size: Size, device: str, length: int) -> Program:
    """A step after microbatches of one sequence each."""
    return lm(way, size, device, size.batch, length, size.batch)


def lora(way: str, size: Size, device: str, length: int) -> Program:
    """A step of the adapters, with one sequence."""
    tokens = torch.randint(size.alphabet, (1, length + 1)).to(device)
    model = transformer(size).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in ("qkv", "out"):
            setattr(block, name, Adapted(getattr(block, name), size.rank))
    return training(way, Loss(model).to(device), [(tokens,)])


def decoding(way: str, size: Size, device: str, one_region: bool = False) -> Program:
    """Greedy, token by token, with a cache of keys and values in the way's dtype.

    With `one_region` it is around all tokens, as users of `generate` have it; else each has one.
    """
    model = Decoder(transformer(size)).to(device).eval()
    shape = (2 * size.layers, 1, size.heads, size.prompt, size.width // size.heads)
    numbers = torch.randn(shape).to(device)
    first = torch.randint(size.alphabet, (1, 1)).to(device)
    low = torch.float32 if plain(way) == "fp32" else torch.bfloat16
    job = Job(model, (first, *numbers.to(low)))
    made = run(way, job)
    start = tuple(numbers.to(made.dtype))

    def once() -> Tensor:
        token, cache = first, start
        around, each = made.region, nullcontext
        if not one_region:
            around, each = each, around
        with torch.no_grad(), around():
            for _ in range(size.decoded):
                with each():
                    scores, *rest = made.call(token, *cache)
                token, cache = scores.argmax(-1), tuple(rest)
        return scores  # type: ignore[no-any-return]

    return Program(once, job.stack)


def convnet(way: str, size: Size, device: str, train: bool) -> Program:
    batch = size.images if train else 1
    x = torch.randn(batch, 3, 32, 32).to(device, memory_format=torch.channels_last)
    wanted = torch.randint(10, (batch,)).to(device)
    model = Pictures(size.channels).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return training(way, PictureLoss(model), [(x, wanted)]) if train else serving(way, model, x)


Make = Callable[[str, Size, str], Program]
WORKLOADS: dict[str, Make] = {
    **{f"mlp {batch}": partial(mlp, batch=batch) for batch in (1, 8, 32, 64)},
    "train": lambda way, size, device: lm(way, size, device, size.sequences, 1, size.context),
    "train deep": lambda way, size, device: lm(
        way, deep(size), device, size.batch, 1, size.context
    ),
    "accumulate": lambda way, size, device: lm(
        way, size, device, size.batch, size.batch, size.context
    ),
    "accumulate short": lambda way, size, device: lm(
        way, size, device, size.batch, size.batch, size.short
    ),
    "decode": decoding,
    "generate": partial(decoding, one_region=True),
    "convnet train": partial(convnet, train=True),
    "convnet": partial(convnet, train=False),
    "lora": lambda way, size, device: lora(way, size, device, size.context),
    "lora short": lambda way, size, device: lora(way, size, device, size.short),
}


def make(workload: str, way: str, size: Size, device: str) -> Program:
    """A workload in one way; the same weights and inputs in every way."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return WORKLOADS[workload](way, size, device)


# --- a worker ------------------------------------------------------------------------------------


def resident(name: str) -> int:
    """A field of /proc/self/status, in bytes: VmRSS, or VmHWM, the most it has been."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def peak(workload: str, way: str, size: Size, device: str) -> float:
    """The most memory that a workload takes on a CPU beyond what was there before it, in bytes.

    A small one runs before, for what any first run loads. It is VmHWM, which starts anew once the
    model is there ("5" into /proc/self/clear_refs), minus VmRSS before the model. What building the
    model takes, and gives back, is not in it. See `allocated` for a GPU.
    """
    before = make(workload, way, SMALL, device)
    before.once()
    before.stack.close()
    del before
    gc.collect()
    start = resident("VmRSS")
    program = make(workload, way, size, device)
    program.once()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        program.once()
    return float(resident("VmHWM") - start)


def kernels(program: Program) -> int:
    """How many kernels one run starts on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        program.once()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type.name == "CUDA"]
    others = ("Memcpy", "Memset")
    return sum(not e.is_user_annotation and not e.name.startswith(others) for e in found)


def host_sync(program: Program) -> str:
    """The op for which the host waited for the GPU in one run; "" if it did not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        program.once()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def allocated(program: Program, before: int) -> float:
    """The most memory that torch had allocated on the GPU in three runs, beyond `before`; bytes."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        program.once()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def timed_by_events(program: Callable[[], Any], inner: int, least: float = 0.01) -> Timed:
    """A program as `pairing.measure` wants it, by the GPU's own clock.

    Args:
        program: what to run.
        inner: how often, at the least, for one figure: the mean.
        least: seconds that one figure is to take: a shorter program runs more often.
    """

    def seconds(times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            program()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    seconds(1)  # whatever a first run sets up
    times = max(inner, math.ceil(least / max(seconds(1), 1e-6)))
    return lambda: seconds(times)


class Worker:
    """One way's programs, made, run and dropped as the parent asks; figures as JSON."""

    def __init__(self, way: str, device: str, size: Size) -> None:
        self.way, self.device, self.size = way, device, size
        self.program: Program | None = None
        self.clock: Timed | None = None
        self.before = 0  # bytes that were allocated on the GPU before the program was made

    def answer(self, do: str, workload: str = "", threads: int = 1, inner: int = 1) -> Any:
        match do:
            case "make":
                torch.set_num_threads(threads)
                self.drop()
                if self.device == "cuda":
                    self.before = torch.cuda.memory_allocated()
                self.program = make(workload, self.way, self.size, self.device)
                self.program.once()
                if self.device == "cuda":
                    self.clock = timed_by_events(self.program.once, inner)
                else:
                    clock = time.process_time if threads == 1 else time.perf_counter
                    self.clock = timed(self.program.once, inner, clock)
                return machine("torch", *filter(None, [PACKAGES.get(self.way)]))["versions"]
            case "run":
                assert self.clock is not None
                return self.clock()
            case "kernels" | "host_sync":
                assert self.program is not None
                return {"kernels": kernels, "host_sync": host_sync}[do](self.program)
            case "memory":
                assert self.program is not None
                return allocated(self.program, self.before)
            case "peak":
                torch.set_num_threads(threads)
                return peak(workload, self.way, self.size, self.device)
            case "drop":
                return self.drop()
        raise ValueError(
            f"{do!r}: a worker can make, run, drop, or tell kernels, host_sync, memory, peak"
        )

    def drop(self) -> None:
        if self.program is not None:
            self.program.stack.close()
        self.program = self.clock = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # another process may need it


def main() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is not an answer
    first = json.loads(sys.stdin.readline())
    worker = Worker(first["way"], first["device"], Size(**first["size"]))
    for line in sys.stdin:
        try:
            answer = {"is": worker.answer(**json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            worker.drop()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
