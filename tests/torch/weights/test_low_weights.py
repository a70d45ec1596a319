"""`low_weights`: what it takes and refuses, and that the optimizer is used as before."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from polymp.backends.torch.weights import low_step, update_watch
from polymp.errors import LowWeightsWarning
from polymp.torch import GradScaler, UpdateWatch, low_weights
from tests.support.torch.low_training import batch, loss_of, low, made, step, train, weights
from tests.support.torch.models import same, seen

MODES = ("master", "split", "stochastic")


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def bits(optimizer: Any) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return seen([params, [optimizer.state[p] for p in params]])


def test_the_optimizer_and_its_parameters_stay_the_same_objects() -> None:
    model = made("mlp")
    optimizer, params = adamw(model), list(model.parameters())
    returned = low_weights(optimizer)
    assert returned is optimizer
    assert isinstance(returned, torch.optim.AdamW)
    assert type(returned).__name__ == "LowAdamW"
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert {p.dtype for p in params} == {torch.bfloat16}
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in params)
    assert returned.low == params
    assert returned.kept == {}


@pytest.mark.parametrize(
    ("mode", "beside", "most"), [("master", 4, 16.1), ("split", 2, 14.1), ("stochastic", 0, 12.1)]
)
def test_bytes_a_parameter_with_adam(mode: str, beside: int, most: float) -> None:
    """All tensors that are alive between backward and the step, counted by their storages."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = low_weights(adamw(model), mode)
    for at in range(2):
        optimizer.zero_grad()
        model(torch.full((4, 256), 0.1 + at, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    alive: list[torch.Tensor] = []
    for p in model.parameters():
        alive += [p, p.grad, *(t for t in optimizer.state[p].values() if torch.is_tensor(t))]
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    each = sum(stored.values()) / sum(p.numel() for p in model.parameters())
    assert 12 + beside <= each <= most


@pytest.mark.parametrize("mode", MODES)
def test_a_step_holds_no_second_float32_model(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 memory made in a step, the optimizer's own aside: that of one piece."""
    monkeypatch.setattr(low_step, "LENT", 4 * 64 * 64)
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(20)]
    optimizer = low_weights(torch.optim.SGD(params, lr=0.1, foreach=False), mode)
    for p in params:
        p.grad = torch.randn(64, 64, dtype=torch.bfloat16)
    lent: list[int] = []
    before = low_step.Loan.give

    def give(self: Any) -> None:
        before(self)
        lent.append(sum(t.numel() for t in self.lent.values()))

    monkeypatch.setattr(low_step.Loan, "give", give)
    optimizer.step()
    assert sum(lent) == 20 * 64 * 64
    assert max(lent) == 64 * 64


@pytest.mark.parametrize("mode", MODES)
def test_pieces_change_no_bit(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one, _ = train("tokens", mode, 5)
    monkeypatch.setattr(low_step, "LENT", 1)
    pieces, other, _ = train("tokens", mode, 5)
    assert bits(one) == bits(other)
    assert same(weights(whole, one), weights(pieces, other))


def test_the_optimizer_shows_what_is_not_stored_low_and_why() -> None:
    model = made("mlp")
    named = list(model.named_parameters())
    shown = []
    for params in (named, [p.data.clone().requires_grad_() for _, p in named]):
        own = dict(params)["2.bias"] if params is named else params[3]
        shown.append(repr(low_weights(torch.optim.SGD(params), keep=[own])))
    assert "Parameter Group 0" in shown[0]
    end = "low weights: 3 in bfloat16, mode 'split'\nnot stored low:\n    {} [{}]: is in keep="
    size = model[2].bias.numel()
    assert shown[0].endswith(end.format("2.bias", size))
    assert shown[1].endswith(end.format("group 0, parameter 3", size))


def test_parameters_without_use_are_kept() -> None:
    model = made("mlp")
    extra = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    optimizer = low_weights(optimizer, keep=lambda: loss_of("mlp", model, 0))
    assert optimizer.kept == {extra: "is not used in the forward pass"}


def test_other_dtypes_and_classes_are_kept() -> None:
    low, double, half = (torch.zeros(3, dtype=d) for d in (torch.float, torch.double, torch.half))
    kept = {double: "is float64", half: "is float16", torch.zeros(0): "is empty"}
    kept[TwoTensor(low, low)] = "is a TwoTensor, whose numbers are in other tensors"
    assert low_weights(torch.optim.SGD([low, *kept], lr=0.1)).kept == kept


def test_parameters_that_do_not_fill_their_memory_are_kept() -> None:
    gaps, repeated = (nn.Parameter(t) for t in (torch.rand(4, 6)[:, :3], torch.ones(1).expand(4)))
    dense = nn.Parameter(torch.rand(4, 6)[1:3].t())
    before = dense.detach().bfloat16()
    optimizer = low_weights(torch.optim.SGD([gaps, repeated, dense], lr=0.1))
    assert set(optimizer.kept.values()) == {"has strides with gaps or overlaps"}
    assert optimizer.low == [dense]
    assert torch.equal(dense, before)


def test_parameters_in_bfloat16_already_get_what_they_need() -> None:
    """A model that was loaded in bfloat16: nothing is beside its weights yet."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = low_weights(torch.optim.SGD([p], lr=1.0))
    for _ in range(10):
        p.grad = torch.full_like(p, 2.0**-10)
        optimizer.step()
    assert p.detach().float().tolist() == [1 - 2.0**-7] * 8  # 1 - 10 * 2**-10, rounded


def test_step_hooks_run_once_and_see_the_low_parameters() -> None:
    model = made("mlp")
    optimizer = low_weights(adamw(model))
    seen: list[Any] = []

    def see(optimizer: Any, *_: Any) -> None:
        seen.append([p.dtype for p in optimizer.param_groups[0]["params"]])

    optimizer.register_step_pre_hook(see)
    optimizer.register_step_post_hook(see)
    step(model, optimizer, 0)
    assert seen == [[torch.bfloat16] * 4] * 2


def test_a_scheduler_sets_the_rate_of_every_mode_as_of_float32() -> None:
    def run(mode: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = made("mlp")
        optimizer = low("mlp", model, adamw(model), mode)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
        rates = []
        for at in range(15):
            step(model, optimizer, at)
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, weights(model, optimizer)

    plain, master = run(None), run("master")
    assert plain[0] == master[0] == run("split")[0]
    assert same(plain[1], master[1])


class Normed(torch.optim.Optimizer):
    """A user's optimizer: divides by the norm of all gradients, and calls its closure twice."""

    norms: tuple[float, ...] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            params = self.param_groups[0]["params"]
            norm = torch.stack([p.grad.norm() for p in params]).norm().item()
            self.norms += (norm,)
            for p in params:
                self.state[p]["seen"] = p.sub_(p.grad, alpha=0.05 / norm).clone()
        return loss


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_of_a_user_sees_all_parameters_at_once(mode: str) -> None:
    plain, one, losses = train("mlp", None, 8, lambda p: Normed(p, {}))
    model, other, low_losses = train("mlp", mode, 8, lambda p: Normed(p, {}))
    assert other.norms == pytest.approx(one.norms, rel=0.1)
    if mode == "master":
        assert other.norms == one.norms
        assert losses == low_losses
        assert same(weights(model, other), weights(plain))


def test_deepcopy_and_pickle() -> None:
    model = made("mlp")
    optimizer = low_weights(adamw(model))
    step(model, optimizer, 0)
    twin, other = copy.deepcopy((model, optimizer))
    step(model, optimizer, 1)
    step(twin, other, 1)
    assert bits(optimizer) == bits(other)
    third, last = pickle.loads(pickle.dumps((model, optimizer)))
    step(model, optimizer, 2)
    step(third, last, 2)
    assert bits(optimizer) == bits(last)
    assert type(last) is type(optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_every_bit(mode: str, scaler_class: Any, fused: bool) -> None:
    scaler = scaler_class("cpu", init_scale=4.0)
    model = made("mlp")
    optimizer = low("mlp", model, adamw(model, fused=fused), mode)
    for at in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of("mlp", model, at)).backward()
        before = bits(optimizer)
        if at == 2:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert (bits(optimizer) == before) == (at == 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_whose_gradients_are_inf_leaves_every_bit(mode: str) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    model = made("mlp")
    optimizer = low_weights(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), mode)
    bad = False

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of("mlp", model, 0)
        scaler.scale(loss).backward()
        if bad:
            model[0].weight.grad[0, 0] = torch.inf
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    before = bits(optimizer)
    bad = True
    scaler.step(optimizer, closure)
    assert bits(optimizer) == before


WRITES = {
    "copy_": lambda p, new: p.copy_(new),
    "data": lambda p, new: p.data.copy_(new),
    "fill_": lambda p, new: p.fill_(new.flatten()[0]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_by_hand_are_what_was_written(mode: str, write: str) -> None:
    model = made("mlp")
    optimizer = low("mlp", model, adamw(model), mode)
    for at in range(3):
        step(model, optimizer, at)
    with torch.no_grad():
        new = torch.full_like(model[0].weight, 0.625)
        WRITES[write](model[0].weight, new)
    full = weights(model, optimizer)["0.weight"]
    if mode == "split":  # the other 16 bits stay: half of the last place
        assert (full - 0.625).abs().max() <= 2.0**-9
    else:
        assert (full == 0.625).all()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert (model[0].weight == 0.625).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_state_that_was_cleared_is_made_again(mode: str) -> None:
    model = made("mlp")
    optimizer = low("mlp", model, adamw(model), mode)
    step(model, optimizer, 0)
    low_before = [p.detach().clone() for p in model.parameters()]
    optimizer.state.clear()
    full = weights(model, optimizer)
    for (name, p), before in zip(model.named_parameters(), low_before, strict=True):
        assert torch.equal(p, before)
        assert torch.equal(full[name], before.float())
    step(model, optimizer, 1)


def test_an_error_in_a_step_puts_the_parameters_back() -> None:
    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            raise RuntimeError("broken")

    model = made("mlp")
    optimizer = low_weights(Broken(model.parameters(), lr=0.1))
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match="broken"):
        step(model, optimizer, 0)
    assert optimizer.param_groups[0]["params"] == params
    assert all("beside" in optimizer.state[p] for p in params)


def after_a_scheduler(model: nn.Module) -> Any:
    optimizer = adamw(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return low_weights(optimizer)


KEEP = (
    "low_weights(keep=...) takes parameters, modules, and a function that runs the model in its "
    "region, got {}. Write keep=lambda: loss_of(model, batch), or keep=[model.head, "
    "model.embedding.weight]."
)
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no optimizer": (
        lambda _: low_weights("adam"),  # type: ignore[arg-type]
        TypeError,
        "low_weights() takes a torch.optim.Optimizer, got 'adam'. Write: optimizer = "
        "low_weights(torch.optim.AdamW(model.parameters())).",
    ),
    "a second call": (lambda _: low_weights(low_weights(adamw(made("mlp")))), TypeError,
        "low_weights(): this LowAdamW keeps its parameters low already, with mode 'split'. Make a "
        "new optimizer to change the mode."),
    "SparseAdam": (lambda model: low_weights(torch.optim.SparseAdam(model.parameters())),
        TypeError,
        "low_weights() does not take SparseAdam: it updates the rows that have a gradient, and a "
        "step on low weights would store the whole weight again. Give the embeddings SparseAdam on "
        "float32, and the other parameters an optimizer of their own."),
    "a scheduler made before": (after_a_scheduler, ValueError,
        "low_weights(): the step of this AdamW was replaced, as a learning-rate scheduler does. "
        "Call low_weights() first, and make the scheduler with what it returns."),
    "a lazy parameter": (
        lambda model: low_weights(adamw(nn.ModuleList([model, nn.LazyLinear(2)]))), ValueError,
        "low_weights(): this AdamW has lazy parameters, which get their values in the first call "
        "of the model. Call the model once before low_weights()."),
    "nothing to store": (lambda model: low_weights(adamw(model), keep=model), ValueError,
        "low_weights(): no parameter of this AdamW can be stored low: is in keep=."),
    "a name": (
        lambda model: low_weights(adamw(model), keep=["0.weight"]),  # type: ignore[list-item]
        TypeError,
        KEEP.format("'0.weight'"),
    ),
    "a loss": (lambda model: low_weights(adamw(model), keep=0 * model[0].weight.norm()), TypeError,
        KEEP.format("tensor(0., grad_fn=<MulBackward0>)")),
    **{
        f"{keep!r}": (
            lambda model, keep=keep: low_weights(adamw(model), keep=keep),
            TypeError,
            KEEP.format(repr(keep)),
        )
        for keep in (3, None, "head", torch.ones(1), nn.LayerNorm)
    },
    "the model": (lambda model: low_weights(model), TypeError,
        "low_weights() takes a torch.optim.Optimizer, got Sequential( (0): Linear(in_features=..."
        "atures=32, out_features=4, bias=True) ). Write: optimizer = "
        "low_weights(torch.optim.AdamW(model.parameters()))."),
    "a function that opens no region": (
        lambda model: low_weights(adamw(model), keep=lambda: model(batch("mlp", 0)[0])),
        ValueError,
        "low_weights(keep=...): the function cast no parameter of the optimizer to bfloat16. It "
        "has to run the model in its region: with autocast(device, dtype=torch.bfloat16): "
        "model(x)."),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_that_the_model_stays_as_it_was(name: str) -> None:
    call, error, message = REFUSED[name]
    model = made("mlp")
    with pytest.raises(error) as raised:
        call(model)
    assert str(raised.value) == message
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_that_is_cast_later_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = low_weights(torch.optim.AdamW(model.parameters()))
    model.float()(torch.ones(1, 4)).sum().backward()
    for read in (optimizer.step, lambda: optimizer.float32_state_dict(model)):
        with pytest.raises(RuntimeError, match=r"shape \(4, 4\) was bfloat16, and is"):
            read()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = low_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    before = bits(optimizer)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert bits(optimizer) == before
    assert str(error.value) == (
        "low_weights(): the gradient of group 0, parameter 0, of shape (8, 4), is sparse. The "
        "step would have to store the whole weight again, and rows without a gradient would not "
        "stay as they are. Make the embedding with sparse=False, or give its weight an optimizer "
        "of its own."
    )


def run(
    dtype: torch.dtype, steps: int, rate: float = 1e-4, mode: str = "", **options: Any
) -> list[Any]:
    """The warnings of a training of weights near 1."""
    p = nn.Parameter(torch.linspace(1, 2, 4096, dtype=dtype))
    optimizer: Any = torch.optim.AdamW([("layer.weight", p)], lr=rate, weight_decay=0, **options)
    if mode:
        optimizer = low_weights(optimizer, mode)
    UpdateWatch(optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
    return [each for each in seen if each.category is LowWeightsWarning]


def test_naive_training_is_warned_of_once() -> None:
    (warning,) = run(torch.bfloat16, 1300)
    said = str(warning.message)
    assert said.startswith("100% of the updates of low weights were rounded away in this step")
    assert "Most in: layer.weight (bfloat16) 100%." in said
    assert "Write optimizer = polymp.torch.low_weights(optimizer), which" in said


@pytest.mark.parametrize("mode", MODES)
def test_low_weights_are_not_warned_of(mode: str) -> None:
    assert run(torch.bfloat16, 150, mode=mode) == []


def test_training_that_learns_is_not_warned_of() -> None:
    assert run(torch.float32, 150) == []
    assert run(torch.bfloat16, 150, rate=0.1) == []  # whole last places
    assert run(torch.bfloat16, 150, rate=0.0) == []  # a warm-up that has not begun
    assert run(torch.bfloat16, 99) == []  # not looked at yet


def test_a_fused_step_that_is_skipped_does_not_count() -> None:
    p, q = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.AdamW([p, q], lr=0.1, fused=True)
    UpdateWatch(optimizer, every=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            scaler = GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.zeros(()))
            p.grad, q.grad = torch.ones_like(p), torch.full_like(q, torch.inf)
            scaler.step(optimizer)
    assert [each for each in seen if each.category is LowWeightsWarning] == []


def test_a_sample_counts_what_a_step_left() -> None:
    p = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16))
    p.grad = torch.tensor([1.0, 2.0**-9, 0.0, 2.0**-9], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p], lr=1.0)
    (sample,) = update_watch.samples(optimizer)
    optimizer.step()
    assert sample.counts(None).tolist() == [3, 1]
    assert sample.name == "group 0, parameter 0"


def test_what_it_does_not_take() -> None:
    with pytest.raises(TypeError) as error:
        UpdateWatch("adam")  # type: ignore[arg-type]
    assert str(error.value) == (
        "UpdateWatch() takes a torch.optim.Optimizer, got 'adam'. Write: watch = "
        "UpdateWatch(optimizer)."
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="every") as wrong:
        UpdateWatch(optimizer, every=0)
    assert str(wrong.value) == "UpdateWatch(every=...) must be a whole number above 0, got 0."
    watch = UpdateWatch(optimizer, every=1)
    watch.remove()
    assert not optimizer._optimizer_step_pre_hooks
