"""Trains one model in float16 on several ranks, each of which holds a part of every parameter.

    torchrun --nproc-per-node 2 examples/train_ranks.py
    torchrun --nproc-per-node 2 examples/train_ranks.py --overflow-at 3

The second puts Inf into one gradient on the last rank only, in that step. No rank may make the
step then, and all of them have to lower the scale: what one has found, the scaler tells the others.
"""

import argparse
import os
import sys
from collections.abc import Sequence

try:
    import job
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from polymp.torch import GradScaler, autocast
except ModuleNotFoundError as error:
    print(
        f"train_ranks.py: error: the package {error.name!r} is missing. Run "
        "pip install -e '.[torch,examples]' at the top of the repository.",
        file=sys.stderr,
    )
    sys.exit(2)

BATCH, INPUTS, OUTPUTS = 32, 16, 4


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    flags = job.Parser("train_ranks.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--steps", type=job.whole(1), default=12, help="optimizer steps")
    flags.add_argument("--width", type=job.whole(1), default=64, help="features of the model")
    flags.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    flags.add_argument(
        "--overflow-at",
        type=job.whole(0),
        metavar="STEP",
        help="put Inf into one gradient in this step, counted from 0, on the last rank only",
    )
    args = flags.parse_args(argv)
    if args.overflow_at is not None and args.overflow_at >= args.steps:
        flags.error(
            f"--overflow-at {args.overflow_at} is never reached: the steps are 0 to "
            f"{args.steps - 1}. Give one of these, or more --steps."
        )
    if "RANK" not in os.environ:
        flags.error(
            "this is one rank of several. Start it with "
            "torchrun --nproc-per-node 2 examples/train_ranks.py"
        )
    found = torch.cuda.device_count()
    if args.device == "cuda" and found <= int(os.environ["LOCAL_RANK"]):
        flags.error(
            f"--device cuda needs a GPU for every rank, and torch {torch.__version__} finds "
            f"{found}. Use --device cpu, or fewer ranks."
        )
    return args


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data: inputs, and what a fixed linear map makes of them."""
    seed = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(BATCH, INPUTS, generator=seed)
    target = torch.linspace(-1, 1, INPUTS * OUTPUTS).view(INPUTS, OUTPUTS)
    return x.to(device), (x @ target).to(device)


def local(tensor: object) -> torch.Tensor:
    """The part of it that this rank holds."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Train; True if every rank's parameters are finite at the end."""
    torch.manual_seed(0)  # every rank makes the same weights, and keeps its part of them
    model = nn.Sequential(
        nn.Linear(INPUTS, args.width), nn.ReLU(), nn.Linear(args.width, OUTPUTS)
    ).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.02, fused=True)
    # The usual 2,000 good steps before the scale doubles are more than this run has.
    scaler = GradScaler(device.type, init_scale=2.0**10, growth_interval=4)
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    for step in range(args.steps):
        x, y = batch(step, device)
        optimizer.zero_grad()
        with autocast(device.type, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if step == args.overflow_at and last:
            local(model[0].weight.grad)[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        if first:
            skipped = "yes" if scaler.step_skipped(optimizer) else "no"
            print(
                f"step {step:3}  loss {mean.item() / dist.get_world_size():8.4f}  "
                f"scale {scaler.get_scale():6g}  skipped {skipped}",
                flush=True,
            )
    finite = torch.stack([local(p.detach()).isfinite().all() for p in model.parameters()]).all()
    worst = finite.int()
    dist.all_reduce(worst, op=dist.ReduceOp.MIN)
    if first:
        kind = "finite" if worst.item() else "not finite"
        print(f"parameters are {kind} on all {dist.get_world_size()} ranks")
    return bool(worst.item())


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and say by the exit code whether the parameters stayed finite."""
    args = arguments(argv)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        good = train(args, device)
        # gloo's threads let go of the last tensors before the interpreter ends (pytorch #179291).
        dist.barrier()
        return 0 if good else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
