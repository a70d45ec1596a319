"""`GradScaler` for JAX as a value: made, refused, shown, taken apart, and saved."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from polymp.jax import GradScaler
from polymp.scaling import LARGEST, SMALLEST, ScaleRule, ScaleState
from tests.conftest import need
from tests.support.jax.scaler_tools import KINDS, bits, kinds


def test_defaults_are_torchs():
    need("torch")
    import torch

    ours, theirs = GradScaler().state_dict(), torch.amp.GradScaler("cpu").state_dict()
    assert {key: ours[key] for key in theirs} == theirs
    others = {"min_scale": SMALLEST, "max_scale": LARGEST}
    others |= dict.fromkeys(["hysteresis", "skips", "spoiled", "skipped"], 0)
    assert {key: ours[key] for key in ours if key not in theirs} == others


def test_a_device_is_refused():
    with pytest.raises(TypeError, match=r"^GradScaler\('cpu'\): in JAX it takes no device."):
        GradScaler("cpu")


ODD = GradScaler(8.0, 3.0, 0.25, 7, min_scale=0.5, max_scale=64.0, hysteresis=1)
SHOWN = (
    "growth=3.0, backoff=0.25, interval=7, min_scale=0.5, max_scale=64.0, hysteresis=1, "
    "enabled=True)"
)


def test_no_field_is_forgotten_on_the_way_through_a_transform():
    scaler = ODD.update(False).update(False, loss_finite=False)
    text = f"GradScaler(scale=2.0, tracker=0, skips=2, spoiled=1, skipped=2, {SHOWN}"
    through = (
        jax.jit(lambda s: s)(scaler),
        jax.tree.map(lambda x: x, scaler),
        jax.tree_util.tree_map_with_path(lambda _, x: x, scaler),
        jax.lax.scan(lambda s, _: (s, None), scaler, None, length=2)[0],
    )
    assert [repr(s) for s in through] == [text] * len(through)
    assert not jax.jit(lambda s: s)(GradScaler(enabled=False)).enabled
    assert kinds(ODD) == KINDS
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ODD)]
    assert paths == [f".state.{name}" for name in ScaleState._fields]


def test_other_constants_are_another_program():
    traced = []

    @jax.jit
    def run(scaler):
        traced.append(scaler)
        return scaler.update(True)

    for scaler in (ODD, ODD.update(True), GradScaler(8.0), GradScaler(9.0)):
        run(scaler)
    assert len(traced) == 2
    counts = ", ".join(f"{name}=int32[]" for name in ScaleState._fields[1:])
    assert repr(traced[0]) == f"GradScaler(scale=float32[], {counts}, {SHOWN}"


def test_it_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        ODD.rule = ScaleRule()  # type: ignore[misc]


def test_it_shows_itself_with_something_else_for_a_state():
    marked = jax.tree.map(lambda _: "here", ODD)
    assert repr(marked).startswith("GradScaler(scale='here', tracker='here', skips='here'")
    hole = jax.tree.unflatten(jax.tree.structure(ODD, is_leaf=lambda x: x is ODD.state), ["state"])
    assert repr(hole) == f"GradScaler(state='state', {SHOWN}"


def new() -> GradScaler:
    """One as a program has it that starts again."""
    return GradScaler(9.0, 1.5, 0.3, 2, min_scale=2.0**-20, max_scale=2.0**20, hysteresis=1)


def used() -> GradScaler:
    """One of the same rule every number of which is another."""
    scaler = new()
    for found in ("good", "good", "overflow", "good", "spoiled", "overflow", "overflow"):
        scaler = scaler.update(found == "good", loss_finite=found != "spoiled")
    return scaler


def whole(scaler: GradScaler) -> Any:
    return bits(scaler), scaler.rule, scaler.enabled


def goes_on(scaler: GradScaler) -> list[Any]:
    step, seen = jax.jit(lambda s, finite: s.update(finite)), []
    for finite in (True, True, False, False, False, True, True):
        scaler = step(scaler, finite)
        seen.append(whole(scaler))
    return seen


def by_standard_orbax(scaler: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scaler": scaler, "step": jnp.int32(7)})
    with ocp.StandardCheckpointer() as checkpointer:
        target = {"scaler": new(), "step": jnp.int32(0)}
        return checkpointer.restore(folder / "state", target)["scaler"]


def by_pytree_orbax(scaler: Any, folder: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scaler": scaler})
        return checkpointer.restore(folder / "state", item={"scaler": new()})["scaler"]


def by_state_dict_in_orbax(scaler: Any, folder: Path) -> Any:
    """The state dict, which has the rule, too, as Python numbers."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "state", scaler.state_dict())
        return GradScaler().load_state_dict(checkpointer.restore(folder / "state"))


def by_state_dict_in_flax(scaler: Any, _: Path) -> Any:
    data = flax.serialization.to_bytes({"scaler": scaler.state_dict()})
    saved = flax.serialization.msgpack_restore(data)["scaler"]
    return GradScaler().load_state_dict(saved)


def by_leaves(scaler: Any, folder: Path) -> Any:
    np.savez(folder / "leaves", *jax.tree.leaves(scaler))
    with np.load(folder / "leaves.npz") as saved:
        return jax.tree.unflatten(jax.tree.structure(new()), list(saved.values()))


WAYS = {
    "pickle": lambda scaler, _: pickle.loads(pickle.dumps(scaler)),
    "copy": lambda scaler, _: copy.copy(scaler),
    "deepcopy": lambda scaler, _: copy.deepcopy(scaler),
    "orbax": by_standard_orbax,
    "orbax, pytree": by_pytree_orbax,
    "orbax, json": by_state_dict_in_orbax,
    "flax, state dict": by_state_dict_in_flax,
    "leaves": by_leaves,
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_is_what_went_in_and_goes_on(way, tmp_path):
    scaler = used()
    back = WAYS[way](scaler, tmp_path)
    assert isinstance(back, GradScaler)
    assert whole(back) == whole(scaler) != whole(new())
    assert goes_on(back) == goes_on(scaler) != goes_on(new())


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_a_disabled_scaler_stays_disabled(way, tmp_path):
    assert WAYS[way](GradScaler(enabled=False), tmp_path).scale(3.0) == 3.0


def test_a_copy_of_one_that_is_donated_lives_on():
    scaler = used()
    kept, wanted = copy.deepcopy(scaler), whole(scaler)
    after = jax.jit(lambda s: s.update(True), donate_argnums=0)(scaler)
    assert scaler.state.scale.is_deleted()
    assert not after.state.scale.is_deleted()
    assert whole(kept) == wanted


@pytest.mark.parametrize("first", [1e38, 3.4e38, 1e-40, 1e-45])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_first_scale_beyond_the_bounds_trains(first, wrap):
    """XLA on CPU takes subnormal numbers for 0: neither the scale nor its inverse may be one."""
    scaler, w = GradScaler(first), jnp.ones(2)
    assert scaler.state_dict()["scale"] == np.float32(first)

    @wrap
    def train(scaler, w, slope):
        grads = jax.grad(lambda w: scaler.scale(slope * w.sum()))(w)
        return scaler.step(grads, lambda g, w: w - g, w)

    slope = 2.0**-10 if first > 1 else 8.0
    w, scaler, finite = train(scaler, w, jnp.float32(slope))
    assert (w.tolist(), bool(finite)) == ([1.0 - slope] * 2, True)
    assert scaler.state_dict()["scale"] == np.float32(first)
    w, scaler, finite = train(scaler, w, jnp.float32(jnp.inf))
    assert (w.tolist(), bool(finite)) == ([1.0 - slope] * 2, False)
    assert SMALLEST <= scaler.state_dict()["scale"] <= LARGEST * 2


@pytest.mark.parametrize(
    ("finite", "shown"),
    [
        (1.0, "float32[]"),
        (1, "int32[]"),
        (np.ones(2, bool), "bool[2]"),
        ({"a": 1}, "{'a': 1}"),
        (None, "None"),
    ],
    ids=["float", "int", "two", "dict", "None"],
)
@pytest.mark.parametrize("name", ["finite", "loss_finite"])
def test_update_wants_one_bool(name, finite, shown):
    said = re.escape(f"{name} must be one bool, got {shown}.")
    with pytest.raises(TypeError, match=f"^{said}$"):
        GradScaler().update(**{"finite": True, name: finite})


@pytest.mark.parametrize(
    ("loss", "finite"),
    [
        (1.0, True),
        (np.float16(7), True),
        (jnp.asarray([1.0, np.nan]), False),
        ({"a": jnp.float16(np.inf), "n": 3}, False),
        (jnp.asarray(1 + 1j * np.nan), False),
        (jnp.float32(3e38), True),
    ],
)
def test_a_loss_is_looked_at_as_it_is(loss, finite):
    grads = jnp.full(2, jnp.inf)
    _, after, _ = GradScaler(2.0**-100).step(grads, lambda g, w: w, jnp.ones(2), loss=loss)
    assert int(after.state.spoiled) == (not finite)


def test_a_state_is_taken_outside_of_traced_code():
    with pytest.raises(TypeError, match="return the scaler from the function"):
        jax.jit(lambda scaler: scaler.state_dict()["scale"])(GradScaler())


@pytest.mark.parametrize("loss", ["a", 3, len])
def test_a_loss_that_is_none_is_refused(loss):
    with pytest.raises(TypeError, match=r"^loss must be the loss as it was before scaling, got "):
        GradScaler().step(jnp.ones(2), lambda grads, w: w, jnp.ones(2), loss=loss)
