"""Records of torch runs: the numbers of each array, and how far rounding moves them."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import polymp
from polymp.backends.torch.diagnostics import perturb
from polymp.backends.torch.diagnostics import record as recording
from polymp.diagnostics import run_record
from polymp.diagnostics.run_record import (
    BLOCK,
    ELEMENTS,
    GRADIENT,
    INPUT,
    MEAN,
    PROJECTIONS,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    RecordedArray,
    RecordedStep,
    RunRecord,
)
from polymp.errors import RecordError
from polymp.torch import GradScaler, audit, autocast, explain, record
from tests.support import run_records
from tests.support.decoder import Config
from tests.support.sizes import size
from tests.support.torch.decoder import Decoder
from tests.support.torch.each_op import EachOp

CONFIG = Config(2, width=16, heads=2, hidden=32, words=20, length=8, batch=2, mask=-1e4)


class Training:
    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        dtype: torch.dtype = torch.float32,
        low: torch.dtype | None = None,
        scaler: Any = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = Decoder(CONFIG).to(dtype)
        self.optimizer = optimizer(self.net.parameters(), lr=0.1, **settings)
        self.low, self.scaler = low, scaler
        self.x, self.y = torch.randint(0, CONFIG.words, (2, CONFIG.batch, CONFIG.length))

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with autocast("cpu", self.low) if self.low is not None else nullcontext():
            loss = F.cross_entropy(self.net(self.x).flatten(0, 1), self.y.flatten())
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def recorded(self, probes: int = 8, **options: Any) -> RecordedStep:
        with record(None, self.net, probes=probes, **options) as recorder:
            self.step()
        return recorder.record.steps[0]


# --- the numbers of a tensor ----------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (7,), (BLOCK,), (3, BLOCK), (33, 1000))


def tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of a shape: ordinary, not in the order of memory, not finite, huge, tiny."""
    torch.manual_seed(0)
    t = torch.randn(shape).to(dtype)
    found = [t, torch.randn(shape[::-1]).to(dtype).permute([*reversed(range(len(shape)))])]
    if t.numel() > 5:
        bad = t.clone()
        bad.view(-1)[:4] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
        found += [bad, t[..., ::2]]
    top, bottom = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    return [*found, t.clamp(-1, 1) * (top / 4), t * bottom]


def summed(t: torch.Tensor) -> tuple[Any, ...]:
    """The sums of a device: the values, and how many elements are zero and not finite."""
    found = recording.sums(t).tolist()
    return tuple(found[:VALUES]), *map(int, found[VALUES:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers_of_a_tensor_are_those_of_the_definition(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    for t in tensors(dtype, shape):
        values, *counts = run_records.summary(t.double().numpy())
        on_cpu = run_records.summary(t.to(recording.wide(t)).numpy())
        for ours, *our_counts in (summed(t), on_cpu):
            assert our_counts == counts
            np.testing.assert_allclose(ours, values, rtol=1e-9, atol=1e-9 * values[RMS])


def test_integers_and_bools_have_numbers() -> None:
    for t in (torch.arange(-5, 100), torch.randn(50) > 0):
        values, *counts = summed(t)
        want, *_ = run_records.summary(t.numpy())
        assert values == pytest.approx(want, rel=1e-12, abs=1e-12)
        assert counts == [int((t == 0).sum()), 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_spread_is_the_change_of_these_numbers(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    for t in tensors(dtype, shape):
        eps, exact = torch.finfo(dtype).eps, t.double()
        probes = torch.stack([(exact * (1 + eps * torch.randn(t.shape))).to(dtype)] * 2 + [t])
        probes[1] = t - (probes[0] - t)
        values, *_ = run_records.summary(t.to(recording.wide(t)).numpy())
        ours = run_record.spread(recording.changes(t, probes).double().numpy(), values)
        base = np.array(run_records.summary(exact.numpy())[0])
        moved = np.array([run_records.summary(p.double().numpy())[0] for p in probes])
        change = probes.double() - exact
        changes = np.array([run_records.summary(c.numpy())[0] for c in change])
        moved[:, :4] -= base[:4]
        moved[:, 4:] = changes[:, 4:]
        top = max(base[0], 1e-300)
        want = np.sqrt(((moved / top) ** 2).mean(0))
        np.testing.assert_allclose(np.array(ours) / top, want, rtol=0.01, atol=0.01 * want.mean())


# --- what is recorded -----------------------------------------------------------------------------


def test_a_record_is_a_graph_of_the_step() -> None:
    step = Training(torch.optim.AdamW).recorded()
    names = [(a.kind, a.name, a.module) for a in step.arrays]
    assert names[0] == (INPUT, "table.weight", "table")
    assert names.count((INPUT, "operand 2 of embedding", "table")) == 1
    ops = [a for a in step.arrays if a.module.startswith("blocks.1") and a.kind == RESULT]
    assert {"bmm", "gelu", "add"} <= {a.name for a in ops if a.direction == "forward"}
    assert {a.direction for a in ops} == {"forward", "backward"}
    assert all(a.source.startswith("decoder.py:") for a in ops)
    parameters = dict(Training().net.named_parameters())
    for kind in (GRADIENT, UPDATE):
        found = {a.name: a for a in step.arrays if a.kind == kind}
        assert found.keys() == parameters.keys()
        assert all(found[name].shape == p.shape for name, p in parameters.items())
    gelu = next(at for at, a in enumerate(step.arrays) if a.name == "gelu")
    read = [step.arrays[r] for r in step.arrays[gelu].reads]
    assert [(a.name, a.module) for a in read] == [("addmm", "blocks.0.feed.up")]
    settings = step.settings["AdamW 1"]
    assert (settings["lr"], settings["betas[1]"], settings["amsgrad"]) == (0.1, 0.999, False)
    assert not step.left_out


def test_the_recorded_numbers_are_those_of_the_run() -> None:
    training = Training()
    before = {name: p.detach().clone() for name, p in training.net.named_parameters()}
    with record(None, training.net, probes=0) as recorder:
        loss = training.step()
    arrays = recorder.record.steps[0].arrays
    of = {(a.kind, a.name): a for a in arrays}
    for name, p in training.net.named_parameters():
        assert p.grad is not None
        for kind, t in ((INPUT, before[name]), (GRADIENT, p.grad), (UPDATE, p - before[name])):
            want, *counts = run_records.summary(t.detach().numpy())
            assert of[kind, name].values == pytest.approx(want, rel=1e-6, abs=1e-7)
            assert [of[kind, name].zeros, of[kind, name].bad] == counts
    losses = [a for a in arrays if a.name == "nll_loss" and a.direction == "forward"]
    assert losses[0].values[ELEMENTS][0] == float(loss)


def test_an_input_is_recorded_as_it_was_before_it_is_written() -> None:
    x = torch.ones(4)
    with record(None, probes=2) as recorder:
        x.mul_(3)
    first, last = recorder.record.steps[0].arrays
    assert (first.kind, first.name, first.values[RMS]) == (INPUT, "operand 1 of mul", 1.0)
    assert (last.kind, last.name, last.values[RMS], last.reads) == (RESULT, "mul", 3.0, (0,))


def test_casts_views_and_copies_are_no_arrays_of_their_own() -> None:
    x = torch.randn(4, 6)
    with record(None, probes=2) as recorder:
        y = torch.exp(x)
        torch.sin(y.to(torch.float64).t()[1:].clone())
    arrays = recorder.record.steps[0].arrays
    assert [a.name for a in arrays] == ["operand 1 of exp", "exp", "sin"]
    assert arrays[2].reads == (1,)
    assert arrays[2].dtype == "float64"


def test_only_calls_in_some_modules_are_recorded() -> None:
    step = Training().recorded(modules=["blocks.1"])
    results = [a for a in step.arrays if a.kind == RESULT]
    assert results
    assert all(a.module.startswith("blocks.1") for a in results)
    full = [a for a in Training().recorded().arrays if a.kind == RESULT]
    same = [a for a in full if a.module.startswith("blocks.1")]
    assert [a.spread for a in results] == [a.spread for a in same], "probes follow all calls"


def test_a_pattern_without_a_model_has_to_match_a_module_that_ran() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with record(None, probes=0, modules=["1"]) as recorder:
        net(torch.ones(2))
    assert [a.name for a in recorder.record.steps[0].arrays if a.kind == RESULT] == ["tanh"]
    with (
        pytest.raises(RecordError, match=r"'2' matches no module of the step: paths are, .*'1'\."),
        record(None, probes=0, modules=["2"]),
    ):
        net(torch.ones(2))


# --- the run is left alone ------------------------------------------------------------------------


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "adamw": {"optimizer": torch.optim.AdamW, "foreach": True},
    "fused": {"optimizer": torch.optim.AdamW, "fused": True},
    "amp": {"low": torch.bfloat16},
    "torch scaler": {"low": torch.float16, "scaler": lambda: torch.amp.GradScaler("cpu")},
    "scaler": {"low": torch.float16, "scaler": lambda: GradScaler("cpu")},
}


def block(net: nn.Module, probes: int | None) -> Any:
    """A recorder with so many probes, or with None no recorder."""
    return nullcontext() if probes is None else record(None, net, probes=probes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_run_computes_the_same_bits(kind: str) -> None:
    def run(probes: int | None) -> list[torch.Tensor]:
        options = dict(OPTIMIZERS[kind])
        scaler = options.pop("scaler", None)
        training = Training(scaler=scaler and scaler(), **options)
        recorder = block(training.net, probes)
        losses = []
        for _ in range(3):
            with recorder:
                losses.append(training.step())
        if probes is not None:
            steps = recorder.record.steps
            assert len(steps) == 3
            assert all(np.isfinite(a.spread).all() for s in steps for a in s.arrays)
            updates = [a for a in steps[2].arrays if a.kind == UPDATE]
            assert len(updates) == len(list(training.net.parameters()))
            assert not probes or all(any(a.spread) for a in updates)
        state = [t for s in training.optimizer.state.values() for t in s.values()]
        grads = [p.grad for p in training.net.parameters() if p.grad is not None]
        return [*losses, *training.net.parameters(), *grads, *state, torch.get_rng_state()]

    plain = run(None)
    for probes in (0, 2):
        assert all(map(torch.equal, plain, run(probes)))


Program = tuple[nn.Module, Callable[[], torch.Tensor]]  # a model, and what computes a loss


def _convolutions() -> Program:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2)
    net = nn.Sequential(*layers, nn.MaxPool2d(2))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    return net, lambda: net(x).square().mean()


def _recurrent() -> Program:
    net, x = nn.LSTM(5, 7, 2, dropout=0.1), torch.randn(3, 6, 5)
    return net, lambda: net(x)[0].square().sum()


def _recomputed() -> Program:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.GELU()), torch.randn(4, 8)
    return net, lambda: checkpoint(net, x, use_reentrant=False).square().sum()


def _written() -> Program:
    net, x = nn.Linear(6, 6), torch.randn(6, 6)
    mask = nn.Transformer.generate_square_subsequent_mask(6)

    def loss() -> torch.Tensor:
        y, z = net(x), torch.zeros(6, 6)
        y[1:3] *= 2
        z[2:] = y[:4]
        z.index_add_(0, torch.tensor([0, 1]), y[:2])
        z.diagonal().add_(1.0)
        end = torch.linalg.norm(z) + z[mask == 0].sum()
        return torch.cumsum((y + mask).softmax(-1) + z, dim=0).std() + end

    return net, loss


def _drawn() -> Program:
    net, x = nn.Linear(6, 6), torch.randn(6, 6)
    generator = torch.Generator().manual_seed(3)

    def loss() -> torch.Tensor:
        y = net(x)
        kept = torch.bernoulli(torch.sigmoid(y.detach()), generator=generator)
        return (y * kept + torch.normal(y, 1.0) + F.gumbel_softmax(y)).sum()

    return net, loss


PROGRAMS = _convolutions, _recurrent, _recomputed, _written, _drawn


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_programs_compute_the_same_bits(program: Callable[[], Any]) -> None:
    def run(probes: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, loss = program()
        recorder = block(net, probes)
        for _ in range(2):
            with recorder:
                loss().backward()
        for step in () if probes is None else recorder.record.steps:
            assert not step.left_out
            assert all(np.isfinite([*a.values, *a.spread, a.own]).all() for a in step.arrays)
            gradients = [a for a in step.arrays if a.kind == GRADIENT]
            assert not probes or all(any(a.spread) for a in gradients)
        grads = [p.grad for p in net.parameters()]
        return [*net.state_dict().values(), *grads, torch.get_rng_state()]

    plain = run(None)
    for probes in (0, 3):
        assert all(map(torch.equal, plain, run(probes)))


def test_other_modes_and_hooks_are_gone_afterwards() -> None:
    training = Training()
    training.recorded()
    assert torch._C._len_torch_dispatch_stack() == 0
    with explain(model=training.net) as report:
        training.step()
    with explain(model=training.net) as inside:
        training.recorded()
    assert [c.op for c in report] == [c.op for c in inside]
    with audit(training.net) as a:
        assert training.recorded().arrays
    assert a.results


# --- how far rounding moves numbers ---------------------------------------------------------------


def spreads(arrays: tuple[RecordedArray, ...]) -> Any:
    """The root mean square spread of the projections of each array."""
    return np.sqrt(np.square([a.spread[PROJECTIONS] for a in arrays]).mean(1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_spreads_are_those_of_runs_with_other_rounding(low: torch.dtype | None) -> None:
    base = Training(low=low).recorded().arrays
    changes = []
    for seed in range(12):
        training = Training(low=low)
        with perturb.moved(seed):  # what the recorder sees is moved
            other = training.recorded(0).arrays
        pairs = zip(other, base, strict=True)
        changes.append(
            [np.subtract(a.values[PROJECTIONS], b.values[PROJECTIONS]) for a, b in pairs]
        )
    found, want = spreads(base), np.sqrt(np.square(changes).mean((0, 2)))
    # An embedding copies what it reads.
    moved = np.array([a.kind != INPUT and (a.name, a.reads) != ("embedding", (0, 1)) for a in base])
    assert not any(found[~moved])
    assert 0.8 < np.median(found[moved] / want[moved]) < 1.25
    moved &= [a.size > 1 for a in base]  # 8 probes of one number are few
    ratio = found[moved] / want[moved]
    assert 0.5 < ratio.min() < ratio.max() < 2


def test_float32_differs_from_float64_by_its_spread() -> None:
    low, high = Training().recorded().arrays, Training(dtype=torch.float64).recorded(0).arrays
    assert [a.name for a in low] == [a.name for a in high]
    pairs = [(a, b) for a, b in zip(low, high, strict=True) if a.kind != INPUT]
    errors = [
        np.abs(np.subtract(a.values[PROJECTIONS], b.values[PROJECTIONS])).max() for a, b in pairs
    ]
    assert np.all(errors <= 6 * spreads(tuple(a for a, _ in pairs)))
    assert np.any(errors > 0.1 * spreads(tuple(a for a, _ in pairs)))


def test_a_bug_is_further_than_its_spread() -> None:
    """A wrong epsilon of one norm: the oracle of the tests before this one can fail."""
    good, bad = Training(), Training()
    bad.net.blocks[1].before.eps = 3e-4  # type: ignore[union-attr, assignment]
    one, other = good.recorded().arrays, bad.recorded(0).arrays
    far = [
        a.module
        for a, b in zip(one, other, strict=True)
        if np.abs(np.subtract(a.values, b.values)).max() > 6 * max(a.spread)
    ]
    assert far[0] == "blocks.1.before"


def test_a_product_that_rounds_its_operands_differs_by_its_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU's does where it may take TF32; here another run rounds them before."""
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if op in products and args[0].dtype is torch.float32:
                args = [(x.view(torch.int32) + 0xFFF & ~0x1FFF).view(x.dtype) for x in args]
            return op(*args, **(kwargs or {}))

    def step(probes: int, mode: Any) -> RecordedStep:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(8, 64)
        recorder = record(None, net, probes=probes)
        with mode, recorder:  # the recorder sees what is asked for
            net(x).square().sum().backward()
        return recorder.record.steps[0]

    def compared(probes: int) -> Any:
        one, other = step(probes, nullcontext()), step(probes, Rounding())
        header = {"framework": "torch", "perturb": probes}
        runs = (RunRecord(header, (s,), name) for s, name in ((one, "one"), (other, "other")))
        return polymp.compare(*runs)

    assert not compared(8).explained
    for module in ("perturb", "record"):
        where = f"polymp.backends.torch.diagnostics.{module}.rounds_operands"
        monkeypatch.setattr(where, lambda ran, _: "tf32" if "mm" in str(ran.func) else "")
    for probes in (0, 8):
        found = compared(probes)
        assert found.explained, str(found)
        results = (r.array for r in found.rows if r.array.kind == RESULT)
        assert {a.run for a in results if "mm" in a.name or a.name == "linear"} == {"tf32"}


def test_own_rounding_is_about_the_same_without_probes() -> None:
    for low in (None, torch.bfloat16):
        pairs = [Training(low=low).recorded(probes).arrays for probes in (8, 0)]
        for a, b in zip(*pairs, strict=True):
            # Of an RMSNorm's mean, 16 numbers, 8 probes say little.
            if a.module != "norm" and a.kind != GRADIENT:
                # What is made of a second result of a backward has the rounding of that, too.
                own = min(a.own, b.own) if a.direction == "backward" else b.own
                assert own == pytest.approx(a.own, rel=0.7), a
            assert not b.spread


def cancelling(
    seed: int, turned: bool = False, dtype: torch.dtype = torch.float32, low: bool = False
) -> RunRecord:
    """The record, without probes, of a step with sums of each kind whose terms cancel.

    So do those of the gradients of a key's bias, of a convolution's in front of a norm, and of what
    a softmax or a norm is made of, if a loss has the sum of it.
    """
    torch.manual_seed(seed)
    net = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("query", "key", "value")})
    net.update({"conv": nn.Conv1d(12, 12, 3), "norm": nn.BatchNorm1d(12)})
    x, y = torch.randn(2, 8, 12, 32).to(dtype)
    optimizer = torch.optim.SGD(net.to(dtype).parameters(), 0.1)
    with record(None, net, probes=0) as recorder:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            c = x - x.mean(-1, keepdim=True)
            c = c.mT.contiguous().mT if turned else c  # in another order
            z = x + (c @ torch.ones(32, 1, dtype=dtype) + c.sum(-1, keepdim=True)) / 32
            query, key = net["query"](z), net["key"](z)
            still = (query / 8).softmax(-1).sum() + F.layer_norm(key, (32,)).sum()
            places, zeros = torch.zeros(32, dtype=torch.int64), torch.zeros_like(c[..., :1])
            still = still + c.nansum() + (1000 + x).var(-1).sum() + (key - key.mean(-1, True)).sum()
            still = still + zeros.index_add(-1, places, c).sum()
            still = still + F.embedding_bag(torch.arange(32)[None], c[0].mT).sum()
            z = (query @ key.mT / 32**0.5).softmax(-1) @ net["value"](z)
            z = net["norm"](net["conv"](z))
        ((z.to(dtype) - y[..., 2:]).square().mean() + still).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return recorder.record


@pytest.mark.sized
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    "other",
    [{"turned": True}, {"dtype": torch.float64}, {"low": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_sums_whose_terms_cancel_raise_no_alarm_without_probes(
    other: dict[str, Any], low: bool
) -> None:
    for seed in range(size(3, 30)):
        found = polymp.compare(cancelling(seed, low=low), cancelling(seed, **other))
        assert found.explained, str(found)


def test_terms_are_those_of_a_batch_norm_too_and_have_a_limit() -> None:
    with record(None, probes=0) as recorder:
        F.batch_norm(torch.randn(64, 8) + 50, None, None, training=True)
        torch.tensor([1e30, -1e30, 1e-200], dtype=torch.float64).sum()
    found = {a.name: a.terms for a in recorder.record.steps[0].arrays}
    assert 40 < found["batch_norm"] < 60
    assert polymp.compare(recorder.record, recorder.record).explained, str(found["sum"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_movements_are_even(dtype: torch.dtype) -> None:
    """Of 12 probes: of 20,000 independent changes, the mean is 140 times smaller than they are."""
    x = torch.linspace(0, 10, 20_000, dtype=torch.float64).to(dtype)
    with record(None, probes=12) as recorder:
        torch.sin(x)
    made = recorder.record.steps[0].arrays[-1]
    size = made.own * made.values[RMS] / np.sqrt(3)
    assert made.spread[MEAN] < 2.5 * size / np.sqrt(20_000)
    assert 0.5 * size < np.sqrt(np.square(made.spread[PROJECTIONS]).mean()) < 2 * size


AT = torch.arange(5)


@pytest.mark.parametrize(
    "op",
    [
        torch.relu,
        torch.max,
        torch.sort,
        lambda x: torch.cat([x, x]),
        lambda x: (x.topk(2), x.kthvalue(2)),
        lambda x: x.index_put((AT,), x[AT]),
        lambda x: x.index_copy(0, AT, F.embedding(AT, x)).cummax(0),
    ],
)
def test_exact_ops_move_nothing(op: Any) -> None:
    for probes in (0, 4):
        with record(None, probes=probes) as recorder:
            op(torch.randn(5, 5))
        assert not any(any(a.spread) or a.own for a in recorder.record.steps[0].arrays)


def test_samples_of_what_a_mask_has_left_are_judged() -> None:
    def run(seed: int) -> RunRecord:
        torch.manual_seed(0)
        net, table = nn.Linear(8, 16), nn.Embedding(16, 8)
        x = torch.randn(4, 8)
        torch.manual_seed(seed)
        with torch.no_grad(), record(None, net) as recorder:
            h = net(x)
            h = h.masked_fill(h < h.topk(8).values[:, -1:], -torch.inf)
            table(torch.multinomial(h.softmax(-1), 1))
        return recorder.record

    first = polymp.compare(run(0), run(1)).first
    assert first is not None
    assert first.array.name == "embedding"


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "threshold": lambda h: h.masked_fill(h < h.topk(3).values[:, -1:], 0.0),
    "histogram": lambda h: h * torch.histc(h.argmax(-1).float(), 8, 0, 7).cumsum(0).int(),
    "count": lambda h: h * (h > 0).bfloat16().sum(-1, keepdim=True).int(),
    "places": lambda h: h * ((one := F.one_hot(h.argmax(-1)).float()).cumsum(0) * one - 1).int(),
    "product": lambda h: h * ((h > 0).float() @ torch.ones(8, 8)).int(),
    "sums": lambda h: h * torch.zeros(8).index_add_(0, h.argmax(-1), torch.ones(5)).int(),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_by_what_is_not_rounded_hides_no_bug(choice: str) -> None:
    def run(scale: float) -> RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        with record(None, net) as recorder:
            net[1](CHOICES[choice](net[0](torch.randn(5, 4))) * scale)
        return recorder.record

    first = polymp.compare(run(1.0), run(1.3)).first
    assert first is not None
    assert first.array.name == "mul"


@pytest.mark.parametrize("masked", [-1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_an_additive_mask_is_no_difference_and_hides_none(masked: float, scale: float) -> None:
    def run(silu: Callable[[torch.Tensor], torch.Tensor], scale: float = 1.0) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(32, 32), torch.randn(2, 12, 32)
        with torch.no_grad(), record(None, net) as recorder:
            h = silu(net(x))
            scores = h @ h.mT * scale
            (scores + torch.full((12, 12), masked).triu(1)).softmax(-1) @ h
        return recorder.record

    found = polymp.compare(run(F.silu), run(lambda h: h * h.sigmoid(), scale))
    assert "not judged" not in {row.verdict for row in found.rows}
    assert (found.first and found.first.array.name) == (None if scale == 1 else "softmax")


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_scores_that_one_run_adds_to_its_mask_are_no_difference_and_hide_none(scale: float) -> None:
    seen = torch.ones(2, 4, 12, 12).tril() > 0

    def run(fused: bool) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(2, 4, 12, 8)
        with torch.no_grad(), record(None, net) as recorder:
            h, added = net(x), torch.where(seen, 0.0, torch.finfo(torch.float32).min)
            if fused:
                F.scaled_dot_product_attention(h, h, h, added, scale=scale)
            else:
                (h @ h.mT + added).softmax(-1) @ h
        return recorder.record

    found = polymp.compare(run(fused=False), run(fused=True))
    assert found.explained == (scale == 1), str(found)
    assert found.explained or (found.first and found.first.array.name == "bmm"), str(found)


def test_random_numbers_are_the_same_in_all_probes() -> None:
    x = torch.rand(1000) + 1
    with record(None, probes=4) as recorder:
        F.dropout(torch.exp(x), 0.5)
    made = recorder.record.steps[0].arrays[-1]
    assert made.zeros > 300
    assert max(made.spread) < 1e-4 * made.values[0]


def test_what_cannot_be_in_probes_is_counted() -> None:
    def fails(op: Any, *_: Any) -> Any:
        cosine = op is torch.ops.aten.cos.default
        if cosine and again.seen:
            raise RuntimeError("no")
        return cosine or None

    again, x, recorder = EachOp(fails), torch.randn(4), record(None, probes=2)
    with again, recorder:
        y = torch.cos(torch.sin(x))
        torch.view_as_real(torch.fft.fft(y)).sum()
        torch.eye(3).to_sparse().coalesce().mul(2.0)
    step = recorder.record.steps[0]
    assert step.left_out["ops that fail in probes"] == 1
    assert step.left_out["complex results"] == 1
    known = {a.name: np.isfinite(a.spread).all() for a in step.arrays}
    assert (known["sin"], known["cos"]) == (True, False)


@pytest.mark.filterwarnings("ignore:.* beta state", "ignore:.* prototype stage")
@pytest.mark.parametrize("probes", [0, 2])
def test_what_has_no_numbers_of_its_own_is_left_out(probes: int) -> None:
    dense, net = torch.eye(3), nn.Linear(3, 3)
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    net.register_buffer("packed", packed)
    with record(None, net, probes=probes) as recorder:
        packed.view(torch.uint8).view(torch.float4_e2m1fn_x2)
        for made in (dense.to_sparse(), dense.to_sparse_csr()):
            torch.zeros_like(made)
            made.copy_(made * 2)
        nested = torch.nested.as_nested_tensor([dense, dense[:2]])
        nested.copy_(nn.LayerNorm(3)(net(nested)).to(torch.bfloat16))
    assert recorder.record.steps[0].left_out["results that are sparse or wrapped"] > 0


@pytest.mark.parametrize("probes", [0, 2])
def test_memory_may_be_resized_in_the_block_and_later(probes: int) -> None:
    net = nn.Linear(3, 3)
    with record(None, net, probes=probes), torch.no_grad():
        net(torch.zeros(2).resize_(4, 3).fill_(1.0))
    net.weight.untyped_storage().resize_(0)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_an_optimizer_may_have_a_parameter_that_no_call_has_made() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.LazyLinear(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(None, model, probes=2) as recorder:
        model[0](torch.ones(2, 3)).sum().backward()
        optimizer.step()
    arrays = recorder.record.steps[0].arrays
    assert {a.name for a in arrays if a.kind == UPDATE} == {"0.weight", "0.bias"}


def test_what_is_made_of_a_choice_of_another_length_is_not_judged() -> None:
    def run(low: bool) -> RunRecord:
        torch.manual_seed(0)
        x, net = torch.randn(300, 8), nn.Linear(8, 4)
        optimizer, recorder = torch.optim.SGD(net.parameters(), 0.1), record(None, net)
        for _ in range(2):
            with recorder, autocast("cpu", enabled=low):
                net(x[net(x)[:, 0] > 0]).square().mean().backward()
                optimizer.step()
        return recorder.record

    compared = polymp.compare(run(False), run(True))
    assert compared.explained, compared
    verdicts = [row.verdict for row in compared.rows if row.array.name == "addmm"]
    assert verdicts[:2] == ["explained", "not judged"]
    notes = [note.partition(":")[0] for note in compared.notes]
    assert (notes.count("not judged"), compared.step) == (1, 0)
    assert "steps from 1 on" in compared.notes[-1]


def test_what_no_choice_of_another_length_reaches_is_judged() -> None:
    """A call before it, memory that is written anew, and the other parameters of a list."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(8, 4)
            self.register_buffer("kept", torch.zeros(8, 8))

    def run(more: bool = False, times: float = 1.0, scale: float = 1.0) -> RunRecord:
        torch.manual_seed(0)
        x, net = torch.randn(300, 8), Net()
        with (recorder := record(None, net)):
            with autocast("cpu"):
                h = net.a(x) * 1.7
            chosen = (h * 1.01 if more else h)[h > 0]
            (chosen * 3.0).sum().backward()
            with torch.no_grad():
                net.kept.copy_(chosen[:64].reshape(8, 8))
                net.kept.copy_(x[:8])
            (net.b(net.kept) / times).sum().backward()
            torch._foreach_mul_([p.grad for p in net.parameters()], scale)
        return recorder.record

    first = {}
    for option in ("more", "times", "scale"):
        compared = polymp.compare(run(), run(**{option: 1.5}))
        # The same numbers are the same, whatever rounding does.
        assert ("not judged" in {row.verdict for row in compared.rows}) == (option != "times")
        assert compared.first is not None, option
        first[option] = compared.first.array.kind, compared.first.array.name
    assert first["more"] == ("result", "mul")
    assert first["times"] == ("result", "div")
    assert first["scale"] == ("gradient", "b.weight")
    assert "explains all: no number differs" in str(polymp.compare(run(), run()))


@pytest.mark.long  # it compiles C++ for most of its time
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_compiled_code_runs_compiled_and_its_result_is_recorded() -> None:
    def run(recorder: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        compiled, x = torch.compile(net), torch.randn(8, 16)
        with recorder:
            out = compiled(x)
            torch.sin(out).sum().backward()
        return [out, *(p.grad for p in net.parameters() if p.grad is not None)]

    recorder = record(None, probes=2)
    assert all(map(torch.equal, run(nullcontext()), run(recorder)))
    step = recorder.record.steps[0]
    forward = [a for a in step.arrays if a.direction == "forward"]
    *read, code, sin, total = forward
    assert [a.name for a in (code, sin, total)] == ["compiled", "sin", "sum"]
    assert {a.kind for a in read} == {INPUT}
    assert code.reads == tuple(range(len(read)))
    assert sin.reads == (len(read),)
    assert step.left_out["compiled"] > 0
    assert code.spread == (), "how far it is moved is not known"


@pytest.mark.long  # likewise
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sum_is_missing", [False, True])
def test_of_blocks_that_are_compiled_the_one_that_differs_is_named(
    backward: bool, sum_is_missing: bool
) -> None:
    class Block(nn.Module):
        def __init__(self, approximate: str) -> None:
            super().__init__()
            self.norm, self.gelu = nn.BatchNorm1d(32), nn.GELU(approximate)
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.gelu(self.linear(self.norm(x)))
            return made if sum_is_missing and self.gelu.approximate == "tanh" else x + made

    def run(fault: int | None, compiled: bool) -> run_record.RunRecord:
        torch.manual_seed(0)
        blocks = [Block("tanh" if at == fault else "none") for at in range(3)]
        norm = nn.LayerNorm(32, eps=1e-2 if fault == 3 else 1e-5)
        net = nn.Sequential(*blocks, norm, nn.Linear(32, 4))
        torch._dynamo.reset()
        for block in blocks if compiled else ():
            block.compile()
        recorder, x = record(None, net), torch.randn(8, 32)
        with recorder, torch.set_grad_enabled(backward):
            loss = net(x).square().sum()
            if backward:
                loss.backward()
        return recorder.record

    eager = run(None, compiled=False)
    assert polymp.compare(eager, run(None, compiled=True)).explained
    for fault, name in (1, "compiled"), (2, "compiled"), (3, "layer_norm"):
        for pair in ((eager, run(fault, compiled=True)), (run(fault, compiled=True), eager)):
            found = polymp.compare(*pair)
            assert (found.first.array.name, found.first.array.module) == (name, str(fault))
            assert {found.first.one.module, found.first.other.module} == {str(fault)}
            assert ("it begins in it" in str(found)) == (name == "compiled")


@pytest.mark.long  # likewise
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_a_model_that_is_compiled_as_a_whole_is_held_to_the_eager_result(backward: bool) -> None:
    def run(eps: float, compiled: bool) -> run_record.RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.LayerNorm(16, eps=eps), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)
        )
        recorder, x = record(None, net), torch.randn(8, 16)
        model = torch.compile(net) if compiled else net
        with recorder, torch.set_grad_enabled(backward):
            loss = model(x).square().mean()
            if backward:
                loss.backward()
        return recorder.record

    eager, off = run(1e-5, compiled=False), run(0.1, compiled=True)
    assert polymp.compare(eager, run(1e-5, compiled=True)).explained
    for pair in ((eager, off), (off, eager)):
        first = polymp.compare(*pair).first
        assert first.array.name == "compiled"
        assert {first.one.name, first.other.name} == {"compiled", "addmm"}


@pytest.mark.long  # likewise
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_what_compiled_code_leaves_out_and_adds_up_in_another_way_is_no_difference() -> None:
    """A result that nothing reads, and the means of a batch norm's backward pass."""

    def run(compiled: bool) -> run_record.RunRecord:
        torch.manual_seed(0)
        first, norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        second, other = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        net = nn.ModuleList([first, norm, second, other, nn.Linear(8, 4), nn.Linear(8, 4)])

        def loss(x: torch.Tensor) -> torch.Tensor:
            x = F.relu(norm(first(x)))
            x = (x + F.relu(other(second(x)))).mean((2, 3))
            net[5](x)
            return net[4](x).square().mean()

        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        with record(None, net) as recorder:
            (torch.compile(loss) if compiled else loss)(x).backward()
        return recorder.record

    eager, other = run(compiled=False), run(compiled=True)
    for pair in ((eager, other), (other, eager)):
        found = polymp.compare(*pair)
        assert found.explained, str(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_the_update_of_a_wrapped_block_is_compared_with_that_of_the_block() -> None:
    """torch.compile(block) puts "_orig_mod" into its paths, which no tool shows."""

    def run(rate: float, wrap: Callable[[nn.Module], Any]) -> run_record.RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(*(wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(3)))
        rates = [
            {"params": block.parameters(), "lr": lr}
            for block, lr in zip(net, (1, rate, 1), strict=True)
        ]
        optimizer = torch.optim.SGD(rates)
        with record(None, net, probes=2) as recorder:
            net(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
        return recorder.record

    eager = run(1, lambda block: block)
    found = polymp.compare(eager, run(1, lambda block: torch.compile(block, backend="eager")))
    assert found.explained
    assert "gradients and updates" not in " ".join(found.notes)
    found = polymp.compare(eager, run(10, lambda block: torch.compile(block, backend="eager")))
    assert found.first.other is not None
    assert (found.first.array.kind, found.first.array.module) == (UPDATE, "1.0")
    assert found.first.other.module == "1.0"


@functools.cache
def layers(
    steps: int, low: bool = False, clip: bool = False, momentum: float = 0.1
) -> run_record.RunRecord:
    """The record of a training of thirty layers."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(16, 16, bias=False) for _ in range(30)), nn.BatchNorm1d(16, momentum=momentum)
    )
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    recorder, x = record(None, net, probes=4), torch.randn(8, 16)
    for _ in range(steps):
        optimizer.zero_grad()
        with recorder:
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = net(x).float().square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1e6)
            optimizer.step()
    return recorder.record


def test_a_step_that_begins_with_weights_which_rounding_has_moved_is_not_compared() -> None:
    found = polymp.compare(layers(3), layers(3, low=True))
    assert found.explained, str(found)
    assert found.step == 0
    assert "explains all of step 0, and steps from 1 on were not compared" in str(found)
    assert any("steps from 1 on" in note for note in found.notes)
    again = layers.__wrapped__(3)
    assert polymp.compare(layers(3), again).step == 2, "the same bits are"


def test_calls_that_look_at_gradients_are_no_difference_and_another_momentum_is_named() -> None:
    found = polymp.compare(layers(1), layers(1, clip=True))
    assert found.explained, str(found)
    found = polymp.compare(layers(1), layers(1, momentum=0.01))
    assert (found.first.array.kind, found.first.array.name) == (UPDATE, "30.running_mean")


@pytest.mark.parametrize("framework", ["torch", "other"])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_what_a_program_prints_is_no_difference_and_hides_none(eps: float, framework: str) -> None:
    def run(eps: float, prints: bool) -> RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Linear(16, 5))
        x, y = torch.randn(6, 8), torch.arange(6) % 5
        with record(None, net) as recorder:
            z = net[0](x)
            if prints:
                z.detach().norm().item()
            scores = net[2](net[1](z))
            F.cross_entropy(scores, y).backward()
            if prints:
                (scores.argmax(-1) == y).float().mean().item()
        return recorder.record

    runs = [run(1e-5, prints=False), run(eps, prints=True)]
    runs[1].header["framework"] = framework
    for pair in (runs, runs[::-1]):
        found = polymp.compare(*pair)
        assert found.explained == (eps == 1e-5), str(found)
        assert found.first is None or found.first.array.name == "layer_norm"


def test_one_result_that_agrees_does_not_hide_another() -> None:
    """One that the other run does not make at all, as the output of a pooler, is no difference."""

    def run(eps: float, more: bool = False) -> RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Linear(16, 5))
        with record(None, net) as recorder, torch.no_grad():
            z = net[0](torch.randn(6, 8))
            z.square().mean()
            if more:
                z[0].tanh()
            net[2](net[1](z))
        return recorder.record

    for eps in 1e-5, 1e-2:
        other = run(eps, more=True)
        other.header["framework"] = "other"
        for pair in (run(1e-5), other), (other, run(1e-5)):
            first = polymp.compare(*pair).first
            assert (first and first.array.name) == (None if eps == 1e-5 else "layer_norm")


@pytest.mark.parametrize("framework", ["torch", "other"])  # between two, values match the calls
@pytest.mark.parametrize("smoothing", [1e-3, 0.1])
def test_another_loss_is_named_beside_a_gradient_that_is_mere_rounding(
    smoothing: float, framework: str
) -> None:
    """That of a key's bias, which is in all runs what rounding makes it, says nothing."""

    def run(smoothing: float) -> RunRecord:
        torch.manual_seed(0)
        parts = {name: nn.Linear(32, 32) for name in ("query", "key", "value")}
        net = nn.ModuleDict({**parts, "up": nn.Linear(32, 64), "out": nn.Linear(64, 20)})
        x, y = torch.randn(8, 12, 32), torch.randint(20, (8, 12))
        with record(None, net) as recorder:
            scores = net["query"](x) @ net["key"](x).mT / 32**0.5
            h = F.leaky_relu(net["up"](x + scores.softmax(-1) @ net["value"](x)))
            z = net["out"](h).flatten(0, 1)
            F.cross_entropy(z, y.flatten(), label_smoothing=smoothing).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        return recorder.record

    other = run(smoothing)
    other.header["framework"] = framework
    found = polymp.compare(run(0.0), other)
    assert found.first is not None
    loss = {a.source for a in run(0.0).steps[0].arrays if a.name in ("cross_entropy", "nll_loss")}
    assert found.first.array.source in loss, str(found)


def test_other_ways_of_one_computation_are_no_difference_and_hide_none() -> None:
    def run(scores: Callable[[torch.Tensor], torch.Tensor]) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(16, 8)
        with record(None, net) as recorder:
            F.cross_entropy(scores(net(x)), torch.arange(16) % 8).backward()
        return recorder.record

    late = torch.eye(16, 8).roll(1, 1) > 0
    pairs = [
        (
            lambda x: x.masked_fill(late, -1e9).softmax(-1),
            lambda x: x.masked_fill(late, -torch.inf).softmax(-1),
        ),
        (F.silu, lambda x: x * x.sigmoid()),
        (lambda x: (x * 0.5).exp(), lambda x: x.exp().sqrt()),
        (lambda x: x.square().mean(-1).mean() + x, lambda x: x.square().mean() + x),
    ]
    for pair in pairs:
        runs = [*map(run, pair)]
        found = polymp.compare(*runs)
        assert found.explained, str(found)
        ran = (sum(a.kind == RESULT for a in r.steps[0].arrays) for r in runs)
        assert "({} and {} calls;".format(*ran) in " ".join(str(found).split())
    # The gradient of the loss by the scores is of the targets alone.
    first = polymp.compare(run(F.silu), run(lambda x: x * (1.1 * x).sigmoid())).first
    assert (first.array.name, first.array.direction) == ("silu", "forward")


def test_a_part_of_the_step_that_one_run_has_alone_is_no_difference() -> None:
    def run(grads: str) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 8)
        with record(None, net) as recorder:
            made = net(x)
            if grads == "kept":
                made.square().mean().backward()
                torch.optim.SGD(net.parameters(), 0.1).step()
            elif grads == "returned":
                torch.autograd.grad(made.square().mean(), [*net.parameters()])
        return recorder.record

    ends = "gradients of parameters, updates"
    for *pair, said in (
        ("kept", "returned", f"{ends} of one"),
        ("kept", "none", f"the backward pass, {ends} of one"),
        ("none", "returned", "the backward pass of other"),
    ):
        found = polymp.compare(*map(run, pair))
        assert found.explained, str(found)
        assert f"not compared: {said}, for the other run has none" in found.notes


def test_folded_weights_are_no_difference_and_hide_none() -> None:
    def run(folds: bool, eps: float = 1e-5) -> RunRecord:
        torch.manual_seed(0)
        own = (nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-5), nn.ReLU())
        net = nn.Sequential(*own, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).eval()
        for norm in (net[1], net[4]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
        net[4].eps = eps
        if folds:
            for at in 0, 3:
                net[at] = nn.utils.fuse_linear_bn_eval(net[at], net[at + 1])
                net[at + 1] = nn.Identity()
        with record(None, net) as recorder, torch.no_grad():
            net(torch.randn(16, 8))
        return recorder.record

    found = polymp.compare(run(folds=False), run(folds=True))
    assert found.explained, str(found)
    found = polymp.compare(run(folds=False), run(folds=True, eps=1e-2))
    assert (found.first.array.kind, found.first.array.module) == (INPUT, "3")


def test_a_scale_that_is_taken_out_around_a_module_is_no_difference_and_hides_none() -> None:
    def run(scale: float, taken_out: float) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False)), torch.randn(4, 8)
        with record(None, net) as recorder, torch.no_grad():
            h = net[0](x)
            h = net[1](h if scale == 1 else h * scale)
            h if taken_out == 1 else h / taken_out
        return recorder.record

    found = polymp.compare(run(1, 1), run(3, 3))
    assert found.explained, str(found)
    assert not polymp.compare(run(1, 1), run(3, 4)).explained


def test_a_mask_that_one_run_makes_is_not_the_first_that_differs() -> None:
    def run(fused: bool, eps: float = 1e-5) -> RunRecord:
        torch.manual_seed(0)
        norms, x = nn.ModuleList([nn.LayerNorm(16, eps) for _ in range(2)]), torch.randn(2, 6, 16)
        with record(None, norms) as recorder:
            seen = None if fused else torch.ones(6, 6).tril() > 0
            mask = None if seen is None else torch.where(seen, 0.0, torch.tensor(-1e4))
            for norm in norms:
                h = norm(x)[:, None]
                if fused:
                    y = F.scaled_dot_product_attention(h, h, h, is_causal=True)
                else:
                    y = (h @ h.mT / 4 + mask).softmax(-1) @ h
                x = x + y[:, 0]
        return recorder.record

    found = polymp.compare(run(fused=False), run(fused=True))
    assert found.explained, str(found)
    found = polymp.compare(run(fused=False), run(fused=True, eps=1e-2))
    assert (found.first.array.name, found.first.array.module) == ("layer_norm", "0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weight", "It reads input out.weight in out in one and input operand 3 of addmm in out"),
        ("order", "All that it reads has the same values, but perhaps in another order"),
        ("eps", "All floats that it reads agree, as far as they were compared"),
    ],
)
def test_what_the_first_call_reads_is_said(change: str, said: str) -> None:
    def run(change: str) -> RunRecord:
        torch.manual_seed(0)
        net = nn.ModuleDict({"norm": nn.LayerNorm(8), "out": nn.Linear(16, 4)})
        x, y = torch.randn(2, 64, 8)
        net["norm"].eps = 1e-2 if change == "eps" else 1e-5
        weight = {"weight": torch.randn(4, 16)} if change == "weight" else {}
        with record(None, net) as recorder, torch.no_grad():
            h = torch.cat([net["norm"](x), y] if change != "order" else [y, net["norm"](x)], 1)
            torch.func.functional_call(net["out"], weight, (h,))
        return recorder.record

    other = run(change)
    other.header["framework"] = "other" if change == "order" else "torch"
    found = polymp.compare(run("none"), other)
    assert said in " ".join(str(found).split())
    assert found.first.difference == found.first.mean_difference, "as the table of modules has it"


@pytest.mark.parametrize("mask", [-1e9, -torch.inf])
def test_scores_that_are_masked_hide_no_fault_of_others(mask: float) -> None:
    def run(rate: float) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(16, 8)
        with record(None, net) as recorder:
            scores = net(x).masked_fill(torch.eye(16, 8).roll(1, 1) > 0, mask)
            (F.cross_entropy(scores, torch.arange(16) % 8) * rate).backward()
        return recorder.record

    assert polymp.compare(run(1.0), run(1.0)).explained
    assert polymp.compare(run(1.0), run(1.01)).first.array.name == "mul"


def test_the_update_by_a_gradient_that_is_mere_rounding_is_no_difference_without_probes() -> None:
    def run(by_hand: bool) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(32, 96), torch.randn(4, 12, 32)
        adam = torch.optim.Adam(net.parameters())
        with record(None, net, probes=0) as recorder:
            q, k, v = net(x).chunk(3, -1)
            scores = (q / 32**0.5 @ k.mT).softmax(-1) if by_hand else None
            out = F.scaled_dot_product_attention(q, k, v) if scores is None else scores @ v
            F.cross_entropy(out.flatten(0, 1), torch.arange(48) % 32).backward()
            adam.step()
        return recorder.record

    found = polymp.compare(run(by_hand=False), run(by_hand=True))
    assert found.explained, str(found)


def test_scores_beside_the_least_number_of_a_mask_are_no_difference_without_probes() -> None:
    mask = torch.ones(12, 12, dtype=torch.bool).tril()

    def run(low: bool) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(32, 32), torch.randn(2, 12, 32)
        with record(None, net, probes=0) as recorder:
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                scores = (net(x) @ net(x).mT / 99).tanh()
                scores = scores + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
                scores.softmax(-1, torch.float32).square().sum().backward()
        return recorder.record

    found = polymp.compare(run(low=False), run(low=True))
    assert found.explained, str(found)


def test_what_a_call_reads_that_ends_later_is_what_that_has_read() -> None:
    """The backward of one key for four heads stands between two parts of that of attention."""
    q, k = torch.randn(2, 4, 12, 8, requires_grad=True), torch.randn(2, 1, 12, 8)
    with record(None, probes=0) as recorder, autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(q, k.requires_grad_(), k * 1).sum().backward()
    arrays = recorder.record.steps[0].arrays
    made = [a for a in arrays if (a.name, a.direction) == ("expand", "backward")]
    assert made
    assert all(a.reads for a in made)


SGD: dict[str, Callable[[list[Any], float], Any]] = {
    "torch": lambda ps, rate: torch.optim.SGD(ps, rate).step(),
    "two writes": lambda ps, rate: [p.data.add_(p.grad, alpha=-rate).clamp_(-9, 9) for p in ps],
    "lists": lambda ps, r: torch._foreach_sub_(ps, torch._foreach_mul([p.grad for p in ps], r)),
    "reads": lambda ps, rate: [p.copy_(p - rate * p.grad / 2) for _ in range(2) for p in ps],
}


@pytest.mark.parametrize("probes", [0, 8])
@pytest.mark.parametrize("how", SGD)
def test_updates_within_a_step_are_compared_and_by_hand_no_calls(how: str, probes: int) -> None:
    def run(how: str, rate: float) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 8)
        with record(None, net, probes=probes) as recorder:
            nn.init.uniform_(net[0].bias).data.mul_(0.1)  # begins with these
            for _ in range(2):
                net.zero_grad()
                net(x).square().mean().backward()
                with torch.inference_mode():
                    SGD[how]([*net.parameters()], rate)
        return recorder.record

    same, found = (polymp.compare(run("torch", 0.1), run(how, rate)) for rate in (0.1, 0.2))
    assert same.explained, str(same)
    assert {r.array.kind for r in same.rows if None in (r.one, r.other)} <= {INPUT}
    assert (found.first.array.kind, found.first.array.module) == (UPDATE, "0"), str(found)
    assert "a loss is scaled" not in str(found)


# --- steps, files, errors -------------------------------------------------------------------------


def test_one_of_so_many_steps_is_recorded(tmp_path: Path) -> None:
    training, path = Training(), tmp_path / "run.rec"
    recorder = record(path, training.net, probes=0, every=2, steps=2)
    for number in range(7):
        with recorder:
            training.step()
            assert (torch._C._len_torch_dispatch_stack() > 0) == (number in (0, 2))
    found = run_record.read(path)
    assert [step.number for step in found.steps] == [0, 2]
    assert recorder.record.steps == found.steps
    header = found.header
    assert (header["framework"], header["model"], header["probes"]) == ("torch", "Decoder", 0)
    assert (header["device"], header["rank"], header["ranks"]) == ("cpu", 0, 1)
    assert header["versions"]["torch"] == torch.__version__


def test_a_step_that_raises_is_not_recorded(tmp_path: Path) -> None:
    training = Training()
    recorder = record(tmp_path / "run.rec", training.net, probes=2)
    with pytest.raises(ZeroDivisionError), recorder:
        raise ZeroDivisionError(training.step())
    assert not (tmp_path / "run.rec").exists()
    with recorder:
        training.step()
    assert [step.number for step in recorder.record.steps] == [1]


class Both(torch.optim.SGD):
    parts: Any = ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_optimizers_that_another_one_steps_are_recorded() -> None:
    model = nn.Linear(2, 2)
    recorder = record(None, model, probes=0)
    (both := Both([torch.zeros(1)])).parts = [torch.optim.SGD([p], 0.5) for p in model.parameters()]
    with recorder:
        model(torch.ones(1, 2)).sum().backward()
        both.step()
    (step,) = recorder.record.steps
    assert [a.name for a in step.arrays if a.kind == UPDATE] == ["weight", "bias"]
    assert [*step.settings] == ["Both 1", "SGD 1", "SGD 2"]


def test_a_recorder_is_of_a_module_and_not_entered_twice_and_tells_of_an_empty_step() -> None:
    with pytest.warns(UserWarning, match="step 0 has no op calls"), record(None) as recorder:
        with pytest.raises(RuntimeError, match="records a step already: leave its block first"):
            recorder.__enter__()
    with pytest.warns(UserWarning, match="step 1 has no op calls"), recorder:
        pass
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, got <built-in function print>"):
        record(None, print)


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with record(tmp_path / "run.rec", probes=0):
        torch.ones(3).exp()
    found = run_record.read(tmp_path / "run.rank1.rec")
    assert (found.header["rank"], found.header["ranks"]) == (1, 2)
    assert polymp.torch.record is record


GATES = {
    "bools": (lambda h: h > 0, lambda h: h.sigmoid() > 0.5),
    "integers": (
        lambda h: nn.functional.one_hot(h.argmax(-1), 8),
        lambda h: nn.functional.one_hot(h.softmax(-1).argmax(-1), 8),
    ),
    "complex numbers": (
        lambda h: torch.fft.ifft(torch.fft.fft(h)).real,
        lambda h: torch.fft.irfft(torch.fft.rfft(h)),
    ),
}


def gated(gate: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> RunRecord:
    """The record of a layer whose result is multiplied by what a gate makes of it."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 8), torch.randn(5, 4)
    torch.manual_seed(seed)
    with record(None, net) as recorder:
        h = net(x)
        (h * gate(h)).square().mean().backward()
    return recorder.record


@pytest.mark.parametrize("through", GATES)
def test_a_call_of_one_run_is_followed_through_results_that_are_no_floats(through: str) -> None:
    found = polymp.compare(*map(gated, GATES[through]))
    assert found.explained, str(found)


@pytest.mark.parametrize("probes", [0, 2])
def test_inference_mode_inside_of_a_step_is_recorded_as_no_grad_is(probes: int) -> None:
    net, runs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), []
    for mode in (torch.no_grad, torch.inference_mode):
        with record(None, net, probes=probes) as run, mode(), autocast("cpu", torch.bfloat16):
            net(torch.ones(3, 4))
        runs.append(run.record)
    names = [[(a.name, a.values) for a in run.steps[0].arrays] for run in runs]
    assert names[0] == names[1]


def test_complex_parameters_are_counted() -> None:
    net = nn.ParameterList([torch.ones(3, dtype=torch.complex64), torch.ones(3)])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with record(None, net, probes=2) as recorder:
        (net[0].abs() * net[1]).sum().backward()
        optimizer.step()
    step = recorder.record.steps[0]
    assert step.left_out["complex parameters"] == 1
    assert [a.name for a in step.arrays if a.kind == UPDATE] == ["1"]


def test_a_tensor_that_is_made_like_another_is_an_input_of_its_own() -> None:
    found = polymp.compare(*(gated(torch.randn_like, seed) for seed in (1, 2)))
    assert found.first.array.name == "operand 2 of mul", str(found)
    assert "THE RUNS BEGIN WITH OTHER NUMBERS" in str(found)


def test_what_random_numbers_fill_is_no_input() -> None:
    """`gumbel_softmax` draws into memory that nothing has written yet."""
    net = nn.Linear(4, 8)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        net.zero_grad()
        with record(None, net) as run:
            nn.functional.gumbel_softmax(net(torch.ones(3, 4))).square().sum().backward()
        runs.append(run.record)
    inputs = [a.name for a in runs[0].steps[0].arrays if a.kind == INPUT]
    assert "exponential_" not in str(inputs)
    assert polymp.compare(*runs).explained


def test_gradients_that_a_step_adds_to_are_named() -> None:
    net, x, runs = nn.Linear(4, 2), torch.ones(3, 4), []
    for zeros in (True, False):
        net(x).sum().backward()
        if zeros:
            net.zero_grad()
        with record(None, net) as run:
            net(x).square().sum().backward()
        runs.append(run.record)
        net.zero_grad()
    assert "It reads input bias.grad in" in " ".join(str(polymp.compare(*runs)).split())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_masks_of_the_least_number_of_each_dtype(epsilon: float) -> None:
    def run(dtype: torch.dtype, epsilon: float) -> RunRecord:
        torch.manual_seed(0)
        norm, mask = nn.LayerNorm(8, epsilon).to(dtype), torch.ones(8, 8).tril().bool()
        least = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
        recorder = record(None, norm)
        with recorder:
            added = torch.where(mask, torch.zeros((), dtype=dtype), least)
            x = norm(torch.randn(8, 8).to(dtype))
            (x @ x.T + added).softmax(-1) @ x
        return recorder.record

    found = polymp.compare(run(torch.float64, 1e-5), run(torch.float32, epsilon))
    assert found.explained == (epsilon == 1e-5), str(found)
    assert found.explained or (found.first and found.first.array.name == "layer_norm")


def test_an_update_that_is_off_by_a_setting_is_said_to_be() -> None:
    def run(rate: float) -> RunRecord:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer, recorder = torch.optim.SGD(model.parameters(), lr=rate), record(None, model)
        with recorder:
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return recorder.record

    found = " ".join(str(polymp.compare(run(0.1), run(0.2))).split())
    assert "The optimizers differ: SGD 1 has lr=0.1 in one run and 0.2 in the other" in found
