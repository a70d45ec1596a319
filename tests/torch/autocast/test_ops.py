"""Every op that torch registers for autocast, in a region of polymp and under torch's own."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import forks
from tests.support.torch import ops, outcomes, run_ops
from tests.support.torch.outcomes import Outcome, Seen
from tests.support.torch.run_ops import STAGES, Case, Record
from tests.support.torch.version_changes import ASK_FOR_DRIVER

pytestmark = pytest.mark.sized  # `run_ops` makes each call with all patterns of dtypes then

DEVICES = ("cpu", "cuda")
ENGINES = tuple(stage for stage in STAGES if stage not in ("torch", "wrong"))
OPS = [(device, op) for device in DEVICES for op in run_ops.registered(device) if run_ops.rows(op)]

# Ops of which a row may raise under torch too, even on float32. The error is compared, and on CUDA
# the dtypes in which the op was called.
NEED_NO_RESULT = {
    ("cpu", "mkldnn_rnn_layer"): "oneDNN has no 16-bit LSTM for some CPUs",
    ("cuda", "_cudnn_rnn"): "asks for a GPU where it casts weights",
    ("cuda", "_thnn_fused_gru_cell"): "asks for a CUDA build of torch",
    ("cuda", "gru_cell"): "asks for a CUDA build of torch",
    ("cuda", "lstm_cell"): "torch's fake kernel fails without biases",
    ("cuda", "cudnn_convolution"): "asks for a CUDA build of torch",
    ("cuda", "cudnn_convolution_transpose"): "asks for a CUDA build of torch",
    ("cuda", "grid_sampler"): "asks for a CUDA build of torch",
    ("cuda", "multi_margin_loss"): "asks for a CUDA build of torch",
    ("cuda", "binary_cross_entropy"): "forbidden: the error is its result",
    **{("cuda", op): "asks for a driver" for op in ASK_FOR_DRIVER},
}
# What raises before the op is called: a CPU build of torch, or one for CUDA without a driver.
ASKS_FOR_GPU = re.compile("unsafe|driver")


@dataclass(frozen=True)
class Run:
    """The results that `run_ops` wrote for one device, by stage and op."""

    registered: tuple[str, ...]
    stages: dict[str, dict[str, Record]]

    def pairs(self, stage: str, op: str) -> Iterator[tuple[Case, Outcome, Outcome]]:
        """Case, torch's outcome and the stage's."""
        theirs = self.stages["torch"][op]
        for case, outcome in self.stages[stage][op].items():
            yield case, theirs[case], outcome


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The runs of both devices, made at once."""
    where = tmp_path_factory.mktemp("ops")
    printed = [where / f"{device}.printed" for device in DEVICES]
    calls = [
        forks.Call(run_ops.__name__, "main", (device, str(where / device)), str(path), strict=False)
        for device, path in zip(DEVICES, printed, strict=True)
    ]
    codes = forks.run(forks.TORCH, calls)
    assert codes == [0, 0], "".join(path.read_text()[-3000:] for path in printed)
    return {device: read(where / device) for device in DEVICES}


def read(path: Path) -> Run:
    registered, records = pickle.loads(path.read_bytes())
    stages: dict[str, dict[str, Record]] = {stage: defaultdict(dict) for stage in STAGES}
    for stage, record in records.items():
        for case, outcome in record.items():
            stages[stage][case.op][case] = outcome
    return Run(tuple(registered), stages)


def filled_in(theirs: Outcome) -> bool:
    """True if torch's kernel filled in the op's own `dtype=`."""
    return any("dtype=" in call for call in theirs.calls)


def differences(theirs: Outcome, ours: Outcome, fills_in: bool = False) -> list[str]:
    """The parts that differ, with values for bits; none if each dtype, bit and word is the same.

    On GPUs, torch's own kernels of sums, norms and softmax fill in `dtype=` where ours cast
    (`fills_in`): the ops in them are others, and ours take inputs in 8 bits, too.
    """
    names = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
    if fills_in:
        refused = "Float8" in theirs.error or "float8" in theirs.error
        names = [] if refused else [name for name in names if name != "calls"]
    pairs = ((name, shown(getattr(ours, name)), shown(getattr(theirs, name))) for name in names)
    return [f"{name} {left}, torch {right}" for name, left, right in pairs]


def shown(part: Any) -> str:
    if isinstance(part, Seen):
        part = replace(part, bits=values(part).tolist())
    return str([*map(shown, part)] if isinstance(part, tuple) else part)


def values(seen: Seen) -> torch.Tensor:
    dtype = getattr(torch, seen.dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not seen.bits:
        return torch.zeros(0, dtype=wide)
    return torch.frombuffer(bytearray(seen.bits), dtype=dtype).to(wide)


def report(found: list[tuple[Case, list[str]]], most: int = 12) -> str:
    lines = [
        f"{case.op}, row {case.row}, {case.way}, region {case.low}: {'; '.join(words)}"
        for case, words in found[:most]
    ]
    return "\n".join([f"{len(found)} calls differ", *lines])


@pytest.mark.parametrize(("device", "op"), OPS)
def test_op_does_what_it_does_under_torch(runs: dict[str, Run], device: str, op: str) -> None:
    for engine in ENGINES:
        pairs = list(runs[device].pairs(engine, op))
        assert len(pairs) >= 2 * len(run_ops.rows(op)), "a row was not run in both region dtypes"
        by_torch = engine == "python" and any(filled_in(theirs) for _, theirs, _ in pairs)
        found = [(case, differences(theirs, ours, by_torch)) for case, theirs, ours in pairs]
        unlike = [(case, words) for case, words in found if words]
        assert not unlike, f"{engine}: {report(unlike)}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("device", DEVICES)
def test_torchs_own_lists_do_as_under_torch(runs: dict[str, Run], device: str, engine: str) -> None:
    run = runs[device]
    titles = run.stages["torch"].keys() - set(run.registered)
    found = [
        (case, differences(theirs, ours, engine == "python" and filled_in(theirs)))
        for title in sorted(titles)
        for case, theirs, ours in run.pairs(engine, title)
    ]
    assert len(found) == 2 * len(outcomes.listed(device)) > 100, "lists left out"
    unlike = [(case, words) for case, words in found if words]
    assert not unlike, report(unlike)


@pytest.mark.parametrize("device", DEVICES)
def test_no_registered_op_is_forgotten(runs: dict[str, Run], device: str) -> None:
    run = runs[device]
    excused = ops.EXCUSED[device].keys() & {*run.registered}
    tested = {op for op in run.registered if run.stages["torch"][op]}
    assert not tested & excused, "tested and excused"
    missing = set(run.registered) - tested - excused
    assert not missing, "no row in tests/support/torch/ops.py"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_have_results_and_gradients_to_compare(runs: dict[str, Run], device: str) -> None:
    run = runs[device]
    empty = []
    for op in run.registered:
        for at, row in enumerate(run_ops.rows(op)):
            outcome = run.stages["torch"][op][Case(op, at, "all float32", "bfloat16")]
            wants_gradients = device == "cpu" and row.outputs != ()
            if (device, op) not in NEED_NO_RESULT or outcome.outputs:
                empty += [f"{op}, row {at}: {word}" for word in _lacks(outcome, wants_gradients)]
            elif device == "cuda" and not outcome.calls and not ASKS_FOR_GPU.search(outcome.error):
                empty.append(f"{op}, row {at}: no result, and not called: {outcome}")
    assert not empty, "\n".join(empty)


def _lacks(outcome: Outcome, wants_gradients: bool) -> Iterator[str]:
    tensors = [one for one in outcome.outputs + outcome.gradients if isinstance(one, Seen)]
    if outcome.error or not outcome.outputs:
        yield f"no result: {outcome.error}"
    elif not all(values(one).isfinite().all() for one in tensors):
        yield "not finite"
    elif wants_gradients and not any(
        isinstance(one, Seen) and values(one).any() for one in outcome.gradients
    ):
        yield "no gradient that is not zero"


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_rule_for_any_op_is_noticed(runs: dict[str, Run], device: str) -> None:
    run = runs[device]
    unnoticed = [
        op
        for op in run.registered
        if op not in ops.EXCUSED[device]
        and not any(differences(theirs, ours) for _, theirs, ours in run.pairs("wrong", op))
    ]
    assert not unnoticed
