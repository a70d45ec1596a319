"""Training on low weights against training on float32 weights under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from polymp import weights as core
from polymp.backends.torch.weights import low_parameters, low_step
from polymp.torch import GradScaler, locate, low_weights
from tests.support.low_weights import edges, spread
from tests.support.sizes import size
from tests.support.torch.low_training import MODELS, made, train, weights
from tests.support.torch.models import same, through_file

MODES = ("split", "master", "stochastic")


def matrices(x: list[torch.Tensor]) -> Any:
    """Muon, which takes matrices alone, with the biases left as they are."""
    return torch.optim.Muon([p for p in x if p.dim() == 2], lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch.optim, name)
        for name in """Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop
        Rprop""".split()
    },
    "Adam-foreach": lambda x: torch.optim.Adam(x, foreach=True),
    "Adam-fused": lambda x: torch.optim.Adam(x, fused=True),
    "Adam-amsgrad": lambda x: torch.optim.Adam(x, amsgrad=True),
    "LBFGS": lambda x: torch.optim.LBFGS(x, lr=0.1, max_iter=3),
    "Muon": matrices,
    "SGD": lambda x: torch.optim.SGD(x, lr=0.1),
    "SGD-momentum": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, nesterov=True),
}
# Classes of torch.optim without a row, and why.
EXCLUDED = {"Optimizer": "the base class", "SparseAdam": "refused: its gradients are sparse"}


def test_every_class_of_torch_optim_has_a_row() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert {name.partition("-")[0] for name in OPTIMIZERS} | set(EXCLUDED) == classes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_optimizer_trains_in_every_mode(name: str, mode: str) -> None:
    """`master` to the bits of float32, the others near them."""
    plain, _, losses = train("mlp", None, 12, OPTIMIZERS[name])
    model, optimizer, low_losses = train("mlp", mode, 12, OPTIMIZERS[name])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {p.dtype for p in optimizer.low} == {torch.bfloat16}
    if mode == "master":
        assert low_losses == losses
        assert same(weights(model, optimizer), weights(plain))
        return
    part = 0.4 if name == "LBFGS" else 0.15  # differences of rounded gradients are its curvature
    start = weights(made("mlp"))
    one, other = weights(model, optimizer), weights(plain)
    for key in one:
        moved = (other[key] - start[key]).norm()
        assert (one[key] - other[key]).norm() <= part * moved + 0.02 * start[key].norm(), key


@pytest.mark.sized
@pytest.mark.parametrize("name", MODELS)
def test_master_trains_to_the_bits_of_float32(name: str) -> None:
    steps = size(60, 300)
    plain, _, losses = train(name, None, steps)
    model, optimizer, low_losses = train(name, "master", steps)
    assert losses == low_losses
    assert same(weights(model, optimizer), weights(plain))
    assert optimizer.low
    assert bool(optimizer.kept) == (name == "tokens")


def test_the_comparison_finds_another_seed_of_bits() -> None:
    model, optimizer, losses = train("mlp", "stochastic", 20)
    other, second, others = train("mlp", "stochastic", 20, seed=1)
    again, third, once_more = train("mlp", "stochastic", 20)
    assert once_more == losses != others
    assert same(weights(model, optimizer), weights(again, third))
    assert not same(weights(model, optimizer), weights(other, second))


def test_locate_names_the_optimizer() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = low_weights(torch.optim.Adam([w], eps=0.0), mode="master")

    def step() -> None:
        (w * 0.0).sum().backward()
        optimizer.step()

    assert "LowAdam's eps is 0" in str(locate(step))


SHAPES = ((3, 4), (5,), (2, 2, 2))
OPTIMIZERS_LOW_HISTORIES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step"] * 3
            + ["some", "skip", "inf", "rate", "copy", "save", "add"]
        ),
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


class Run:
    def __init__(self, kind: str, mode: str | None) -> None:
        made = torch.Generator().manual_seed(0)
        self.kind, self.mode = kind, mode
        self.params = [nn.Parameter(torch.randn(s, generator=made)) for s in SHAPES]
        self.optimizer = self.start(OPTIMIZERS_LOW_HISTORIES[kind]([{"params": self.params}]))

    def start(self, optimizer: Any) -> Any:
        return low_weights(optimizer, self.mode) if self.mode else optimizer

    def happens(self, event: str, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        if event == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] = 0.001 * (1 + seed % 50)
        elif event == "copy":
            at = seed % len(self.params)
            new = torch.randn(self.params[at].shape, generator=made).bfloat16()
            with torch.no_grad():
                self.params[at].copy_(new)
        elif event == "save":
            self.through_file()
        elif event == "add":
            p = nn.Parameter(torch.randn(4, generator=made))
            self.params.append(p)
            self.optimizer.add_param_group({"params": [p], "lr": 0.02})
        else:
            self.step(event, seed, made)

    def step(self, event: str, seed: int, made: torch.Generator) -> None:
        for at, p in enumerate(self.params):
            grad = torch.randn(p.shape, generator=made).bfloat16()
            p.grad = None if event == "some" and at == seed % 2 else grad.to(p.dtype)
        if event in ("inf", "skip"):
            self.params[-1].grad = torch.full_like(self.params[-1], torch.inf)
        if event != "skip":
            self.optimizer.step()
            return
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(self.optimizer)

    def through_file(self) -> None:
        saved = [p.detach() for p in self.params], self.optimizer.state_dict()
        values, state = through_file(saved)
        groups = [len(g["params"]) for g in self.optimizer.param_groups]
        self.params = [nn.Parameter(torch.zeros(v.shape)) for v in values]
        each = iter(self.params)
        parts = [{"params": [next(each) for _ in range(n)]} for n in groups]
        self.optimizer = self.start(OPTIMIZERS_LOW_HISTORIES[self.kind](parts))
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)
        self.optimizer.load_state_dict(state)

    def full(self) -> list[torch.Tensor]:
        if self.mode is None:
            return [p.detach() for p in self.params]
        module = nn.ParameterList(self.params)
        return list(self.optimizer.float32_state_dict(module).values())


@pytest.mark.parametrize("mode", ["master", "split"])
@pytest.mark.parametrize("kind", OPTIMIZERS_LOW_HISTORIES)
@settings(max_examples=size(6, 60))
@given(events=EVENTS)
def test_an_exact_mode_has_the_bits_of_float32(mode, kind, events) -> None:
    plain, low = Run(kind, None), Run(kind, mode)
    for event, seed in events:
        plain.happens(event, seed)
        low.happens(event, seed)
        for one, other in zip(plain.full(), low.full(), strict=True):
            if event == "copy":  # the other 16 bits stay as they were
                off = (other - one).abs()
                assert ((off <= one.abs() * 2.0**-8) | ~one.isfinite()).all()
                one.copy_(other)
            same = one.view(torch.int32) == other.view(torch.int32)
            assert (same | (one.isnan() & other.isnan())).all(), event
        for p, full in zip(low.params, low.full(), strict=True):
            assert p.dtype is torch.bfloat16
            gap = (p.detach().float() - full).abs()
            # A subnormal number has the same last place as the smallest normal one.
            half = full.abs().clamp(min=2.0**-126) * 2.0**-8
            assert ((gap <= half) | ~full.isfinite() | (full.abs() > 3.38e38)).all()


@settings(max_examples=size(6, 60))
@given(events=EVENTS)
@example(events=[("copy", 0), ("save", 0)])  # the values that the weights have already
def test_stochastic_is_the_same_in_every_run(events: list[tuple[str, int]]) -> None:
    """And a save and a load, wherever it happens, changes nothing."""
    one, other = Run("adamw", "stochastic"), Run("adamw", "stochastic")
    for event, seed in events:
        one.happens(event, seed)
        if event != "save":
            other.happens(event, seed)
    for a, b in zip(one.full(), other.full(), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)) or a.isnan().any()


def give(params: list[Any], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=made).to(p.dtype)


adam: Any = pytest.importorskip(
    "torchao.optim.adam", reason="torchao is not among the packages of the tests"
)
TORCHAO_SHAPES = (65, 33), (17,)


class WideMoments(adam._AdamW):  # type: ignore[misc]
    """torchao's AdamW; beside bfloat16 weights, too, its moments are float32."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(p, dtype=torch.float32)


def drawn(step: int, place: int) -> torch.Tensor:
    """The random bits of a parameter in a step, as `low_weights(seed=0)` makes them."""
    shape = torch.Size(TORCHAO_SHAPES[place])
    index = torch.arange(shape.numel(), dtype=torch.int32)
    bits: torch.Tensor = core.random16(core.key(0, step, place), index)
    return bits.view(shape)


def torchao_steps(seed: int | None) -> list[torch.Tensor]:
    """Weights and moments after twenty steps: ours, or those of torchao, which draws our bits."""
    made = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=made).bfloat16()) for s in TORCHAO_SHAPES]
    optimizer = WideMoments(params, lr=1e-2, bf16_stochastic_round=seed is None)
    if seed is not None:
        optimizer = low_weights(optimizer, "stochastic", seed=seed)
    for step in range(20):
        give(params, 100 + step)
        bits = [] if seed is not None else [drawn(step, place) for place in range(len(params))]
        with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
            if bits:
                patch.setattr(torch, "randint", lambda *_, bits=bits, **__: bits.pop(0))
            optimizer.step()
        assert not bits
    assert {p.dtype for p in params} == {torch.bfloat16}
    moments = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]
    return [*params, *moments]


def test_every_step_is_that_of_torchaos_optimizer() -> None:
    """Around the same arithmetic, and with float32 moments in both: weights and moments."""
    theirs = torchao_steps(None)
    assert all(map(torch.equal, torchao_steps(0), theirs))
    assert not all(map(torch.equal, torchao_steps(1), theirs)), "the check cannot fail"


def test_elements_beyond_2_to_31_have_bits_of_their_own() -> None:
    large = torch.empty(2**31 + 4, dtype=torch.int8)  # whose memory nothing touches
    key, index = core.key(0, 1, 0), [*range(2**31 - 4, 2**31), *range(-(2**31), 4 - 2**31)]
    found = low_parameters.random_of(large, key)(2**31 - 4, 2**31 + 4)
    assert torch.equal(found, core.random16(key, torch.tensor(index, dtype=torch.int32)))


# --- Compiled steps on low weights: one graph, and the numbers of the eager step up to rounding ---


def start(mode: str, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[list[Any], Any]:
    made = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=made)) for s in ((9, 7), (5,), (3, 4))]
    return params, low_weights(kind(params, **options), mode, keep=[params[1]])


def full(params: list[Any], optimizer: Any) -> list[torch.Tensor]:
    return list(optimizer.float32_state_dict(nn.ParameterList(params)).values())


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:.*record_function.*will be ignored")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_step_is_one_graph_and_the_eager_step(mode: str, kind: Any) -> None:
    torch._dynamo.reset()
    params, optimizer = start(mode, kind)
    others, eager = start(mode, kind)
    compiled = torch.compile(optimizer.step)
    counters.clear()
    for at in range(4):
        give(params, at)
        give(others, at)
        compiled()
        eager.step()
    assert counters["stats"]["unique_graphs"] == 1
    params[0].grad = params[1].grad = others[0].grad = others[1].grad = None  # not used in a step
    compiled()
    eager.step()
    for one, other in zip(full(params, optimizer), full(others, eager), strict=True):
        assert torch.allclose(one, other, rtol=2.0**-7 if mode == "stochastic" else 1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:.*record_function.*will be ignored")
@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
def test_weights_written_by_hand_between_compiled_steps(mode: str) -> None:
    torch._dynamo.reset()
    params, optimizer = start(mode, torch.optim.SGD, lr=0.0)
    compiled = torch.compile(optimizer.step)
    for at in range(3):
        give(params, at)
        compiled()
        with torch.no_grad():
            params[0].data.mul_(0 if at else 1)
            params[2].fill_(0.625)
    give(params, 4)
    compiled()
    assert (params[0] == 0).all()
    assert (params[2] == 0.625).all()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:.*record_function.*will be ignored")
@pytest.mark.parametrize("mode", MODES)
def test_the_verbs_of_a_graph_store_the_bits_of_the_core(mode: str) -> None:
    """NaN aside, whose payload a cast to bfloat16 does not keep."""
    x = torch.cat([torch.from_numpy(edges().copy()), torch.from_numpy(spread(2**16))])
    x = x[~x.isnan()]
    random = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    kept = core.MODES[mode]
    low, beside = core.store(low_parameters.VERBS, kept, x, random)
    wide, rest = low_step.keep(kept, x, random)
    assert torch.equal(wide.bfloat16().view(torch.int16), low.view(torch.int16))
    if beside is not None:
        made = torch.empty_like(beside)
        low_step.put(made, rest)
        assert torch.equal(made.view(torch.uint8), beside.view(torch.uint8))
    seen = low_parameters.as_saved(beside)
    read = low_step.load(kept, low.float(), low_step.opened(seen))
    again = core.load(low_parameters.VERBS, kept, low, beside)
    assert torch.equal(read.view(torch.int32), again.view(torch.int32))
