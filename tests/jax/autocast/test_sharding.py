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
from tests.support.jax.walker import OURS, equations

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
    """A scan, a branch and a block to compute again."""

    def block(x: Any) -> Any:
        return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]

    x = lax.scan(lambda c, _: (jax.checkpoint(block)(c), None), x, None, length=2)[0]
    x = lax.cond(params["b"][0] > 0, block, lambda x: 2 * block(x), x)
    return (x**2).mean()


def products(jaxpr: Any) -> set[str]:
    found = [site for site in equations(jaxpr) if site.op in (OURS, "dot_general")]
    return {site.params.get("run", "as written") for site in found}


def seen(grad: Callable[..., Any], plain: Any, *args: Any) -> dict[str, Any]:
    kinds = sorted(products(jax.make_jaxpr(grad)(*args)))
    grads = grad(*args)  # which may use up its arguments
    errors = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in zip(*map(jax.tree.leaves, (grads, plain)), strict=True)
    ]
    return {
        "error": max(errors),
        "dtypes": sorted({leaf.dtype.name for leaf in jax.tree.leaves(grads)}),
        "shardings": {
            name: str(getattr(leaf.sharding, "spec", None)) for name, leaf in grads.items()
        },
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
    plain = jax.jit(jax.grad(loss))(PARAMS, X)
    plain_looped = jax.jit(jax.grad(looped))(PARAMS, X)
    grad = jax.grad(autocast(loss))

    flat = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for check in (True, False):
        outside = jax.grad(autocast(in_shard_map(loss, flat, check_vma=check)))
        found[f"shard_map-{check}-outside"] = seen(jax.jit(outside), plain, PARAMS, X)
    found["shard_map-eager"] = seen(outside, plain, PARAMS, X)
    inside = jax.grad(in_shard_map(autocast(loss), flat))
    found["shard_map-inside"] = seen(jax.jit(inside), plain, PARAMS, X)
    looping = jax.grad(autocast(in_shard_map(looped, flat)))
    found["shard_map-looped"] = seen(jax.jit(looping), plain_looped, PARAMS, X)

    square = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    partly = jax.grad(autocast(in_shard_map(loss, square, axis_names={"data"})))
    found["shard_map-partly"] = seen(jax.jit(partly), plain, PARAMS, X)

    def mean_of_pmap(params: Any, x: Any) -> Any:
        each = jax.pmap(loss, in_axes=(None, 0), axis_name="data")
        return each(params, x.reshape(8, 2, 8)).mean()

    found["pmap"] = seen(jax.grad(autocast(mean_of_pmap)), plain, PARAMS, X)

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        specs = {"w": P(None, "model"), "b": P("model"), "v": P("model", None)}
        explicit = kind is AxisType.Explicit
        wrapped = partial(loss, out_sharding=P("data", None)) if explicit else loss
        grad = jax.grad(autocast(wrapped))
        with jax.set_mesh(mesh):
            params = {
                n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in PARAMS.items()
            }
            x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
            name = f"mesh-{kind.name}"
            found[name] = seen(jax.jit(grad), plain, params, x)
            remat = jax.checkpoint(wrapped, policy=jax.checkpoint_policies.dots_saveable)
            found[f"{name}-remat"] = seen(jax.jit(jax.grad(autocast(remat))), plain, params, x)
            donated = jax.jit(grad, donate_argnums=0)
            copies = jax.tree.map(jnp.copy, params)
            found[f"{name}-donated"] = seen(donated, plain, copies, x)
            found[f"{name}-donated"]["deleted"] = all(
                leaf.is_deleted() for leaf in jax.tree.leaves(copies)
            )
            # The function runs with axes of the other type, its arguments come with these.
            if explicit:
                other = partial(auto_axes, out_sharding=P())
                inner = loss
            else:
                other = partial(explicit_axes, in_sharding=(specs, P("data", None)))
                inner = partial(loss, out_sharding=P("data", None))
            inside, outside = autocast(other(inner)), other(autocast(inner))
            found[f"{name}-axes-inside"] = seen(jax.jit(jax.grad(inside)), plain, params, x)
            found[f"{name}-axes-eager"] = seen(jax.grad(inside), plain, params, x)
            found[f"{name}-axes-outside"] = seen(jax.jit(jax.grad(outside)), plain, params, x)
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
    shardings = {"w": "(None, 'model')", "b": "('model',)", "v": "('model', None)"}
    for name, spec in on_mesh[f"mesh-{kind}"]["shardings"].items():
        found = (
            spec.removeprefix("PartitionSpec").removeprefix("P").replace("('model')", "('model',)")
        )
        assert found in (shardings[name], shardings[name].replace("('model', None)", "('model',)"))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_donated_parameters_are_used_up(on_mesh, kind):
    assert on_mesh[f"mesh-{kind}-donated"]["deleted"]


if __name__ == "__main__":
    main()
