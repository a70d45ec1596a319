"""`catch`: the step that is stopped at, the state it leaves, and what it cannot see."""

from __future__ import annotations

import functools
import math
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polymp.backends.torch.diagnostics.catch import TrainingState, bad_by_device
from polymp.errors import BadStepError, CatchWarning
from polymp.torch import GradScaler, autocast, catch
from tests.support.sizes import size
from tests.support.torch.audit_trainings import CASES, Training
from tests.support.torch.models import same

pytestmark = pytest.mark.usefixtures("left_as_found")

BAD = math.nan


def report_of(call: Callable[..., Any], *args: Any) -> Any:
    with pytest.raises(BadStepError) as raised:
        call(*args)
    return raised.value.report


def trained(training: Training, factors: list[float]) -> list[torch.Tensor]:
    """The state of a training after some steps by hand."""
    torch.manual_seed(1)
    for factor in factors:
        training.step(factor)
    return training.state()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("what", CASES, ids=lambda what: "-".join(map(str, what)))
def test_a_healthy_training_is_left_alone_and_a_bad_step_undone(what: Any, every: int) -> None:
    """Bit for bit the training by hand; after the error, the one that never made the bad step."""
    caught, factors = Training(*what), [1.0, 0.5, 2.0, 1.0, 0.25]
    step = catch(caught.step, every=every)
    torch.manual_seed(1)
    for factor in factors:
        step(factor)
    by_hand = trained(Training(*what), factors)
    assert same(caught.state(), by_hand)
    report = report_of(step, BAD)
    assert same(caught.state(), by_hand)
    assert (report.step, report.found, report.undone) == (5, "the loss is NaN", 1)
    assert report.fault.kind == "operation"  # the batch is multiplied by NaN in the step
    assert step(1.0).isfinite()
    assert step.step == 7


def guarded(guard: Callable[[torch.Tensor], Any], scale: float = 1.0) -> tuple[nn.Module, Any]:
    """A net in float16 and a step of it, whose loss a guard looks at."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=scale != 1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", torch.float16):
            loss = net(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * scale).backward()
        guard(loss)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return net, step


GUARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "SystemExit: 1": lambda loss: loss.isfinite() or sys.exit(1),
    "ValueError: Expected parameter": lambda loss: torch.distributions.Normal(
        0 * loss,
        1.0,
        validate_args=True,  # torch.compile turns that off
    ),
}


@pytest.mark.parametrize("words", GUARDS)
def test_a_step_that_raises_for_a_bad_value(words: str) -> None:
    net, inner = guarded(GUARDS[words])
    step = catch(inner)
    step(torch.ones(1, 2))
    before = [p.clone() for p in net.parameters()]
    report = report_of(step, torch.full((1, 2), 1e6))
    assert report.found.startswith(f"the step raised {words}")
    assert (report.step, report.fault.op, report.fault.kind) == (1, "linear", "overflow")
    assert all(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("scale", [1.0, 1e9])  # the second makes gradients that a scaler skips
def test_an_error_of_another_cause_is_passed_on(scale: float) -> None:
    def refuse(loss: torch.Tensor) -> None:
        if loss > 1:
            raise ValueError("a loss above 1")

    step = catch(guarded(refuse, scale)[1])
    step(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="a loss above 1"):
        step(torch.full((1, 2), 99.0))
    assert report_of(step, torch.full((1, 2), BAD)).step == 1  # the call that raised is no step


def test_a_state_that_is_not_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingState, "put_back", lambda _: None)
    training = Training("convolution", "fp32")
    step = catch(training.step)
    step(1.0)
    before = training.state()
    report_of(step, BAD)
    assert not same(training.state(), before)


@settings(max_examples=size(4, 60), deadline=None)
@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=12),
    every=st.integers(1, 5),
    what=st.sampled_from(CASES),
)
def test_training_goes_on_without_the_bad_batches(
    bad: list[bool], every: int, what: tuple[Any, ...]
) -> None:
    """`on_bad="report"`: the state is that of a training that never saw them."""
    caught = Training(*what)
    step = catch(caught.step, every=every, on_bad="report")
    taken = list[float]()
    torch.manual_seed(1)
    for at, spoiled in enumerate(bad):
        factor = BAD if spoiled else 1.0 + at / 8
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CatchWarning)
            try:
                step(factor)
            except BadStepError:
                break
        taken += [] if spoiled else [factor]
    assert [r.step for r in step.reports] == [i for i, b in enumerate(bad[: step.step]) if b]
    assert same(caught.state(), trained(Training(*what), taken))


def test_the_report_ends_with_what_may_help() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e30)

    @catch
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step(torch.ones(2, 4))
    for batch, remedy in ((BAD, "Look at the data"), (1.0, "lower the learning rate")):
        report = report_of(step, torch.full((2, 4), batch))
        assert remedy in report.remedy
        assert str(report).endswith(report.remedy)


@pytest.mark.parametrize("repeatable", [True, False])
def test_three_bad_steps_in_a_row_raise(repeatable: bool) -> None:
    """Also those that read their batches themselves, so that repeating them reads others."""
    training, batches = Training("mlp", "fp32"), iter([1.0, 0.5, *[BAD] * 99])
    inner = training.step if repeatable else lambda _: training.step(next(batches))
    step = catch(inner, on_bad="report")
    step(1.0), step(0.5)
    with pytest.warns(CatchWarning, match="the loss is NaN") as told:
        [step(BAD) for _ in range(2)]
    other = "Either the step reads its batch itself: give it the batch as an argument."
    assert (other in str(told[0].message)) != repeatable
    assert len(told) == 2
    report_of(step, BAD)
    assert step.__name__ == inner.__name__


class Net(nn.Module):
    """A net whose loss can be finite while its gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).abs().sqrt().sum()


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def sgd(
    net: nn.Module, rate: float = 0.1, loss_of: Callable[[Any], Any] = torch.sum
) -> Callable[..., torch.Tensor]:
    """A step of a training."""
    optimizer = torch.optim.SGD(net.parameters(), rate)

    def step(x: torch.Tensor) -> torch.Tensor:
        return update(optimizer, loss_of(net(x)))

    return step


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64,
                                   torch.complex64], ids=str)  # fmt: skip
def test_one_number_that_is_not_finite_is_found_anywhere(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max / (2 if dtype.is_complex else 1)
    tensors = [torch.zeros((), dtype=torch.bfloat16), torch.full((100_003,), -largest, dtype=dtype)]
    tensors[1][::2] = largest
    tensors[1][7::11] = 0
    assert [bool(found) for found in bad_by_device(tensors)] == [False]
    for value in (math.nan, math.inf, -math.inf):
        for at in (0, 6, 31, 50_001, 99_998, 100_002):
            broken = tensors[1].clone()
            broken[at] = value
            assert [bool(found) for found in bad_by_device([tensors[0], broken])] == [True]


def test_a_bad_gradient_under_a_finite_loss() -> None:
    net = Net()
    step = catch(sgd(net))
    step(torch.ones(3))
    before = net.scale.detach().clone()
    report = report_of(step, torch.tensor([1.0, 0.0, 1.0]))
    assert report.found == "the gradient of scale is NaN"
    assert (report.fault.op, report.fault.direction) == ("sqrt", "backward")
    assert torch.equal(net.scale, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_bad_weight_shows_in_the_check(dtype: torch.dtype) -> None:
    net = nn.Module()
    net.scale = nn.Parameter(torch.ones(3, dtype=dtype))
    net.forward = lambda x: (net.scale * x).abs().sum()
    step = catch(sgd(net, 3e38))
    step(torch.full((3,), 100.0))
    assert not net.scale.isfinite().all()
    with pytest.raises(BadStepError, match=r"step 0: the weight scale is (Inf|NaN)"):
        step.check()
    assert torch.equal(net.scale, torch.ones(3, dtype=dtype))


def test_a_learning_rate_that_other_code_sets_is_repeated() -> None:
    """The schedule stands outside of the step; the steps are repeated with the rates they had."""
    caught, by_hand = Training("mlp", "fp32", "foreach"), Training("mlp", "fp32", "foreach")
    step = catch(caught.step, every=100)
    for at in range(6):
        for training, do in ((caught, step), (by_hand, by_hand.step)):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + at)
            do(1.0)
    report_of(step, BAD)
    assert same(caught.state(), by_hand.state())


def test_random_numbers_that_a_data_loader_draws_are_repeated() -> None:
    """One at the start of each epoch, between two steps with dropout."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    step, data = catch(sgd(net, loss_of=mean_square)), torch.randn(12, 4)

    def epoch() -> None:
        for (batch,) in DataLoader(TensorDataset(data), 4):
            step(batch)

    epoch()
    data[9, 0] = math.nan
    report = report_of(epoch)
    assert (report.step, report.undone, report.fault.kind) == (5, 1, "input")
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_weight_that_other_code_writes_is_in_the_next_copy() -> None:
    training = Training("mlp", "fp32")
    step = catch(training.step, every=100)
    step(1.0)
    with torch.no_grad():
        training.model[0].weight.mul_(2)
    before = training.state()
    report_of(step, BAD)
    assert same(training.state(), before)


def test_a_step_without_its_optimizer_is_told() -> None:
    training = Training("mlp", "fp32")

    def forward() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(training.x)
        loss.backward()
        return loss

    step = catch(forward)
    for _ in range(3):
        step()
        training.optimizer.step()
    with pytest.warns(CatchWarning, match="'0.weight' is written between two calls of the step"):
        step()


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_reads_its_batch_itself_is_told(ends: bool) -> None:
    """Also where the iterator has ended when the step is repeated."""
    more = () if ends else (torch.ones(1, 2),)
    net, batches = nn.Linear(2, 1), iter([torch.ones(1, 2), torch.full((1, 2), BAD), *more])
    inner = sgd(net)
    step = catch(lambda: inner(next(batches)))
    step()
    with pytest.raises(
        BadStepError, match="Repeating the steps did not give that value again"
    ) as raised:
        step()
    report = raised.value.report
    assert (report.step, report.found, report.undone) == (1, "the loss is NaN", 0)
    assert str(raised.value).endswith("a lazy model once before, and do all of the step in it.")
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("healthy", [0, 2])
def test_the_call_that_makes_lazy_parameters_cannot_be_undone(healthy: int) -> None:
    net = nn.ModuleList([nn.LazyLinear(1), nn.LazyLinear(1)])  # the second is never called
    optimizer = torch.optim.Adam(net.parameters())

    @catch
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net[0](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(healthy):
        step(torch.ones(1, 2))
    report = report_of(step, torch.full((1, 2), BAD))
    assert (report.step, report.found) == (healthy, "the loss is NaN")
    assert ("made lazy parameters" in report.note) == (healthy == 0)
    assert (report.fault is not None) == bool(net[0].weight.isfinite().all()) == (healthy > 0)


def test_what_torch_cannot_check_or_write_is_left_alone() -> None:
    """Parameters on meta and of float4, a buffer of inference mode, and one that is expanded."""
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    net = nn.Linear(2, 1)
    net.ghost, net.packed = nn.Linear(2, 2, device="meta"), nn.Parameter(packed, False)
    net.register_buffer("wide", torch.ones(1).expand(4))
    with torch.inference_mode():
        net.register_buffer("made", torch.ones(2))
    step = catch(sgd(net), every=1)
    step(torch.ones(1, 2))
    assert report_of(step, torch.full((1, 2), BAD)).step == 1
    assert net.weight.isfinite().all()


class Loader(torch.utils.data.DataLoader[Any]):
    """As accelerate's: it has a state only with another package."""

    def state_dict(self) -> Any:
        raise AttributeError("no dl_state_dict")

    def load_state_dict(self, state: Any) -> None:
        raise AttributeError("no dl_state_dict")


class Helper:
    def state_dict(self) -> Any:
        raise RuntimeError("not prepared")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_data_loaders_are_no_state_and_what_has_none_to_give_is_left_out() -> None:
    training, loader = Training("mlp", "fp32"), Loader([1, 2])
    step = catch(lambda x: (loader, training.step(x))[1])
    step(1.0)
    before = training.state()
    report_of(step, BAD)
    assert same(training.state(), before)
    helper = Helper()
    step = catch(lambda x: (helper, training.step(x))[1])
    with pytest.warns(CatchWarning, match="leaves out Helper.* RuntimeError: not prepared"):
        step(1.0)


class Hiding:
    """A training whose optimizer only a library's object knows, or a weak reference."""

    def __init__(self, kind: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        optimizer = kind(self.net.parameters(), 0.1)
        self.optimizers = functools.partial(weakref.ref(optimizer))
        HIDDEN.append(optimizer)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        return update(optimizer, (self.net(x) - 1).square().mean())


HIDDEN: list[torch.optim.Optimizer] = []


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("every", [3, 100])
def test_an_optimizer_that_cannot_be_found_is_met_when_it_steps(kind: Any, every: int) -> None:
    hiding, twin = Hiding(kind), Hiding(kind)
    step = catch(hiding.step, every=every)
    for at in range(9):
        step(torch.full((2, 2), 1.0 + at))
        twin.step(torch.full((2, 2), 1.0 + at))
    report = report_of(step, torch.full((2, 2), BAD))
    assert (report.step, report.note, report.fault.kind) == (9, "", "input")
    assert torch.equal(hiding.net.weight, twin.net.weight)
    hiding.step(torch.ones(2, 2)), twin.step(torch.ones(2, 2))
    assert torch.equal(hiding.net.weight, twin.net.weight), "the state of the optimizer"


def test_a_replay_of_another_training_names_the_step_by_its_own_losses() -> None:
    net, kept = nn.Linear(1, 1), {"scale": 1.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        kept["scale"] *= 10  # nothing that is copied
        loss = (net(x) * kept["scale"]).float()
        return loss.sum() * 1e30

    caught = catch(step)
    for _ in range(7):
        caught(torch.ones(1, 1))
    report = report_of(lambda: [caught(torch.ones(1, 1)) for _ in range(40)])
    assert report.step == caught.step - 1
    assert (report.undone, report.fault, report.remedy) == (0, None, "")
    assert re.search(r"Repeating step 0 gave the loss .*, where it was", report.note)


def test_of_several_models_the_one_that_broke_is_named() -> None:
    class Critic(nn.Sequential):
        pass

    critic, other = Critic(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))
    inner, loss = sgd(critic), nn.MSELoss()  # which has no weights, and counts for none
    step = catch(lambda x: inner(x + 0 * loss(other(x), x).detach()))
    step(torch.ones(1, 2))
    with torch.no_grad():
        critic[0].weight.fill_(1e38)
    assert report_of(step, torch.full((1, 2), 9.0)).fault.module == "Critic.0"


def test_gradients_are_checked_if_the_optimizer_steps_outside() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x).sum()
        (loss * 1.0 + (net.weight * 0).sqrt().sum()).backward()  # 0 / 0 in the gradient
        return loss.detach()

    step = catch(forward, every=1)
    with pytest.raises(BadStepError, match="the gradient of weight is NaN"):
        step(torch.ones(1, 2))
    del optimizer


@pytest.mark.parametrize("scaling", ["fp16", "fp32"])
def test_a_step_without_a_loss_is_told(scaling: str) -> None:
    training = Training("mlp", scaling)
    step = catch(lambda x: (training.step(x), None)[1])
    with pytest.warns(CatchWarning, match="the step returns no loss.* Return the loss"):
        step(1.0)


def test_an_optimizer_in_a_list_in_a_dict_and_a_schedule_are_found() -> None:
    net = nn.Linear(2, 1)
    parts = {"optimizers": [torch.optim.Adam(net.parameters())]}
    schedule = torch.optim.lr_scheduler.LinearLR(parts["optimizers"][0])

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).sum()
        loss.backward()
        for optimizer in parts["optimizers"]:
            optimizer.step()
        schedule.step()
        return loss.detach()

    step = catch(train)
    for _ in range(3):
        step(torch.ones(1, 2))
    before = net.weight.detach().clone(), schedule.get_last_lr()
    report_of(step, torch.full((1, 2), BAD))
    assert torch.equal(net.weight, before[0])
    assert schedule.get_last_lr() == before[1]


def test_what_is_not_found_is_named_by_hand() -> None:
    net = Net()

    class Hidden:
        __slots__ = ()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return sgd(net)(x)

    with pytest.raises(ValueError, match=re.escape("catch(step, of=[model, optimizer])")):
        catch(Hidden())(torch.ones(3))
    catch(Hidden(), of=[net])(torch.ones(3))
    with pytest.raises(TypeError, match=r"^catch\(of=...\): 'net' is no model, no optim"):
        catch(Hidden(), of="net")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_a_compiled_step() -> None:
    training = Training("mlp", "bf16")
    step = catch(torch.compile(training.step, backend="eager"))
    step(1.0)
    before = training.state()
    assert report_of(step, BAD).step == 1
    assert same(training.state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_step_waits_for_the_gpu() -> None:
    net = nn.Linear(64, 64, device="cuda")
    x = torch.ones(8, 64, device="cuda")
    step = catch(sgd(net, 1e-3, mean_square), every=1000)
    step(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_that_writes_into_its_batch_is_repeated_with_the_batch_as_it_came() -> None:
    model = nn.Linear(8, 4)
    inner = sgd(model, loss_of=mean_square)
    step = catch(lambda x: inner(x.sub_(0.5).div_(0.25)), every=5)
    for _ in range(7):
        step(torch.rand(6, 8))
    report = report_of(step, torch.full((6, 8), BAD))
    assert (report.step, report.fault.op, report.fault.kind) == (7, "sub", "input")
    assert model.weight.isfinite().all()


def test_a_training_with_sparse_gradients_is_put_back() -> None:
    net = nn.Embedding(5, 3, sparse=True)
    inner = sgd(net)
    step = catch(lambda x, factor: inner(x) * factor)
    step(torch.tensor([1, 2]), 1.0)
    before = net.weight.detach().clone()
    assert report_of(step, torch.tensor([2, 3]), BAD).step == 1
    assert torch.equal(net.weight, before)


def test_buffers_and_attributes_that_a_module_sets_anew_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.weight = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls, self.seen = self.calls + 1, self.seen + 1
            return self.weight * x / self.seen

    model = Counting()
    step = catch(lambda x: model(x), every=100)
    for _ in range(3):
        step(torch.ones(()))
    assert report_of(step, torch.tensor(BAD)).step == 3
    assert (model.calls, float(model.seen)) == (3, 3.0)


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_a_buffer_that_is_filled_again_for_each_batch(kind: str) -> None:
    model, buffer = nn.Linear(8, 4), torch.zeros(6, 8)
    batch = buffer if kind == "tensor" else buffer.numpy()
    inner = sgd(model, loss_of=mean_square)
    step = catch(lambda x: inner(torch.as_tensor(x)), every=5)
    for _ in range(7):
        buffer.copy_(torch.rand(6, 8))
        step(batch)
    buffer.fill_(BAD)
    report = report_of(step, batch)
    assert (report.step, report.fault.kind) == (7, "input")
    assert model.weight.isfinite().all()


def test_parameters_as_arguments_are_the_training_s_own() -> None:
    """They are put back, and no copies of them are trained."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @functools.partial(catch, every=50, of=[model, optimizer])
    def step(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return update(optimizer, (x @ weights[0].T).square().mean())

    for _ in range(3):
        step(list(model.parameters()), torch.rand(3, 4))
    before = model.weight.detach().clone()
    report = report_of(step, list(model.parameters()), torch.full((3, 4), BAD))
    assert torch.equal(model.weight, before)
    assert (report.step, report.note, report.fault.inputs[1].name) == (3, "", "weight")
