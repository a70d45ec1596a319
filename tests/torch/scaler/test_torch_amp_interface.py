"""`GradScaler`: misuse, and the names that others reach for, beside torch.amp's."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState as TorchOptState

from polymp.backends.torch.scaler.grad_scaler import OptState, _refresh_per_optimizer_state
from polymp.torch import GradScaler, cpu, cuda
from tests.support.torch.training import entries

CLASSES = (GradScaler, torch.amp.GradScaler)
BOTH = pytest.mark.parametrize("kind", CLASSES, ids=["polymp", "torch"])


def weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    w = torch.ones(2, dtype=dtype, requires_grad=True)
    w.grad = torch.full_like(w, value)
    return w


def sgd(*weights: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights or [weight()], lr=0.5, **options)


def ready(kind: Any, **arguments: Any) -> Any:
    """A scaler that has scaled something."""
    scaler = kind("cpu", **{"init_scale": 4.0, **arguments})
    scaler.scale(torch.ones(()))
    return scaler


# --- misuse: the same exceptions, word for word --------------------------------------------------


def of_one_optimizer(scaler: Any, *calls: str) -> None:
    optimizer = sgd()
    for call in calls:
        getattr(scaler, call)(optimizer)


def in_mid_iteration(scaler: Any, how: Callable[[Any], Any]) -> None:
    scaler.unscale_(sgd())
    how(scaler)


def other_device(scaler: Any) -> None:
    with FakeTensorMode():
        new_scale = torch.ones((), device="cuda")
    scaler.update(new_scale)


MISUSE: dict[str, Callable[[Any], Any]] = {
    "unscaled twice": lambda s: of_one_optimizer(s, "unscale_", "unscale_"),
    "unscaled after step": lambda s: of_one_optimizer(s, "step", "unscale_"),
    "stepped twice": lambda s: of_one_optimizer(s, "step", "step"),
    "update without a check": lambda s: s.update(),
    "float16 gradients": lambda s: s.unscale_(sgd(weight(dtype=torch.float16))),
    "a number to scale": lambda s: s.scale(3.0),
    "numbers to scale": lambda s: s.scale([torch.ones(()), 3.0]),
    "an empty state": lambda s: s.load_state_dict({}),
    "a new scale of two elements": lambda s: s.update(torch.ones(2)),
    "a new scale that wants gradients": lambda s: s.update(torch.ones((), requires_grad=True)),
    "a new scale on another device": other_device,
    "pickled in mid-iteration": lambda s: in_mid_iteration(s, pickle.dumps),
    "copied in mid-iteration": lambda s: in_mid_iteration(s, copy.copy),
    "copied deeply in mid-iteration": lambda s: in_mid_iteration(s, copy.deepcopy),
    "tracker made before scale": lambda s: s._lazy_init_scale_growth_tracker(torch.device("cpu")),
}
EARLY: dict[str, Callable[[Any], Any]] = {
    "unscale_": lambda s: s.unscale_(sgd()),
    "step": lambda s: s.step(sgd()),
    "update": lambda s: s.update(),
    "update with a scale": lambda s: s.update(2.0),
    "_check_inf_per_device": lambda s: s._check_inf_per_device(sgd()),
}
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"growth_factor": 1.0},
    {"growth_factor": 0.5},
    {"backoff_factor": 1.0},
    {"backoff_factor": 2.0},
    {"growth_rate": 2.0},
)


def outcome(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run()
        except Exception as error:
            return type(error), str(error)
    return result, [(w.category, str(w.message), w.filename) for w in caught]


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_what_torch_raises(name: str) -> None:
    ours, theirs = (outcome(lambda k=kind: MISUSE[name](ready(k))) for kind in CLASSES)
    assert ours == theirs
    assert issubclass(ours[0], Exception)


@pytest.mark.parametrize("name", EARLY)
def test_too_early_raises_what_torch_raises(name: str) -> None:
    ours, theirs = (outcome(lambda k=kind: EARLY[name](k("cpu"))) for kind in CLASSES)
    assert ours == theirs
    assert ours[0] is AssertionError
    assert "but _scale is None" in ours[1]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_wrong_arguments_raise_what_torch_raises(arguments: dict[str, Any]) -> None:
    ours, theirs = (outcome(lambda k=kind: k("cpu", **arguments)) for kind in CLASSES)
    assert ours == theirs
    assert issubclass(ours[0], Exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a GPU")
@pytest.mark.parametrize("args", [(), ("cuda",)])
def test_cuda_without_a_gpu_warns_and_disables(args: tuple[str, ...]) -> None:
    found = [outcome(lambda k=kind: k(*args).is_enabled()) for kind in CLASSES]
    assert found[0][0] is False
    assert [entry[:2] for entry in found[0][1]] == [entry[:2] for entry in found[1][1]]
    assert [entry[0] for entry in found[0][1]] == [UserWarning]


def test_disabled_everything_passes_through() -> None:
    scaler, optimizer, loss = GradScaler("cpu", enabled=False), sgd(), torch.ones(())
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 5.0) == 5.0
    scaler.update()
    scaler.load_state_dict({"anything": 1})
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    assert scaler.state_dict() == {}
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1.0, 0)
    assert not scaler.is_enabled()


def test_an_optimizer_that_asks_for_the_scaler_gets_it_with_torch_s_warning() -> None:
    class Old(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
            return grad_scaler.get_scale(), dict(grad_scaler._check_inf_per_device(self))

    results = [outcome(lambda k=kind: ready(k).step(Old([weight()], {}))) for kind in CLASSES]
    assert results[0][0] == results[1][0] == (4.0, {torch.device("cpu"): torch.zeros(())})
    assert [w[:2] for w in results[0][1]] == [w[:2] for w in results[1][1]]
    assert [w[0] for w in results[0][1]] == [FutureWarning]


# --- what others reach for -----------------------------------------------------------------------


NUMBERS = (
    "_growth_factor", "_backoff_factor", "_growth_interval", "_init_scale", "_init_growth_tracker",
    "_enabled", "_device",
)  # fmt: skip


def reached(kind: Any) -> dict[str, Any]:
    """Types and values of the names that other libraries use, in the middle of an iteration."""
    scaler = kind("cpu", 4.0, 3.0, 0.25, 7)
    before = {"_scale": scaler._scale, "_growth_tracker": scaler._growth_tracker}
    optimizer = sgd(weight(), weight(float("inf")))
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    found = state["found_inf_per_device"]
    fresh = scaler._per_optimizer_states[0]
    return before | {
        "numbers": [
            (type(getattr(scaler, name)).__name__, getattr(scaler, name)) for name in NUMBERS
        ],
        "tensors": [
            (t.dtype, t.shape, t.device, t.item()) for t in (scaler._scale, scaler._growth_tracker)
        ],
        "states": (type(scaler._per_optimizer_states), type(state), list(state)[:2]),
        "stages": (state["stage"], fresh["stage"]),
        "found": [(d, t.dtype, t.shape, t.item()) for d, t in found.items()],
        "_found_inf_per_device": scaler._found_inf_per_device(optimizer) is found,
        "checked": [type(t) for t in scaler._check_scale_growth_tracker("x")],
        "skipped": scaler._maybe_opt_step(optimizer, state, lambda: 5.0),
        "stepped": scaler._maybe_opt_step(optimizer, {"found_inf_per_device": {}}, lambda: 5.0),
        "_get_scale_async": scaler._get_scale_async() is scaler._scale,
    }


def test_the_names_that_others_use_are_there_with_torch_s_types() -> None:
    ours = reached(GradScaler)
    assert ours == reached(torch.amp.GradScaler)
    assert ours["states"] == (defaultdict, dict, ["stage", "found_inf_per_device"])
    assert ours["stages"] == (TorchOptState.UNSCALED, TorchOptState.READY)
    assert (ours["skipped"], ours["stepped"]) == (None, 5.0)


def test_the_module_has_the_names_of_torch_s() -> None:
    assert OptState is TorchOptState
    state = _refresh_per_optimizer_state()
    assert state == {"stage": OptState.READY, "found_inf_per_device": {}}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_device_spellings() -> None:
    assert entries(cpu.GradScaler(8.0, 3.0, 0.25, 5).state_dict()) == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "_growth_tracker": 0,
    }
    assert cpu.GradScaler()._device == "cpu"
    assert cuda.GradScaler(enabled=False)._device == "cuda"
    assert issubclass(cuda.GradScaler, GradScaler)


@BOTH
def test_a_loss_may_be_scaled_inside_a_transform(kind: Any) -> None:
    scaler, w = ready(kind), torch.tensor([1.0, -3.0])

    def scaled(w: torch.Tensor) -> torch.Tensor:
        return scaler.scale(w.square().sum())

    scale = scaler.get_scale()
    assert torch.func.grad(scaled)(w).tolist() == [2 * scale, -6 * scale]
    rows = torch.stack([w, 2 * w])
    assert torch.vmap(torch.func.grad(scaled))(rows).tolist() == (2 * scale * rows).tolist()


@BOTH
def test_a_lost_loss_inside_a_transform_has_its_own_gradients(kind: Any) -> None:
    scaler = ready(kind)
    rows = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    made = torch.vmap(torch.func.grad(lambda w: scaler.scale(w.sum())))(rows)
    assert made.tolist() == [[scaler.get_scale()] * 2] * 2
