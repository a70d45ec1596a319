"""`GradScaler` on two and on four ranks: DDP, FSDP1, FSDP2, tensor parallel, and mixes of them.

What goes wrong goes wrong on one rank only. `run_ranks` is what a rank runs; here the notes of the
ranks are compared with one another, with the rule, and with a run that no scaler is in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from polymp import scaling
from polymp.scaling import ScaleRule, ScaleState, to_state_dict
from tests.support.sizes import LONG
from tests.support.torch import run_ranks
from tests.support.torch.models import seen
from tests.support.torch.ranks import launch
from tests.support.torch.run_ranks import HISTORY, SETTINGS, WAYS, Plant, some, tried, ways
from tests.support.torch.sharded_models import Toy, data

pytestmark = pytest.mark.sized

WORLDS = (2, 4)
RULE = ScaleRule(interval=SETTINGS["growth_interval"])
START = ScaleState(SETTINGS["init_scale"])
UNSETTLED = ("ddp", "two_meshes")  # where not all ranks hear of a loss that is lost
# Where gradients are added up over all ranks.
ADDED_UP = ("ddp", "ddp_grouped", "fsdp1", "fsdp1_original", "fsdp2", "hsdp")
KEYS = [
    (ranks, cut, way)
    for ranks in WORLDS
    for cut in (*tried(ranks), "ddp_grouped")
    for way in ways(cut, ranks)
]
EVERY = pytest.mark.parametrize(("ranks", "cut", "way"), KEYS)
WORLD = pytest.mark.parametrize("ranks", WORLDS if LONG else WORLDS[:1])


def several(names: Sequence[str]) -> pytest.MarkDecorator:
    """Run a test with each number of ranks and each of the ways that these have."""
    pairs = [(ranks, way) for ranks in WORLDS for way in some(names, ranks)]
    return pytest.mark.parametrize(("ranks", "way"), pairs)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return {ranks: launch("tests.support.torch.run_ranks", ranks, folder) for ranks in WORLDS}


def outcomes(history: Sequence[Plant | None], settled: bool) -> list[str]:
    """Return the expected outcome of each step; `settled` if all ranks know of a bad loss."""
    of_loss = {"loss": "spoiled" if settled else "overflow", "apart": "good"}
    return ["good" if p is None else of_loss.get(p.what, "overflow") for p in history]


def states(steps: Sequence[str], rule: ScaleRule = RULE, start: Any = START) -> list[Any]:
    saved = []
    for step in steps:
        finite, loss_finite = step == "good", step != "spoiled"
        start = scaling.step(rule, start, finite, loss_finite=loss_finite)
        saved.append(to_state_dict(rule, start))
    return saved


def alone(steps: Sequence[str], way: str) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step in one process, without scaling; only good ones are made."""
    model = Toy()
    name = way.split(",")[0]
    optimizer = WAYS[name].optimizer(model.parameters())
    seen = []
    for at, step in enumerate(steps):
        optimizer.zero_grad()
        model(*data(at)).backward()
        if step == "good":
            optimizer.step()
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return seen


def array(noted: Any) -> np.ndarray:
    dtype, shape, _, values = noted
    assert dtype == "torch.float32"
    return np.frombuffer(values, np.float32).reshape(shape)


def of_all(notes: dict[int, list[dict[Any, Any]]], ranks: int, key: Any, what: str) -> list[Any]:
    return [[step[what] for step in of_rank[key]] for of_rank in notes[ranks]]


def same(each: Sequence[Any]) -> bool:
    return all(one == each[0] for one in each)


@EVERY
def test_all_ranks_agree_and_stay_finite(worlds: Any, ranks: int, cut: str, way: str) -> None:
    for what in ("state", "parameters", "skipped"):
        assert same(of_all(worlds, ranks, (cut, way), what)), what
    assert all(map(all, of_all(worlds, ranks, (cut, way), "finite")))


@EVERY
def test_scale_and_counts_are_the_rule_s(worlds: Any, ranks: int, cut: str, way: str) -> None:
    steps = outcomes(HISTORY, cut not in UNSETTLED)
    assert of_all(worlds, ranks, (cut, way), "state")[0] == states(steps)
    skips = [step != "good" for step in steps]
    assert of_all(worlds, ranks, (cut, way), "skipped")[0] == skips


@EVERY
def test_parameters_are_those_of_one_process(worlds: Any, ranks: int, cut: str, way: str) -> None:
    expected = alone(outcomes(HISTORY, cut not in UNSETTLED), way)
    found = of_all(worlds, ranks, (cut, way), "parameters")[0]
    exact = way.startswith("sgd")
    for step, wanted in zip(found, expected, strict=True):
        if cut == "fsdp1":
            assert step.keys() == wanted.keys()
        for name, p in wanted.items():
            if exact:
                assert step[name] == seen(p)
            else:  # kernels may round in another order
                np.testing.assert_allclose(array(step[name]), p.numpy(), rtol=1e-5, atol=1e-6)


@EVERY
def test_one_rank_alone_sees_what_was_planted(worlds: Any, ranks: int, cut: str, way: str) -> None:
    here = of_all(worlds, ranks, (cut, way), "here")
    bad = of_all(worlds, ranks, (cut, way), "bad")
    for at, plant in enumerate(HISTORY):
        by = [bool(of_rank[at]) for of_rank in here]
        rows = [of_rank[at] for of_rank in bad]
        assert sum(by) == (plant is not None)
        if plant is None:
            assert rows == [[]] * ranks
        elif plant.what == "apart":
            assert not any(rows)
        elif plant.what == "loss":
            assert rows[by.index(True)]
            assert all(rows) or cut not in ADDED_UP
        elif cut != "ddp" and not way.endswith("clipped"):  # clipping by Inf spreads NaN
            (row,) = rows[by.index(True)]
            assert row[1:] == ((0, 1) if math.isnan(plant.what) else (1, 0))
            assert sum(map(bool, rows)) == 1


def test_a_report_counts_the_rank_s_part(worlds: Any) -> None:
    total = sum(p.numel() for p in Toy().parameters())
    for ranks, cut, way in KEYS:
        copies = {"fsdp2": 1, "fsdp1_original": 1, "ddp": ranks, "hsdp": 2}.get(cut)
        if copies is not None:
            counted = of_all(worlds, ranks, (cut, way), "values")
            values = [sum(step) for step in zip(*counted, strict=True)]
            assert values == [copies * total] * len(HISTORY)


@several(run_ranks.FIRST_WAYS)
def test_a_quotient_that_overflows_on_one_rank(worlds: Any, ranks: int, way: str) -> None:
    key = "below one", way
    expected = states(["overflow", "good", "good", "overflow"], start=ScaleState(2.0**-60))
    assert of_all(worlds, ranks, key, "state") == [expected] * ranks
    assert same(of_all(worlds, ranks, key, "parameters"))
    assert all(map(all, of_all(worlds, ranks, key, "finite")))


@several(run_ranks.FIRST_WAYS)
def test_ranks_without_gradients(worlds: Any, ranks: int, way: str) -> None:
    key = "absent", way
    steps = ["good", "overflow", "good", "good", "overflow", "nothing"]
    expected = states(steps[:5])
    expected.append(expected[-1])
    assert of_all(worlds, ranks, key, "state") == [expected] * ranks
    assert of_all(worlds, ranks, key, "skipped") == [[s == "overflow" for s in steps]] * ranks
    parameters = of_all(worlds, ranks, key, "parameters")
    assert same(parameters)
    moved = [a != b for a, b in zip(parameters[0], parameters[0][1:], strict=False)]
    assert moved == [step == "good" for step in steps[1:]]


@WORLD
def test_stages_of_a_pipeline_share_a_verdict(worlds: Any, ranks: int) -> None:
    steps = ["good", "spoiled", "overflow", "overflow", "good"]
    for rank, of_rank in enumerate(worlds[ranks]):
        seen = of_rank["pipeline"]
        assert [state for state, _, _ in seen] == states(steps)
        assert [skipped for _, skipped, _ in seen] == [step != "good" for step in steps]
        assert [p for p, _ in seen[-1][2]] == [i - 0.25 for i in range(rank + 1)]


def test_a_group_of_some_ranks_does_not_settle_a_loss(worlds: Any) -> None:
    assert of_all(worlds, 4, "subgroup", "state") == [states(["overflow", "good", "good"])] * 4
    assert same(of_all(worlds, 4, "subgroup", "parameters"))


@WORLD
def test_every_rank_is_told_that_the_run_is_stuck(worlds: Any, ranks: int) -> None:
    for rank, of_rank in enumerate(worlds[ranks]):
        (report,) = of_rank["stuck"]
        assert (report.state.skips, report.state.scale) == (3, 2.0**13)
        assert [g.name for g in report.bad] == (["a.weight"] if rank == ranks - 1 else [])
        done, said = of_rank["raised"]
        assert done == 1
        assert said.startswith("2 steps in a row were skipped; the loss scale is 16384.")


@WORLD
@pytest.mark.parametrize("way", run_ranks.FIRST_WAYS)
def test_terms_of_a_sum_are_judged_by_the_sum(worlds: Any, ranks: int, way: str) -> None:
    for size in (2.0, 3e38):
        notes = [of_rank["partial", way, size] for of_rank in worlds[ranks]]
        assert same(notes)
        placed, finite_terms, parameters, found, state = notes[0]
        assert (placed, finite_terms) == ("(Partial(sum),)", True)
        assert found == (size > 2)
        assert state["scale"] == (0.5 if size > 2 else 1.0)
        values = array(parameters)
        assert np.isfinite(values).all()
        if size > 2:
            assert (values == np.float32(1e-30)).all()
        elif way == "sgd":
            assert (values == -0.125 * size * ranks).all()


@WORLD
def test_an_evaluation_of_a_closure_that_overflows_on_one_rank(worlds: Any, ranks: int) -> None:
    notes = [of_rank["closure"] for of_rank in worlds[ranks]]
    assert same(notes)
    taken_back, calls, saved, parameters = zip(*notes[0], strict=True)
    assert taken_back == (False, True, False)
    assert calls == (2, 2, 2)
    assert list(saved) == states(["good", "overflow", "good"])
    assert parameters[0] == parameters[1] != parameters[2]
    assert all(np.isfinite(array(p)).all() for p in parameters[2].values())


@pytest.mark.parametrize("kind", run_ranks.KINDS)
@pytest.mark.parametrize("dtype", run_ranks.DTYPES, ids=str)
def test_ddp_trains_as_with_torch_s_classes(worlds: Any, dtype: torch.dtype, kind: str) -> None:
    """In the step whose loss is lost, too; and alike on both ranks."""
    one, other = ([notes[name, dtype, kind] for name in ("polymp", "torch")] for notes in worlds[2])
    assert one[0] == other[0] == one[1] == other[1]
    assert one[0].count(str(dtype)) == 6


@pytest.mark.parametrize("fused", [False, True])
def test_torch_s_sharded_scaler_on_our_base(worlds: Any, fused: bool) -> None:
    ours, *others = (
        notes[name, "sharded", fused] for notes in worlds[2] for name in ("polymp", "torch")
    )
    assert others == [ours] * 3
    assert [state["scale"] for state in ours[1::2]] == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    assert [w[0] for _, w in ours[::2]] == [0.75, 0.5, 0.5, 0.25, 0.0, -0.25]


@pytest.mark.parametrize("how", run_ranks.HOW)
def test_four_ranks_go_on_where_two_stopped(worlds: Any, how: str) -> None:
    """Scale, counts and parameters are those of the two ranks that never stopped."""
    rest = slice(run_ranks.SAVED, None)
    for what in ("state", "skipped", "parameters"):
        one, other = of_all(worlds, 2, "unstopped", what)
        assert one == other
        assert of_all(worlds, 4, ("resumed", how), what) == [one[rest]] * 4, what


def test_the_run_that_never_stopped_is_the_rule_s(worlds: Any) -> None:
    settings = run_ranks.RESUMED_SETTINGS
    rule = ScaleRule(interval=settings["growth_interval"], hysteresis=settings["hysteresis"])
    steps = outcomes(run_ranks.RESUMED_HISTORY, True)
    expected = states(steps, rule, ScaleState(settings["init_scale"]))
    assert of_all(worlds, 2, "unstopped", "state")[0] == expected
    assert len({state["scale"] for state in expected}) == 2
    before, after = expected[run_ranks.SAVED - 1 :][:2]
    assert (before["skips"], before["scale"] / after["scale"]) == (1, 2.0)


@pytest.mark.parametrize(
    ("ranks", "cut", "way"),
    [(ranks, *case) for ranks in WORLDS for case in run_ranks.mute_cases(ranks)],
)
def test_ranks_that_do_not_talk_part(worlds: Any, ranks: int, cut: str, way: str) -> None:
    seen = of_all(worlds, ranks, ("mute", cut, way), "state")
    scales = [state["scale"] for (state,) in seen]
    assert scales == [1024.0] * (ranks - 1) + [512.0]


def test_the_oracles_can_differ() -> None:
    settled, unsettled = (outcomes(HISTORY, known) for known in (True, False))
    assert states(settled) != states(unsettled)
    one, other = alone(settled, "sgd"), alone(["good"] * len(HISTORY), "sgd")
    assert any(not torch.equal(one[-1][n], other[-1][n]) for n in one[-1])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_ranks_on_gpus_agree(tmp_path: Any) -> None:
    notes = {2: launch("tests.support.torch.run_ranks", 2, tmp_path, backend="nccl")}
    for key in notes[2][0]:
        assert of_all(notes, 2, key, "state") == [states(outcomes(HISTORY, True))] * 2
        assert same(of_all(notes, 2, key, "parameters"))
        assert all(map(all, of_all(notes, 2, key, "finite")))
