"""`assert_parity` on shared ops in both low dtypes, and on pairs with a planted difference.

The ops are those of `cases`, called on what a matrix product in the region has made low.
"""

from __future__ import annotations

import linecache
import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from polymp.diagnostics.rounding import unit_roundoff
from polymp.testing import Parity, ParityError, assert_parity
from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks, parity_pairs
from tests.support.cases import LOW
from tests.support.decisions import recording
from tests.support.parity_pairs import MISMATCHES, Mismatch, block_inputs, jax_block, torch_block
from tests.support.sizes import LONG, size

# Of every kind: products, convolutions, attention, cells, powers, softmax, norms, losses, sums,
# arithmetic, activations, indexing and pooling.
OPS = tuple(
    name.strip()
    for name in """
    addmm|linear|einsum|conv1d with bias|conv2d|attention|rnn_tanh_cell|exp|log1p|rsqrt|x ** 1.5
    |softmax|log_softmax|layer_norm|rms_norm|norm of rows|cosine_similarity|mse_loss|nll_loss
    |binary_cross_entropy_with_logits|sum of rows|cumsum|add|div|tanh|sigmoid|gelu|silu|glu
    |lgamma|gather
    """.split("|")
)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    """Do the set-up of a recording once, for all tests here."""
    need(*FRAMEWORKS)
    with recording():
        yield


def functions(name: str, low: bool) -> list[Any]:
    """A shared op in torch and in JAX, its float arguments made low if asked."""
    floats = [x.dtype.kind == "f" and low for x in cases.values(name)]

    def function(framework: str) -> Any:
        fw = frameworks.load(framework)

        def call(*arrays: Any) -> Any:
            pairs = zip(arrays, floats, strict=True)
            return fw.ops[name](*(fw.product(x) if made else x for x, made in pairs))

        return call

    return [*map(function, FRAMEWORKS)]


def both(name: str, low: str) -> Parity:
    """The parity of a shared op in a low dtype; `test_no_seed_...` compares it in float32."""
    given = list(cases.values(name))
    return assert_parity(*functions(name, True), given, dtype=low, probes=6, float32_first=False)


def asked(low: str) -> tuple[str, ...]:
    """In `make test` a quarter of the ops in one of the dtypes, else all in both."""
    return OPS if LONG else OPS[LOW.index(low) :: 8]


@pytest.mark.sized
@pytest.mark.parametrize("low", LOW)
def test_ops_agree_and_a_tolerance_is_a_few_roundings_of_the_dtype(low: str) -> None:
    """Of results in the low dtype; a looser one would hide another dtype's error."""
    found = {name: both(name, low) for name in asked(low)}
    gaps = [gap for parity in found.values() for gap in parity.gaps]
    margins = [gap.margin for gap in gaps if gap.error]
    tolerances = [gap.tolerance for gap in gaps if gap.what.startswith("result")]
    roundings = statistics.median(tolerances) / unit_roundoff(low)
    assert len(found) == len(set(asked(low))) >= size(4, 30)
    assert all(parity.gaps[0].tolerance > 0 for parity in found.values())
    assert min(margins) > 1
    assert roundings < 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda m: m.name)
def test_a_mismatch_fails_and_names_the_op(mismatch: Mismatch) -> None:
    given = mismatch.inputs()
    with pytest.raises(ParityError) as raised:
        assert_parity(mismatch.torch(), mismatch.jax(), given, dtype=mismatch.dtype, probes=6)
    error = raised.value
    # Outside of a region torch has no kernels that name an op: it is the one that ran.
    ran = {"linear": "addmm"} if error.dtype == "float32" else {}
    op = ran.get(mismatch.op, mismatch.op)
    assert error.op == op
    assert error.side_by_side in str(error)
    assert f"first op that differs is {op}:" in str(error)
    assert bool(error.gaps) != mismatch.dtypes
    assert "parity_pairs.py:" in error.side_by_side
    hidden = mismatch.within or not mismatch.dtypes
    assert (error.dtype == "float32") == hidden or mismatch.op == "to"
    assert str(error).startswith(
        "in float32, without a region: the two functions"
        if error.dtype == "float32"
        else f"in {mismatch.dtype}, though not in float32: the two functions"
    )
    if mismatch.within:
        assert assert_parity(
            mismatch.torch(), mismatch.jax(), given, dtype=mismatch.dtype, probes=6,
            float32_first=False,
        ).margin > 1  # fmt: skip


@pytest.mark.parametrize(
    ("at", "changed", "op", "line"),
    [
        (0, {"approximate": True}, "gelu", "jax.nn.gelu("),
        (1, {"approximate": True}, "gelu", "jax.nn.gelu("),
        pytest.param(1, {"eps": 1e-3}, "layer_norm", "x = x - x.mean(", marks=pytest.mark.long),
        pytest.param(1, {"axis": -2}, "softmax", "jax.nn.softmax(", marks=pytest.mark.long),
        pytest.param(0, {"power": -0.4}, "mul", "** power", marks=pytest.mark.long),
    ],
)
def test_the_columns_show_the_same_place(at: int, changed: Any, op: str, line: str) -> None:
    """Of two blocks, in each of which many ops of JAX have the name of one in torch."""
    import jax

    blocks = [torch_block()] * 2, [jax_block(**changed) if i == at else jax_block() for i in (0, 1)]

    def ours(x: Any, p: Any) -> Any:
        for block in blocks[0]:
            x = block(x, p)
        return x

    def theirs(x: Any, p: Any) -> Any:
        for i, block in enumerate(blocks[1]):
            with jax.named_scope(f"block{i}"):
                x = block(x, p)
        return x

    with pytest.raises(ParityError) as raised:
        assert_parity(ours, theirs, block_inputs(0), dtype=None, grads=False, probes=6)
    assert raised.value.op == op
    rows = [row.split() for row in raised.value.side_by_side.splitlines()]
    (module,) = (row[-1] for row in rows if row[:1] == ["module"])
    (source,) = (row[-1] for row in rows if row[:1] == ["source"])
    file, number = source.split(":")
    assert file == "parity_pairs.py"
    assert (module, line in linecache.getline(parity_pairs.__file__, int(number))) == (
        f"block{at}",
        True,
    )


def test_an_eps_of_1e_6_is_told_from_1e_5_in_a_block() -> None:
    given = block_inputs(0)
    assert assert_parity(torch_block(), jax_block(), given, dtype=None, probes=6).margin > 1
    with pytest.raises(ParityError) as raised:
        assert_parity(torch_block(), jax_block(eps=1e-6), given, dtype=None, probes=6)
    assert raised.value.op == "layer_norm"
    assert any(gap.part for gap in raised.value.gaps if "gradient" in gap.what)


# Gradients that are the sum of the fixed cotangent, whatever the seed: one error, often zero.
ONE_ERROR = {("linear", 2), ("conv1d with bias", 2), ("layer_norm", 2)}


@pytest.mark.long
@pytest.mark.parametrize("name", ["block", *OPS])
def test_no_seed_is_a_false_alarm_and_the_tolerance_is_30_errors(name: str) -> None:
    """In float32. In a low dtype most roundings are the same ones in both frameworks."""
    from tests.support.parity_seeds import Repeated

    def given(seed: int) -> list[Any]:
        return block_inputs(seed) if name == "block" else list(cases.values(name, seed))

    pair = (torch_block(), jax_block()) if name == "block" else functions(name, False)
    repeated = Repeated(*pair, given(1), probes=8)
    seeds = range(33)  # the ops have a thousand together
    rows = [repeated.gaps(given(1 + seed)) for seed in seeds]
    assert [str(gap) for row in rows for gap in row if gap.part] == []
    for at, column in enumerate(zip(*rows, strict=True)):
        seen = max(gap.error for gap in column)
        if seen and (name, at - 1) not in ONE_ERROR:
            times = statistics.median(g.tolerance for g in column) / seen
            assert times <= 30, column[0].what


@pytest.mark.long
@pytest.mark.parametrize("low", LOW)
def test_the_tolerance_of_a_block_is_30_errors_in_a_low_dtype(low: str) -> None:
    from tests.support.parity_seeds import Repeated

    repeated = Repeated(torch_block(), jax_block(), block_inputs(1), low, probes=4)
    rows = [repeated.gaps(block_inputs(seed)) for seed in range(1, 21)]
    assert [str(gap) for row in rows for gap in row if gap.part] == []
    seen = [(column, max(gap.error for gap in column)) for column in zip(*rows, strict=True)]
    times = [statistics.median(g.tolerance for g in c) / most for c, most in seen if most]
    assert max(times) <= 30


def test_a_mask_of_inf_leaves_a_tolerance_to_hold_values_to() -> None:
    import jax
    import jax.numpy as jnp
    import torch

    def in_torch(q: Any, k: Any, v: Any) -> Any:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    def in_jax(q: Any, k: Any, v: Any, factor: float = 1.0) -> Any:
        scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1]) * factor
        earlier = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
        return jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf), -1) @ v

    random = np.random.default_rng(0)
    inputs = [random.standard_normal((2, 6, 8)).astype(np.float32) for _ in range(3)]
    how: dict[str, Any] = {"dtype": "float16", "probes": 4, "float32_first": False}
    found = assert_parity(in_torch, in_jax, inputs, **how)
    assert all(0 < g.tolerance < 0.1 for g in found.gaps)
    assert all(g.error > 0 for g in found.gaps[1:])  # values were compared
    with pytest.raises(ParityError, match="compute other values"):
        assert_parity(in_torch, partial(in_jax, factor=1.5), inputs, **how)
