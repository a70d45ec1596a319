"""Programs of nested regions, ops, weight updates, threads and exceptions, and what runs them.

A program is plain data. `run` carries it out with a library, such as `run_programs.Correct`, which
says how regions are entered, functions and generators decorated and threads run, and is told of
written weights. It returns all that could be seen: dtypes and bits of every result, torch's state
at every op, errors, and at the end weights, gradients and the state left behind. Nothing here
imports polymp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter


@dataclass(frozen=True)
class Spec:
    """A region's arguments; a `shared` one is one object for all its entries in the program."""

    dtype: str | None
    enabled: bool
    cache: bool | None
    shared: bool


@dataclass(frozen=True)
class Op:
    op: int  # which of the program's ops
    a: int  # which activation
    b: int


@dataclass(frozen=True)
class Write:
    how: str
    weight: str


@dataclass(frozen=True)
class Step:
    optimizer: str
    backward: bool


@dataclass(frozen=True)
class Raise:
    pass


@dataclass(frozen=True)
class Inside:
    spec: int  # which of the program's regions
    body: Block


@dataclass(frozen=True)
class Call:
    """A decorated function that calls itself `depth` times."""

    spec: int
    depth: int
    body: Block


@dataclass(frozen=True)
class Yielding:
    """A decorated generator with one yield; `between` runs while it is suspended."""

    spec: int
    before: Block
    between: Block
    after: Block


@dataclass(frozen=True)
class NoGrad:
    body: Block


@dataclass(frozen=True)
class Inference:
    body: Block


@dataclass(frozen=True)
class Catch:
    body: Block


@dataclass(frozen=True)
class Thread:
    """Run by a thread of its own while the one that started it waits."""

    body: Block


Node = Op | Write | Step | Raise | Inside | Call | Yielding | NoGrad | Inference | Catch | Thread
Block = tuple[Node, ...]


@dataclass(frozen=True)
class Program:
    """A few ops and regions, which the body names by number, so that they meet again and again."""

    seed: int
    ops: tuple[str, ...]
    specs: tuple[Spec, ...]
    body: Block


class Weights:
    """The tensors that the ops compute with; all float32, `frozen` without gradients."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random) * 0.5

        self.w = Parameter(normal(4, 4))
        self.u = Parameter(normal(4, 4))
        self.b = Parameter(normal(4))
        self.conv = Parameter(normal(4, 4, 3))
        self.gates = Parameter(normal(12, 4))
        self.frozen = normal(4, 4)
        self.x = normal(4, 4).requires_grad_()  # a leaf, so its casts are kept as a weight's are
        self.activations = [
            self.x,
            normal(4, 4),
            normal(4, 4).bfloat16(),
            normal(4, 4).half(),
            normal(4, 4).double(),
        ]

    def parameters(self) -> list[Parameter]:
        return [p for p in vars(self).values() if isinstance(p, Parameter)]


T = torch.Tensor
OPS: dict[str, Callable[[Weights, T, T], T]] = {
    "linear": lambda p, a, b: F.linear(a, p.w, p.b),
    "linear frozen": lambda p, a, b: F.linear(a, p.frozen),
    "two layers": lambda p, a, b: F.linear(F.linear(a, p.w, p.b).relu(), p.u, p.b),
    "matmul": lambda p, a, b: torch.matmul(a, b),
    "mm weight": lambda p, a, b: a @ p.w,
    "mm view of weight": lambda p, a, b: a @ p.w.t(),
    "mm two weights": lambda p, a, b: p.u @ p.w,
    "addmm": lambda p, a, b: torch.addmm(p.b, a, p.u),
    "baddbmm": lambda p, a, b: torch.baddbmm(p.w[None], a[None], p.u[None])[0],
    "einsum": lambda p, a, b: torch.einsum("ij,jk->ik", a, p.w),
    "conv1d": lambda p, a, b: F.conv1d(a[None], p.conv, p.b, padding=1)[0],
    "gru_cell": lambda p, a, b: torch.gru_cell(a, b, p.gates, p.gates),
    "sdpa": lambda p, a, b: F.scaled_dot_product_attention(
        a[None, None], p.w[None, None], b[None, None]
    )[0, 0],
    "prelu": lambda p, a, b: F.prelu(a, p.b),
    "exp": lambda p, a, b: torch.exp(a * 0.5),
    "softmax": lambda p, a, b: torch.softmax(a, -1),
    "layer_norm": lambda p, a, b: F.layer_norm(a, (4,), p.b),
    "sum": lambda p, a, b: a.sum(),
    "add": lambda p, a, b: a + b,
    "mul": lambda p, a, b: a * p.w,
    "add_": lambda p, a, b: (a * 1).add_(b),
    "clamp_": lambda p, a, b: (a * 1).clamp_(-0.5, 0.5),
    "cat": lambda p, a, b: torch.cat([a[:2], b[2:]]),
    "stack": lambda p, a, b: torch.stack([a, p.w, b]).mean(0),
    "mse_loss": lambda p, a, b: F.mse_loss(a, b),
    "smooth_l1_loss": lambda p, a, b: F.smooth_l1_loss(a, p.u),
    "cosine_embedding_loss": lambda p, a, b: F.cosine_embedding_loss(a, b, a.new_ones(4)),
    "trace": lambda p, a, b: torch.trace(a),
    "cdist": lambda p, a, b: torch.cdist(a, p.w),
    "pad": lambda p, a, b: F.pad(a[None], (1, 1), "reflect")[0, :, 1:5],
}

WRITES: dict[str, Callable[[Parameter], object]] = {
    "add_": lambda w: w.add_(0.25),
    "mul_": lambda w: w.mul_(-0.75),
    "copy_": lambda w: w.copy_(w.flip(0)),
    "lerp_": lambda w: w.lerp_(w.flip(0), 0.25),
    "view": lambda w: w[0].mul_(0.5),
    "setitem": lambda w: w.__setitem__(0, 0.5),
    "foreach": lambda w: torch._foreach_mul_([w], 0.75),
    "uniform_": lambda w: w.uniform_(-1, 1, generator=torch.Generator().manual_seed(0)),
}

OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


class Stop(Exception):
    """The exception that a program raises."""


def count_up() -> None:
    """Let this thread make so many autograd nodes that it is ahead of every thread of a program.

    Gradients of one tensor are added in the order of numbers that each thread counts for itself,
    from 0. Two processes that compare bits must both be past what new threads count to.
    """
    x = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        x.clone()


def state() -> tuple[Any, ...]:
    dtype = str(torch.get_autocast_dtype("cpu"))
    return torch.is_autocast_enabled("cpu"), dtype, torch.is_autocast_cache_enabled()


def nesting() -> int:
    """How many regions torch counts as open in this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def bits(t: torch.Tensor | None) -> tuple[Any, ...]:
    if t is None:
        return ()
    raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(t.dtype), tuple(t.shape), t.requires_grad, raw


def run(program: Program, library: Any) -> list[tuple[Any, ...]]:
    """Everything that could be seen of the program."""
    machine = _Machine(program, library)
    try:
        machine.block(program.body)
    except Stop:
        machine.seen.append(("stopped",))
    machine.seen.append(("left behind", *state(), nesting()))
    machine.backward()
    for name, t in vars(machine.weights).items():
        if isinstance(t, torch.Tensor):
            machine.seen.append((name, bits(t), bits(t.grad)))
    return machine.seen


class _Machine:
    def __init__(self, program: Program, library: Any) -> None:
        self.program = program
        self.weights = weights = Weights(program.seed)
        self.library = library
        self.seen: list[tuple[Any, ...]] = []
        self.pool = list(weights.activations)
        self.outputs: list[torch.Tensor] = []  # since the last backward pass
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.open = 0  # regions, in all threads

    def block(self, body: Block) -> None:
        for node in body:
            self.node(node)

    def node(self, node: Node) -> None:
        match node:
            case Op():
                self.op(node)
            case Write(how, weight):
                self.write(how, weight)
            case Step(optimizer, backward):
                self.step(optimizer, backward)
            case Raise():
                raise Stop
            case Inside(spec, body):
                with self.library.region(self.spec(spec)):
                    self.inside(body)
            case Call(spec, depth, body):

                def function(left: int) -> None:
                    self.inside(body)
                    if left:
                        decorated(left - 1)

                decorated = self.library.function(self.spec(spec), function)
                decorated(depth)
            case Yielding(spec, before, between, after):

                def generator() -> Iterator[None]:
                    self.inside(before)
                    yield
                    self.inside(after)

                steps = self.library.generator(self.spec(spec), generator)()
                try:
                    next(steps)
                    self.block(between)
                    next(steps, None)
                finally:
                    steps.close()  # type: ignore[attr-defined]
            case NoGrad(body):
                with torch.no_grad():
                    self.block(body)
            case Inference(body):
                before = len(self.pool)
                try:
                    with torch.inference_mode():
                        self.block(body)
                finally:
                    del self.pool[before:]  # inference tensors are of no use outside
            case Catch(body):
                try:
                    self.block(body)
                except Stop:
                    self.seen.append(("caught", *state()))
            case Thread(body):
                self.library.thread(lambda: self.thread(body))

    def spec(self, number: int) -> Spec:
        return self.program.specs[number % len(self.program.specs)]

    def inside(self, body: Block) -> None:
        self.open += 1
        try:
            self.block(body)
        finally:
            self.open -= 1

    def thread(self, body: Block) -> None:
        try:
            self.block(body)
        except Stop:
            self.seen.append(("thread stopped",))
        self.seen.append(("thread left behind", *state()))

    def op(self, node: Op) -> None:
        name = self.program.ops[node.op % len(self.program.ops)]
        a, b = (self.pool[i % len(self.pool)] for i in (node.a, node.b))
        try:
            out = OPS[name](self.weights, a, b)
        except RuntimeError as error:
            self.seen.append((name, *state(), type(error).__name__, str(error)))
            return
        self.seen.append((name, *state(), *bits(out)))
        if out.isfinite().all():
            if out.requires_grad:
                self.outputs.append(out)
            if out.shape == (4, 4):
                self.pool.append(out)

    def write(self, how: str, weight: str) -> None:
        if self.open and not torch.is_autocast_enabled("cpu"):
            return  # polymp does not see such a write: see docs/differences.md
        with torch.no_grad():
            WRITES[how](getattr(self.weights, weight))
        self.library.wrote()

    def step(self, name: str, backward: bool) -> None:
        if torch.is_inference_mode_enabled():
            return  # its state would be inference tensors
        if backward:
            self.backward()
        parameters = self.weights.parameters()
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad.nan_to_num(0.0, 1.0, -1.0).clamp(-1.0, 1.0)
        if name not in self.optimizers:
            self.optimizers[name] = OPTIMIZERS[name](parameters)
        self.optimizers[name].step()
        self.library.wrote()
        self.seen.append((name, *map(bits, parameters)))

    def backward(self) -> None:
        """Add the gradients of all outputs so far, in one pass: casts they share add up.

        If a weight that the graph holds was written meanwhile, torch refuses; then output by
        output, so that most gradients are seen.
        """
        ones = [torch.ones_like(out) for out in self.outputs]
        try:
            if self.outputs:
                torch.autograd.backward(self.outputs, ones, retain_graph=True)
            self.seen.append(("backward", *state()))
        except RuntimeError as error:
            self.seen.append(("backward", *state(), str(error)))
            for out in self.outputs:
                try:
                    torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)
                except RuntimeError as error:
                    self.seen.append(("backward of one", str(error)))
        self.outputs.clear()
        del self.pool[len(self.weights.activations) :]
