"""`LossScalers`: a scale for each loss; and a scaler for each optimizer, which is simply two."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.errors import StuckError
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import ScaleRule, ScaleState
from polymp.scaling.state_dict import to_state_dict
from polymp.torch import GradScaler, LossScalers

NAN = float("nan")
OVER = -1.0  # as a loss's factor: the loss is finite, a gradient is not
KINDS: dict[str, Any] = {
    "loop": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=False),
    "fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True),
    "undone": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
}
every = pytest.mark.parametrize("kind", KINDS)


class Run:
    """Two weights; loss `a` is of both, through a product that `b` of the first shares."""

    def __init__(self, kind: str = "loop", **options: Any) -> None:
        self.w = torch.tensor([1.0, -2.0], requires_grad=True)
        self.v = torch.tensor([0.5], requires_grad=True)
        self.optimizer = KINDS[kind]([self.w, self.v])
        asked = {"init_scale": 8.0, "growth_interval": 2, "on_stuck": "raise"}
        if kind == "undone":
            asked["skip_on"] = "device"
        self.scalers = LossScalers("cpu", losses=("a", "b"), **asked | options)

    def losses(self, a: float = 1.0, b: float = 1.0) -> dict[str, torch.Tensor]:
        shared = self.w.square()
        spoil = (self.w * 0).sum().sqrt()  # 0, and its gradient NaN
        a_loss, b_loss = (shared * self.v).sum(), shared.sum()
        return {
            "a": a_loss + spoil if a == OVER else a_loss * a,
            "b": b_loss + spoil if b == OVER else b_loss * b,
        }

    def backward(self, a: float | None = 1.0, b: float | None = 1.0) -> None:
        losses = self.losses(a or 1.0, b or 1.0)
        asked = {"a": a, "b": b}
        left = {name: loss for name, loss in losses.items() if asked[name] is not None}
        self.scalers.backward(self.optimizer, **left)

    def iterate(self, a: float | None = 1.0, b: float | None = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(a, b)
        self.scalers.step(self.optimizer)
        self.scalers.update()

    def bits(self) -> tuple[list[float], ...]:
        return self.w.tolist(), self.v.tolist()


def true(run: Run, *factors: tuple[float, float]) -> list[torch.Tensor]:
    """The gradients of all losses, without scaling."""
    total = sum(sum(run.losses(a, b).values()) for a, b in factors)
    return list(torch.autograd.grad(total, [run.w, run.v]))


# --- gradients ------------------------------------------------------------------------------------


@every
def test_the_gradients_are_the_true_ones_added_up(kind) -> None:
    run = Run(kind)
    run.scalers["b"].scale(torch.ones(()))
    run.scalers["b"].update(1024.0)
    run.backward(0.5, 2.0)
    assert all(map(torch.equal, (run.w.grad, run.v.grad), true(run, (0.5, 2.0))))


def test_they_are_those_of_two_of_torchs_scalers_bit_for_bit() -> None:
    """Scales that are no powers of two round, in the same places."""
    run = Run(init_scale=1.1)
    run.backward(0.3, 0.7)
    by_hand, w_grad = Run(), torch.zeros(2)
    for name in ("a", "b"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.1)
        by_hand.w.grad = None
        scaler.scale(by_hand.losses(0.3, 0.7)[name]).backward()
        scaler.unscale_(by_hand.optimizer)
        w_grad += by_hand.w.grad
    assert torch.equal(run.w.grad, w_grad)
    assert not torch.equal(run.w.grad, true(run, (0.3, 0.7))[0]), "nothing was rounded"


def test_what_is_there_already_stays() -> None:
    run = Run()
    run.w.grad = kept = torch.tensor([100.0, 200.0])
    run.backward()
    wanted = true(run, (1.0, 1.0))
    assert torch.equal(run.w.grad, wanted[0] + torch.tensor([100.0, 200.0]))
    assert run.w.grad is kept, "another tensor would be missed by who holds the first"
    assert torch.equal(run.v.grad, wanted[1])


def test_called_again_it_accumulates() -> None:
    run = Run()
    run.backward(1.0, 2.0)
    run.backward(None, 3.0)
    run.backward(0.5, None)
    wanted = true(run, (1.5, 5.0))
    assert torch.equal(run.w.grad, wanted[0])
    assert torch.equal(run.v.grad, wanted[1])


@every
@pytest.mark.parametrize("bad", range(3))
def test_one_bad_backward_of_several_is_remembered(kind, bad) -> None:
    run = Run(kind)
    before = run.bits()
    for at in range(3):
        run.backward(1.0, OVER if at == bad else 1.0)
    run.scalers.step(run.optimizer)
    run.scalers.update()
    assert run.bits() == before
    assert (run.scalers["a"].get_scale(), run.scalers["b"].get_scale()) == (8.0, 4.0)
    assert run.scalers["a"]._get_growth_tracker() == 1


def test_other_parameters_get_no_gradient() -> None:
    run = Run()
    alone = torch.optim.SGD([run.w], lr=0.5)
    run.scalers.backward(alone, **run.losses())
    assert run.v.grad is None
    assert torch.equal(run.w.grad, true(run, (1.0, 1.0))[0])


def test_losses_with_graphs_of_their_own_and_a_graph_kept() -> None:
    run = Run()
    a, b = run.w.sum(), run.losses()["b"]
    run.scalers.backward(run.optimizer, a=a, b=b, retain_graph=True)
    run.scalers.backward(run.optimizer, b=b)
    assert torch.equal(run.w.grad, 1 + 4 * run.w)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run.scalers.backward(run.optimizer, b=b)
    assert torch.equal(run.w.grad, 1 + 4 * run.w), "what was there is lost"


@pytest.mark.filterwarnings("ignore:.*invariant checks:UserWarning")
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_sparse_and_dense_gradients_add_up(order) -> None:
    eighths = torch.arange(10.0).reshape(5, 2) / 8  # whose sums are exact
    table = torch.nn.Embedding.from_pretrained(eighths, freeze=False, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    scalers = LossScalers("cpu", losses="ab")
    assert list(scalers) == ["ab"], "one name, not two letters"
    scalers = LossScalers("cpu", losses=list("ab"))
    losses = {"a": table(torch.tensor([1, 1, 3])).sum(), "b": table.weight.square().sum()}
    scalers.backward(optimizer, **{name: losses[name] for name in order})
    scalers.backward(optimizer, a=table(torch.tensor([4])).sum())
    rows = torch.tensor([0.0, 2, 0, 1, 1])[:, None]
    assert torch.equal(table.weight.grad.to_dense(), 2 * table.weight.detach() + rows)


# --- steps and scales -----------------------------------------------------------------------------

factors = st.sampled_from([1.0, 1.0, 1.0, OVER, NAN, None])


@every
@settings(max_examples=40)
@given(history=st.lists(st.tuples(factors, factors), max_size=8))
def test_each_scale_follows_its_own_loss_and_the_step_all_of_them(kind, history) -> None:
    run, skipped = Run(kind), 0
    rule, states = ScaleRule(interval=2), {"a": ScaleState(8.0), "b": ScaleState(8.0)}
    for a, b in history:
        if a is b is None:
            continue
        with torch.no_grad():  # far from where squares of weights overflow by themselves
            run.w.copy_(torch.tensor([1.0, -2.0]))
            run.v.fill_(0.5)
        before = run.bits()
        run.iterate(a, b)
        for name, factor in (("a", a), ("b", b)):
            if factor is not None:
                states[name] = scale_rule.step(
                    rule, states[name], factor == 1.0, loss_finite=factor == factor
                )
            assert run.scalers[name].state_dict() == to_state_dict(rule, states[name])
        skip = not {a, b} <= {1.0, None}
        skipped += skip
        assert (run.bits() == before) == skip
        assert bool(run.scalers.step_skipped(run.optimizer)) == skip
        assert bool(run.scalers.found_inf(run.optimizer)) == skip
        assert int(run.scalers.skipped_steps) == skipped == run.scalers.state_dict()["skipped"]


@every
def test_the_step_is_the_optimizers(kind) -> None:
    run, plain = Run(kind), Run(kind)
    for _ in range(4):
        run.iterate(0.01, 0.02)
        plain.optimizer.zero_grad()
        sum(plain.losses(0.01, 0.02).values()).backward()
        plain.optimizer.step()
        assert run.bits() == plain.bits()
    assert run.scalers["a"].get_scale() == 32.0


@pytest.mark.parametrize("factor", [1.0, OVER])
def test_the_host_waits_once(factor, monkeypatch) -> None:
    run = Run()
    run.iterate()
    waits: list[str] = []
    run.optimizer.zero_grad()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda t, own=own, name=name: (waits.append(name), own(t))[1]
        )
    run.backward(factor)
    assert waits == []
    run.scalers.step(run.optimizer)
    assert waits == ["tolist"]
    run.scalers.update()
    assert waits == ["tolist"] + ["item"] * (factor != 1.0)  # whether the loss itself was at fault


def test_every_scale_is_set_before_a_stuck_one_raises() -> None:
    run = Run(stuck_after=1)
    with pytest.raises(
        StuckError, match=r"^1 steps in a row were skipped; the loss scale of 'a' is 4\."
    ):
        run.iterate(OVER, OVER)
    assert [s.get_scale() for s in run.scalers.values()] == [4.0, 4.0]
    run.iterate()


def test_names_for_reports_are_for_every_loss() -> None:
    w = torch.ones(2, requires_grad=True)
    scalers = LossScalers("cpu", losses=("a", "b"), named=iter([("mine", w)]))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scalers.backward(optimizer, a=w.sum(), b=w.sum())
    assert [s.report().gradients[0].name for s in scalers.values()] == ["mine", "mine"]


@every
def test_no_gradient_is_no_step(kind) -> None:
    run = Run(kind)
    before = run.bits()
    other = torch.ones((), requires_grad=True)
    run.scalers.backward(run.optimizer, a=other * 2)
    assert run.scalers.step(run.optimizer) is None
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        run.scalers.update()
    assert run.bits() == before
    assert bool(run.scalers.step_skipped(run.optimizer))
    assert run.scalers["a"]._get_growth_tracker() == 0


@every
def test_a_loss_without_gradients_beside_one_with_them_keeps_its_scale(kind) -> None:
    run = Run(kind)
    other = torch.ones((), requires_grad=True)
    run.scalers.backward(run.optimizer, a=other * 2, b=run.w.sum())
    run.scalers.step(run.optimizer)
    run.scalers.update()
    assert [run.scalers[name]._get_growth_tracker() for name in "ab"] == [0, 1]


def test_disabled_everything_passes_through() -> None:
    run = Run(enabled=False)
    run.backward(2.0)
    assert torch.equal(run.w.grad, true(run, (2.0, 1.0))[0])
    run.scalers.step(run.optimizer)
    assert run.v.item() == 0.5 - 0.5 * 10.0
    run.scalers.update()
    run.scalers.load_state_dict({"anything": 1})
    assert run.scalers.state_dict() == {}
    assert not run.scalers.is_enabled()
    assert not bool(run.scalers.step_skipped(run.optimizer))
    assert int(run.scalers.skipped_steps) == 0
    assert run.scalers.step(run.optimizer, lambda: torch.tensor(7.0)) == 7.0


# --- misuse ---------------------------------------------------------------------------------------


def test_the_scalers_by_name() -> None:
    scalers = Run().scalers
    assert list(scalers) == ["a", "b"]
    assert len(scalers) == 2
    assert all(isinstance(scaler, GradScaler) for scaler in scalers.values())
    with pytest.raises(KeyError, match="no loss 'c'; there are 'a', 'b'"):
        scalers["c"]
    assert "c" not in scalers


@pytest.mark.parametrize("losses", [(), ("a", "a"), ("retain_graph",), ("a", "skipped")])
def test_names_that_cannot_be(losses) -> None:
    with pytest.raises(ValueError, match="losses must be one name or more, each once, and none"):
        LossScalers("cpu", losses=losses)


def test_arguments_that_are_wrong() -> None:
    with pytest.raises(TypeError, match="losses must be names, got"):
        LossScalers("cpu", losses=(1, 2))
    with pytest.raises(TypeError, match="growth_rate"):
        LossScalers("cpu", losses="a", growth_rate=2.0)
    with pytest.raises(ValueError, match="hysteresis must be from 0"):
        LossScalers("cpu", losses="a", hysteresis=-1)


def test_calls_that_are_wrong_change_nothing() -> None:
    run = Run()
    before = run.scalers.state_dict(), run.bits()
    loss = run.losses()["a"]
    with pytest.raises(KeyError, match="no loss 'c'; there are 'a', 'b'"):
        run.scalers.backward(run.optimizer, a=loss, c=loss)
    with pytest.raises(TypeError, match=r"needs a loss by its name: one of 'a', 'b'\."):
        run.scalers.backward(run.optimizer)
    with pytest.raises(TypeError, match=r"the loss 'a' must be a tensor, got 3\.0"):
        run.scalers.backward(run.optimizer, a=3.0)
    with pytest.raises(RuntimeError, match=r"step\(\) was called before this SGD's backward"):
        run.scalers.step(run.optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\) was called before backward\(\)"):
        run.scalers.update()
    with pytest.raises(RuntimeError, match="has not looked at the gradients of this SGD"):
        run.scalers.found_inf(run.optimizer)
    assert run.w.grad is None
    run.backward()
    with pytest.raises(RuntimeError, match=r"called before this SGD's step\(\)"):
        run.scalers.step_skipped(run.optimizer)
    with pytest.raises(TypeError, match="takes no closure"):
        run.scalers.step(run.optimizer, lambda: 1.0)
    assert (run.scalers.state_dict(), run.bits()) == before
    run.scalers.step(run.optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last"):
        run.scalers.step(run.optimizer)
    with pytest.raises(RuntimeError, match=r"backward\(\) was called after this SGD's step\(\)"):
        run.backward()
    run.scalers.update()
    run.iterate()


def test_float16_gradients_are_refused_and_those_before_stay() -> None:
    w = torch.ones(2, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    w.grad = torch.ones_like(w)
    scalers = LossScalers("cpu", losses="a")
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scalers.backward(optimizer, a=w.float().sum())
    assert w.grad.tolist() == [1.0, 1.0]


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state", "pickle", "copy", "deepcopy"])
def test_a_run_goes_on(way) -> None:
    whole, run = Run(), Run()
    history = [(1.0, 1.0), (OVER, 1.0), (1.0, NAN), (0.001, 0.001), (0.001, None)]
    for a, b in history[:3]:
        whole.iterate(a, b)
        run.iterate(a, b)
    if way == "state":
        state = run.scalers.state_dict()
        run.scalers = Run(init_scale=1.0).scalers
        run.scalers.load_state_dict(state)
    elif way == "pickle":
        run.scalers = pickle.loads(pickle.dumps(run.scalers))
    else:
        run.scalers = getattr(copy, way)(run.scalers)
    assert run.scalers.state_dict() == whole.scalers.state_dict()
    assert int(run.scalers.skipped_steps) == 2
    for a, b in history[3:]:
        whole.iterate(a, b)
        run.iterate(a, b)
        assert run.bits() == whole.bits()
        assert run.scalers.state_dict() == whole.scalers.state_dict()


def test_one_of_the_states_is_a_scalers() -> None:
    run = Run()
    run.iterate(OVER)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(run.scalers.state_dict()["a"])
    assert scaler.get_scale() == 4.0


BAD: tuple[tuple[Any, type[Exception], str], ...] = (
    (None, TypeError, "the state of LossScalers must be a dictionary, got None"),
    ({}, KeyError, "must have the losses 'a', 'b'; it has nothing"),
    ({"a": {}, "c": {}}, KeyError, "it has 'a', 'c'"),
    ({"b": 3}, TypeError, "a scaler's state must be a dictionary, got 3"),
    ({"b": {"scale": 1.0}}, KeyError, "growth_factor"),
    ({"skipped": -1}, ValueError, "skipped must be from 0"),
    ({"skipped": "x"}, TypeError, "skipped must be a number, got 'x'"),
)


@pytest.mark.parametrize(("state", "kind", "said"), BAD, ids=lambda v: str(v)[:30])
def test_a_bad_state_changes_nothing(state, kind, said) -> None:
    run = Run()
    run.iterate(OVER)
    before = run.scalers.state_dict()
    good = Run(init_scale=2.0).scalers.state_dict()
    if isinstance(state, dict) and state and "c" not in state:
        state = good | state
    with pytest.raises(kind, match=said) as raised:
        run.scalers.load_state_dict(state)
    assert run.scalers.state_dict() == before
    if isinstance(state, dict) and state.get("b") != good["b"] and "c" not in state and state:
        assert raised.value.__notes__ == ["in the state of the loss 'b'"]


# --- a scaler for each optimizer ------------------------------------------------------------------


def test_a_scaler_for_each_optimizer_is_two_scalers() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.5) for w in weights]
    scalers = [GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for bad in (None, 1, None, None):
        for at, (w, optimizer, scaler) in enumerate(zip(weights, optimizers, scalers, strict=True)):
            optimizer.zero_grad()
            scaler.scale(w.sum() * (1e38 if at == bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [s.get_scale() for s in scalers] == [32.0, 8.0]
    assert [w.tolist() for w in weights] == [[-1.0, -1.0], [-0.5, -0.5]]
    assert [int(s.skipped_steps) for s in scalers] == [0, 1]


@every
@pytest.mark.parametrize("wide", [True, False], ids=["overflows", "fits"])
def test_true_gradients_that_overflow_only_in_their_sum_are_a_skip(kind, wide) -> None:
    """It counts for each of the losses."""
    w = torch.ones(2, requires_grad=True)
    optimizer = KINDS[kind]([w])
    asked = {"skip_on": "device"} if kind == "undone" else {}
    scalers = LossScalers("cpu", losses=("a", "b"), init_scale=2.0**-4, **asked)
    each = 2e38 if wide else 2e37
    scalers.backward(optimizer, a=(w * each).sum(), b=(w * each).sum())
    scalers.step(optimizer)
    scalers.update()
    assert bool(scalers.step_skipped(optimizer)) == wide
    assert (w.tolist() == [1.0, 1.0]) == wide
    assert w.isfinite().all()
    assert int(scalers.skipped_steps) == wide
    for scaler in scalers.values():
        assert scaler.get_scale() == 2.0 ** (-5 if wide else -4)
        assert scaler.state_dict()["skips"] == wide
