"""`freeze` on whole models: the bits of autocast on a copy that is not frozen, wherever it runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from polymp import PolicyError
from polymp.backends.torch.weights import freeze_usage
from polymp.torch import autocast, freeze
from tests.support.sizes import size
from tests.support.torch.compiled import Count
from tests.support.torch.fp8_models import LowRank
from tests.support.torch.freezable_models import plainly
from tests.support.torch.models import Attention, ConvNet, First
from tests.support.torch.version_changes import need_lstm

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = (None, "amp", "lean", "matmul")


class Block(nn.Module):
    def __init__(self, size: int, lora: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            LowRank(size, 2) if lora else nn.Linear(size, size, bias=False) for _ in range(4)
        )
        self.norm, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = q * turn.to(q.dtype), k * turn.to(k.dtype)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.after(x))))


checkpointed = functools.partial(checkpoint, use_reentrant=False)


class LM(nn.Module):
    """A language model with rotary buffers, and checkpoints if asked."""

    def __init__(self, lora: bool = False, again: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, lora) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.register_buffer("frequency", 0.1 ** torch.arange(4.0), persistent=False)
        self.again = again
        pairs = [m for m in self.modules() if isinstance(m, LowRank)]
        trained = {id(p) for m in pairs for p in (*m.up.parameters(), *m.down.parameters())}
        for p in self.parameters():
            p.requires_grad_(id(p) in trained)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        turn = torch.outer(torch.arange(ids.shape[1]).float(), self.frequency).cos()
        x = self.table(ids)
        for block in self.blocks:
            run = (lambda *a, b=block: self.again(b, *a)) if self.again else block
            x = run(x, turn)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    layer = kind(8, 6, 2, batch_first=True, bidirectional=True)
    return nn.Sequential(First(layer), nn.Linear(12, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator())
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "LM": (LM, IDS),
    "LM, checkpoints": (lambda: LM(again=checkpointed), IDS),
    "convolutions": (ConvNet, IMAGES),
    "channels last": (lambda: ConvNet().to(memory_format=torch.channels_last), IMAGES),
    "LSTM": (lambda: recurrent(nn.LSTM), X),
    "GRU": (lambda: recurrent(nn.GRU), X),
    "attention": (Attention, X),
    "encoder": (encoder, X),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    return make().requires_grad_(False), inputs


WAYS_TO_RUN = [(None, False), (None, True), ("amp", False), ("lean", True), ("matmul", False)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("policy", "train"), WAYS_TO_RUN)
@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model_gives_the_bits_of_autocast(name: str, policy: Any, train: bool) -> None:
    if name == "LSTM" and policy is None:
        need_lstm(BF16)
    model, inputs = made(name)
    model.train(train)
    plain = copy.deepcopy(model)
    handle = freeze(model, (inputs,), policy=policy)
    low = {id(t): t for n, t in freeze_usage.names(model).items() if n in handle.stored}.values()
    saved = sum(4 * t.numel() - t.nbytes for t in low)
    assert handle.bytes_before - handle.bytes_after == saved > 0

    def region() -> Any:
        return autocast("cpu", policy=policy) if policy else torch.autocast("cpu", BF16)

    for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        results = []
        for which, around in ((model, contextlib.nullcontext), (model, region), (plain, region)):
            fresh = copy.deepcopy(which)
            torch.manual_seed(7)
            with grad(), around():
                y = fresh(inputs)
            results.append([y, *(b for n, b in fresh.named_buffers() if n not in handle.stored)])
        assert freeze_usage.same(results[0], results[2])
        assert freeze_usage.same(results[1], results[2])


RECURRENT = {"0.layer.weight_ih_l0", "0.layer.bias_hh_l1_reverse", "1.weight", "1.bias"}
EXPECTED = {
    "LM": {"head.weight", *(f"blocks.0.{n}.weight" for n in ("q", "k", "v", "o", "up", "down"))},
    "LSTM": RECURRENT,
    "GRU": RECURRENT,
    "channels last": {f"body.{at}.weight" for at in (0, 3, 7, 8)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_stored_of_them(name: str) -> None:
    if name == "LSTM":
        need_lstm(torch.bfloat16)
    model, inputs = made(name)
    strides = [p.stride() for p in model.parameters()]
    assert EXPECTED[name] <= {*freeze(model, (inputs,)).stored}
    assert [p.stride() for p in model.parameters()] == strides


def test_a_fast_path_is_what_runs_in_an_example() -> None:
    """Without gradients a TransformerEncoder runs as one kernel, which autocast leaves float32."""
    slow, inputs = made("encoder")
    fast = copy.deepcopy(slow).eval()
    why = "read in float32 by aten._transformer_encoder_layer_fwd.default in 0.layers.0"
    handle = freeze(fast, (inputs,))
    assert handle.stored == ("1.weight", "1.bias")
    assert handle.kept["0.layers.0.linear1.weight"] == why
    handle = freeze(slow.train(), (inputs,))
    assert "0.layers.0.linear1.weight" in handle.stored
    asked = "its dtype is read in 0.layers.0.self_attn"
    assert handle.kept["0.layers.0.self_attn.in_proj_weight"] == asked


def steps(model: nn.Module, policy: Any) -> list[Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=0.1), []
    for step in range(3):
        with autocast("cpu", policy=policy):
            loss = F.cross_entropy(model((IDS + step) % 11).flatten(0, 1), IDS.flatten())
        loss.backward()
        found += [loss.detach().clone(), [p.grad.clone() for p in trained if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [p.detach().clone() for p in trained]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [None, "lean"])
@pytest.mark.parametrize("again", [None, checkpointed])
def test_adapters_train_on_a_frozen_base_bit_for_bit(policy: Any, again: Any) -> None:
    frozen, plain = LM(lora=True, again=again), LM(lora=True, again=again)
    handle = freeze(frozen, (IDS,), policy=policy)
    assert {"blocks.0.q.base.weight", "head.weight"} <= {*handle.stored}
    assert handle.kept["blocks.1.o.up.weight"] == "requires gradients"
    ours, theirs = steps(frozen, policy), steps(plain, policy)
    assert freeze_usage.same(ours, theirs)
    moved = freeze_usage.same(ours[-1], [p for p in LM(lora=True).parameters() if p.requires_grad])
    assert not moved, "nothing was trained"
    assert freeze_usage.same(frozen(IDS), plainly(plain, IDS, policy=policy))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), LowRank(16, 2))
    net[0].requires_grad_(False)
    return net


def learned(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    y = call()
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y.float().square().sum(), wanted)]


def test_compiled_whole(count: Count) -> None:
    model, other = adapted(), adapted()
    freeze(model, (X,), policy="lean")
    compiled = torch.compile(model, backend=count, fullgraph=True)

    def inside(called: nn.Module) -> Callable[[], torch.Tensor]:
        return autocast("cpu", policy="lean")(functools.partial(called, X))

    expected = learned(other, inside(other))
    for _ in range(2):
        assert freeze_usage.same(learned(model, functools.partial(compiled, X)), expected)
    assert count.graphs == 1, "a graph was made twice"
    assert freeze_usage.same(learned(model, inside(compiled)), expected)
    assert count.graphs == 2, "in a region it is another graph"
    with autocast("cpu", FP16):
        assert freeze_usage.same(compiled(X), expected[0])


def test_a_graph_of_before_is_not_used_after(count: Count) -> None:
    model = adapted()
    compiled = torch.compile(model, backend=count)
    with autocast("cpu"):
        expected = compiled(X)
        freeze(model, (X,))
        assert freeze_usage.same(compiled(X), expected)
    assert freeze_usage.same(compiled(X), expected)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).requires_grad_(False)


@pytest.mark.long  # it compiles C++ for most of its time
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_inductor() -> None:
    net = perceptron()
    plain = torch.compile(copy.deepcopy(net), fullgraph=True)
    freeze(net, (X,))
    frozen = torch.compile(net, fullgraph=True)
    with torch.no_grad(), autocast("cpu"):
        expected = plain(X)
    with torch.no_grad():
        assert freeze_usage.same(frozen(X), expected)
    torch._dynamo.reset()


def test_under_torch_func() -> None:
    net, other = perceptron(), perceptron()
    freeze(net, (X,))
    rows = X.flatten(0, 1)
    with autocast("cpu"):
        slope = torch.func.grad(lambda x: other(x).float().sum())(rows)
        called = torch.func.functional_call(other, dict(other.named_parameters()), (rows,))
    # In a region, vmap takes a linear layer apart before autocast; a frozen one has been cast.
    mapped = torch.func.vmap(copy.deepcopy(other).bfloat16())(rows.bfloat16())
    assert freeze_usage.same(torch.func.vmap(net)(rows), mapped)
    assert freeze_usage.same(torch.func.grad(lambda x: net(x).float().sum())(rows), slope)
    weights = dict(other.named_parameters())
    assert freeze_usage.same(torch.func.functional_call(net, weights, (rows,)), called)


def disabled(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", enabled=False):
        return m.layer(x.float())


def other_dtype(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", FP16 if torch.get_autocast_dtype("cpu") is BF16 else BF16):
        return m.layer(x)


def moving(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.buffer.mul_(0.5).add_(x.detach().float().mean())
    return m.layer(x) + m.buffer


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "layer": lambda m, x: m.layer(x),
    "norm": lambda m, x: m.norm(x),
    "relu": lambda m, x: x.relu(),
    "softmax": lambda m, x: x.softmax(-1),
    "shared": lambda m, x: m.root.shared(x),
    "shared, read": lambda m, x: x + m.root.shared.weight[0],
    "rows": lambda m, x: F.linear(x, m.layer.weight[:4]).repeat_interleave(2, -1),
    "columns": lambda m, x: F.linear(x[..., :4], m.layer.weight[:, :4]),
    "float": lambda m, x: F.linear(x, m.layer.weight.float(), m.layer.bias),
    "low by hand": lambda m, x: x @ m.layer.weight.to(torch.get_autocast_dtype("cpu")).to(x.dtype),
    "buffer": lambda m, x: x @ m.square,
    "asked": lambda m, x: m.layer(x.to(m.layer.weight.dtype)),
    "disabled": disabled,
    "other dtype": other_dtype,
    "moving": moving,
}


class Step(nn.Module):
    def __init__(self, way: str, root: Any) -> None:
        super().__init__()
        self.way, self.layer, self.norm = WAYS[way], nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("buffer", torch.zeros(8))
        self.register_buffer("square", torch.randn(8, 8))
        object.__setattr__(self, "root", root)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


class Random(nn.Module):
    def __init__(self, ways: list[tuple[str, bool]]) -> None:
        super().__init__()
        torch.manual_seed(len(ways))
        self.shared = nn.Linear(8, 8).requires_grad_(False)
        self.steps = nn.ModuleList(Step(way, self).requires_grad_(grad) for way, grad in ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


def outcome(model: nn.Module, region: Any) -> list[Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    with region:
        y = model(X)
    grads = (
        torch.autograd.grad(y.float().sum(), trained, allow_unused=True) if y.requires_grad else ()
    )
    return [y.detach(), *grads, *(t for n, t in model.named_buffers() if n.endswith("buffer"))]


several = st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=size(3, 15))
@given(several, st.sampled_from(POLICIES), st.sampled_from([BF16, FP16]))
def test_random_models(ways: list[tuple[str, bool]], policy: str | None, dtype: Any) -> None:
    model, other = Random(ways), Random(ways)
    each = {way for way, grad in ways if not grad} & {
        "layer", "rows", "low by hand", "asked", "float", "moving"  # of the last three the bias
    }  # fmt: skip
    if not each and not {way for way, _ in ways} & {"shared", "buffer"}:
        with pytest.raises(PolicyError, match="can be stored low"):
            freeze(model, (X,), dtype=dtype, policy=policy)
    else:
        freeze(model, (X,), dtype=dtype, policy=policy)
        assert any(t.dtype is dtype for t in freeze_usage.names(model).values())
    region = autocast("cpu", dtype, policy=policy)
    expected = outcome(other, region)
    assert freeze_usage.same(outcome(model, region), expected)
    assert not math.isnan(expected[0].float().sum().item())
