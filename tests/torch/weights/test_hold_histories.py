"""Random histories of a model's weights: with held casts as without, bit for bit.

What can happen is in `held_histories`. Planted faults show that the comparison notices them.
Products in 8 bits may have any sizes here, so that those of the model have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.backends.torch.autocast import held_casts, region_casts
from polymp.backends.torch.weights import held_modules
from polymp.fp8 import fallback
from polymp.torch import hold_casts
from tests.support.sizes import size
from tests.support.torch.fp8_models import policy
from tests.support.torch.held_histories import (
    DTYPES,
    MATRICES,
    OPTIMIZERS,
    SCALERS,
    USES,
    WRITES,
    Event,
    agree,
    differs_at,
)

IN_8_BITS = {recipe: policy(recipe) for recipe in ("tensorwise", "rowwise")}


@pytest.fixture(autouse=True, scope="module")
def any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "MULTIPLE", 1)
        yield


inside = st.sampled_from([*USES, *USES, *DTYPES, "off", "aside", "shadow", "mul_", "foreach"])
regions = st.tuples(
    st.just("region"),
    st.sampled_from(["ours", "ours", "ours", "torch", "decorated", "around", "halfway"]),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["grad", "grad", "grad", "no_grad", "inference"]),
    st.booleans() | st.just(True),
    st.sampled_from([None, None, None, "amp", "lean", "matmul", *IN_8_BITS.values()]),
    st.lists(inside, min_size=1, max_size=3),
).filter(lambda event: event[2] == "bfloat16" or event[5] not in IN_8_BITS.values())
backwards = st.tuples(
    st.just("backward"),
    st.sampled_from(["sum", "each", "reversed"]),
    st.sampled_from([1.0, 1.0, 1.0, float("inf")]),
)
names = st.sampled_from(MATRICES)
changes = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("write"), st.sampled_from(list(WRITES)), names),
    st.tuples(st.just("load"), st.booleans()),
    st.tuples(st.just("swap"), st.sampled_from(["data", "copy", "tensors"]), names),
    st.tuples(st.just("data"), st.integers(1, 4), names),
    st.tuples(st.just("transpose"), names),
    st.tuples(st.just("flip"), st.sampled_from(["w", "a.weight", "base.weight"])),
    st.tuples(st.just("invalidate")),
    st.tuples(st.just("again")),
)
histories = st.lists(st.one_of(regions, regions, backwards, changes, changes), max_size=14)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of ours wait for the first region with gradients; until then layers hold alone."""
    monkeypatch.setattr(held_modules, "bare", lambda *_: False)


@pytest.mark.sized
@pytest.mark.parametrize("together", [False, True], ids=["each", "together"])
@pytest.mark.parametrize("small", [0, 60, 2**16], ids=["nodes", "small", "layers"])
def test_histories(
    monkeypatch: pytest.MonkeyPatch, request: Any, small: int, together: bool
) -> None:
    if small > 60:
        request.getfixturevalue("late")
    monkeypatch.setattr(held_casts, "SMALL", small)
    monkeypatch.setattr(held_casts, "TOGETHER", {"cpu"} if together else set())

    @settings(max_examples=(2 if small == 0 else 1) * size(5, 50))
    @given(st.sampled_from(list(OPTIMIZERS)), st.sampled_from(list(SCALERS)), histories)
    def histories_agree(optimizer: str, scaler: str, history: list[Event]) -> None:
        assert differs_at(optimizer, scaler, history) is None

    histories_agree()


def region(
    *uses: str, kind: str = "ours", dtype: str = "bfloat16", mode: str = "grad", cache: bool = True
) -> Event:
    return ("region", kind, dtype, mode, cache, None, list(uses))


SUM, STEP = ("backward", "sum", 1.0), ("step",)
FUSED, LOOP, FOREACH = "fused adamw", "loop sgd", "foreach adamw"
TRAINED = ("mm", "tied", "table")

# Each by name: optimizer, scaler, events. All agree, until a fault is planted.
DIRECTED: dict[str, tuple[str, str, list[Event]]] = {
    "fused steps": (FUSED, "none", [region("mm"), SUM, STEP, region("mm"), SUM, STEP] * 2),
    "a skipped step": (
        FUSED,
        "device",
        [
            region(*TRAINED, dtype="float16"),
            ("backward", "sum", float("inf")),
            STEP,
            ("zero_grad", True),
            region(*TRAINED, dtype="float16"),
            SUM,
            STEP,
            region(*TRAINED, dtype="float16"),
        ],
    ),
    "accumulation": (LOOP, "torch", [*[region("transposed", "tied", "adapters")] * 5, SUM, STEP]),
    "written": (LOOP, "none", [region("mm"), ("write", "mul_", "w"), region("mm")]),
    "written, frozen": (
        LOOP,
        "none",
        [
            region("adapters", "table"),
            ("write", "copy_", "base.weight"),
            region("adapters", mode="inference"),
            ("write", "view", "table"),
            region("table"),
        ],
    ),
    "swapped": (LOOP, "none", [region("mm"), ("swap", "data", "w"), region("mm", "shadow")]),
    "same address": (
        LOOP,
        "none",
        [region("mm"), *[event for _ in range(6) for event in (("data", 2, "w"), region("mm"))]],
    ),
    "two dtypes": (
        LOOP,
        "none",
        [region("mm", "float16", "mm"), region("mm", dtype="float16"), region("mm"), SUM],
    ),
    "turned": (LOOP, "none", [region("mm"), ("transpose", "w"), region("mm", mode="no_grad")]),
    "invalidated": (LOOP, "none", [region("mm", "adapters"), ("invalidate",), region("mm")]),
    "loaded": (FOREACH, "none", [region(*TRAINED), ("load", True), region(*TRAINED), SUM, STEP]),
    "torch's region": (LOOP, "none", [region("thrice", kind="torch")] * 3 + [SUM]),
    "layers": (
        LOOP,
        "none",
        [
            region("tied", "conv", mode="no_grad"),
            ("write", "mul_", "a.weight"),
            region("tied", "adapters", mode="no_grad"),
            ("write", "copy_", "base.weight"),
            region("adapters", "float16", mode="inference"),
            ("swap", "tensors", "base.weight"),
            region("adapters", dtype="float16"),
            region("tied", "conv"),
            SUM,
            STEP,
            region("tied", mode="no_grad"),
        ],
    ),
    "inference first": (LOOP, "none", [region("mm", mode="inference"), region("mm"), SUM, STEP]),
}


def directed(name: str, recipe: str = "") -> tuple[str, str, list[Event]]:
    """A history; with a recipe, its products run in 8 bits where the region's dtype allows it."""
    optimizer, scaler, events = DIRECTED[name]
    if recipe:
        events = [
            (*event[:5], IN_8_BITS[recipe], event[6])
            if event[0] == "region" and event[2] == "bfloat16"
            else event
            for event in events
        ]
    return optimizer, scaler, events


def seen(name: str, recipe: str = "") -> bool:
    return not agree(*directed(name, recipe))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_casts, "SMALL", 0)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("recipe", ["", *IN_8_BITS])
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_histories(name: str, recipe: str) -> None:
    assert differs_at(*directed(name, recipe)) is None


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_histories_of_layers_alone(name: str) -> None:
    assert differs_at(*DIRECTED[name]) is None


def without(*places: int) -> Any:
    """A stamp that leaves something out."""
    stamp = held_casts._stamp
    return lambda t: tuple(part for at, part in enumerate(stamp(t)) if at not in places)


def sharing_nodes() -> Any:
    cast, made = held_casts.cast, dict[Any, Any]()

    def shared(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key = id(t), dtype, t._version, t.data_ptr(), t.requires_grad and torch.is_grad_enabled()
        return made.setdefault(key, (t, cast(t, dtype)))[1]  # type: ignore[no-any-return]

    return shared


def of_one_dtype() -> Any:
    find = held_casts.find
    return lambda t, dtype: find(t, torch.bfloat16)


def made_in_inference_mode() -> Any:
    def made(weight: held_casts.Weight, t: torch.Tensor, key: Any) -> held_casts.Held:
        low = t.detach().to(key[0])
        held = held_casts.Held(held_casts._stamp(t), t.detach(), low, 0, torch.empty(0))
        weight.casts[key] = held
        return held

    return made


# What is planted, in which module, and the histories that notice it.
FAULTS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "no versions": (
        held_casts,
        "_stamp",
        lambda: without(0),
        ("written", "written, frozen"),
    ),
    "no addresses": (held_casts, "_stamp", lambda: without(1), ("swapped", "same address")),
    "no strides": (held_casts, "_stamp", lambda: without(3), ("turned",)),
    "no steps": (
        held_casts,
        "stepped",
        lambda: lambda _: None,
        ("fused steps", "a skipped step"),
    ),
    "shared nodes": (held_casts, "cast", sharing_nodes, ("accumulation",)),
    "one dtype": (held_casts, "find", of_one_dtype, ("two dtypes",)),
    "inference": (held_casts, "_made_again", made_in_inference_mode, ("inference first",)),
    "no invalidate": (hold_casts, "invalidate", lambda: lambda _: None, ("invalidated",)),
    "layers: whatever was served": (
        held_modules,
        "_served",
        lambda: lambda known, t, dtype: known and known[1].low,
        ("layers",),
    ),
    "layers: gradients": (held_modules, "is_grad_enabled", lambda: lambda: False, ("layers",)),
    "torch's map": (region_casts, "kept_by_torch", lambda: lambda _: False, ("torch's region",)),
}


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted, histories = FAULTS[fault]
    monkeypatch.setattr(where, name, planted())
    assert {history: seen(history) for history in histories} == dict.fromkeys(histories, True)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("recipe", IN_8_BITS)
@pytest.mark.parametrize("fault", ["no versions", "no addresses", "no steps", "no invalidate"])
def test_planted_faults_are_noticed_in_8_bits(
    fault: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, planted, histories = FAULTS[fault]
    monkeypatch.setattr(where, name, planted())
    assert all(seen(history, recipe) for history in histories)
