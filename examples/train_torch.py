"""Trains a small language model in float32, bfloat16 and float16, and compares the three.

    python examples/train_torch.py                       # on the CPU, within two minutes
    python examples/train_torch.py --device cuda --width 512 --heads 8 --layers 6 --batch 64

The loop in `train` is the one for torch.amp; only the import is polymp's. Every dtype starts
from the same weights and sees the same batches.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

try:
    import job
    import picture
    import report
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
    from tqdm import tqdm

    from polymp.torch import GradScaler, autocast
except ModuleNotFoundError as error:
    print(
        f"train_torch.py: error: the package {error.name!r} is missing. Run "
        "pip install -e '.[torch,examples]' at the top of the repository.",
        file=sys.stderr,
    )
    sys.exit(2)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY = {
    "cuda": "the most that torch held on the GPU at any one time",
    "cpu": "counted after a forward pass: parameters, optimizer state, tensors saved for backward",
}


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """From the bytes so far to the scores of the next: int64 [batch, length] to [..., alphabet]."""

    def __init__(self, alphabet: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.bytes(x) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


def first_model(text: job.Text, args: argparse.Namespace) -> Transformer:
    """A model with the job's first weights."""
    model = Transformer(text.alphabet, args.context, args.width, args.layers, args.heads)
    weights = job.first_weights(text.alphabet, args)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # torch keeps it as [outputs, inputs]
            weights[f"{name}.weight"] = weights[f"{name}.weight"].T
    model.load_state_dict({name: torch.tensor(values) for name, values in weights.items()})
    return model


def loss_on(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of guessing every byte from those before it, in nats; float32 []."""
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def train(name: str, text: job.Text, args: argparse.Namespace, device: torch.device) -> report.Run:
    """Train in one dtype."""
    model = first_model(text, args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    # The usual 2,000 good steps before the scale doubles are more than this run has.
    interval = max(1, args.steps // 10)
    scaler = GradScaler(device.type, growth_interval=interval, enabled=name == "fp16")
    region = partial(autocast, device.type, dtype=DTYPES[name], enabled=name != "fp32")
    stepped: set[int] = set()
    optimizer.register_step_post_hook(lambda *_: stepped.add(step))  # not called for a skip
    exam = torch.from_numpy(job.held_out(text, args)).to(device)
    run = report.Run(name, parameters=sum(p.numel() for p in model.parameters()))
    run.scale = [scaler.get_scale()] if scaler.is_enabled() else []

    @torch.no_grad()
    def held_out_loss() -> float:
        total = 0.0
        for tokens in exam.split(args.batch):
            with region():
                total += loss_on(model, tokens).item() * len(tokens)
        return total / len(exam)

    if device.type == "cuda":
        gc.collect()  # what is left of the run before must not count in this one's peak
        torch.cuda.reset_peak_memory_stats(device)
    pause = 0.1 if sys.stderr.isatty() else 10  # a log needs fewer lines than a terminal
    numbered = enumerate(job.batches(text, args))
    bar = tqdm(numbered, name, args.steps, unit=" step", mininterval=pause, disable=args.quiet)
    for step, numbers in bar:
        if job.look_at(step, args):
            run.held_out.append((step, held_out_loss()))
        start = time.perf_counter()
        tokens = torch.from_numpy(numbers).to(device)
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step, args)

        optimizer.zero_grad()
        with region():
            loss = loss_on(model, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

        run.train_loss.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
        if scaler.is_enabled():
            run.scale.append(scaler.get_scale())
        bar.set_postfix(loss=f"{run.train_loss[-1]:.3f}", refresh=False)
    run.held_out.append((args.steps, held_out_loss()))
    run.skipped = [step + 1 for step in range(args.steps) if step not in stepped]

    if device.type == "cuda":
        run.peak_memory = torch.cuda.max_memory_allocated(device)
    with region():
        run.saved = bytes_saved(model, lambda: loss_on(model, tokens))
    if device.type == "cpu":
        run.peak_memory = bytes_of(model, optimizer) + run.saved
    return run


def bytes_saved(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves for backward in a forward pass, besides the parameters."""
    held: dict[int, int] = {}  # by address: a storage that is saved twice counts once

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = forward()  # its graph keeps the saved tensors, so no address comes twice
    del loss
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in held.items() if address not in own)


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the parameters and the optimizer state."""
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *states))


def find_device(name: str, dtypes: Sequence[str]) -> torch.device:
    """The device of that name.

    Raises:
        BadArgument: there is no such device, or not here, or it cannot compute in a dtype.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise job.BadArgument(f"--device '{name}' is not known. Use cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise job.BadArgument(
                f"--device '{name}' needs a CUDA GPU, and torch {torch.__version__} finds none. "
                "Use --device cpu."
            )
        if (device.index or 0) >= count:
            raise job.BadArgument(
                f"--device '{name}' is not here: torch finds cuda:0 to cuda:{count - 1}. "
                "Use one of these."
            )
        if "bf16" in dtypes and not torch.cuda.is_bf16_supported():
            raise job.BadArgument(
                f"--dtypes '{','.join(dtypes)}': this GPU has no bfloat16. Leave bf16 out."
            )
    return device


def main(argv: Sequence[str] | None = None) -> None:
    """Train in every dtype that was asked for, then print and save what came of it."""
    about = "Train a small language model in several float dtypes and compare them."
    sizes = job.default_sizes()
    flags = job.parser("train_torch.py", about, sizes)
    # In the products of small sizes, threads mostly wait for one another.
    many = torch.get_num_threads() if sizes == job.LARGE else 1
    flags.add_argument("--threads", type=job.whole(1), default=many, help="CPU threads of an op")
    try:
        args = job.arguments(flags, argv)
        device = find_device(args.device, args.dtypes)
        text = job.read(args.text, args.context)
        job.check_outputs(args)
    except job.BadArgument as bad:
        flags.error(str(bad))

    torch.set_num_threads(args.threads)
    runs = [train(name, text, args, device) for name in args.dtypes]
    memory = MEMORY[device.type]
    report.show(runs, text, args, memory)
    if device.type == "cpu":
        print(job.speed_of_bfloat16())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    made_by = {"framework": f"torch {torch.__version__}", "device": kind}
    report.save(runs, text, args, memory=memory, **made_by)
    picture.draw(args.out, runs, text, ", ".join(made_by.values()))
    print(f"saved {job.near(args.out)} and {job.near(args.json)}")


if __name__ == "__main__":
    main()
