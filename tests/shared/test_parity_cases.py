"""`assert_parity` on shared ops in both low dtypes, and on pairs with a planted difference.

The ops are those of `cases`, called on what a matrix product in the region has made low.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import polymp
from polymp.testing import Parity, ParityError, assert_parity
from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks
from tests.support.cases import LOW
from tests.support.parity_pairs import MISMATCHES, Mismatch
from tests.support.sizes import LONG, size

# Of every kind: products, convolutions, attention, cells, powers, softmax, norms, losses, sums,
# arithmetic, activations, indexing and pooling.
OPS = tuple(
    """
    addmm|linear|einsum|conv1d with bias|conv2d|attention|rnn_tanh_cell|exp|log1p|rsqrt|x ** 1.5
    |softmax|log_softmax|layer_norm|rms_norm|norm of rows|cosine_similarity|mse_loss|nll_loss
    |binary_cross_entropy_with_logits|sum of rows|cumsum|add|div|tanh|sigmoid|gelu|silu|glu
    |lgamma|gather
    """.replace("\n", "").split("|")
)
OPS = tuple(name.strip() for name in OPS)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    """Do the set-up of a recording once, for all tests here."""
    with polymp.recording():
        yield


def both(name: str, low: str) -> Parity:
    """The parity of a shared op, its float arguments made low."""
    values = cases.values(name)

    def function(framework: str) -> Any:
        fw = frameworks.load(framework)

        def call(*arrays: Any) -> Any:
            pairs = zip(arrays, values, strict=True)
            return fw.ops[name](*(fw.product(x) if v.dtype.kind == "f" else x for x, v in pairs))

        return call

    return assert_parity(*map(function, FRAMEWORKS), list(values), dtype=low, probes=3)


@cache
def passed(low: str) -> dict[str, Parity]:
    for name in FRAMEWORKS:
        need(name)
    return {name: both(name, low) for name in asked(low)}


def asked(low: str) -> tuple[str, ...]:
    """The ops that are compared: a half in one of the dtypes in `make test`, all in both else."""
    return OPS if LONG else OPS[LOW.index(low) :: 4]


@pytest.mark.sized
@pytest.mark.parametrize("low", LOW)
def test_ops_agree(low: str) -> None:
    found = passed(low)
    margins = [gap.margin for parity in found.values() for gap in parity.gaps if gap.error]
    print(f"\nparity in {low}: {len(found)} of {len(asked(low))} ops pass; tolerance by error: "
          f"least {min(margins):.1f}, median {statistics.median(margins):.0f}")  # fmt: skip
    assert len(found) == len(set(asked(low))) >= size(7, 30)
    assert all(gap.tolerance > 0 for parity in found.values() for gap in parity.gaps[:1]
               if "result" in gap.what)  # fmt: skip
    assert min(margins) > 1


@pytest.mark.sized
@pytest.mark.parametrize("low", LOW)
def test_a_tolerance_is_a_few_roundings_of_the_dtype(low: str) -> None:
    """Of results in the low dtype; a looser one would hide another dtype's error."""
    from polymp.diagnostics.rounding import unit_roundoff

    found = [
        gap.tolerance / unit_roundoff(low)
        for parity in passed(low).values()
        for gap in parity.gaps
        if gap.what.startswith("result")
    ]
    print(f"\ntolerances in {low}, in units roundoff: median {statistics.median(found):.1f}, "
          f"largest {max(found):.1f}")  # fmt: skip
    assert statistics.median(found) < 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda m: m.name)
def test_a_mismatch_fails_and_names_the_op(mismatch: Mismatch) -> None:
    for name in FRAMEWORKS:
        need(name)
    given = mismatch.inputs()
    with pytest.raises(ParityError) as raised:
        assert_parity(mismatch.torch(), mismatch.jax(), given, dtype=mismatch.dtype, probes=3)
    error = raised.value
    assert error.op == mismatch.op
    assert error.side_by_side in str(error)
    assert f"first op that differs is {mismatch.op}:" in str(error)
    assert bool(error.gaps) != mismatch.dtypes
    assert "parity_pairs.py:" in error.side_by_side


@pytest.mark.parametrize(
    "mismatch", [MISMATCHES[at] for at in (2, 8, 9)], ids=lambda m: m.torch().__name__
)
def test_the_same_function_without_the_difference_passes(mismatch: Mismatch) -> None:
    for name in FRAMEWORKS:
        need(name)
    parity = assert_parity(
        mismatch.torch(), mismatch.right(), mismatch.inputs(), dtype=mismatch.dtype, probes=3
    )
    assert parity.margin > 1
