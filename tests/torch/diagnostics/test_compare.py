"""Comparisons of torch runs: what rounding explains, and what it does not."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymp
from polymp.diagnostics.run_record import INPUT, RESULT, UPDATE, RunRecord
from polymp.errors import RecordError
from polymp.torch import autocast, record
from tests.support.sizes import size

# --- rounding, and what hides in it ---------------------------------------------------------------


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


# --- masks ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("number", [-1e4, torch.finfo(torch.float32).min, -torch.inf, True])
def test_a_mask_is_the_same_with_other_numbers(number: float) -> None:
    """`MultiheadAttention` adds it in a product, or fills with it; True has bools."""

    def run(mask: torch.Tensor) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.MultiheadAttention(16, 2), torch.randn(8, 2, 16)
        with record(None, net) as recorder:
            net(x, x, x, attn_mask=mask)[0].sum().backward()
        return recorder.record

    late, ours = torch.ones(8, 8).triu(1) > 0, run(torch.full((8, 8), -1e9).triu(1))
    theirs = late if number is True else torch.zeros(8, 8).masked_fill(late, number)
    found = polymp.compare(ours, run(theirs))
    assert found.explained, str(found)
    found = polymp.compare(ours, run(theirs.roll(1, 0)))
    assert found.first.array.name == "baddbmm", str(found)
    assert "perhaps in another order" in " ".join(str(found).split())
    found = polymp.compare(ours, run(torch.full((8, 8), -1e9).triu(2)))
    assert found.first.array.name == "operand 1 of baddbmm", str(found)


def test_large_numbers_without_others_are_no_mask() -> None:
    """Log-likelihoods, say."""

    def run(factor: float) -> RunRecord:
        torch.manual_seed(0)
        with record(None) as recorder:
            (torch.randn(64).square().mul(-1e4 * factor) - 9e3).sum()
        return recorder.record

    assert polymp.compare(run(1), run(1)).explained
    assert polymp.compare(run(1), run(1.01)).first.array.name == "mul"


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


@pytest.mark.parametrize("given", ["numbers", "bools"])
@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_a_mask_that_a_fused_op_is_given_is_no_difference_and_hides_none(
    scale: float, given: str
) -> None:
    """The other run makes two masks before, as for two kinds of layers, and reads the second."""
    masks = [torch.ones(2, 1, 12, 12).tril() > 0 for _ in range(2)]

    def run(fused: bool) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(2, 4, 12, 8)
        with record(None, net) as recorder:
            least, own = torch.finfo(torch.float32).min, fused and given == "bools"
            added = masks if own else [torch.where(seen, 0.0, least) for seen in masks]
            h = net(x)
            if fused:
                F.scaled_dot_product_attention(h, h, h, added[1], scale=scale)
            else:
                (h @ h.mT + added[1]).softmax(-1) @ h
        return recorder.record

    runs = [run(fused=True), run(fused=False)]
    for one, other in (runs, runs[::-1]):
        found = polymp.compare(one, other)
        assert found.explained == (scale == 1), str(found)
        named = found.first and found.first.array.name
        assert named in (None, "bmm", "scaled_dot_product_attention"), str(found)


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


# --- what cannot be judged ------------------------------------------------------------------------


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


def test_the_update_by_a_sparse_gradient_is_not_judged() -> None:
    def run(low: bool) -> RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(100, 16, sparse=True), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
        with record(None, net) as recorder, autocast("cpu", enabled=low):
            net(torch.arange(0, 100, 9)).square().mean().backward()
            optimizer.step()
        return recorder.record

    compared = polymp.compare(run(False), run(True))
    assert compared.explained, compared
    assert {row.verdict for row in compared.rows if row.array.kind == UPDATE} == {"not judged"}


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


# --- compiled code --------------------------------------------------------------------------------


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

    def run(fault: int | None, compiled: bool) -> RunRecord:
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_what_compiled_code_leaves_out_and_adds_up_in_another_way_is_no_difference() -> None:
    """A result that nothing reads, and the means of a batch norm's backward pass."""

    def run(compiled: bool) -> RunRecord:
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

    def run(rate: float, wrap: Callable[[nn.Module], Any]) -> RunRecord:
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


# --- what one run alone has -----------------------------------------------------------------------


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


def test_other_ways_of_one_computation_are_no_difference_and_hide_none() -> None:
    def run(scores: Callable[[torch.Tensor], torch.Tensor]) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(16, 8)
        with record(None, net) as recorder:
            F.cross_entropy(scores(net(x)), torch.arange(16) % 8).backward()
        return recorder.record

    pairs = [
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
                made.softmax(-1)  # as the weights that attention returns, too
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


@pytest.mark.parametrize("taken_out", [1.0, 1.1])
def test_a_scale_of_scores_that_both_factors_take_is_no_difference_and_hides_none(
    taken_out: float,
) -> None:
    """The key's backward products have one place in both programs, and other values."""

    def run(scaled: bool, share: float = 1.0) -> RunRecord:
        torch.manual_seed(0)
        first, last = (nn.Sequential(*[nn.Linear(8, 8), nn.Tanh()] * 6) for _ in range(2))
        net = nn.ModuleList([first, last, nn.Linear(8, 16)])
        x, y = torch.randn(2, 2, 12, 8)
        with record(None, net) as recorder:
            key, value = net[2](first(x)).chunk(2, -1)
            query, key = torch.stack([value + x, value - x], 1), key[:, None].mT
            scores = (query * 0.5 * share) @ (key * 0.5) if scaled else (query @ key) * 0.25
            (last(scores.softmax(-1) @ value[:, None]).sum(1) - y).square().mean().backward()
        return recorder.record

    one, other = run(scaled=False), run(scaled=True, share=taken_out)
    for pair in ((one, other), (other, one)):
        found = polymp.compare(*pair)
        assert found.explained == (taken_out == 1), str(found)


def test_the_first_call_stands_beside_that_of_a_model_with_other_names() -> None:
    """Both read the model's input, and are one call though a weight is off."""

    def run(name: str) -> RunRecord:
        torch.manual_seed(0)
        net = nn.Sequential()
        for at in range(12):
            net.add_module(f"{name}{at}", nn.Linear(8, 8))
        x = torch.randn(4, 8)
        with record(None, net) as recorder, torch.no_grad():
            weight = net[0].weight.div(2) if name == "up" else net[0].weight.mul(2)
            torch.func.functional_call(net, {f"{name}0.weight": weight}, x)
        return recorder.record

    found = polymp.compare(run("up"), run("down"))
    assert [row.parts for row in found.rows if row.array.name == "addmm"] == [""] * 12


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


# --- gradients, updates, steps --------------------------------------------------------------------


@functools.cache
def layers(steps: int, low: bool = False, clip: bool = False, momentum: float = 0.1) -> RunRecord:
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


@pytest.mark.parametrize(("kind", "options"), [("SGD", {}), ("LBFGS", {"max_iter": 2})])
def test_an_update_that_is_off_by_a_setting_is_said_to_be(kind: str, options: Any) -> None:
    def run(rate: float) -> RunRecord:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=rate, **options)
        recorder = record(None, model, probes=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        with recorder:
            optimizer.step(closure)
        return recorder.record

    found = " ".join(str(polymp.compare(run(0.1), run(0.2))).split())
    assert f"The optimizers differ: {kind} 1 has lr=0.1 in one run and 0.2 in the other" in found


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weight", "THE RUNS BEGIN WITH OTHER NUMBERS: input out.weight in out: off by 1 of"),
        ("wiring", "in one, which it does not read in the other"),
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
            z = net["norm"](x)
            h = [y, z] if change == "order" else [x, y] if change == "wiring" else [z, y]
            h = torch.cat(h, 1)
            torch.func.functional_call(net["out"], weight, (h,))
        return recorder.record

    other = run(change)
    other.header["framework"] = "other" if change == "order" else "torch"
    found = polymp.compare(run("none"), other)
    assert said in " ".join(str(found).split())
    assert found.first.difference == found.first.mean_difference, "as the table of modules has it"


def test_a_run_of_another_model_is_not_explained_where_rounding_is_large() -> None:
    """Without probes, in bfloat16: deep in one of them, any array agrees with some of the other."""

    def run(name: str, layers: int, low: bool) -> RunRecord:
        torch.manual_seed(layers)
        net = nn.Sequential()
        for at in range(layers):
            net.add_module(f"{name}{at}", nn.Linear(32, 32))
            net.add_module(f"{name}norm{at}", nn.LayerNorm(32))
        with record(None, net, probes=0) as recorder:
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                net(torch.randn(24, 32)).exp().square().sum().backward()
        return recorder.record

    pair = run("up", 3, low=False), run("down", 24, low=True)
    for one, other in (pair, pair[::-1]):
        with pytest.raises(RecordError, match="share nothing"):
            polymp.compare(one, other)


def test_the_first_call_that_is_off_is_one_of_both_programs() -> None:
    def run(eps: float, fused: bool) -> RunRecord:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.LayerNorm(8, eps=eps)), torch.randn(2, 12, 8)
        with torch.no_grad(), record(None, net) as recorder:
            h = net(x)
            if fused:
                F.scaled_dot_product_attention(h, h, h)
            else:
                (h @ h.mT / 8**0.5).softmax(-1) @ h
        return recorder.record

    found = polymp.compare(run(1e-5, fused=True), run(1e-2, fused=False))
    assert [row for row in found.rows if row.array.name == "layer_norm"] == [found.first]
    assert [row.array.name for row in found.growth()] == ["layer_norm"]
    assert found.parted.array.name != "layer_norm"
