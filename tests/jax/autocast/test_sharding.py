"""Autocast on a mesh of eight devices: every way to shard gives the gradients of one device."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

from polymp.jax import autocast, lower
from tests.support.jax import eight_devices
from tests.support.jax.walker import products
from tests.support.sizes import LONG

X = jax.random.normal(jax.random.key(0), (16, 8))
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (8, 16)) / 3,
    "b": jnp.ones(16),
    "v": jax.random.normal(jax.random.key(2), (16, 8)) / 4,
}


def loss(params: Any, x: Any, out_sharding: Any = None) -> Any:
    h = jax.nn.relu(x @ params["w"] + params["b"])
    out = jnp.einsum("bi,ij->bj", h, params["v"], out_sharding=out_sharding)
    return (jax.nn.log_softmax(out) ** 2).mean()


def looped(params: Any, x: Any) -> Any:
    def block(x: Any) -> Any:
        return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]

    x = lax.scan(lambda c, _: (jax.checkpoint(block)(c), None), x, None, length=2)[0]
    x = lax.cond(params["b"][0] > 0, block, lambda x: 2 * block(x), x)
    return (x**2).mean()


def seen(grad: Callable[..., Any], plain: Any, *args: Any) -> dict[str, Any]:
    kinds = sorted({*products(jax.make_jaxpr(grad)(*args))})
    grads = grad(*args)  # which may use up its arguments
    errors = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in zip(*map(jax.tree.leaves, (grads, plain)), strict=True)
    ]
    return {
        "error": max(errors),
        "dtypes": sorted({leaf.dtype.name for leaf in jax.tree.leaves(grads)}),
        "shardings": {n: [*getattr(leaf.sharding, "spec", ())] for n, leaf in grads.items()},
        "products": kinds,
    }


def in_shard_map(fn: Callable[..., Any], mesh: Any, **settings: Any) -> Callable[..., Any]:
    def mapped(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return lax.pmean(fn(params, x).astype(jnp.float32), "data")

        specs = (P(), P("data"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), **settings)(params, x)

    return mapped


def reduced() -> dict[str, Any]:
    """Of a product over a sharded dimension: the dtypes that are added up, and the error."""
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    x = random.standard_normal((16, 2048), np.float32)
    w = random.standard_normal((2048, 32), np.float32)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P(None, "t")), (w, P("t")))]

    def both(x: Any, w: Any) -> Any:
        low, both = autocast(lambda x, w: lower(x @ w)), autocast(lambda x, w: x @ w)
        # A parameter that every device has, and an activation cut along the batch.
        grad = jax.grad(lambda w, x: both(x, w).astype(jnp.float32).sum())(w[:16], x.T)
        return low(x, w), grad

    program = jax.jit(both).lower(*args).compile()
    sums = re.findall(r"= \(?(\w+)\[[^=]* all-reduce(?:-start)?\(", program.as_text())
    low, _ = program(*args)
    exact = np.asarray(x.astype(low.dtype), np.float64) @ np.asarray(
        w.astype(low.dtype), np.float64
    )
    error = np.abs(np.asarray(low, np.float64) - exact) / np.abs(exact)
    return {"dtypes": sorted(set(sums)), "dtype": low.dtype.name, "error": float(error.max())}


def main() -> None:
    found: dict[str, Any] = {"reduced": reduced()}
    exact = {fn: jax.jit(jax.grad(fn))(PARAMS, X) for fn in (loss, looped)}

    def look(
        name: str, fn: Any, params: Any = PARAMS, x: Any = X, jit: bool = True, **how: Any
    ) -> None:
        grad = jax.jit(jax.grad(fn), **how) if jit else jax.grad(fn)
        found[name] = seen(grad, exact[looped if "looped" in name else loss], params, x)

    flat = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for check in (True, False):
        look(f"shard_map-{check}-outside", autocast(in_shard_map(loss, flat, check_vma=check)))
    look("shard_map-eager", autocast(in_shard_map(loss, flat, check_vma=False)), jit=False)
    look("shard_map-inside", in_shard_map(autocast(loss), flat))
    look("shard_map-looped", autocast(in_shard_map(looped, flat)))
    square = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    look("shard_map-partly", autocast(in_shard_map(loss, square, axis_names={"data"})))

    def mean_of_pmap(params: Any, x: Any) -> Any:
        each = jax.pmap(loss, in_axes=(None, 0), axis_name="data")
        return each(params, x.reshape(8, 2, 8)).mean()

    look("pmap", autocast(mean_of_pmap), jit=False)

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        specs = {"w": P(None, "model"), "b": P("model"), "v": P("model", None)}
        by_rows = partial(loss, out_sharding=P("data", None))
        # The function runs with axes of the other type, its arguments come with these.
        if kind is AxisType.Explicit:
            fn, inner, other = by_rows, loss, partial(auto_axes, out_sharding=P())
        else:
            fn, inner = loss, by_rows
            other = partial(explicit_axes, in_sharding=(specs, P("data", None)))
        with jax.set_mesh(mesh):
            params = {
                n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in PARAMS.items()
            }
            args = params, jax.device_put(X, NamedSharding(mesh, P("data", None)))
            name = f"mesh-{kind.name}"
            look(name, autocast(fn), *args)
            remat = jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)
            look(f"{name}-remat", autocast(remat), *args)
            copies = jax.tree.map(jnp.copy, params)
            look(f"{name}-donated", autocast(fn), copies, args[1], donate_argnums=0)
            deleted = all(leaf.is_deleted() for leaf in jax.tree.leaves(copies))
            found[f"{name}-donated"]["deleted"] = deleted
            look(f"{name}-axes-inside", autocast(other(inner)), *args)
            look(f"{name}-axes-eager", autocast(other(inner)), *args, jit=False)
            look(f"{name}-axes-outside", other(autocast(inner)), *args)
    print(json.dumps(found))


MESHES = [f"mesh-{kind}" for kind in ("Auto", "Explicit")]
WAYS = [
    *[f"{name}{way}" for name in MESHES for way in ("", "-remat", "-donated")],
    *[f"{name}-axes-{way}" for name in MESHES for way in ("inside", "eager", "outside")],
    *[f"shard_map-{way}" for way in ("True-outside", "False-outside", "inside", "looped")],
    "shard_map-eager",
    "shard_map-partly",
    "pmap",
]


@pytest.fixture(scope="module")
def on_mesh():
    return eight_devices.run("tests.jax.autocast.test_sharding")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_low_products_away_from_those_of_one_device(on_mesh, way):
    seen = on_mesh[way]
    # Two or six products in a row, each operand rounded by at most 2**-9; headroom of 4.
    assert 0 < seen["error"] < 4 * 6 * 2**-8
    assert seen["dtypes"] == ["float32"]
    assert seen["products"] == ["bfloat16"]


def test_what_devices_computed_is_added_up_in_float32_and_rounded_once(on_mesh):
    seen = on_mesh["reduced"]
    assert seen["dtypes"] == ["f32"]
    assert seen["dtype"] == "bfloat16"
    assert seen["error"] <= 1.01 * 2**-8


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_are_sharded_as_their_parameters(on_mesh, kind):
    shardings = {"w": [None, "model"], "b": ["model"], "v": ["model"]}
    for name, spec in on_mesh[f"mesh-{kind}"]["shardings"].items():
        assert (spec[:-1] if spec[-1] is None else spec) == shardings[name]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_donated_parameters_are_used_up(on_mesh, kind):
    assert on_mesh[f"mesh-{kind}-donated"]["deleted"]


# --- Weights are gathered as often as by hand, in as few bytes, and nothing more is saved ---------

EVERY = slice(None, None, 1 if LONG else 3)  # one in three programs of each kind in `make test`

# Where the program gathers its weights itself, and marks them with `lower`.
OWN = ("explicit, resharded", "shard_map")[EVERY]
# Where the partitioner does.
JITTED = (
    "jitted",
    "jitted, one in the other",
    "jitted, scan and remat",
    "jitted with autocast inside",
    "jitted, explicit",
)[EVERY]
IN_A_ROW = (*("plain", "weight on the left", "few rows", "remat", "explicit")[EVERY], *JITTED)
ITS = (*IN_A_ROW, *("scan", "scan and remat")[EVERY])


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla")
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_pass_re=spmd-partitioning"
    asked = () if LONG else (*ITS, *OWN, "shard_map, not marked")
    return eight_devices.run("tests.support.jax.gathers_on_mesh", folder, *asked, flags=dump)


@pytest.mark.sized
@pytest.mark.parametrize("name", [*ITS, *OWN])
def test_weights_are_gathered_as_by_hand(gathered, name):
    seen = gathered[name]
    ours, by_hand, full = seen["autocast"], seen["by hand"], seen["float32"]
    assert ours["gathers"] == ["bfloat16"] * len(full["gathers"])
    assert ours["bytes"] == full["bytes"] / 2
    if name == "jitted, explicit":  # where jax 0.11 gathers some of what is cast by hand twice
        assert ours["bytes"] <= by_hand["bytes"]
    else:
        assert ours["bytes"] == by_hand["bytes"]
        assert ours["gathers"] == by_hand["gathers"]


@pytest.mark.sized
@pytest.mark.parametrize("name", ITS)
def test_nothing_more_is_saved_and_gradients_stay_as_they_are(gathered, name):
    seen = gathered[name]
    assert seen["autocast"]["saved"] == seen["off"]["saved"]
    assert seen["same"], "the gradients have other bits than without it"
    assert seen["unrounded"], "these gradients were rounded"
    assert 0 < seen["error"] < 4 * 3 * 2**-8


@pytest.mark.sized
def test_a_weight_that_the_program_gathers_unmarked_is_gathered_in_float32(gathered):
    seen = gathered["shard_map, not marked"]
    assert seen["autocast"]["gathers"] == seen["float32"]["gathers"] == ["float32"] * 3


@pytest.mark.sized
def test_casts_that_are_not_one_are_gathered_twice(gathered):
    for name in IN_A_ROW:
        assert len(gathered[name]["off"]["gathers"]) > len(gathered[name]["autocast"]["gathers"])


if __name__ == "__main__":
    main()
