"""One pair of functions compared at many inputs, with one trace and one compilation in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polymp.backends.jax.diagnostics import perturb as in_jax
from polymp.backends.torch.diagnostics import perturb as in_torch
from polymp.diagnostics import rounding
from polymp.diagnostics.rounding import Gap
from polymp.testing import parity
from polymp.testing.parity import arguments


class Repeated:
    """A torch and a JAX function, compared as `assert_parity` does at inputs of one shape."""

    def __init__(
        self,
        torch_fn: Callable[..., Any],
        jax_fn: Callable[..., Any],
        inputs: Sequence[object],
        dtype: str | None = None,
        probes: int = 16,
    ) -> None:
        given = *arguments(inputs), dtype, "amp", parity.cotangent
        self._torch = in_torch.Program(torch_fn, *given)
        self._jax = in_jax.Program(jax_fn, *given)
        self._probes = probes

    def gaps(self, inputs: Sequence[object]) -> list[Gap]:
        """The arrays of a call, with errors and tolerances."""
        ours, theirs, tree = self._torch, self._jax, arguments(inputs)
        ours._tree = tree
        theirs._flat = jax.tree.leaves(
            {p: jnp.asarray(x) for p, x in rounding.arrays(tree).items()}
        )
        one, other = ours.run(), theirs._run(theirs._plain(*theirs._flat))
        moved = ours.probes(self._probes)
        return list(parity._gaps(one, other, (one, moved), (other, theirs.probes(self._probes))))
