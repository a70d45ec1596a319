"""`compare` names a planted fault, and only that: in torch, in JAX, and between the two.

The model is a decoder of three layers with one fault in the second; `make test-faults` takes twelve
layers, every cell and 200 seeds. What rounding hides is listed: there `compare` has to say so.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import polymp
from polymp.diagnostics.compare import Comparison
from polymp.diagnostics.record_pairs import EXPLAINED, Compared
from polymp.diagnostics.run_record import GRADIENT, INPUT, RESULT, UPDATE, RunRecord
from tests.conftest import need
from tests.support.decoder import FAULTS, IN_REGIONS, Config
from tests.support.sizes import FULL, LONG

# In `make test` all is of one width: JAX has a third fewer programs to compile.
WIDTHS = {} if LONG else {"hidden": 48, "words": 48}
CONFIG = Config() if FULL else Config(layers=3, layer=1, **WIDTHS)

# The right program and the one with the fault. "torch" is a torch.nn.Module, "nnx" and "linen" are
# flax's.
WITHIN = (("torch", "torch"), ("nnx", "nnx"), ("linen", "linen"))
ACROSS = (("nnx", "torch"), ("torch", "nnx"), ("linen", "torch"))

# Faults of dtypes alone, which rounding explains: `parted` has them.
OF_DTYPES = {"dtype", *IN_REGIONS}

# What rounding to bfloat16 hides in a region. The other eps of Adam is in `notes`.
HIDDEN = {"gelu", "eps", "adam"}


class Cell(NamedTuple):
    """A fault in one of two programs."""

    good: str
    bad: str
    fault: str
    low: str = ""  # dtype of the region; "" for float32

    def __str__(self) -> str:
        return f"{self.good}-{self.bad}-{self.fault}-{self.low or 'float32'}"

    @property
    def hidden(self) -> bool:
        """True if rounding hides the fault."""
        if not self.low:
            return False
        # The norm of linen is written out: between frameworks it is no op whose dtype may differ.
        written_out = self.fault == "norm" and "linen" in self[:2] and self.good != self.bad
        return self.fault in HIDDEN or written_out


CELLS = [
    Cell(good, bad, fault, low)
    for low in ("", "bfloat16")
    for good, bad in (*WITHIN, *ACROSS)
    for fault in FAULTS
    if (low or fault not in IN_REGIONS)
    and (fault, bad) != ("norm", "linen")  # whose norm is written out: no row has it
]

# For `make test`. JAX compiles what it records for the first time; a fault in torch takes a second.
QUICK: tuple[Cell, ...] = (
    *(Cell("torch", "torch", fault) for fault in ("gelu", "bias", "rope", "residual", "adam")),
    *(Cell("torch", "torch", fault, "bfloat16") for fault in ("scale", "dropout", "softmax")),
    *(Cell("nnx", "torch", fault) for fault in ("transposed", "eps", "mask", "dtype")),
)

# For `make test-long`: every fault within torch and between the frameworks, every third within JAX.
SOME = [cell for cell in CELLS if cell[:2] in (("torch", "torch"), ("linen", "torch"))]
SOME += [cell for cell in CELLS if cell[:2] == ("nnx", "nnx") and not cell.low][::3]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Both frameworks are needed; torch takes one thread, as in a process of many."""
    need("torch", "jax")
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def training(kind: str, config: Config, seed: int = 0, **how: Any) -> Any:
    if kind == "torch":
        from tests.support.torch import decoder as in_torch

        return in_torch.Training(config, seed, **how)
    from tests.support.jax import decoder as in_jax

    return in_jax.Training(config, seed, linen=kind == "linen", **how)


def recorded(kind: str, *seeds: int, config: Config, **how: Any) -> RunRecord:
    first = training(kind, config, seeds[0], **how)
    if kind == "torch":
        import polymp.torch

        recorder = polymp.torch.record(None, first.model)
        for seed in seeds:
            first.start(seed)
            with recorder:
                first.step()
        return recorder.record
    import polymp.jax

    step = polymp.jax.record(None, first.step)
    for seed in seeds:
        made = first if seed == seeds[0] else training(kind, config, seed, **how)
        step(made.state, made.tokens)
    return step.record


@functools.lru_cache(8)
def kept(kind: str, *seeds: int, config: Config, **how: Any) -> RunRecord:
    """A record that several tests compare with others."""
    return recorded(kind, *seeds, config=config, **how)


def good(kind: str, low: str = "") -> RunRecord:
    return kept(kind, 0, config=CONFIG._replace(low=low))


def compared(cell: Cell) -> Comparison:
    config = CONFIG._replace(low=cell.low, fault=cell.fault)
    return polymp.compare(good(cell.good, cell.low), recorded(cell.bad, 0, config=config))


def layer_of(row: Compared | None) -> str:
    """The layer that an array is in, or a parameter; "" outside of layers."""
    arrays = [] if row is None else [a for a in (row.one, row.other) if a is not None]
    for text in (text for a in arrays for text in (a.module, a.name)):
        layer = re.search(r"blocks(?:_|\.|'\]\[)(\d+)", text)
        if layer is not None:
            return layer[1]
    return ""


def misnamed(cell: Cell, comparison: Comparison) -> str:
    """Return the mistake in a comparison; "" if it names the fault."""
    first, planted = comparison.first, str(CONFIG.layer)
    of_dtypes = cell.fault in OF_DTYPES and not cell.hidden
    if of_dtypes and layer_of(comparison.parted) != planted:
        return f"parts at {comparison.parted and comparison.parted.array}"
    if first is None:  # a hidden one may show in what it computes on the way, as gelu by tanh does
        return "" if cell.hidden or of_dtypes else "names nothing"
    right = first.array.kind == UPDATE if cell.fault == "adam" else layer_of(first) == planted
    return "" if right else f"names {first.array}"


@pytest.mark.parametrize(
    "cell",
    [
        *QUICK,
        *(
            pytest.param(c, marks=pytest.mark.long)
            for c in (CELLS if FULL else SOME)
            if c not in QUICK
        ),
    ],
    ids=str,
)
def test_the_planted_fault_is_named(cell: Cell) -> None:
    comparison = compared(cell)
    assert not misnamed(cell, comparison), str(comparison)


def test_the_settings_of_an_optimizer_are_noted() -> None:
    comparison = compared(Cell("torch", "torch", "adam", "bfloat16"))
    assert any("eps=1e-08 in one run and 1e-06" in note for note in comparison.notes)


# --- no false alarms ------------------------------------------------------------------------------


def shares(comparison: Comparison) -> list[float]:
    """Of the arrays that calls made, how much of what is allowed the differences take."""
    pairs = (r for r in comparison.rows if r.one is not None and r.other is not None)
    return [row.share for row in pairs if row.array.kind in (RESULT, GRADIENT)]


def in_dtype(kind: str, name: str) -> Any:
    need(kind if kind == "torch" else "jax")
    module = "torch" if kind == "torch" else "jax.numpy"
    return getattr(importlib.import_module(module), name)


class Pair(NamedTuple):
    """Two ways to run one step."""

    one: str
    other: str
    low: tuple[str, str] = ("", "")  # the regions
    dtype: str = ""  # of the weights of the other

    def records(self, *seeds: int) -> Iterator[tuple[RunRecord, RunRecord]]:
        how = {"dtype": in_dtype(self.other, self.dtype)} if self.dtype else {}
        ways: tuple[dict[str, Any], ...] = ({}, how)
        runs = [
            kept(kind, *seeds, config=CONFIG._replace(low=low), **way)
            for kind, low, way in zip(self[:2], self.low, ways, strict=True)
        ]
        for steps in zip(*(run.steps for run in runs), strict=True):
            one, other = (run._replace(steps=(s,)) for run, s in zip(runs, steps, strict=True))
            yield one, other


IN_TORCH = {
    "float64 and float32": Pair("torch", "torch", dtype="float64"),
    "a region": Pair("torch", "torch", ("", "bfloat16")),
    "bfloat16 weights": Pair("torch", "torch", dtype="bfloat16"),
}
PAIRS = {
    **IN_TORCH,
    "torch and nnx": Pair("torch", "nnx"),
    "nnx and torch": Pair("nnx", "torch"),
    "torch and linen": Pair("torch", "linen"),
    "linen and nnx": Pair("linen", "nnx"),
    "torch and nnx in a region": Pair("torch", "nnx", ("bfloat16", "bfloat16")),
    "a region in nnx": Pair("nnx", "nnx", ("", "bfloat16")),
    "bfloat16 weights in linen": Pair("linen", "linen", dtype="bfloat16"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (*IN_TORCH, "nnx and torch") else pytest.mark.long)
        for name in PAIRS
    ],
)
def test_no_false_alarm(name: str) -> None:
    ((one, other),) = PAIRS[name].records(0)
    comparison = polymp.compare(one, other)
    assert comparison.explained, str(comparison)
    assert max(shares(comparison)) > 0, "the two are one"


@pytest.mark.long
@pytest.mark.parametrize("name", IN_TORCH)
def test_no_false_alarm_with_other_weights_and_data(name: str) -> None:
    """The largest share of what is allowed tells how much the tolerance has to spare."""
    worst = []
    for one, other in PAIRS[name].records(*range(1, 201 if FULL else 11)):
        comparison = polymp.compare(one, other)
        assert comparison.explained, str(comparison)
        worst.append(max(shares(comparison)))
    assert np.median(worst) > 0.02, "the tolerance is too large to find anything"


@pytest.mark.long
def test_no_false_alarm_between_frameworks_with_other_weights_and_data() -> None:
    for one, other in PAIRS["torch and nnx"].records(*range(1, 51 if FULL else 6)):
        comparison = polymp.compare(one, other)
        assert comparison.explained, str(comparison)


# In torch's words and JAX's; each turns in a region for some numbers, and not in float32.
CHOICES = {
    "argmax": ("F.embedding((a @ b).argmax(-1), e)", "e[(a @ b).argmax(-1)]"),
    "one hot": (
        "F.one_hot((a @ b).argmax(-1), 64).to(e.dtype) @ e",
        "jax.nn.one_hot((a @ b).argmax(-1), 64) @ e",
    ),
    "top": ("(a @ b).topk(5, -1).values", "jax.lax.top_k(a @ b, 5)[0]"),
    "a jump": ("torch.where(a @ b > 0, 5 * (a @ b), a @ b - 7)",
               "jnp.where(a @ b > 0, 5 * (a @ b), a @ b - 7)"),
    "round": ("(3 * (a @ b)).round() * (a @ b)", "jnp.round(3 * (a @ b)) * (a @ b)"),
    "sign": ("(a @ b).sign() * b.sum()", "jnp.sign(a @ b) * b.sum()"),
}  # fmt: skip


def chosen(kind: str, form: str, low: bool, seed: int) -> RunRecord:
    """The record of a step with a choice: the sum of the squares of an expression in a, b and e."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(s, "float32") for s in ((200, 4), (4, 64), (64, 8))]
    if kind == "torch":
        import torch

        import polymp.torch

        a, b, e = given = [torch.tensor(x, requires_grad=True) for x in arrays]
        recorder = polymp.torch.record(None, torch.nn.ParameterList(given))
        with recorder:
            with polymp.torch.autocast("cpu", torch.bfloat16, enabled=low):
                made = eval(form, {"F": torch.nn.functional, "torch": torch}, dict(a=a, b=b, e=e))
            made.float().square().sum().backward()
        return recorder.record
    import jax

    import polymp.jax

    def loss(a: Any, b: Any, e: Any) -> Any:
        made = eval(form, {"jax": jax, "jnp": jax.numpy}, {"a": a, "b": b, "e": e})
        return (made.astype("float32") ** 2).sum()

    region = polymp.jax.autocast(loss, dtype="bfloat16", enabled=low)
    step = polymp.jax.record(None, jax.value_and_grad(region, (0, 1)))
    step(*map(jax.numpy.asarray, arrays))
    return step.record


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_rounding_turns_raises_no_alarm(kind: str, name: str) -> None:
    form = CHOICES[name][kind == "jax"]
    for seed in range(3 if kind == "torch" else 1):
        comparison = polymp.compare(*(chosen(kind, form, low, seed) for low in (False, True)))
        assert comparison.explained, str(comparison)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_choice_that_is_another_is_named(kind: str) -> None:
    form = CHOICES["argmax"][kind == "jax"]
    one, other = (chosen(kind, f, False, 0) for f in (form, form.replace("argmax", "argmin")))
    comparison = polymp.compare(one, other)
    assert comparison.first is not None
    assert comparison.first.array.name == {"torch": "embedding", "jax": "gather"}[kind]


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_a_cast_that_a_program_makes_is_a_call_of_it(kind: str) -> None:
    """Rounding explains what comes of it; but the programs are not the same."""
    casts = {"torch": ".half().float()", "jax": ".astype('float16').astype('float32')"}[kind]
    comparison = polymp.compare(*(chosen(kind, f"(a @ b){c} @ e", False, 0) for c in ("", casts)))
    assert comparison.explained
    assert comparison.parted is not None
    assert comparison.parted.array.name == "to"


def test_threads_raise_no_alarm() -> None:
    import torch

    config = CONFIG._replace(batch=16, layers=1, layer=0)
    one = recorded("torch", 0, config=config)
    torch.set_num_threads(2)
    try:
        other = recorded("torch", 0, config=config)
    finally:
        torch.set_num_threads(1)
    assert polymp.compare(one, other).explained


def test_another_order_of_the_batch_is_another_input_and_changes_no_gradient() -> None:
    import polymp.torch

    made = training("torch", CONFIG)
    made.start(0, order=[*range(CONFIG.batch)][::-1])
    recorder = polymp.torch.record(None, made.model)
    with recorder:
        made.step()
    comparison = polymp.compare(good("torch"), recorder.record)
    assert comparison.first is not None
    assert comparison.first.array.kind == INPUT
    sums = [row for row in comparison.rows if row.array.kind in (GRADIENT, UPDATE)]
    assert sums
    assert {row.verdict for row in sums} == {EXPLAINED}, str(comparison)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_a_compiled_model_raises_no_alarm() -> None:
    config = CONFIG._replace(layers=2, layer=1)
    comparison = polymp.compare(
        recorded("torch", 0, config=config), recorded("torch", 0, config=config, compiled=True)
    )
    assert comparison.explained, str(comparison)


# --- on a GPU -------------------------------------------------------------------------------------

GPU_FAULTS = ("gelu", "bias", "rope", "mask", "dropout", "residual", "softmax")


def on_gpu(config: Config) -> RunRecord:
    """The record of a step in torch on a GPU; skips where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return recorded("torch", 0, config=config, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("low", ["", "bfloat16"])
def test_a_gpu_and_a_cpu_raise_no_alarm(low: str) -> None:
    comparison = polymp.compare(on_gpu(CONFIG._replace(low=low)), good("torch", low))
    assert comparison.explained, str(comparison)
    assert max(shares(comparison)) > 0, "the two are one"


@pytest.mark.gpu
def test_tf32_raises_no_alarm() -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        comparison = polymp.compare(on_gpu(CONFIG), good("torch"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert comparison.explained, str(comparison)
    assert comparison.parted is not None
    assert comparison.parted.array.run == "tf32"


@pytest.mark.gpu
@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_the_planted_fault_is_named_on_a_gpu(fault: str) -> None:
    low = "bfloat16" if fault in IN_REGIONS else ""
    cell = Cell("torch", "torch", fault, low)
    bad = on_gpu(CONFIG._replace(low=low, fault=fault))
    comparison = polymp.compare(good("torch", low), bad)
    assert not misnamed(cell, comparison), str(comparison)


@pytest.mark.gpu
def test_a_record_makes_no_step_wait_for_the_gpu_before_it_ends() -> None:
    """The bits are those of a step without a record, too."""
    import torch

    import polymp.torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    plain, followed = (training("torch", CONFIG, device="cuda") for _ in range(2))
    plain.step()
    recorder = polymp.torch.record(None, followed.model, probes=2)
    with recorder:  # the first step makes what is kept on the device
        followed.step()
    plain.step()
    with recorder:
        torch.cuda.set_sync_debug_mode("error")
        try:
            followed.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(plain.model.parameters(), followed.model.parameters(), strict=True):
        assert torch.equal(one, other)
