"""Twelve trainings with a fault planted in each: what is named, and what is suggested.

A training is healthy in float16 by its policy; a fault makes it break. `locate` and `audit` get the
spoiled step and no more. Where the fault sits, and what kind of change helps, stands here.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

import polymp
from tests.conftest import need


def attention(training: Any) -> None:
    """Queries and keys 256 times as large, and scores divided by as much again."""
    head = training.model.attention
    for layer in (head.q, head.k):
        layer.weight.data *= 2.0**8
    head.temperature *= 2.0**-16


def convolution(training: Any) -> None:
    """Images in other units: the whitening undoes it."""
    images, labels = training.batch
    training.batch = images * 2.0**-16, labels


def counting(training: Any) -> None:
    """Counts of a shorter time: rates are larger by e**12."""
    training.model.head.bias.data += 12
    training.loss.time = math.exp(-12)


def recurrent(training: Any) -> None:
    """A weight of the loss that Adam does not see."""
    training.loss.weight = 2.0**-26


def embedding(training: Any) -> None:
    training.model.unit.eps = 1e-8


def stream(training: Any) -> None:
    """All that is added to the stream 2**18 times as large: the norms undo it."""
    layers = [training.model.start, *(block.down for block in training.model.blocks)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data *= 2.0**18


def regression(training: Any) -> None:
    """One value of the data is no number."""
    x, y = training.batch
    x = x.copy()
    x[5, 2] = math.nan
    training.batch = x, y


def pooling(training: Any) -> None:
    """One row of the batch is masked as a whole."""
    x, mask, y = training.batch
    mask = mask.copy()
    mask[3] = 0
    training.batch = x, mask, y


def unit(training: Any) -> None:
    """Data in other units: the norm undoes it."""
    x, y = training.batch
    training.batch = x * 2.0**4, y


def sparse(training: Any) -> None:
    """The penalty in other units: its weight undoes it."""
    training.loss = training.loss._replace(units=2.0**6)


def classes(training: Any) -> None:
    """Scores 12 times as large, so that most classes are all but ruled out."""
    training.model.sharpness = 12.0


def graph(training: Any) -> None:
    """Messages in other units: who receives them divides by as much."""
    training.model.neighbours.units = 2.0**12


# How far a mended training must come, as a share of how far the healthy one comes.
ENOUGH = 0.7


class Planted(NamedTuple):
    framework: str  # whose training it is planted in
    plant: Callable[[Any], None]  # plants it in the training of its name
    ops: tuple[str, ...]  # what the op may be called; the gradient's, if the fault is in no op
    module: str  # where the op is called
    kinds: tuple[str, ...]  # what `Fault.kind` may be
    remedy: str  # what is suggested: "float32" for some op, "bfloat16", "scale" or "" for nothing
    unit: float = 1.0  # what the loss is measured in

    @property
    def training(self) -> str:
        return self.plant.__name__

    def __str__(self) -> str:
        return f"{self.framework}-{self.training}"


OVER, UNDER, NUMBER = ("overflow",), ("underflow",), ("number", "underflow")
PLANTED = (
    # the scores of an attention, before they are divided
    Planted("torch", attention, ("matmul", "bmm"), "attention", OVER, "float32"),
    # the squares of a variance, written out
    Planted("torch", convolution, ("mul",), "whiten", UNDER, "float32"),
    # an exponential in a loss, by a policy that leaves it low
    Planted("torch", counting, ("exp",), "", OVER, "float32"),
    # gradients that are zero in float16, without a scaler: nothing is learnt
    Planted("torch", recurrent, ("gradient",), "", (), "scale", 2.0**-26),
    # 1e-8 added to a mean that is zero
    Planted("torch", embedding, ("add",), "unit", NUMBER, "float32"),
    # a residual stream of the size that bfloat16 allows
    Planted("torch", stream, ("linear",), "start", OVER, "bfloat16"),
    # a value of the data
    Planted("jax", regression, ("linear",), "body", ("input",), ""),
    # a mean over a row that is masked as a whole: 0 / 0, and a gradient that `where` does not stop
    Planted("jax", pooling, ("div",), "pool", ("operation",), ""),
    # a norm along a long axis, as a product of a row with itself
    Planted("jax", unit, ("matmul",), "unit", OVER, "float32"),
    # a penalty that is a sum where it could be a mean
    Planted("jax", sparse, ("sum",), "penalty", OVER, "float32"),
    # the logarithm of a softmax that is zero in float16
    Planted("jax", classes, ("softmax",), "", UNDER, "float32"),
    # a mean as a sum by a product, divided afterwards
    Planted("jax", graph, ("linear",), "neighbours", OVER, "float32"),
)  # fmt: skip
each = pytest.mark.parametrize("case", PLANTED, ids=str)


def made(case: Planted) -> Any:
    need(case.framework)
    return importlib.import_module(f"tests.support.faults.in_{case.framework}").made(case.training)


def spoiled(case: Planted) -> Any:
    """The training with the fault in it, and no word of which."""
    training = made(case)
    case.plant(training)
    return training


@cache
def healthy(case: Planted) -> tuple[float, ...]:
    return tuple(made(case).train())


def fall(losses: Sequence[float], unit: float = 1.0) -> float:
    """How far a loss fell; no distance at all if it was not finite at any time."""
    return (losses[0] - losses[-1]) / unit if all(map(math.isfinite, losses)) else 0.0


def changed(training: Any, suggestion: Any) -> Any:
    training.use(suggestion.apply(polymp.policy(training.policy)))
    if suggestion.dtype:
        training.compute_in(suggestion.dtype)
    elif suggestion.init_scale:
        training.scale_by(suggestion.init_scale)
    return training


@each
def test_the_fault_alone_keeps_it_from_training(case: Planted) -> None:
    losses = healthy(case)
    assert fall(losses) >= 0.5 * abs(losses[0]), losses
    spoilt = spoiled(case).train()
    assert fall(spoilt, case.unit) < 0.1 * fall(losses), spoilt


def audited(case: Planted, training: Any) -> Any:
    if case.framework == "torch":
        import polymp.torch

        scaler = training.scaler if training.scaler.is_enabled() else None
        with polymp.torch.audit(training.model, scaler=scaler) as audit:
            for _ in range(2):
                training.step(*training.batch)
        return audit
    import polymp.jax

    step, state = polymp.jax.audit(training.step), training.state
    for _ in range(2):
        state, _ = step(state, *training.batch)
    return step.audit


def located(case: Planted, training: Any) -> Any:
    """Return the fault that the replay of a step finds."""
    if case.framework == "torch":
        import polymp.torch

        return polymp.torch.locate(training.step, *training.batch)
    import polymp.jax

    return polymp.jax.locate(training.step, training.state, *training.batch)


@cache
def audit_of(case: Planted) -> Any:
    return audited(case, spoiled(case))


def misnamed(case: Planted, audit: Any, found: Any) -> str:
    """Return the mistake in what was found; "" if only the planted op is named."""
    if case.remedy == "scale":
        told = " ".join(audit.suggest(base=made(case).policy).reasons)
        if audit.fault or found or "gradient" not in told:
            return f"{case}: {audit.fault or found or told!r}"
        return ""
    faults = [fault for fault in (audit.fault, found) if fault is not None]
    for fault in faults:
        named = fault.op in case.ops and fault.kind in case.kinds
        if not named or fault.module != case.module:
            return f"{case}: wants {case.ops}, {case.module!r}, {case.kinds}; found {fault}"
    return "" if faults else f"{case}: nothing found"


def is_replayed(case: Planted) -> bool:
    """True where `locate` is asked, too; in JAX it compiles twice what an audit compiles once."""
    return case.framework == "torch" or case.training in ("regression", "pooling", "sparse")


@pytest.mark.one_in(6)
@each
def test_the_planted_op_is_named(case: Planted) -> None:
    found = located(case, spoiled(case)) if is_replayed(case) else None
    assert misnamed(case, audit_of(case), found) == ""


@pytest.mark.one_in(6)
@each
def test_what_is_suggested_makes_it_train(case: Planted) -> None:
    training = spoiled(case)
    suggestion = audit_of(case).suggest(base=training.policy)
    if not case.remedy:
        assert not suggestion
        assert suggestion.reasons
        return
    kinds = {"float32": suggestion.rules or suggestion.scopes, "bfloat16": suggestion.dtype}
    kinds["scale"] = suggestion.init_scale
    assert [kind for kind, found in kinds.items() if found] == [case.remedy], str(suggestion)
    losses = changed(training, suggestion).train()
    assert fall(losses, case.unit) >= ENOUGH * fall(healthy(case)), f"{suggestion}\n{losses}"


@pytest.mark.one_in(6)
@each
def test_nothing_is_found_where_nothing_was_planted(case: Planted) -> None:
    training = made(case)
    audit = audited(case, training)
    assert audit.fault is None, str(audit.fault)
    if is_replayed(case):
        assert located(case, made(case)) is None
    if case.training != "recurrent":  # which is as good as never without a scaler
        assert not audit.suggest(base=training.policy), str(audit.suggest(base=training.policy))


class Single(NamedTuple):
    """A step that breaks of `tests.support.faults.steps_torch`; complex ones also `steps_jax`."""

    name: str  # of the step
    op: str  # what is to be named
    kind: str  # as in `Fault.kind`
    # True if a row makes the step finite; else the tools have to say that none does
    helps: bool = False
    says: str = ""  # words of the fault, as it is printed


NOT_FINITE = "a constant of the program is not finite here"
SINGLE = (
    Single("scores of a view", "matmul", "overflow", helps=True),
    Single("scores with a gradient", "matmul", "overflow", helps=True),
    Single("complex product", "pow", "operation", says="ran in complex64"),
    Single("complex quotient", "div", "operation", says="input 1: complex64[3], all zero"),
    Single("complex conjugate", "mul", "operation", says="complex64[3]"),
    Single("transform", "fft_rfft", "operation", says="ran in complex64"),
    Single("upper bound", "clamp", "number", helps=True, says="0.999999 is 1 in float16"),
    Single("upper bound in bfloat16", "clamp", "number", True, "0.9999 is 1 in bfloat16"),
    Single("sigmoid of 10", "sigmoid", "saturation", helps=True, says="below 1 in float32"),
    Single("lower bound", "clamp_min", "number", helps=True, says="is zero in float16"),
    Single("bound in place", "clamp_min", "number", says="is zero in float16"),
    Single("fill of where", "where", "number", helps=True, says="1e-09"),
    Single("fill of a mask", "masked_fill", "number", helps=True, says="1e-09"),
    Single("eps inside", "cosine_similarity", "number", helps=True, says="1e-08"),
    Single("eps in a tensor", "add", "number", helps=True, says="1e-09"),
    Single("inf in a column", "fill_", "operation", says=NOT_FINITE),
    Single("nan in a column", "fill_", "operation", says=NOT_FINITE),
    Single("inf by a mask", "index_put", "operation", says=NOT_FINITE),
    Single("fill_", "fill_", "operation", says=NOT_FINITE),
    Single("full", "full", "operation", says=NOT_FINITE),
    Single("stale gradient", "add", "input", says="the .grad of a leaf (float32 3)"),
    Single("underflow of softmax", "softmax", "underflow", True, "then Inf, of log steps_torch.py"),
    Single("empty mask", "div", "operation", says="operation: its inputs are finite"),
    Single("a column beside Inf", "div", "operation", says="input 1: float32[3, 4], all zero"),
    Single("Inf that was removed", "div", "operation", says="input 1: float16[3, 4], all zero"),
    Single("root of a negative", "sqrt", "operation", says="33 % negative"),
    Single("past 1", "acos", "operation", says="|x| from 0.5 to 1.00000012"),
)


BOTH = ("complex product", "complex quotient", "complex conjugate", "transform", "empty mask")
SINGLE_IN_JAX = [case for case in SINGLE if case.name in BOTH] + [
    Single("complex loop", "mul", "operation", says="input 0: complex64[3], |x| from 1e+30")
]


@pytest.mark.parametrize(
    ("framework", "case"),
    [*(("torch", case) for case in SINGLE), *(("jax", case) for case in SINGLE_IN_JAX)],
    ids=lambda part: part.name if isinstance(part, Single) else part,
)
def test_a_step_that_breaks_is_explained_by_all_tools_alike(framework: str, case: Single) -> None:
    """`locate` and `audit` name one op; the rows of `suggest` are tried."""
    need(framework)
    if framework == "torch":
        import polymp.torch

        polymp.torch.autocast("cpu", policy="amp")  # its kernels name calls as without them
    one = importlib.import_module(f"tests.support.faults.steps_{framework}").STEPS[case.name]()
    assert not one.is_finite()
    fault, audit = one.located(), one.audited()
    if framework == "jax":
        assert fault.source.startswith("steps_jax.py:"), str(fault)
    assert (fault.op, fault.kind) == (case.op, case.kind), str(fault)
    assert case.says in str(fault)
    assert audit.fault[:7] == fault[:7]
    assert audit.fault.why == fault.why
    suggestion = audit.suggest(base=one.policy)
    assert bool(suggestion) == case.helps, str(suggestion)
    assert suggestion.reasons
    assert suggestion.dtype is None
    one.policy = suggestion.apply(one.policy)
    assert one.is_finite() == case.helps
