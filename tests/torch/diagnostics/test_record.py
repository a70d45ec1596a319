"""Records of torch runs: the numbers of each array, and how far rounding moves them."""

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
    AMAX,
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
        if not t.numel():
            continue
        ours = run_record.spread(recording.changes(t, probes).double().numpy(), values, t.numel())
        base = np.array(run_records.summary(exact.numpy())[0])
        moved = np.array([run_records.summary(p.double().numpy())[0] for p in probes])
        change = probes.double() - exact
        changes = np.array([run_records.summary(c.numpy())[0] for c in change])
        moved[:, :4] -= base[:4]
        largest = exact.nan_to_num(0.0, 0.0, 0.0).abs().argmax()
        moved[:, AMAX] = change.reshape(len(change), -1)[:, largest]
        moved[:, PROJECTIONS], moved[:, ELEMENTS] = changes[:, [RMS]], changes[:, ELEMENTS]
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


def test_what_a_call_reads_that_ends_later_is_what_that_has_read() -> None:
    """The backward of one key for four heads stands between two parts of that of attention."""
    q, k = torch.randn(2, 4, 12, 8, requires_grad=True), torch.randn(2, 1, 12, 8)
    with record(None, probes=0) as recorder, autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(q, k.requires_grad_(), k * 1).sum().backward()
    arrays = recorder.record.steps[0].arrays
    made = [a for a in arrays if (a.name, a.direction) == ("expand", "backward")]
    assert made
    assert all(a.reads for a in made)


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
