"""`step_or_undo`: every optimizer of torch, taken or undone on the device, bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from polymp.backends.torch.scaler import optimizer_step
from polymp.torch import GradScaler
from tests.support.torch.each_op import EachOp
from tests.support.torch.models import seen

# torch's SparseAdam and Adagrad make sparse tensors without saying whether they are to be checked.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.usefixtures("capturable_here"),
]

DOCS = Path(__file__).parents[3] / "docs/scaling-torch.md"  # its table says which wait
NEVER, ELSEWHERE, ALWAYS = "never", "unless found on the CPU", "always"
Make = Callable[[Any], optim.Optimizer]
CAPTURABLE = (
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.ASGD,
    optim.RMSprop, optim.Rprop,
)  # fmt: skip

# Every optimizer of torch, and when its step waits for the finding once its state is there.
OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "SGD": (partial(optim.SGD, lr=0.1), NEVER),
    "SGD, momentum": (partial(optim.SGD, lr=0.1, momentum=0.9), NEVER),
    "SGD, dampening": (partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), NEVER),
    "SGD, nesterov": (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), NEVER),
    "Muon": (partial(optim.Muon, lr=0.1), NEVER),
    "Adagrad": (optim.Adagrad, ELSEWHERE),
    "Adafactor": (optim.Adafactor, ELSEWHERE),
    "SparseAdam": (optim.SparseAdam, ALWAYS),
    "Adam, amsgrad": (partial(optim.Adam, amsgrad=True), ELSEWHERE),
    "RMSprop, centered": (partial(optim.RMSprop, centered=True, momentum=0.9), ELSEWHERE),
    "lr is a tensor": (partial(optim.AdamW, lr=torch.tensor(0.1), foreach=False), ELSEWHERE),
}
for kind in CAPTURABLE:
    waits = NEVER if kind is optim.ASGD else ELSEWHERE  # ASGD reads its count of steps itself
    OPTIMIZERS[kind.__name__] = (partial(kind, foreach=False), waits)
    OPTIMIZERS[f"{kind.__name__}, foreach"] = (partial(kind, foreach=True), waits)
    OPTIMIZERS[f"{kind.__name__}, capturable"] = (partial(kind, capturable=True), NEVER)
    OPTIMIZERS[f"{kind.__name__}, capturable foreach"] = (
        partial(kind, capturable=True, foreach=True), NEVER,
    )  # fmt: skip
every = pytest.mark.parametrize("name", OPTIMIZERS)


def weights(name: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (2, 2), (1, 3)] if name == "Muon" else [(3, 4), (5,), ()]
    return [torch.randn(s, generator=random).requires_grad_() for s in shapes]


def give(name: str, params: list[torch.Tensor], at: int, *, bad: bool) -> None:
    """New gradients; the last parameter has none at first."""
    random = torch.Generator().manual_seed(at)
    for i, p in enumerate(params):
        if i == len(params) - 1 and at < 3:
            continue
        p.grad = torch.randn(p.shape, generator=random)
        if bad:
            p.grad.view(-1)[0] = (float("inf"), float("nan"), float("-inf"))[i]
        if name == "SparseAdam" and p.dim():
            p.grad = p.grad.to_sparse(1)


def everything(params: list[torch.Tensor], optimizer: optim.Optimizer) -> str:
    states = [sorted(optimizer.state.get(p, {}).items()) for p in params]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return repr(seen([params, states, groups]))


def makes(name: str) -> Any:
    make = OPTIMIZERS[name][0]
    if name == "SparseAdam":  # takes no scalars
        return lambda params: make([p for p in params if p.dim()])
    return make


def made(name: str) -> tuple[list[torch.Tensor], optim.Optimizer]:
    params = weights(name)
    return params, makes(name)(params)


HISTORIES = ("1011010001", "0110100010")


def first_difference(name: str, history: str, step: Any) -> int | None:
    """The first iteration after which a twin, not stepped at all where it is bad, is different."""
    (ours, mine), (theirs, plain) = made(name), made(name)
    for at, bad in enumerate(history):
        for params in (ours, theirs):
            give(name, params, at, bad=bad == "1")
        step(mine, torch.tensor(float(bad)))
        if bad == "0":
            plain.step()
        if everything(ours, mine) != everything(theirs, plain):
            return at
    return None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("history", HISTORIES)
@every
def test_a_step_is_the_plain_one_or_none(name: str, history: str) -> None:
    assert first_difference(name, history, optimizer_step.step_or_undo) is None


WRONG: dict[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "parameters alone are undone": torch.where,
    "undone by a product, into which NaN runs": lambda bad, was, p: bad * was + ~bad * p,
}


@pytest.mark.parametrize("way", WRONG)
@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "Rprop", "SparseAdam"])
def test_a_wrong_step_is_seen(name: str, way: str) -> None:
    def step(optimizer: optim.Optimizer, found: torch.Tensor) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        before = [p.detach().clone() for p in params]
        optimizer.step()
        for p, was in zip(params, before, strict=True):
            p.data.copy_(WRONG[way](found.bool(), was, p))

    assert first_difference(name, HISTORIES[0], step) is not None


def reads(step: Callable[[], Any]) -> int:
    with EachOp(lambda op, *_: op is torch.ops.aten._local_scalar_dense.default) as mode:
        step()
    return sum(mode.seen)


@every
def test_the_first_step_waits_and_later_ones_as_listed(name: str) -> None:
    """On the CPU; values that the optimizer reads by itself do not count."""
    (ours, mine), (theirs, plain) = made(name), made(name)
    waits = []
    for at in range(3, 8):
        for params in (ours, theirs):
            give(name, params, at, bad=False)
        step = partial(optimizer_step.step_or_undo, mine, torch.zeros(()))
        waits.append(reads(step) - reads(plain.step))
    first = name not in ("SGD", "Adagrad")  # which make no state in a step
    later = OPTIMIZERS[name][1] == ALWAYS
    assert waits == [int(first)] + [int(later)] * 4


@every
def test_what_is_kept_where_and_as_what_says_who_waits(name: str) -> None:
    """On a device of another kind: a count on the CPU has to wait, one that is a number always."""
    params = [p.detach().to("meta").requires_grad_() for p in weights(name)]
    optimizer = makes(name)(params)
    lists: list[list[Any]] = [[] for _ in range(8)]
    if name == "SparseAdam":
        for p in params:  # it has no function that makes state
            optimizer.state[p]["step"] = 0
    else:
        for p in params:
            p.grad = torch.ones_like(p)
        make: Any = optimizer._init_group
        used = len(inspect.signature(make).parameters) - 1
        make(optimizer.param_groups[0], *lists[:used])
    values = [v for state in optimizer.state.values() for v in state.values()]
    numbers = any(isinstance(v, (int, float)) for v in values)
    on_cpu = any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values)
    assert (ALWAYS if numbers else ELSEWHERE if on_cpu else NEVER) == OPTIMIZERS[name][1]
    kind = type(optimizer).__name__
    assert kind in DOCS.read_text()


def test_every_optimizer_of_torch_is_here() -> None:
    there = {
        n for n, v in vars(optim).items()
        if isinstance(v, type) and issubclass(v, optim.Optimizer) and v is not optim.Optimizer
    }  # fmt: skip
    tried = {type(made(name)[1]).__name__ for name in OPTIMIZERS}
    assert there - tried == {"LBFGS"}  # which needs a closure


def test_a_finding_goes_to_the_cpu_only_by_waiting() -> None:
    """A copy to the CPU that nobody waits for would be read before it is there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def copies(op: Any, args: Any, kwargs: Any) -> tuple[str, bool] | None:
        if op is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            return str(kwargs["device"]), kwargs.get("non_blocking", False)
        return None

    class Counts(optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["step"].add_(1)

    mode = EachOp(copies)
    with FakeTensorMode():
        w = torch.ones(2, device="cuda:0", requires_grad=True)
        w.grad = torch.ones_like(w)
        optimizer = Counts([w], {})
        for device in ("cuda:0", "cpu"):
            optimizer.state[w]["step"] = torch.zeros((), device=device)
            with mode:
                optimizer_step.step_or_undo(optimizer, torch.zeros((), device="cuda:0"))
    assert mode.seen == [("cpu", False)]


class KeepsLists(optim.Optimizer):
    """Its history cannot be put back by exchanging tensors."""

    steps = 0

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad.clone())
        return "stepped"


def test_an_optimizer_with_a_list_in_its_state_is_not_stepped_before_the_host_knows() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = KeepsLists([w], {})
    optimizer.state[w]["history"] = []
    assert optimizer_step.step_or_undo(optimizer, torch.ones(())) is None
    assert (optimizer.steps, optimizer.state[w]["history"]) == (0, [])
    assert optimizer_step.step_or_undo(optimizer, torch.zeros(())) == "stepped"
    assert len(optimizer.state[w]["history"]) == 1


class CountsInItsGroup(optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 2.0


def test_numbers_of_a_group_are_put_back() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = CountsInItsGroup([w], {"k": 0, "d": 1.0})
    for found in (0.0, 1.0, 0.0, 1.0):
        assert reads(lambda f=found: optimizer_step.step_or_undo(optimizer, torch.tensor(f))) == 1
    assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["d"]) == (2, 4.0)


def test_a_state_that_says_none_is_put_back() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)
    optimizer = optim.SGD([w], lr=0.5, momentum=0.9)
    optimizer.state[w]["momentum_buffer"] = None
    optimizer_step.step_or_undo(optimizer, torch.ones(()))
    assert (w.tolist(), optimizer.state[w]) == ([1.0, 1.0], {"momentum_buffer": None})
    optimizer_step.step_or_undo(optimizer, torch.zeros(()))
    assert (w.tolist(), optimizer.state[w]["momentum_buffer"].tolist()) == ([0.5, 0.5], [1.0, 1.0])


def test_it_copies_parameters_with_gradients_and_their_state_once() -> None:
    """No parameter without a gradient is copied."""

    def copied(op: Any, args: Any, _: Any) -> int:
        assert op is not torch.ops.aten.clone.default
        return sum(t.numel() for t in args[0]) if op is torch.ops.aten._foreach_mul.Tensor else 0

    params = [torch.ones(7, requires_grad=True), torch.ones(100, requires_grad=True)]
    optimizer = optim.Adam(params, foreach=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[1].grad = None
    with EachOp(copied) as mode:
        optimizer_step.step_or_undo(optimizer, torch.ones(()))
    assert sum(mode.seen) == 3 * 7 + 1  # the parameter, two moments, the count of steps


@pytest.mark.parametrize("count", [4, 300])
def test_a_few_launches_take_and_put_back_all_tensors(count: int) -> None:
    def launched(op: Any, *_: Any) -> bool | None:
        return not any(free in str(op) for free in ("view", "detach", "record", "profiler")) or None

    params = [torch.ones(3, requires_grad=True) for _ in range(count)]
    params += [torch.ones(3, dtype=torch.float16, requires_grad=True)]
    optimizer = optim.SGD(params, lr=0.5, momentum=0.5, foreach=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with EachOp(launched) as plain:
        optimizer.step()
    found = torch.ones(())
    with EachOp(launched) as ours:
        optimizer_step.step_or_undo(optimizer, found)
    # What was found, and not; for each of two dtypes both of them, copies, and two to put back.
    assert len(ours.seen) - len(plain.seen) == 2 + 2 * 5
    assert all(p.tolist() == [-0.25] * 3 for p in params)


EVERYTHING = [0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
     torch.complex128, torch.int32, torch.uint8, torch.bool],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_every_bit_is_put_back_or_kept(dtype: torch.dtype, found: float) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        old = torch.tensor(EVERYTHING, dtype=torch.float64).to(dtype)
    else:
        old = torch.arange(8).to(dtype)
    new = old.flip(0).clone()

    class Replaces(optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state[w]["kept"].copy_(new)

    w = torch.ones(1, requires_grad=True)
    w.grad = torch.ones(1)
    optimizer = Replaces([w], {})
    optimizer.state[w]["kept"] = old.clone()
    optimizer_step.step_or_undo(optimizer, torch.tensor(found))
    assert seen(optimizer.state[w]["kept"]) == seen(old if found else new)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 1], ids=["first", "later"])
def test_a_step_that_raises_is_undone_where_it_was_to_be_skipped(steps: int, found: float) -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = optim.Adam([w], lr=0.5)
    w.grad = torch.ones(2)
    for _ in range(steps):
        optimizer.step()
    before, was = w.tolist(), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.register_step_post_hook(lambda *_: 1 // 0)
    w.grad = torch.full((2,), float("nan") if found else 1.0)
    with pytest.raises(ZeroDivisionError):
        optimizer_step.step_or_undo(optimizer, torch.tensor(found))
    assert w.isfinite().all()
    assert (w.tolist() == before) == bool(found)
    if found:
        assert str(optimizer.state_dict()["state"]) == str(was)


# What the gradients are, before they are scaled: the first two steps are skipped.
HISTORY = (float("inf"), float("nan"), 1.0, -0.5, 2.0)


@pytest.fixture
def no_memory_is_zero_by_chance() -> Iterator[None]:
    """In this mode torch fills with NaN what it makes without a value."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


garbage = pytest.mark.usefixtures("no_memory_is_zero_by_chance")


def train(kind: Any, late: bool = False, **options: Any) -> tuple[list[list[float]], float]:
    """Both parameters after each step, and the last scale; `late`: one's gradient comes later."""
    params = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.SGD(params, lr=0.25, **options)
    scaler = kind("cpu", init_scale=2.0**10)
    log = []
    for at, value in enumerate(HISTORY):
        optimizer.zero_grad()
        used = params[:1] if late and at < 3 else params
        scale = scaler.scale(torch.ones(()))
        for p in used:
            p.grad = torch.full_like(p, value) * scale
        scaler.step(optimizer)
        scaler.update()
        log += [p.tolist() for p in params]
    return log, scaler.get_scale()


OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.5},
    {"momentum": 0.5, "dampening": 0.25},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.125},
    {"momentum": 0.5, "maximize": True},
    {"momentum": 0.5, "late": True},
    {},
]


@garbage
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_of_a_fused_sgd_are_those_of_one_that_is_not(options: dict[str, Any]) -> None:
    expected = train(torch.amp.GradScaler, fused=False, foreach=False, **options)
    assert train(GradScaler, fused=True, **options) == expected
    assert expected[1] == 256.0


@garbage
def test_momentum_of_garbage_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "prepare_to_skip", lambda optimizer, found: True)
    log, _ = train(GradScaler, fused=True, momentum=0.5)
    assert str(log[-1]) == "[nan, nan]"


def test_a_fused_sgd_waits_only_with_dampening() -> None:
    """Reading the finding would raise: a tensor on the device meta has no value."""
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    found = torch.zeros((), device="meta")
    plain = torch.optim.SGD([p], lr=0.1, momentum=0.5, fused=True)
    assert optimizer_step.prepare_to_skip(plain, found)
    assert plain.state[p]["momentum_buffer"].tolist() == [0.0, 0.0]
    damped = torch.optim.SGD([p], lr=0.1, momentum=0.5, dampening=0.1, fused=True)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer_step.prepare_to_skip(damped, found)
    assert optimizer_step.prepare_to_skip(torch.optim.AdamW([p], fused=True), found)


KINDS = {
    "SGD": lambda w: torch.optim.SGD(w, lr=0.01, fused=True),
    "Adam": lambda w: torch.optim.Adam(w, lr=0.01, eps=1e-3, fused=True),
    "AdamW": lambda w: torch.optim.AdamW(w, lr=0.01, eps=1e-3, fused=True),
    "Adagrad": lambda w: torch.optim.Adagrad(w, lr=0.01, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 1.0), (torch.float32, 1e30), (torch.float64, 1e300)],
    ids=str,
)
def test_below_a_scale_of_1_no_quotient_makes_a_weight_inf(kind, dtype, value) -> None:
    """Of 35 elements torch's kernels for a CPU divide the last three in the weight's own dtype."""
    for scale in (2.0**-8, 2.0**-24, 2.0**-40, 2.0**-100, 2.0**-126):
        weight = torch.ones(35, dtype=dtype, requires_grad=True)
        scaler, optimizer = GradScaler("cpu", init_scale=scale), KINDS[kind]([weight])
        scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, value)
        weight.grad[3] = 0
        scaler.step(optimizer)
        scaler.update()
        assert weight.isfinite().all()
        fits = value / scale < torch.finfo(dtype).max and (dtype, scale) != (torch.float16, 2**-40)
        assert bool(scaler.step_skipped(optimizer)) == (not fits)
        assert weight.grad[0] == (value if not fits else value / scale)
