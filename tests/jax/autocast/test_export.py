"""Export: what jax.export keeps of a function under autocast is StableHLO with plain converts.

Every artifact is written to a file and run in one other process, in which polymp cannot be
imported. Its bits must be those of the jitted function here.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from polymp.jax import autocast
from tests.support import processes
from tests.support.jax import forms, hlo
from tests.support.jax.corpus_runs import QUICK
from tests.support.jax.scaler_tools import bits
from tests.support.sizes import LONG

OWN = {
    "name": "own",
    "extends": "amp",
    "rules": {"softmax": "lower", "class:normalisation": "lower", "gelu": "fp32", "tanh": "fp32"},
}
POLICIES: dict[str, Any] = {"amp": "amp", "lean": "lean", "own": OWN}
DTYPES = {"bfloat16": "bf16", "float16": "f16"}

WIDTH = 8


def block(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention by hand, a norm, a loop and a branch: what a model has of each kind of op."""
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    weights = jax.nn.softmax(h @ w["q"] @ (h @ w["k"]).T)
    h = jax.nn.gelu(weights @ (h @ w["v"]))

    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ w["loop"]).astype(carry.dtype), None

    h, _ = jax.lax.scan(body, h, None, length=3)
    h = jax.lax.cond(x.sum() > 0, lambda h: h @ w["q"], lambda h: h @ w["k"], h)
    return jax.nn.log_softmax(h)


def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(block(w, x).astype(jnp.float32) ** 2)


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    random = np.random.default_rng(0)
    w = {n: random.standard_normal((WIDTH, WIDTH), np.float32) / 2 for n in ("q", "k", "v", "loop")}
    x = random.standard_normal((4, WIDTH), np.float32)
    return jax.tree.map(jnp.asarray, (w, x))


class Case(NamedTuple):
    policy: str
    dtype: str
    way: str  # what is exported, and what is asked of it

    def __str__(self) -> str:
        return f"{self.policy}-{self.dtype}-{self.way}"

    def function(self) -> Callable[..., Any]:
        what = block if self.way == "value" else loss
        return autocast(what, dtype=jnp.dtype(self.dtype), policy=POLICIES[self.policy])

    def exported(self, *platforms: str) -> export.Exported:
        fn = jax.grad(self.function()) if self.way == "gradient" else self.function()
        return export.export(jax.jit(fn), platforms=platforms)(*arguments())


@cache
def here(case: Case) -> list[np.ndarray]:
    """Return the results of the jitted function, in the form of exported programs."""
    fn = case.function() if case.way == "value" else jax.grad(case.function())
    run = jax.jit(fn, compiler_options=QUICK)
    with forms.lowered_as("row_by_row"):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*arguments()))]


WAYS = ("value", "gradient", "gradient of the artifact")
RUN = (("amp", "bfloat16"), ("own", "bfloat16"), ("lean", "float16"))
CASES = [Case(policy, dtype, way) for policy, dtype in RUN for way in WAYS]
ASKED = CASES if LONG else CASES[::4]  # each policy once, and each way

# Takes a folder of artifacts and writes what they come to. The name's end says how to call one.
ELSEWHERE = f"""
import sys
sys.modules["polymp"] = None  # so that nothing can import it
from pathlib import Path
import jax, numpy as np
from jax import export
folder = Path(sys.argv[1])
leaves = [a for _, a in sorted(np.load(folder / "arguments.npz").items())]
w, x = dict(zip(("k", "loop", "q", "v"), leaves[:4])), leaves[4]
for path in sorted(folder.glob("*.artifact")):
    call = export.deserialize(bytearray(path.read_bytes())).call
    call = jax.grad(call) if path.stem.endswith("of the artifact") else call
    run = jax.jit(call, compiler_options={QUICK})
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(run(w, x))]
    np.savez(path.with_suffix(".npz"), *found)
assert not [name for name in sys.modules if name.startswith("polymp.")]
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[np.ndarray]]:
    """Return the results of a case's artifact in a process without polymp."""
    folder = tmp_path_factory.mktemp("artifacts")
    np.savez(folder / "arguments.npz", *map(np.asarray, jax.tree.leaves(arguments())))
    for case in ASKED:
        vjps = 1 if case.way == WAYS[2] else 0
        (folder / f"{case}.artifact").write_bytes(case.exported("cpu").serialize(vjp_order=vjps))
    processes.run(ELSEWHERE, folder)

    def found(case: Case) -> list[np.ndarray]:
        with np.load(Path(folder) / f"{case}.npz") as arrays:
            return [arrays[name] for name in arrays.files]

    return found


@pytest.mark.sized
@pytest.mark.parametrize("case", ASKED, ids=str)
def test_an_artifact_gives_the_bits_of_the_jitted_function(case, elsewhere):
    assert bits(elsewhere(case)) == bits(here(case))


@pytest.mark.sized
@pytest.mark.parametrize("case", ASKED[:: 1 if LONG else 2], ids=str)
def test_the_comparison_sees_another_policy_and_another_dtype(case, elsewhere):
    others = {Case(policy, dtype, case.way) for policy, dtype in RUN} - {case}
    assert len(others) == 2
    assert not any(bits(elsewhere(case)) == bits(here(other)) for other in others)


def foreign(text: str) -> list[str]:
    """Lines of a module that are not plain StableHLO, where they are from left out."""
    lines = (re.sub(r"loc\(.*\)", "", line) for line in text.splitlines() if line[:4] != "#loc")
    return [line for line in lines if "custom_call" in line or "polymp" in line]


def has_low_products(text: str, dtype: str, way: str) -> None:
    """Raise unless a module is plain StableHLO, all of whose products are low."""
    assert foreign(text) == []
    products = hlo.in_stablehlo("dot_general", text)
    assert {dtypes[:2] for dtypes in products} == {(DTYPES[dtype], DTYPES[dtype])}
    assert len(products) >= (7 if way == "value" else 20)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("policy", POLICIES)
def test_stablehlo_has_plain_converts_and_low_products(policy, way):
    text = Case(policy, "bfloat16", way).exported("cpu").mlir_module()
    has_low_products(text, "bfloat16", way)
    cast = rf"stablehlo.convert %arg\d+ : \(tensor<{WIDTH}x{WIDTH}xf32>\) -> tensor<8x8xbf16>"
    assert re.search(cast, text), "no parameter is converted"


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_lowers_for_machines_that_are_not_here(dtype, way):
    exported = Case("own", dtype, way).exported("cuda", "tpu")
    assert exported.platforms == ("cuda", "tpu")
    has_low_products(exported.mlir_module(), dtype, way)
    copy = export.deserialize(exported.serialize())
    assert copy.out_avals == exported.out_avals
    with pytest.raises(ValueError, match="platform"):
        jax.jit(copy.call)(*arguments())


def test_shapes_may_be_symbols():
    w, x = arguments()
    rows = export.symbolic_shape("n, 8")
    inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), w)
    fn = jax.jit(Case("lean", "bfloat16", "value").function())
    exported = export.export(fn)(inputs, jax.ShapeDtypeStruct(rows, jnp.float32))
    for n in (2, 4):
        assert bits(exported.call(w, x[:n])) == bits(fn(w, x[:n]))
