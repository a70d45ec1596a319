"""Every private name of jax that polymp uses does what `compat` says; loud when one changes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from polymp.backends.jax import compat


@pytest.mark.parametrize("check", [True, False])
def test_varying_axes(check):
    seen = []

    def body(whole, part):
        seen.extend(map(compat.varying_axes, (whole, part)))
        return whole

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("d"))
    x = jnp.ones(1)
    jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check)(x, x)
    assert seen == [frozenset(), frozenset({"d"} if check else ())]
    assert compat.varying_axes(x) == frozenset()
