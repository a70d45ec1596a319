"""Training programs with a loss scaler, each a loop as users write them.

A program takes `Amp`, the two classes under test, and returns a `Log`: after every iteration the
scale, the growth count, what `step` returned, and every bit of parameters and gradients.
`test_histories` compares the logs of polymp's and of torch's classes. What overflows here are
gradients of finite losses: a loss that is not finite itself is among the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from polymp.torch import GradScaler, autocast
from tests.support.torch.models import seen

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Iterations whose gradient is spoiled, and how.
SPOILS = {1: float("inf"), 4: float("nan"), 5: 1e30}

# What torch.amp's scaler saves; polymp's saves more.
ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class Amp(NamedTuple):
    autocast: Any
    scaler: Any


def entries(state: dict[str, Any]) -> dict[str, Any]:
    """Torch's entries of a scaler's state, in torch's order; none of a disabled one's."""
    return {key: state[key] for key in ENTRIES} if state else {}


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def spoiled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The same values; in the backward pass their gradient is multiplied by the factor."""
    return _Spoil.apply(x, factor)


class Log(list[Any]):
    def bits(self, *tensors: torch.Tensor | None) -> None:
        self.extend(map(seen, tensors))

    def model(self, model: nn.Module) -> None:
        for p in model.parameters():
            self.bits(p, p.grad)

    def scaler(self, scaler: Any) -> None:
        state = entries(scaler.state_dict())
        self.append((scaler.get_scale(), scaler._get_growth_tracker(), state))


class Loop:
    """An iteration of training that reads its input from memory, for graphs as for eager code.

    It writes to gradients that stay where they are: a graph knows them by their addresses.
    """

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        dtype: torch.dtype = FP32,
        device: str = "cpu",
        clip: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)]
        self.net = nn.Sequential(*layers).to(device, dtype)
        self.weights = list(self.net.parameters())
        self.optimizer, self.clip, self.device = make(self.weights), clip, device
        start = {"init_scale": 1000.0, "growth_factor": 1.5, "growth_interval": 5}
        self.scaler = GradScaler(device, **start | options)
        self.x = torch.randn(3, 8, device=device)
        self.spoil = torch.ones((), device=device)
        for w in self.weights:
            w.grad = torch.zeros_like(w)

    def forward_and_backward(self) -> None:
        for w in self.weights:
            w.grad.zero_()
        with autocast(self.device, dtype=FP16):
            y = self.net(self.x)
        self.scaler.scale(y.float().square().mean() * self.spoil).backward()

    def finish(self) -> None:
        if self.clip:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iterate(self) -> None:
        self.forward_and_backward()
        self.finish()

    def noted(self) -> list[Any]:
        state = self.scaler.state_dict()
        return [state, [w.tolist() for w in self.weights]]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def new_scaler(amp: Amp, **arguments: Any) -> Any:
    return amp.scaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **arguments})


def loss_of(amp: Amp, model: nn.Module, step: int, spoils: dict[int, float]) -> torch.Tensor:
    with amp.autocast("cpu", dtype=FP16):
        loss = model(data(step)).float().square().mean()
    return spoiled(loss, spoils.get(step, 1.0))


def train(
    amp: Amp,
    make: Callable[[Any], torch.optim.Optimizer],
    spoils: dict[int, float] = SPOILS,
    clip: Callable[[Any], Any] | None = None,
    **arguments: Any,
) -> Log:
    """Train a model; gradients may be clipped between `unscale_` and `step`."""
    log, model = Log(), net()
    optimizer, scaler = make(model.parameters()), new_scaler(amp, **arguments)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(amp, model, step, spoils)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            log.bits(clip(model.parameters()))
            log.model(model)
        end_step(log, scaler, optimizer)
        log.model(model)
        log.append(sorted(vars(optimizer).keys() & {"grad_scale", "found_inf"}))
    return log


def end_step(log: Log, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Step and update; log what the step returned, and the scaler."""
    log.append(scaler.step(optimizer))
    scaler.update()
    log.scaler(scaler)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
by_norm = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
by_value = partial(nn.utils.clip_grad_value_, clip_value=0.01)


def accumulated(amp: Amp, unscale: bool) -> Log:
    """Three microbatches to a step; one in one of them is spoiled."""
    log, model = Log(), net()
    optimizer, scaler = sgd(model.parameters()), new_scaler(amp)
    for step in range(18):
        scaler.scale(loss_of(amp, model, step, {4: float("inf"), 12: 1e30}) / 3).backward()
        if step % 3 == 2:
            if unscale:
                scaler.unscale_(optimizer)
                log.bits(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            log.append(scaler.step(optimizer))
            scaler.update()
            log.model(model)
            optimizer.zero_grad()
        log.scaler(scaler)
    return log


def sparse(amp: Amp, make: Any, dtype: torch.dtype = FP32) -> Log:
    """Sparse gradients, with indices that come twice."""
    log = Log()
    torch.manual_seed(0)
    table, bag = nn.Embedding(6, 3, sparse=True), nn.EmbeddingBag(5, 3, mode="sum", sparse=True)
    tables = nn.ModuleList([table, bag]).to(dtype)
    optimizer, scaler = make(tables.parameters()), new_scaler(amp)
    for step in range(6):
        optimizer.zero_grad()
        with amp.autocast("cpu", dtype=FP16):
            rows = table(torch.tensor([1, 3, 1, step])).sum(0) + bag(torch.tensor([[0, 2, 2]]))[0]
            loss = rows.float().square().sum()
        scaler.scale(spoiled(loss, float("inf") if step in (1, 4) else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        log.model(tables)
        end_step(log, scaler, optimizer)
        log.model(tables)
    return log


def coalesced_half(amp: Amp) -> Log:
    """Entries of a float16 gradient that are finite one by one, and whose sum is not."""
    log = Log()
    for value in (100.0, 40000.0):
        weight = nn.Parameter(torch.ones(3, 2, dtype=FP16))
        indices, values = torch.tensor([[1, 1]]), torch.full((2, 2), value, dtype=FP16)
        weight.grad = torch.sparse_coo_tensor(indices, values, (3, 2))
        optimizer, scaler = sgd([weight]), new_scaler(amp)
        scaler.scale(torch.ones(()))
        found = scaler._check_inf_per_device(optimizer)
        log.append({str(device): found_inf.item() for device, found_inf in found.items()})
        log.bits(weight.grad)
        scaler.update()
        log.scaler(scaler)
    return log


def mixed_parameters(amp: Amp) -> Log:
    """Parameters of several dtypes, one without elements, one without a gradient."""
    log = Log()
    made = torch.Generator().manual_seed(0)
    parameters = nn.ParameterList(
        [torch.randn(3, generator=made).to(d) for d in (FP32, BF16, torch.float64)]
    )
    parameters.extend([torch.zeros(0), torch.ones(2)])
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    scaler = new_scaler(amp)
    for step in range(6):
        optimizer.zero_grad()
        loss = sum((p.float() ** 3).sum() for p in parameters[:4])
        loss = loss + spoiled(parameters[2], float("inf") if step == 2 else 1.0).sum()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        end_step(log, scaler, optimizer)
        log.model(parameters)
    return log


def every_dtype(amp: Amp) -> Log:
    """Losses of every dtype, in nested iterables; the products' dtypes and bits."""
    log, scaler = Log(), new_scaler(amp)
    made = [torch.ones((), dtype=d) / 3 for d in (FP16, BF16, FP32, torch.float64)]
    log.bits(*(scaler.scale(t) for t in made))
    several = scaler.scale([made[0], (made[1], [made[2]]), iter(made)])
    log.append((type(several).__name__, type(several[1]).__name__, type(several[2]).__name__))
    log.bits(several[0], several[1][0], several[1][1][0], *several[2])
    return log


def fused(kind: str) -> Any:
    return partial(getattr(torch.optim, kind), lr=0.01, fused=True)


PLAIN = {
    "SGD": sgd,
    "SGD, for-loop": partial(sgd, foreach=False),
    "Adam, foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    **{f"{kind}, fused": fused(kind) for kind in ("SGD", "Adam", "AdamW", "Adagrad")},
}
SPARSE = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
}
PROGRAMS: dict[str, Callable[[Amp], Log]] = {
    **{f"plain {name}": partial(train, make=make) for name, make in PLAIN.items()},
    "no overflow": partial(train, make=sgd, spoils={}),
    "only overflows": partial(train, make=sgd, spoils={n: 1e38 for n in range(8)}),
    "odd factors": partial(train, make=sgd, growth_factor=1.7, backoff_factor=0.3),
    "disabled": partial(train, make=sgd, spoils={}, enabled=False),
    **{f"clipped {name}": partial(train, make=make, clip=by_norm) for name, make in PLAIN.items()},
    "clipped by value": partial(train, make=sgd, clip=by_value),
    "accumulated": partial(accumulated, unscale=False),
    "accumulated and clipped": partial(accumulated, unscale=True),
    **{f"sparse {name}": partial(sparse, make=make) for name, make in SPARSE.items()},
    "sparse bfloat16": partial(sparse, make=SPARSE["SGD"], dtype=BF16),
    "coalesced half": coalesced_half,
    "mixed parameters": mixed_parameters,
    "every dtype": every_dtype,
}
