"""One `GradScaler` in training steps that torch.compile makes graphs of.

torch's own optimizers, in the parts of a step that dynamo can have in one graph: the forward with
`scale`, and `unscale_`, `step` and `update`; or all of it, where dynamo is told to trace gradients.
The twin is the scaler in eager code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import nn, optim
from torch._dynamo.testing import CompileCounterWithBackend

from polymp.torch import GradScaler, autocast
from tests.support.torch.version_changes import VERSION

# torch's own modules, which dynamo imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.skipif(VERSION < (2, 12), reason="dynamo of torch 2.11 traces no scaler"),
]

STEPS = 24
IN_LOSS, IN_GRADIENT = (0, 9, 17), (4, 5, 17, 22)
Make = Callable[[Any], optim.Optimizer]

# Every optimizer of torch whose step is in a graph. SGD's momentum is there from the second on.
OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD, nesterov, foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": optim.Adam,
    "Adam, capturable": partial(optim.Adam, capturable=True),
    "AdamW, foreach": partial(optim.AdamW, foreach=True),
    "RMSprop": partial(optim.RMSprop, momentum=0.9),
    **{
        name: getattr(optim, name)
        for name in "NAdam RAdam Adamax Adagrad Adadelta ASGD Rprop Adafactor Muon".split()
    },
}
# Those whose step does the same arithmetic in compiled code; others count steps in tensors there.
SAME_BITS = ("SGD", "SGD, momentum", "SGD, nesterov, foreach", "Muon")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says that record_function is ignored
    yield
    logger.setLevel(level)
    torch._dynamo.reset()


class NotTorchs(optim.SGD):
    """Its step is not in a graph, and nothing puts back what it counts: the host has to wait."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps.add_(1)
        for p in self.param_groups[0]["params"]:
            p -= p.grad / self.steps


class History(NamedTuple):
    states: list[Any]
    weights: list[torch.Tensor]
    graphs: list[int]


class Part:
    def __init__(self, make: Make, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)
        )
        self.weights = list(self.net.parameters())
        self.optimizer = make(self.weights)
        self.scaler = GradScaler("cpu", 16.0, growth_interval=3, **options)
        self.x = torch.randn(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=torch.float16):
            loss = self.net(x).float().square().mean()
        return self.scaler.scale(loss)

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def spoiled(self, step: int) -> torch.Tensor:
        return self.x * (float("inf") if step in IN_LOSS else 1.0)

    def overflow(self, step: int) -> None:
        if step in IN_GRADIENT:
            self.weights[0].grad[0, 0] = float("nan") if step % 2 else float("inf")


def run(
    make: Make,
    backend: Any = None,
    *,
    compiled: Callable[[int], bool] = lambda step: True,
    steps: int = STEPS,
    **options: Any,
) -> History:
    """Both parts compiled in the steps that `compiled` says; none without a backend."""
    part = Part(make, **options)
    count = CompileCounterWithBackend(backend)
    forward, update = (
        torch.compile(f, backend=count, fullgraph=True) if backend else f
        for f in (part.forward, part.update)
    )
    states, graphs = [], []
    for step in range(steps):
        part.optimizer.zero_grad()
        now = compiled(step)
        (forward if now else part.forward)(part.spoiled(step)).backward()
        part.overflow(step)
        (update if now else part.update)()
        scaler = part.scaler
        skipped = scaler.step_skipped(part.optimizer).item()
        assert skipped == (step in IN_LOSS + IN_GRADIENT)
        states.append(scaler.state_dict())
        graphs.append(count.frame_count)
    return History(states, [w.detach().clone() for w in part.weights], graphs)


IN_BOTH = ("SGD", "SGD, momentum", "Adam")


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "eager") for name in OPTIMIZERS]
    + [(name, "aot_eager") for name in IN_BOTH]
    # Inductor compiles C++ for most of its time.
    + [pytest.param("Adam", "inductor", marks=pytest.mark.long)],
)
def test_two_graphs_and_the_history_of_eager_code(name: str, backend: str) -> None:
    make = OPTIMIZERS[name]
    eager_make = optim.Adam if name == "Adam, capturable" else make  # on the CPU it raises
    eager, ours = run(eager_make), run(make, backend)
    assert ours.states == eager.states
    assert eager.states[-1]["skipped"] == len(set(IN_LOSS + IN_GRADIENT))
    for w, expected in zip(ours.weights, eager.weights, strict=True):
        torch.testing.assert_close(w, expected)
        if name in SAME_BITS:
            assert torch.equal(w, expected)
    # One for each part, a second forward now that there is a scale, a second step with momentum.
    assert ours.graphs[1:] == [3 + ("SGD, " in name)] * (STEPS - 1)


def test_every_optimizer_of_torch_is_here() -> None:
    there = {
        n for n, v in vars(optim).items()
        if isinstance(v, type) and issubclass(v, optim.Optimizer) and v is not optim.Optimizer
    }  # fmt: skip
    tried = {getattr(make, "func", make).__name__ for make in OPTIMIZERS.values()}
    assert there - tried == {"LBFGS", "SparseAdam"}  # see docs/scaling-torch.md


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["Adam", "AdamW, foreach", "Rprop"])
def test_a_good_step_is_that_of_the_compiled_optimizer_alone(name: str) -> None:
    """Bit for bit: the same steps on the same true gradients, without a scaler."""
    ours, theirs = (Part(OPTIMIZERS[name]) for _ in range(2))
    theirs.scaler = GradScaler("cpu", 1.0, enabled=False)
    update = torch.compile(ours.update, backend="aot_eager", fullgraph=True)
    step = torch.compile(theirs.optimizer.step, backend="aot_eager")
    for at in range(8):
        ours.optimizer.zero_grad()
        ours.scaler.scale((ours.x * 1.0).sum())
        grads = [
            torch.randn(w.shape, generator=torch.Generator().manual_seed(at)) for w in ours.weights
        ]
        for w, v, g in zip(ours.weights, theirs.weights, grads, strict=True):
            w.grad, v.grad = g * ours.scaler.get_scale(), g.clone()
        ours.overflow(at)
        update()
        if at not in IN_GRADIENT:
            step()
        assert all(map(torch.equal, ours.weights, theirs.weights))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("period", "odd"), [(1, 0), (3, 1)])
def test_eager_and_compiled_steps_in_turns(period: int, odd: int, backend: str) -> None:
    make = OPTIMIZERS["SGD, momentum"]
    mixed = run(make, backend, compiled=lambda step: step // period % 2 == odd)
    eager = run(make)
    assert mixed.states == eager.states
    assert all(map(torch.equal, mixed.weights, eager.weights))


def test_below_a_scale_of_one_a_quotient_that_overflows_is_caught() -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = optim.SGD([w], lr=0.1)
    scaler = GradScaler("cpu", 2.0**-10)
    scaler.scale(torch.ones(()))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def update() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    w.grad = torch.full((2,), 3e38)
    update()
    assert (w.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0**-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["AdamW, foreach"])
def test_a_whole_step_is_one_graph_where_dynamo_traces_gradients(name: str, backend: str) -> None:
    part = Part(OPTIMIZERS[name])
    eager = Part(OPTIMIZERS[name])
    for one in (part, eager):
        for w in one.weights:
            w.grad = torch.zeros_like(w)  # written into: a new one would be a graph break

    def step(part: Part, x: torch.Tensor) -> torch.Tensor:
        scaled = part.forward(x)
        for w, grad in zip(part.weights, torch.autograd.grad(scaled, part.weights), strict=True):
            w.grad.copy_(grad)
        part.scaler.unscale_(part.optimizer)
        nn.utils.clip_grad_norm_(part.weights, 1.0)
        part.scaler.step(part.optimizer)
        part.scaler.update()
        return scaled.detach()

    count = CompileCounterWithBackend(backend)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(lambda x: step(part, x), backend=count, fullgraph=True)
        graphs = []
        for at in range(STEPS):
            scaled = compiled(part.spoiled(at))
            expected = step(eager, eager.spoiled(at))
            torch.testing.assert_close(scaled, expected, equal_nan=True)
            assert part.scaler.state_dict() == eager.scaler.state_dict()
            graphs.append(count.frame_count)
    assert graphs == [1] + [2] * (STEPS - 1)  # the first makes the scale
    for w, v in zip(part.weights, eager.weights, strict=True):
        torch.testing.assert_close(w, v)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        OPTIMIZERS["Adam"],
        partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(optim.AdamW, fused=True),
        NotTorchs,
    ],
    ids=["Adam", "dampening", "SGD fused", "AdamW fused", "not torch's"],
)
def test_a_training_function_with_graph_breaks(make: Make) -> None:
    """As most write it: `zero_grad` and `backward` break the graph, a fused step does, too."""

    def train(part: Part, x: torch.Tensor) -> None:
        part.optimizer.zero_grad()
        part.forward(x).backward()
        part.update()

    def history(step: Any) -> History:
        part = Part(make)
        count = CompileCounterWithBackend("aot_eager")
        if step is None:
            step = torch.compile(train, backend=count)
        states, graphs = [], []
        for at in range(STEPS):
            step(part, part.spoiled(at) * (1e5 if at in IN_GRADIENT else 1.0))
            states.append(part.scaler.state_dict())
            graphs.append(count.frame_count)
        return History(states, [w.detach() for w in part.weights], graphs)

    ours, eager = history(None), history(train)
    assert ours.states == eager.states
    assert eager.states[-1]["skipped"] == len(set(IN_LOSS + IN_GRADIENT))
    assert len(set(ours.graphs[3:])) == 1
    for w, expected in zip(ours.weights, eager.weights, strict=True):
        torch.testing.assert_close(w, expected)


def test_two_scalers_in_one_compiled_function_keep_their_own_states() -> None:
    """One is stuck: no Python runs with the updates of a graph, and so there is no StuckError."""
    stuck = Part(OPTIMIZERS["SGD"], on_stuck="raise", stuck_after=3)
    parts, eager = [Part(OPTIMIZERS["SGD"]), stuck], [Part(OPTIMIZERS["SGD"]) for _ in range(2)]
    update = torch.compile(Part.update, backend="eager", fullgraph=True)
    for _ in range(8):
        for part, go in [*((p, update) for p in parts), *((p, Part.update) for p in eager)]:
            part.optimizer.zero_grad()
            part.forward(part.x).backward()
            if part in (stuck, eager[1]):
                part.overflow(IN_GRADIENT[0])
            go(part)
    assert [p.scaler.state_dict() for p in parts] == [p.scaler.state_dict() for p in eager]
    assert [int(p.scaler.skipped_steps) for p in parts] == [0, 8]


def test_hooks_of_an_optimizer_run_in_compiled_steps_and_a_scheduler_does_not_notice() -> None:
    part, calls = Part(OPTIMIZERS["SGD"]), []
    part.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    part.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = optim.lr_scheduler.ConstantLR(part.optimizer)
    update = torch.compile(part.update, backend="eager", fullgraph=True)
    for _ in range(3):
        part.forward(part.x).backward()
        update()
    assert calls == ["before", "after"] * 3
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
