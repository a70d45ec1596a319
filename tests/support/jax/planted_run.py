"""A training run into which Inf and NaN are planted, and every way to spread it over devices.

    python -m tests.support.jax.planted_run FUNCTION ARGUMENTS     prints what it returns, as JSON

Every number in it is a whole multiple of a power of two that float16 gradients and float32 sums
hold exactly, so the run on one device is what each of the others has to give, bit for bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.jax import GradScaler

ROWS, STEPS, RATE = 32, 12, 2.0**-6
SHAPES = {"a": (16, 8), "b": (8, 16)}
# By step: an Inf in one value of one parameter's gradient, or a NaN in one row of the batch.
PLANTS = {2: ("a", (3, 7)), 3: ("a", (12, 0)), 6: ("b", (7, 1)), 8: ("row", 13)}


class Run(NamedTuple):
    # after each step: scale, tracker, skips, spoiled, skipped, and whether it was taken
    history: list[list[float]]
    params: dict[str, Any]  # at the end, as lists


def first_scaler() -> GradScaler:
    return GradScaler(2.0**8, growth_interval=2)


def first_params() -> dict[str, Any]:
    return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def batch(step: int) -> Any:
    """Rows of -1, 0 and 1; float32 [ROWS, 16]."""
    x = np.random.default_rng(step).integers(-1, 2, (ROWS, 16)).astype(np.float32)
    kind, at = PLANTS.get(step, (None, None))
    if kind == "row":
        x[at, 5] = np.nan
    return x


def probe(step: int) -> dict[str, Any]:
    """Return the arrays that are added to the gradients: 0, and Inf where it is planted."""
    planted = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    kind, at = PLANTS.get(step, (None, None))
    if kind in planted:
        planted[kind][at] = np.inf
    return planted


def cost(params: Any, x: Any) -> Any:
    """The loss of some rows, as their part of the mean over all; computed in float16."""
    x = x.astype(jnp.float16)
    a, b = (x[:, : p.shape[0]] @ p.astype(jnp.float16) for p in (params["a"], params["b"]))
    return (a.astype(jnp.float32).sum() + b.astype(jnp.float32).sum()) / ROWS


def update(grads: Any, params: Any) -> Any:
    return jax.tree.map(lambda g, p: p - RATE * g, grads, params)


def step(
    scaler: GradScaler,
    params: Any,
    x: Any,
    probe: Any,
    total: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[GradScaler, Any, Any]:
    """One step; `total` sums gradients over devices, and the probe is added after it."""

    def scaled(params: Any) -> tuple[Any, Any]:
        loss = cost(params, x)
        return scaler.scale(loss), loss

    grads, loss = jax.grad(scaled, has_aux=True)(params)
    grads = jax.tree.map(jnp.add, total(grads), probe)
    params, scaler, finite = scaler.step(grads, update, params, loss=loss)
    return scaler, params, finite


def row(scaler: Any, finite: Any) -> list[float]:
    """A line of the history, from arrays of any number of devices that all say the same."""
    return [float(one(x)) for x in (*scaler.state, finite)]


def one(x: Any) -> Any:
    """The value that every device of this process holds."""
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert len({shard.tobytes() for shard in shards}) == 1, f"devices differ: {shards}"
    assert len(set(shards[0].ravel().tolist())) == 1, f"devices differ: {shards[0]}"
    return shards[0].ravel()[0]


def run(
    advance: Callable[..., Any],
    scaler: Any,
    params: Any,
    place: Callable[[Any, str], Any],
    steps: Iterable[int] = range(STEPS),
) -> tuple[list[list[float]], Any, Any]:
    """The history of some steps, and then the scaler and the parameters."""
    history = []
    for at in steps:
        scaler, params, finite = advance(
            scaler, params, place(batch(at), "x"), place(probe(at), "probe")
        )
        history.append(row(scaler, finite))
    return history, scaler, params


def left(history: Any, _: Any, params: Any) -> Run:
    return Run(history, {name: np.asarray(p).tolist() for name, p in params.items()})


def alone() -> Run:
    return left(*run(jax.jit(step), first_scaler(), first_params(), lambda x, _: x))


def auto_mesh(data: int, model: int) -> Any:
    axes, devices = ("data", "model"), jax.devices()[: data * model]
    return jax.make_mesh((data, model), axes, axis_types=(AxisType.Auto,) * 2, devices=devices)


def shardings(mesh: Any) -> tuple[Any, dict[str, Any], Any]:
    """Of a scaler, of the parameters, and of a batch."""
    specs = {"a": P(None, "model"), "b": P("model", None)}
    weights = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return NamedSharding(mesh, P()), weights, NamedSharding(mesh, P("data"))


def placed(rows: Any, weights: Any) -> Callable[[Any, str], Any]:
    return lambda x, kind: jax.device_put(x, rows if kind == "x" else weights)


CUT = 8  # steps before the checkpoint: the scale is not the first one, and a streak has begun


def resumed_on_more(folder: str) -> dict[str, Any]:
    """Save on two devices, and go on with four and eight."""
    assert len(jax.devices()) == 8
    everywhere, weights, rows = shardings(auto_mesh(1, 2))
    scaler, params = jax.device_put((first_scaler(), first_params()), (everywhere, weights))
    before, *state = run(jax.jit(step), scaler, params, placed(rows, weights), range(CUT))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
    found: dict[str, Any] = {"alone": alone()._asdict(), "before": before}
    for devices in (2, 4, 8):
        everywhere, weights, rows = shardings(auto_mesh(devices // 2, 2))
        where = [jax.tree.map(lambda _, e=everywhere: e, state[0]), weights]
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where
        )
        with ocp.StandardCheckpointer() as checkpointer:
            scaler, params = checkpointer.restore(Path(folder) / "state", target)
        assert len(scaler.state.scale.sharding.device_set) == devices
        rest = run(jax.jit(step), scaler, params, placed(rows, weights), range(CUT, STEPS))
        found[str(devices)] = left(*rest)._asdict()
    return found


def over_processes(rank: str, address: str) -> dict[str, Any]:
    """The run over two processes, a device each: what this one saw, by mesh."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Gloo's collectives wait in the threads that run programs, and there are few of these.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
    assert (jax.process_count(), jax.device_count()) == (2, 2)
    found = {}
    for name, shape in (("data", (2, 1)), ("model", (1, 2))):
        everywhere, weights, rows = shardings(auto_mesh(*shape))

        def put(x: Any, where: Any) -> Any:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

        def place(x: Any, kind: str, rows: Any = rows, weights: Any = weights) -> Any:
            return put(x, rows) if kind == "x" else jax.tree.map(put, x, weights)

        scaler = jax.tree.map(lambda x, e=everywhere: put(x, e), first_scaler())
        advance = jax.jit(step, out_shardings=(everywhere, weights, everywhere))
        history, _, params = run(advance, scaler, place(first_params(), "probe"), place)
        assert not scaler.state.scale.is_fully_addressable
        report = first_scaler().report(place(probe(6), "probe"))
        found[name] = {
            "history": history,
            "report": [str(g) for g in report.bad],
            "params": {
                name: [
                    [[part.start for part in shard.index], shard.data.tolist()]
                    for shard in p.addressable_shards
                ]
                for name, p in params.items()
            },
        }
    return found


def meshes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Jit with shardings: XLA finds what has to cross devices."""
    for shape in ((8, 1), (1, 8), (4, 2)):
        everywhere, weights, rows = shardings(auto_mesh(*shape))
        start = jax.device_put((first_scaler(), first_params()), (everywhere, weights))
        out = everywhere, weights, everywhere
        advance = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
        after = run(advance, *start, placed(rows, weights))
        assert len(after[-1]["a"].sharding.device_set) == 8
        yield f"jit-{shape[0]}x{shape[1]}", left(*after)._asdict()


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
        for advance in (summed, by_value_and_grad):
            if f"{name}-{advance.__name__}" not in asked:
                continue
            history, _, params = run(
                spread_out(on_each(advance)),
                for_each(first_scaler()),
                for_each(jax.tree.map(jnp.asarray, first_params())),
                spread,
            )
            same = all(len({row.tobytes() for row in np.asarray(p)}) == 1 for p in params.values())
            first = jax.tree.map(lambda p: p[0], params)
            seen = left(history, None, first)._asdict()
            yield f"{name}-{advance.__name__}", seen | {"same": same}


def meshes_of_eight(*names: str) -> dict[str, Any]:
    """A history by way to spread the run over eight devices."""
    assert len(jax.devices()) == 8
    found = {"alone": alone()._asdict()}
    found |= meshes()
    found |= one_per_device(names)
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
