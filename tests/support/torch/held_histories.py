"""Events between two uses of a model's weights, and a player of histories of such events.

A history is a list of events, each a tuple of plain data. Played on equal worlds with a block that
holds casts and without one, it must leave the same notes: outputs, gradients, parameters, errors.
Left out is what no block can see: writes through `.data`, which need `invalidate`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from polymp.torch import GradScaler, autocast, hold_casts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Event = tuple[Any, ...]


class Net(nn.Module):
    """Weights of every kind: tied, viewed, frozen, buffers, with adapters, in layers and bare."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.conv = nn.Conv2d(2, 4, 1, bias=False).to(memory_format=torch.channels_last)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 4)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.stack = nn.Parameter(torch.randn(2, 8, 4))
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.register_buffer("table", torch.randn(8, 8))
        self.low = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16), requires_grad=False)
        self.eval()


def halves(m: Net, x: torch.Tensor) -> torch.Tensor:
    first, second = m.w.chunk(2)
    return F.linear(x, second) * F.linear(x, first)


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "tied": lambda m, x: m.b(torch.tanh(m.a(x))),
    "thrice": lambda m, x: m.a(m.b(m.a(x) * 0.1) * 0.1),
    "conv": lambda m, x: m.conv(x[:, None, None, :4].expand(4, 2, 3, 4)),
    "attention": lambda m, x: m.attention(x[None], x[None], x[None])[0],
    "lstm": lambda m, x: m.lstm(x[None])[0],
    "mm": lambda m, x: torch.mm(x, m.w),
    "transposed": lambda m, x: torch.mm(x, m.w.t()) + torch.mm(x, m.w),
    "rows": lambda m, x: F.linear(x, m.w[:5]),
    "halves": halves,
    "einsum": lambda m, x: torch.einsum("bi,ij->bj", x, m.w),
    "bmm": lambda m, x: torch.bmm(x.expand(2, 4, 8), m.stack),
    "adapters": lambda m, x: m.base(x) + (x @ m.down) @ m.up,
    "table": lambda m, x: (x @ m.table) @ m.w,
    "low": lambda m, x: (x @ m.low) @ m.w,
    "checkpoint": lambda m, x: checkpoint(m.a, x.requires_grad_(), use_reentrant=False),
    "both": lambda m, x: F.linear(m.w, m.w)[:4] + x,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "loop adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
SCALERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2),
    "polymp": lambda: GradScaler("cpu", init_scale=16.0, growth_interval=2),
    "device": lambda: GradScaler("cpu", init_scale=16.0, growth_interval=2, skip_on="device"),
}

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(p.flip(0) + 0.25),
    "view": lambda p: p.t().add_(0.25),
    "row": lambda p: p[0].zero_(),
    "index": lambda p: p.__setitem__(0, 0.5),
    "foreach": lambda p: torch._foreach_add_([p], 0.25),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "detached": lambda p: p.detach().mul_(0.5),
}
MATRICES = ("w", "a.weight", "base.weight", "table")


class World:
    """A model, its shadow, an optimizer and a scaler; `play` notes what each event gave."""

    def __init__(self, optimizer: str, scaler: str, held: bool) -> None:
        self.model, self.shadow = Net(), Net()
        with torch.no_grad():
            for p in self.shadow.parameters():
                p.mul_(0.5)
        self.make = OPTIMIZERS[optimizer]
        self.scaler = SCALERS[scaler]()
        self.optimizer = self.make([p for p in self.model.parameters() if p.requires_grad])
        self.block = hold_casts(self.model, self.shadow) if held else contextlib.nullcontext()
        self.losses: list[torch.Tensor] = []
        self.notes: list[Any] = []
        self.at = 0

    def play(self, history: list[Event]) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.block.__enter__()
            try:
                for self.at, (name, *given) in enumerate(history):
                    try:
                        getattr(self, name)(*given)
                    except RuntimeError as error:
                        self.losses.clear()
                        self.notes.append((name, str(error)))
                    self.note(name, *(p for _, p in self.model.named_parameters()))
                    grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                    self.note("gradients", *grads)
            finally:
                self.block.__exit__(None, None, None)
        return self.notes

    def note(self, what: str, *tensors: torch.Tensor) -> None:
        self.notes.append((what, [bits(t) for t in tensors]))

    def tensor(self, name: str, model: Any = None) -> torch.Tensor:
        found: torch.Tensor = (
            (model or self.model).get_parameter(name)
            if name != "table"
            else ((model or self.model).get_buffer(name))
        )
        return found

    def region(
        self, kind: str, dtype: str, mode: str, cache: bool, policy: str | None, uses: list[str]
    ) -> None:
        """Use weights in a region; `inner` in uses: another region inside, or a write."""
        made = torch.Generator().manual_seed(self.at)
        x = torch.randn(4, 8, generator=made)
        ours = kind != "torch"

        def body() -> list[torch.Tensor]:
            found = []
            for use in uses:
                if use in WRITES:
                    with torch.no_grad():
                        WRITES[use](self.model.w)
                elif use in DTYPES or use == "off":
                    low = DTYPES.get(use, torch.bfloat16)
                    with autocast("cpu", low, enabled=use in DTYPES):
                        found.append(torch.mm(x, self.model.w))
                elif use == "aside":
                    with torch.no_grad():
                        found.append(self.model.a(x))
                elif use == "shadow":
                    found.append(self.shadow.b(x))
                else:
                    found.append(USES[use](self.model, x.clone()))
            return found

        region: Any = (
            autocast("cpu", DTYPES[dtype], cache_enabled=cache, policy=policy)
            if ours
            else torch.autocast("cpu", DTYPES[dtype], cache_enabled=cache)
        )
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes.get(mode, contextlib.nullcontext)():
            if kind == "decorated":
                found = region(body)()
            elif kind == "around":  # the block is left and entered again in the region
                with region:
                    self.again()
                    found = body()
            elif kind == "halfway":  # the same, after uses: right, but of more nodes in the graph
                with region:
                    found = body()
                    self.block.__exit__(None, None, None)
                    found += body()
                    self.block.__enter__()
                    found += body()
            else:
                with region:
                    found = body()
        self.note("outputs", *found)
        total = sum(y.float().square().mean() for y in found)
        if isinstance(total, torch.Tensor) and total.requires_grad and kind != "halfway":
            self.losses.append(total)

    def backward(self, how: str, times: float = 1.0) -> None:
        """Of the sum of the losses so far, or of one after the other."""
        losses, self.losses = self.losses, []
        losses = [loss * times for loss in losses]
        if how == "sum" and losses:
            losses = [sum(losses[1:], losses[0])]
        for loss in losses if how != "reversed" else losses[::-1]:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        if any(
            p.grad is not None for group in self.optimizer.param_groups for p in group["params"]
        ):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def zero_grad(self, none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=none)

    def write(self, how: str, name: str) -> None:
        with torch.no_grad():
            WRITES[how](self.tensor(name))

    def load(self, assign: bool) -> None:
        state = {n: t.clone() * 0.75 for n, t in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=assign)
        self.optimizer = self.make([p for p in self.model.parameters() if p.requires_grad])

    def swap(self, how: str, name: str) -> None:
        """Exchange a weight with the shadow's."""
        ours, other = self.tensor(name), self.tensor(name, self.shadow)
        if how == "data":
            ours.data, other.data = other.data, ours.data
        elif how == "copy":
            kept = ours.detach().clone()
            with torch.no_grad():
                ours.copy_(other)
                other.copy_(kept)
        else:
            torch.utils.swap_tensors(ours, other)

    def data(self, times: int, name: str) -> None:
        """New memory several times; where what was freed can be had again, that."""
        for _ in range(times):
            p = self.tensor(name)
            value, address = p.data * 0.5 + 0.125, p.data_ptr()
            p.data = torch.empty(0)
            spare = [torch.empty_like(value)]
            while spare[-1].data_ptr() != address and len(spare) < 20:
                spare.append(torch.empty_like(value))
            p.data = spare[-1].copy_(value)

    def transpose(self, name: str) -> None:
        self.tensor(name).data = self.tensor(name).data.t()

    def flip(self, name: str) -> None:
        p = self.tensor(name)
        p.requires_grad_(not p.requires_grad)

    def invalidate(self) -> None:
        """After a write that does not show."""
        self.model.w.data.mul_(0.5)
        self.model.base.weight.data.mul_(0.5)
        if isinstance(self.block, hold_casts):
            self.block.invalidate()

    def again(self) -> None:
        """Leave the block and enter it again."""
        self.block.__exit__(None, None, None)
        self.block.__enter__()


def bits(t: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    with torch.inference_mode(False), torch.no_grad():
        raw = t.detach().clone().contiguous()
        view = raw.view(torch.int16) if raw.element_size() == 2 else raw
        return str(t.dtype), tuple(t.shape), view.numpy().tobytes()


def agree(optimizer: str, scaler: str, history: list[Event]) -> bool:
    """True if a history leaves the same notes with a block as without."""
    return differs_at(optimizer, scaler, history) is None


def differs_at(optimizer: str, scaler: str, history: list[Event]) -> Any:
    held, plain = (World(optimizer, scaler, held).play(history) for held in (True, False))
    for at, (ours, theirs) in enumerate(zip(held, plain, strict=True)):
        if ours != theirs:
            return at, ours[0], theirs[0], ours, theirs
    return None
