"""`GradScaler`: misuse, names that others reach for, and several devices, beside torch.amp's."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState as TorchOptState

from polymp.backends.torch.scaler.grad_scaler import OptState, _refresh_per_optimizer_state
from polymp.torch import GradScaler, cpu, cuda
from tests.support.torch.each_op import EachOp
from tests.support.torch.training import entries

INF, NAN = float("inf"), float("nan")
CLASSES = (GradScaler, torch.amp.GradScaler)
BOTH = pytest.mark.parametrize("kind", CLASSES, ids=["polymp", "torch"])


def weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    w = torch.ones(2, dtype=dtype, requires_grad=True)
    w.grad = torch.full_like(w, value)
    return w


def sgd(*weights: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights or [weight()], lr=0.5, **options)


def ready(kind: Any, **arguments: Any) -> Any:
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


CALLS: dict[str, Callable[[Any], Any]] = (
    {name: lambda kind, f=f: f(ready(kind)) for name, f in MISUSE.items()}
    | {f"{name}, too early": lambda kind, f=f: f(kind("cpu")) for name, f in EARLY.items()}
    | {str(given): lambda kind, given=given: kind("cpu", **given) for given in ARGUMENTS}
)


@pytest.mark.parametrize("name", CALLS)
def test_misuse_raises_what_torch_raises(name: str) -> None:
    ours, theirs = (outcome(lambda k=kind: CALLS[name](k)) for kind in CLASSES)
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
    assert scaler.step_skipped(optimizer).dtype is torch.bool
    assert (bool(scaler.step_skipped(optimizer)), int(scaler.skipped_steps)) == (False, 0)
    assert scaler.report().gradients == ()
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


def test_the_constants_can_be_set_to_any_value_as_in_torch() -> None:
    found = []
    for kind in CLASSES:
        scaler = ready(kind)
        scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 1.0, 0.25, 1
        for value in (1.0, float("inf")):
            scaler.step(sgd(weight(value)))
            scaler.update()
            found.append((scaler.get_growth_factor(), scaler.get_scale()))
    assert found == [(1.0, 4.0), (1.0, 1.0)] * 2


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
    assert OptState is TorchOptState
    fresh = _refresh_per_optimizer_state()
    assert fresh == {"stage": OptState.READY, "found_inf_per_device": {}}


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
    rows = torch.tensor([[1.0, 2.0], [INF, 1.0]])  # a lost loss has its own gradients
    made = torch.vmap(torch.func.grad(lambda w: scaler.scale(w.sum())))(rows)
    assert made.tolist() == [[scale] * 2] * 2


# --- misuse that torch.amp has no word for, and optimizers that it refuses -----------------------


# Arguments that this scaler alone has, and what is said about them.
OWN: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"device": 1024.0}, TypeError,
        "device must be a name such as 'cuda' or 'cpu', got 1024.0. The first scale is "
        "GradScaler(device, init_scale)."),
    ({"on_stuck": "ignore"}, ValueError,
        "on_stuck must be 'warn', 'raise' or a function, got 'ignore'."),
    # What torch gives, in place of a group, to a process that is not in it; and a name.
    *(
        ({"process_group": x}, TypeError,
            "process_group must be None or a torch.distributed.ProcessGroup that this process is "
            f"in, such as torch.distributed.group.WORLD, got {x!r}.")
        for x in (dist.GroupMember.NON_GROUP_MEMBER, "world")
    ),
    *(
        ({"stuck_after": x}, ValueError, f"stuck_after must be a whole number from 1 up, got {x}.")
        for x in (0, True)
    ),
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), OWN, ids=lambda v: str(v)[:40])
def test_wrong_arguments_raise_what_names_them(arguments, error, message) -> None:
    assert outcome(lambda: GradScaler(**{"device": "cpu"} | arguments)) == (error, message)


NEW = f"new_scale must be from min_scale to max_scale, {2.0**-126!r} to {2.0**126!r}; got "


@pytest.mark.parametrize(
    ("new", "error", "message"),
    [
        *((x, ValueError, f"{NEW}{x!r}.") for x in (0.0, -1.0, 2.0**127, INF, NAN)),
        ("8", TypeError, "new_scale must be a number, got '8'."),
    ],
    ids=str,
)
def test_a_new_scale_that_is_none_changes_nothing(new, error, message) -> None:
    scaler = ready(GradScaler)
    before, looked = scaler.state_dict(), sgd()
    scaler.step(looked)
    assert outcome(lambda: scaler.update(new)) == (error, message)
    assert scaler.state_dict() == before
    scaler.update()  # the iteration is still open
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_gradients_is_left_alone(fused: bool) -> None:
    scaler, w = ready(GradScaler), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.5, fused=fused)
    before = scaler.state_dict()
    assert scaler.step(optimizer) is None
    assert (w.tolist(), dict(optimizer.state)) == ([1.0, 1.0], {})
    assert not scaler.step_skipped(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    assert scaler.state_dict() == before
    scaler.step(sgd())  # another one goes on
    scaler.update()
    assert scaler._get_growth_tracker() == 1


def test_a_strict_scaler_wants_gradients_as_torch_s_does() -> None:
    without, fused = (sgd(torch.ones(2, requires_grad=True), fused=f) for f in (False, True))
    for misuse in (
        lambda scaler: scaler.step(without),
        lambda scaler: (scaler.unscale_(without), scaler.update()),
    ):
        ours = outcome(lambda m=misuse: m(ready(GradScaler, strict=True)))
        assert ours == outcome(lambda m=misuse: m(ready(torch.amp.GradScaler)))
        assert ours[0] is AssertionError
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        ready(GradScaler, strict=True).step(fused)  # torch.amp raises in update() only


# --- parameters on several devices, and findings that subclasses change --------------------------


def unscaled(op: Any, args: Any, _: Any) -> list[tuple[str, torch.dtype]] | None:
    """Devices and dtypes of the gradients that are unscaled in one call."""
    if op is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
        return None
    gradients, found, inverse = args
    assert {t.device for t in gradients} == {found.device} == {inverse.device}
    return [(str(t.device), t.dtype) for t in gradients]


class Fused(torch.optim.Optimizer):
    """Keeps what a scaler hands to an optimizer that decides on the device."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        return self.grad_scale, self.found_inf  # type: ignore[attr-defined]


@BOTH
def test_gradients_of_several_devices_are_unscaled_where_they_are(kind: Any) -> None:
    """On fake devices: each has a copy of the inverse and a finding of its own."""
    devices = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")]
    calls: list[tuple[Any, ...]] = []

    class Watched(kind):  # type: ignore[misc]
        def _unscale_grads_(self, *args: Any) -> Any:
            found = super()._unscale_grads_(*args)
            calls.append(tuple(found))
            return found

    with FakeTensorMode():
        scaler = Watched("cpu")
        scaled = scaler.scale([torch.ones((), device=d) for d in devices])
        assert [t.device for t in scaled] == devices
        assert scaler._scale.device == devices[0]
        weights = [torch.ones(2, device=d) for d in (*devices, devices[2])]
        weights.append(torch.ones(2, device=devices[1], dtype=torch.float64))
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer, other = Fused(weights, {}), Fused(weights[1:2], {})
        with EachOp(unscaled) as unscalings:
            scaler.unscale_(optimizer)
        assert sorted(unscalings.seen, key=str) == [
            [("cpu", torch.float32)],
            [("cuda:0", torch.float32)],
            [("cuda:0", torch.float64)],
            [("cuda:1", torch.float32)] * 2,
        ]
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert [(d, t.device, t.dtype, t.shape) for d, t in found.items()] == [
            (d, d, torch.float32, torch.Size([])) for d in devices
        ]
        scale, combined = scaler.step(optimizer)
        assert (scale, combined.device) == (None, devices[0])
        scale, combined = scaler.step(other)
        assert (scale.device, combined.device) == (devices[0], devices[0])
        scaler.update()
        assert scaler._scale.device == devices[0]
    assert calls == [tuple(devices), (devices[1],)]


@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_a_finding_on_any_device_skips_the_whole_step_and_counts_once(which: int | None) -> None:
    class Devices(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            super()._unscale_grads_(*args)
            return {at: torch.tensor(float(at == which)) for at in range(3)}

    def run(optimizer: Any) -> tuple[Any, ...]:
        scaler = ready(Devices, growth_interval=1)
        result = scaler.step(optimizer)
        scaler.update()
        return result, scaler.get_scale()

    w = weight()
    run(sgd(w))
    assert w.tolist() == ([0.875, 0.875] if which is None else [1.0, 1.0])
    (_, found), scale = run(Fused([weight()], {}))
    assert (found.item(), scale) == ((0.0, 8.0) if which is None else (1.0, 2.0))


@pytest.mark.parametrize("factor", [2.0, 0.5], ids=["sum", "mean"])
@pytest.mark.parametrize("fused", [False, True])
def test_sums_and_means_of_findings_over_ranks_skip_and_count_once(fused, factor) -> None:
    """Fused kernels of torch skip for 1 and for nothing else."""
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5, fused=fused)
    scaler = GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    w.grad[0] = float("inf")
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.mul_(factor)
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1.0, 1.0]
    state = scaler.state_dict()
    assert (state["skips"], state["skipped"], state["scale"]) == (1, 1, 2.0**15)
