"""The program of `test_processes` in each of two processes: the planted run over both.

Run as a module with the rank and the address of rank 0; one CPU device each. The last line that it
prints is JSON: by mesh, what this process saw.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.jax import planted_run


def main(rank: int, address: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Gloo's collectives wait in the threads that run programs, and there are few of these.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    assert (jax.process_count(), jax.device_count()) == (2, 2)
    found = {}
    for name, shape in (("data", (2, 1)), ("model", (1, 2))):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        weights = {
            "a": NamedSharding(mesh, P(None, "model")),
            "b": NamedSharding(mesh, P("model", None)),
        }

        def put(x: Any, where: Any) -> Any:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

        def place(x: Any, kind: str, rows: Any = rows, weights: Any = weights) -> Any:
            return put(x, rows) if kind == "x" else jax.tree.map(put, x, weights)

        scaler = planted_run.first_scaler()
        scaler = jax.tree.map(put, scaler, jax.tree.map(lambda _, e=everywhere: e, scaler))
        params = jax.tree.map(put, planted_run.first_params(), weights)
        advance = jax.jit(planted_run.step, out_shardings=(everywhere, weights, everywhere))
        history, params = planted_run.run(advance, scaler, params, place)
        assert not scaler.state.scale.is_fully_addressable
        report = planted_run.first_scaler().report(place(planted_run.probe(6), "probe"))
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
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
