"""Low weights in torch and in JAX: the same bits, as in NumPy, for the same numbers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from polymp import weights
from tests.conftest import need
from tests.support.low_weights import BF16, NUMPY, edges, spread, ties, upper_halves
from tests.support.sizes import size

# Inf and overflow are among the numbers, and NumPy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")

N = size(2**16, 2**18)
VERBS = {
    "torch": "polymp.backends.torch.weights.low_parameters",
    "jax": "polymp.backends.jax.weights.low_weights",
}


def array(framework: str, x: np.ndarray) -> Any:
    if framework == "torch":
        torch = importlib.import_module("torch")
        if x.dtype == BF16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)
    return importlib.import_module("jax.numpy").asarray(x)


def bits(x: Any) -> np.ndarray:
    """The bits of an array of any framework, as whole numbers."""
    if type(x).__module__ == "torch":
        torch = importlib.import_module("torch")
        x = x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).numpy()
    x = np.asarray(x)
    return x.view({2: np.int16, 4: np.int32}[x.itemsize])


def numbers(mode: str) -> np.ndarray:
    """All kinds; NaN where it keeps its bits."""
    x = np.concatenate([edges(), spread(N)])
    return x if mode == "split" else x[~np.isnan(x)]  # a cast may change a NaN


@pytest.mark.sized
@pytest.mark.parametrize("framework", VERBS)
@pytest.mark.parametrize("mode", weights.MODES)
def test_a_framework_stores_and_reads_the_bits_of_the_core(framework: str, mode: str) -> None:
    need(framework)
    verbs = importlib.import_module(VERBS[framework]).VERBS
    x = numbers(mode)
    index = np.arange(x.size, dtype=np.int32)
    key = weights.key(3, 5, 7)
    random = weights.random16(key, array(framework, index))
    expected_random = weights.random16(key, index)
    assert (bits(random) == expected_random).all()
    kept = weights.MODES[mode]
    low, beside = weights.store(verbs, kept, array(framework, x), random)
    expected, expected_beside = weights.store(NUMPY, kept, x, expected_random)
    assert (bits(low) == bits(expected)).all()
    if beside is not None:
        assert (bits(beside) == bits(expected_beside)).all()
    read = weights.load(verbs, kept, low, beside)
    assert (bits(read) == bits(weights.load(NUMPY, kept, expected, expected_beside))).all()


@pytest.mark.sized
@pytest.mark.parametrize("framework", VERBS)
def test_split_rebuilds_every_number(framework: str) -> None:
    """Of values with all upper halves, in `make test-long`, random ones, and all edges, NaN too.

    The high part is the framework's own cast, but for ties. In JAX all of it is compiled, too.
    """
    need(framework)
    verbs = importlib.import_module(VERBS[framework]).VERBS
    compiled = importlib.import_module("jax").jit if framework == "jax" else lambda f: f
    x = np.concatenate([edges(), upper_halves(size(64, 1)), spread(size(2**18, 2**20))])
    given = array(framework, x)
    for way in (lambda f: f, compiled):
        high, rest = way(lambda x: weights.split(verbs, x))(given)
        back = way(lambda high, rest: weights.join(verbs, high, rest))
        assert (bits(high).itemsize, bits(rest).itemsize) == (2, 2)
        assert (bits(back(high, rest)) == x.view(np.int32)).all()
        differ = bits(high) != bits(way(lambda x: verbs.narrow(x))(given))
        assert (ties(x) | np.isnan(x))[differ].all()
        assert (differ & ties(x)).any()
