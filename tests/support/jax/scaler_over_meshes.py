"""The program that `test_meshes` runs on eight devices: the planted run, spread in every way.

Run as a module with eight CPU devices, and with the names of ways in which every device keeps its
own scaler; prints one line of JSON: by way, what the run left.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.backends.jax.scaler.grad_scaler import GradScaler
from tests.support.jax import planted_run
from tests.support.jax.planted_run import RATE, cost, first_params, first_scaler, step


def left(history: Any, params: Any, **others: Any) -> dict[str, Any]:
    lists = {name: np.asarray(p).tolist() for name, p in params.items()}
    return {"history": history, "params": lists} | others


def meshes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Jit with shardings: XLA finds what has to cross devices."""
    for shape in ((8, 1), (1, 8), (4, 2)):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        specs = {"a": P(None, "model"), "b": P("model", None)}
        weights = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        where = {"x": NamedSharding(mesh, P("data")), "probe": weights}
        everywhere = NamedSharding(mesh, P())
        scaler = jax.device_put(first_scaler(), everywhere)
        advance = jax.jit(
            step, donate_argnums=(0, 1), out_shardings=(everywhere, weights, everywhere)
        )
        history, params = planted_run.run(
            advance,
            scaler,
            jax.device_put(first_params(), weights),
            lambda x, kind, where=where: jax.device_put(x, where[kind]),
        )
        assert len(params["a"].sharding.device_set) == 8
        yield f"jit-{shape[0]}x{shape[1]}", left(history, params)


def on_each(advance: Callable[..., Any]) -> Callable[..., Any]:
    """A step of values that have a leading axis: one for each device."""

    def body(*args: Any) -> Any:
        out = advance(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], out)

    return body


def for_each(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.stack([a] * 8), tree)


def spread(x: Any, kind: str) -> Any:
    """Rows in eight parts; a probe that only one device of eight sees."""
    if kind == "x":
        return x.reshape(8, -1, x.shape[1])
    return jax.tree.map(lambda p: np.stack([p * 0 if i != 5 else p for i in range(8)]), fill(x))


def fill(tree: Any) -> Any:
    return jax.tree.map(lambda p: np.nan_to_num(p, posinf=3e38), tree)


def infinite(probe: Any) -> Any:
    """The probe as it was: 0 * Inf on the other devices would have been NaN."""
    return jax.tree.map(lambda p: jnp.where(p > 1e38, jnp.inf, p), probe)


def summed(scaler: GradScaler, params: Any, x: Any, probe: Any) -> Any:
    return step(scaler, params, x, infinite(probe), lambda g: lax.psum(g, "data"))


def by_value_and_grad(scaler: GradScaler, params: Any, x: Any, probe: Any) -> Any:
    """The helper looks at the gradients of each device; the probe is in one of them."""

    def planted_cost(params: Any) -> Any:
        return cost(jax.tree.map(planted_in, params, infinite(probe)), x)

    (_, grads), scaler, finite = scaler.value_and_grad(planted_cost)(params)
    grads = lax.psum(grads, "data")
    new = jax.tree.map(lambda p, g: jnp.where(finite, p - RATE * g, p), params, grads)
    return scaler, new, finite


def by_optimizer(scaler: GradScaler, params: Any, x: Any, probe: Any) -> Any:
    optimizer = optax.chain(optax.identity(), optax.sgd(RATE))

    def loss(params: Any) -> Any:
        value = cost(params, x)
        return scaler.scale(value), value

    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads, value = jax.grad(loss, has_aux=True)(params)
    grads = jax.tree.map(jnp.add, lax.psum(grads, "data"), infinite(probe))
    state = optimizer.init(params)
    (params, _), scaler, finite = scaler.step(grads, update, params, state, loss=value)
    return scaler, params, finite


@jax.custom_vjp
def planted_in(p: Any, probe: Any) -> Any:
    """P, with a gradient to which the probe is added."""
    return p


planted_in.defvjp(
    lambda p, probe: (p, probe), lambda probe, ct: (ct + probe, jnp.zeros_like(probe))
)


def one_per_device(asked: Container[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every device keeps its own scaler and parameters; only the finding can keep them together."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    ways: dict[str, Callable[..., Any]] = {
        f"shard_map-{check}": lambda f, check=check: jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check)
        )
        for check in (True, False)
    }
    ways["pmap"] = lambda f: jax.pmap(
        lambda *args: jax.tree.map(lambda a: a[0], f(*jax.tree.map(lambda a: a[None], args))),
        axis_name="data",
    )
    for name, spread_out in ways.items():
        for advance in (summed, by_value_and_grad, by_optimizer):
            if f"{name}-{advance.__name__}" not in asked:
                continue
            history, params = planted_run.run(
                spread_out(on_each(advance)),
                for_each(first_scaler()),
                for_each(jax.tree.map(jnp.asarray, first_params())),
                spread,
            )
            same = all(len({row.tobytes() for row in np.asarray(p)}) == 1 for p in params.values())
            first = jax.tree.map(lambda p: p[0], params)
            yield f"{name}-{advance.__name__}", left(history, first, same=same)


def by_types() -> Iterator[tuple[str, dict[str, Any]]]:
    """Scaler and parameters that are the same by their types; gradients are summed by theirs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def body(scaler: GradScaler, params: Any, x: Any, probe: Any) -> Any:
        probe = jax.tree.map(lambda a: a[0], infinite(probe))

        def scaled_cost(params: Any) -> Any:
            here = lax.pcast(params, "data", to="varying")
            loss = cost(jax.tree.map(planted_in, here, probe), x[0])
            return scaler.scale(loss), loss

        def local(params: Any) -> Any:
            value, loss = scaled_cost(params)
            return lax.psum(value, "data"), loss

        grads, loss = jax.grad(local, has_aux=True)(params)
        params, scaler, finite = scaler.step(grads, planted_run.update, params, loss=loss)
        return scaler, params, finite

    specs = P(), P(), P("data"), P("data")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))
    everywhere = NamedSharding(mesh, P())
    start = jax.device_put((first_scaler(), first_params()), everywhere)
    yield "by types", left(*planted_run.run(run, *start, spread))


def main() -> None:
    assert len(jax.devices()) == 8
    found = {"alone": planted_run.alone()._asdict()}
    found |= meshes()
    found |= one_per_device(sys.argv[1:])
    found |= by_types()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
