"""What adds up is arithmetic, and a product that adds nothing up is no matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polymp
from tests.conftest import FRAMEWORKS, need
from tests.support import frameworks

N = 4096
FP32 = polymp.policy({"name": "all in float32", "rules": {"all": "fp32"}})


def in_region(framework: str, fn: Any, policy: Any) -> Any:
    """A function in a bfloat16 region of a policy."""
    if framework == "torch":
        import torch

        from polymp.torch import autocast

        return autocast("cpu", torch.bfloat16, policy=policy)(fn)
    from polymp.jax import autocast as transformed

    return transformed(fn, dtype="bfloat16", policy=policy)


def scatters(framework: str) -> dict[str, Any]:
    """Functions of a zero and N numbers, by name, that add the numbers up in the zero's place."""
    if framework == "torch":
        import torch

        at = torch.zeros(N, dtype=torch.long)
        return {
            "index_add": lambda zero, x: zero.index_add(0, at, x),
            "index_put": lambda zero, x: zero.index_put((at,), x, accumulate=True),
            "put": lambda zero, x: zero.put(at, x, accumulate=True),
            "scatter_add": lambda zero, x: zero.scatter_add(0, at, x),
            "scatter_reduce": lambda zero, x: zero.scatter_reduce(0, at, x, "sum"),
        }
    import jax

    at = np.zeros(N, int)
    return {
        "add": lambda zero, x: zero.at[at].add(x),
        "subtract": lambda zero, x: -zero.at[at].subtract(x),
        "segment_sum": lambda zero, x: jax.ops.segment_sum(x, at, 1),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("policy", [FP32, "matmul"], ids=str)
def test_summing_scatters_are_arithmetic(framework: str, policy: Any) -> None:
    """In bfloat16 the sum of 4,096 times 0.01 ends at 4."""
    need(framework)
    fw: Any = frameworks.load(framework)
    zero, numbers = fw.array([0.0], "bfloat16"), fw.array([0.01] * N, "bfloat16")
    found = {
        name: in_region(framework, fn, policy)(zero, numbers)
        for name, fn in scatters(framework).items()
    }
    assert {name: fw.dtype(x) for name, x in found.items()} == dict.fromkeys(found, "float32")
    for name, x in found.items():
        assert float(fw.numbers(x)[0]) == pytest.approx(41.0, rel=0.01), name
