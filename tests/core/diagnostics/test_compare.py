"""`compare` on records made up in numpy: the first call that rounding cannot explain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.diagnostics.compare import Comparison
from polymp.diagnostics.record_pairs import ALONE, EXPLAINED, PASSED, UNJUDGED
from polymp.diagnostics.run_record import INPUT, RMS, UPDATE, RecordedArray, RunRecord
from polymp.errors import RecordError
from tests.support import run_records
from tests.support.run_records import SIZE, Call, arrays, calls, normal, record

NASTY = "</td><script>alert(1)</script>\x1b[31m"


def against(
    program: list[Call], layers: int = 4, dtype: str = "float32", **header: Any
) -> Comparison:
    """A run of the model compared with one of another program."""
    one = record(arrays(calls(layers), 1, dtype))
    return polymp.compare(one, record(arrays(program, 2, dtype), name="other.rec", **header))


def first_of(found: Comparison) -> tuple[str, str]:
    assert found.first is not None
    return found.first.array.name, found.first.array.module


# --- rounding explains all ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_that_differ_by_rounding_alone(dtype: str) -> None:
    found = against(calls(4), dtype=dtype)
    assert found.explained
    assert not found
    assert (found.first, found.parted) == (None, None)
    assert {row.verdict for row in found.rows} == {EXPLAINED}
    assert "rounding explains all. The largest difference" in str(found)
    assert "the same program: 16 calls" in str(found)


def test_a_run_and_itself(tmp_path: Path) -> None:
    one = record(arrays(calls(2)))
    found = polymp.compare(one, one)
    assert "rounding explains all: no number differs" in str(found)
    assert found.names == ("one", "other"), "both files have one name"
    paths = [tmp_path / folder / "run.rec" for folder in ("before", "after")]
    for path in paths:
        path.parent.mkdir()
        run_records.written(path, one)
    assert polymp.compare(*paths).names == (str(paths[0]), str(paths[1]))


@pytest.mark.parametrize("probes", [8, 2])
def test_no_alarm_is_false(probes: int) -> None:
    """Each of 2,400 arrays, with 20 numbers, in another pair of runs; two probes know little."""
    program = calls(3)
    runs = [record(arrays(program, seed, probes=probes), probes=probes) for seed in range(50)]
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        assert polymp.compare(one, other).explained


def test_without_probes_the_spread_is_an_estimate_and_a_note_says_so() -> None:
    one, same = (record(arrays(calls(4), seed, probes=0), probes=0) for seed in (1, 2))
    found = polymp.compare(one, same)
    assert found.explained
    assert "estimated from each call's own rounding" in " ".join(found.notes)
    other = record(arrays(calls(4, epsilon=1e-3), 2, probes=0), probes=0)
    assert first_of(polymp.compare(one, other)) == ("layer_norm", "blocks.0.norm")


def test_a_lower_dtype_is_explained_by_its_own_rounding() -> None:
    one = record(arrays(calls(4), 1))
    other = record(arrays(calls(4), 2, "bfloat16"), name="low.rec")
    for pair in ((one, other), (other, one)):
        found = polymp.compare(*pair)
        assert found.explained
        assert found.parted is not None
        assert found.parted.parts == "in other dtypes"
        assert (
            "the programs part at layer_norm in blocks.0.norm (model.py:12): in other dtypes"
            in (" ".join(str(found).split()))
        )


# --- the first call that it does not explain ------------------------------------------------------


def changed(program: list[Call], at: int, change: Callable[[Any], Any]) -> list[Call]:
    """A program with another result of one call."""
    name, module, fn, reads = program[at]
    call = name, module, lambda *xs: change(fn(*xs)), reads
    return [*program[:at], call, *program[at + 1 :]]


@pytest.mark.parametrize("at", [2, 3, 4, 5, 7, 9, 13, 18])
@pytest.mark.parametrize("size", [1e-4, 3e-6])
def test_the_call_that_is_off_is_named(at: int, size: float) -> None:
    program = calls(4)
    if not program[at][3]:
        pytest.skip("an input")
    found = against(changed(program, at, lambda x: x * (1 + size * np.sign(x))))
    if size > 1e-5:
        assert found, "a difference of a hundred roundings"
    if found:
        assert first_of(found) == program[at][:2]
        assert found.rows.index(found.first) == at
        assert {row.verdict for row in found.rows[:at]} == {EXPLAINED}


def test_a_fault_in_bfloat16_is_found_if_it_is_larger_than_its_rounding() -> None:
    program = calls(4)
    assert against(changed(program, 8, lambda x: x * 1.0002), dtype="bfloat16").explained
    found = against(changed(program, 8, lambda x: x * 1.2), dtype="bfloat16")
    assert first_of(found) == program[8][:2]


def test_a_parameter_that_differs_is_named_and_not_the_call_that_reads_it() -> None:
    program = calls(4)
    found = against(changed(program, 6, lambda w: w * 1.001))
    assert first_of(found) == ("blocks.1.linear.weight", "blocks.1.linear")
    assert "THE RUNS BEGIN WITH OTHER NUMBERS: input blocks.1.linear.weight" in str(found)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (1024, "In other.rec it is 1,024 times as large, as where a loss is scaled"),
        (1 / 2, "In one.rec it is 2 times as large, as where a loss is scaled"),
        (3, "All floats that it reads agree"),
        (1020, "All floats that it reads agree"),
    ],
)
def test_a_gradient_that_is_larger_by_a_loss_scale_is_said_to_be(times: float, said: str) -> None:
    def backward(seed: int, factor: float) -> list[RecordedArray]:
        *ran, end = arrays(calls(2), seed)
        values, spread = (tuple(factor * x for x in each) for each in (end.values, end.spread))
        return [*ran, end._replace(direction="backward", values=values, spread=spread)]

    one, other = record(backward(1, 1.0)), record(backward(2, times), name="other.rec")
    text = " ".join(str(polymp.compare(one, other)).split())
    assert "ROUNDING DOES NOT EXPLAIN add in blocks.1, backward" in text
    assert said in text


@pytest.mark.parametrize("many", [1, 8 * SIZE])
def test_inf_in_one_run_alone(many: int) -> None:
    def overflowed(x: Any) -> Any:
        return np.where(np.arange(x.size).reshape(x.shape) < many, np.inf, x)

    with np.errstate(invalid="ignore"):
        found = against(changed(calls(2), 3, overflowed), layers=2)
    assert first_of(found) == ("linear", "blocks.0.linear")
    counts = f"0 of its numbers in one.rec and {many} in other.rec"
    assert f"{counts} are Inf, NaN or a mask's" in " ".join(str(found).split())
    assert "  0, " not in str(found), "a record has 0 in the place of Inf"
    assert found.to_dict()["first"]["difference"] is None
    json.dumps(found.to_dict(), allow_nan=False)  # which has no word for Inf


def test_the_first_step_that_differs_is_shown() -> None:
    fine, off = calls(2), calls(2, epsilon=1e-3)
    one = record(*(arrays(fine, seed) for seed in (1, 2, 3)), numbers=(0, 5, 10))
    other = record(
        *(arrays(p, seed) for seed, p in ((4, fine), (5, off), (6, off))), numbers=(0, 5, 9)
    )
    assert polymp.compare(one, other).step == 5
    assert polymp.compare(one, one).step == 10
    with pytest.raises(RecordError, match="share no step: 'one' has 7, 'other' has none"):
        polymp.compare(record(arrays(fine), numbers=[7]), one._replace(name="one.rec", steps=()))


def test_the_header_claims_no_more_than_was_compared() -> None:
    one = record(arrays(calls(1)))
    loops = one._replace(steps=(one.steps[0]._replace(left_out={"in a while loop": 3}),))
    found = polymp.compare(loops, loops)
    assert "the same program, as far as it was compared: 4 calls" in str(found)
    assert "not compared: 3 calls of one, in a while loop" in str(found)


def test_steps_that_only_one_record_has_are_in_the_notes() -> None:
    ran = arrays(calls(1))
    one = record(ran, ran, ran, numbers=(0, 1, 2))
    other = record(ran, *[ran] * 9, numbers=range(2, 12), name="other.rec")
    found = polymp.compare(one, other)
    assert found.explained
    assert "not compared: 2 steps of one.rec that other.rec has not: 0, 1" in found.notes
    assert "not compared: 9 steps of other.rec that one.rec has not: 3 to 11" in found.notes
    both = polymp.compare(one, record(ran, numbers=[1], name="other.rec"))
    assert "not compared: 2 steps of one.rec that other.rec has not: 0, 2" in both.notes
    assert not polymp.compare(one, one).notes


# --- programs that are not the same ---------------------------------------------------------------


def test_a_call_by_another_op_of_the_same_values() -> None:
    program = calls(4)
    fused = [*program[:9], ("quick_gelu", *program[9][1:]), *program[10:]]
    found = against(fused)
    assert found.explained
    assert (
        "the programs part at gelu in blocks.1.gelu (model.py:19): quick_gelu in the other run"
        in (" ".join(str(found).split()))
    )
    assert "(16 and 16 calls; calls that differ: 1)" in " ".join(str(found).split())


def with_call(program: list[Call], after: int, new: Call) -> list[Call]:
    """A program with one more call, whose result is read in place of what it reads."""
    moved = [
        (name, module, fn, tuple(r + (r > after) for r in reads))
        for name, module, fn, reads in program
    ]
    rest = [
        (name, module, fn, tuple(after + 1 if r == after else r for r in reads))
        for name, module, fn, reads in moved[after + 1 :]
    ]
    return [*moved[: after + 1], new, *rest]


def test_a_call_that_only_one_run_has_and_that_changes_nothing_is_passed_over() -> None:
    program = calls(4)
    same = with_call(program, 8, ("mul", "blocks.1.scale", lambda x: x * 1.0, (8,)))
    found = against(same)
    assert found.explained
    assert found.parted is not None
    assert found.parted.array.name == "mul"
    assert "only one run has it (16 and 17 calls; calls that differ: 1)" in " ".join(
        str(found).split()
    )
    back = polymp.compare(record(arrays(same, 1)), record(arrays(program, 2)))
    assert back.explained


def test_a_call_that_only_one_run_has_and_that_changes_its_values_is_named() -> None:
    other = with_call(calls(4), 8, ("dropout", "blocks.1.drop", lambda x: x * (x > -0.5), (8,)))
    found = against(other)
    assert found.first is not None
    sides = (found.first.one, found.first.other)
    assert "dropout" in {array.name for array in sides if array is not None}


def test_ops_that_one_run_has_as_one_call() -> None:
    """linear and gelu as one, as where a compiler fuses them: the sum after them is aligned."""

    def fused(program: list[Call], bug: float = 0.0) -> list[Call]:
        made = list(program)
        for at, (name, module, fn, reads) in enumerate(program):
            if name == "gelu":
                linear = program[reads[0]]

                def both(w: Any, x: Any, fn: Any = fn, linear: Any = linear) -> Any:
                    return fn(linear[2](w, x)) * (1 + bug)

                made[at] = ("linear_gelu", module, both, linear[3])
        keep = [at for at, call in enumerate(made) if call[0] != "linear"]
        place = {at: k for k, at in enumerate(keep)}
        return [(*made[at][:3], tuple(place[r] for r in made[at][3])) for at in keep]

    found = against(fused(calls(3)), layers=3)
    assert found.explained
    assert {r.verdict for r in found.rows if r.array.name == "linear"} == {PASSED}
    broken = against(fused(calls(3), bug=1e-3), layers=3)
    assert first_of(broken)[1].startswith("blocks.0.")
    assert first_of(broken)[0] in ("linear", "gelu", "linear_gelu", "add")


def compiled(seed: int, epsilon: float = 1e-5, *, loss: bool) -> RunRecord:
    """A record of the model compiled as a whole: its last result, and the calls of the loss."""
    ran = arrays(with_loss(calls(4, epsilon=epsilon), loss=loss), seed)
    end, read = ran[-4 if loss else -1], [a for a in ran if a.kind == INPUT]
    reads = tuple(range(len(read)))
    code = end._replace(name="compiled", module="", inputs=(), own=0.0, reads=reads, spread=())
    rest = [a._replace(reads=(at,)) for at, a in enumerate(ran[-3:], len(read))] if loss else []
    made = record([*read, code, *rest], name=f"compiled{seed}.rec")
    return made._replace(steps=(made.steps[0]._replace(left_out={"compiled": 1}),))


def with_loss(program: list[Call], *, loss: bool) -> list[Call]:
    """A program and the mean of the squares of its result, in three calls that keep its shape."""
    if not loss:
        return program
    end = len(program) - 1
    return [
        *program,
        ("mul", "", lambda x: x * 2.0, (end,)),
        ("pow", "", np.square, (end + 1,)),
        ("mean", "", lambda x: x.mean(keepdims=True), (end + 2,)),
    ]


@pytest.mark.parametrize("loss", [False, True])
def test_a_model_that_is_compiled_as_a_whole(loss: bool) -> None:
    eager = record(arrays(with_loss(calls(4), loss=loss), 1))
    same, off = compiled(2, loss=loss), compiled(3, epsilon=1e-2, loss=loss)
    for pair in ((eager, same), (same, eager)):
        found = polymp.compare(*pair)
        assert found.explained, str(found)
        assert "without a counterpart" not in " ".join(found.notes)
    found = polymp.compare(same, off)
    assert " differs by 0.0" in " ".join(str(found).partition("NOT JUDGED")[2].split())
    assert "both runs are compiled" in " ".join(found.notes)
    for pair in ((eager, off), (off, eager)):
        found = polymp.compare(*pair)
        assert first_of(found) == ("compiled", "")
        assert found.first is not None
        assert found.first.one is not None
        assert found.first.other is not None
        assert {found.first.one.name, found.first.other.name} <= {"compiled", "add"}
        assert any(row is found.first for row in found.rows), "one row for both"
        assert "ROUNDING DOES NOT EXPLAIN compiled (model.py:30): off by" in str(found)


def test_compiled_code_with_an_end_that_is_not_known_has_no_partner() -> None:
    """The other call that comes after it may be part of the compiled code."""
    eager = record(arrays(with_loss(calls(4), loss=True), 1))
    off = compiled(3, epsilon=1e-2, loss=True)
    ran = [a._replace(name="abs") if a.name == "mul" else a for a in off.steps[0].arrays]
    found = polymp.compare(eager, off._replace(steps=(off.steps[0]._replace(arrays=ran),)))
    assert first_of(found) == ("compiled", "")
    assert "compiled (model.py:30) runs in compiled3.rec, and nothing in one.rec" in str(found)
    assert "Beside it stands the first call there" in " ".join(str(found).split())


def test_modules_of_other_names() -> None:
    theirs = calls(4, "model.layers.{}")
    assert against(theirs).explained, "in order, if few paths are shared"
    one, other = record(arrays(calls(4), 1)), record(arrays(theirs, 2))
    found = polymp.compare(one, other, modules={"model.layers": "blocks"})
    assert found.explained
    assert found.parted is None
    assert len(found.growth()) == 16
    off = record(arrays(calls(4, "model.layers.{}", epsilon=1e-3), 2))
    found = polymp.compare(one, off, modules={"model.layers": "blocks"})
    assert first_of(found) == ("layer_norm", "blocks.0.norm")


def transposed(program: list[Call]) -> list[Call]:
    """The same with weights, inputs and results transposed, and one more op per layer."""
    made: list[Call] = []
    place: dict[int, int] = {}
    for at, (name, _, fn, reads) in enumerate(program):

        def turned(*xs: Any, fn: Any = fn) -> Any:
            return fn(*(x.T for x in xs)).T

        made.append(
            ({"linear": "matmul"}.get(name, name), "", turned, tuple(place[r] for r in reads))
        )
        place[at] = len(made) - 1
        if name == "gelu":
            made.append(("add", "", lambda x: x + 0.0, (place[at],)))
            place[at] = len(made) - 1
    return made


def test_two_frameworks_are_matched_by_values() -> None:
    one = record(arrays(calls(4), 1))
    other = record(arrays(transposed(calls(4)), 2), framework="jax", name="jax.rec")
    found = polymp.compare(one, other)
    assert found.explained
    assert found.parted is None
    assert "two frameworks: 16 calls of one.rec, 16 matched by their values" in str(found)
    program = transposed(changed(calls(4), 14, lambda x: x * 1.001))
    off = record(arrays(program, 2), framework="jax", name="jax.rec")
    found = polymp.compare(one, off)
    assert first_of(found) == calls(4)[14][:2]
    assert found.first is not None
    assert found.first.other is not None, "beside the call that reads the same values"


def test_numbers_in_each_others_place_are_found_between_frameworks() -> None:
    """No sum over all elements changes, but the order is nearly the same."""

    def exchanged(x: Any) -> Any:
        made, order = x.ravel().copy(), np.argsort(x, axis=None)
        made[order] = made[order.reshape(-1, 2)[:, ::-1].ravel()]  # each with the next larger one
        return made.reshape(x.shape)

    ran = arrays(changed(calls(4), 18, exchanged), 2, "bfloat16")
    ran = [a._replace(shape=(2, 4, SIZE)) if a.shape == (8, SIZE) else a for a in ran]
    one, other = record(arrays(calls(4), 1, "bfloat16")), record(ran, framework="jax", name="j")
    assert first_of(polymp.compare(one, other)) == calls(4)[18][:2]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_call_that_agrees_by_chance_hides_no_fault(swapped: bool) -> None:
    """Behind the fault the signs are the same; the other call that reads it is not at fault."""
    end: list[Call] = [("sign", "", np.sign, (3,)), ("add", "", np.add, (10, 11))]
    one = record(arrays([*calls(2), *end], 1))
    port = [(name, "", *call) for name, _, *call in calls(2)]
    program = changed([*port, *end], 3, lambda x: x * 1.2)
    other = record(arrays(program, 2), framework="jax", name="jax.rec")
    found = polymp.compare(*((other, one) if swapped else (one, other)))
    assert first_of(found)[0] == "linear"


def test_beside_a_call_stands_what_reads_all_that_it_reads() -> None:
    """A product without the bias is off by the bias, too."""
    given: list[Call] = [
        (f"operand {n} of addmm", "", lambda n=n: normal(n, n), ()) for n in (1, SIZE, 4)
    ]
    one = [*given, ("addmm", "", lambda b, w, x: x @ w + b, (0, 1, 2))]
    product: Call = "linear", "", lambda w, x: x @ w.T, (1, 2)
    other = [*given, product, ("add", "", np.add, (0, 3))]
    found = polymp.compare(
        record(arrays(one)), record(arrays(other), framework="jax", name="jax.rec")
    )
    assert first_of(found)[0] == "addmm"
    assert found.first is not None
    assert found.first.other is not None
    assert (found.first.verdict, found.first.other.name) == (ALONE, "add")


@pytest.mark.parametrize("swapped", [False, True])
def test_updates_of_one_parameter_stand_beside_each_other(swapped: bool) -> None:
    """As where two frameworks have Adam with another epsilon; each has its own names."""

    def stepped(size: float, seed: int, prefix: str) -> list[RecordedArray]:
        program = [*calls(2), ("step", "blocks.0.linear", lambda w: size * np.sign(w), (1,))]
        ran = arrays(program, seed)
        ran[1] = ran[1]._replace(name=f"{prefix}weight")
        ran[-1] = ran[-1]._replace(kind=UPDATE, name=f"{prefix}weight", source="")
        return ran

    one = record(stepped(1e-3, 1, "blocks.0."))
    pair = [one, record(stepped(8e-4, 2, "p."), framework="jax", name="jax.rec")]
    found = polymp.compare(*(reversed(pair) if swapped else pair))
    assert found.first is not None
    assert found.first.one is not None
    assert found.first.other is not None
    assert {found.first.one.name, found.first.other.name} == {"blocks.0.weight", "p.weight"}
    assert found.first.difference == pytest.approx(0.2, rel=0.2)  # of eight projections
    assert any(row is found.first for row in found.rows)
    same = record(stepped(1e-3, 2, "p."), framework="jax", name="jax.rec")
    assert polymp.compare(one, same).explained
    ran = stepped(8e-4, 2, "p.")
    ran[-1] = ran[-1]._replace(spread=(np.inf,) * len(ran[-1].spread))
    pair[1] = record(ran, framework="jax", name="jax.rec")
    found = polymp.compare(*(reversed(pair) if swapped else pair))
    assert (found.explained, found.rows[-1].verdict) == (True, UNJUDGED), "no one knows"


def updated(program: list[Call], seed: int, weights: dict[int, int]) -> list[RecordedArray]:
    """A run in which some calls are the updates of weights, and what they read is of gradients."""
    ran = arrays(program, seed)
    for at, weight in weights.items():
        ran[at] = ran[at]._replace(kind=UPDATE, name=ran[weight].name, source="")
        for read in {*ran[at].reads} - {*weights.values()}:
            ran[read] = ran[read]._replace(direction="backward")
    return ran


@pytest.mark.parametrize("swapped", [False, True])
def test_a_loss_that_agrees_by_chance_hides_no_fault_before_first_updates_of_adam(
    swapped: bool,
) -> None:
    """These have the signs of gradients alone."""
    loss: Call = "mean", "", lambda x: 2 + np.sign(x).mean(), (10,)
    gradient: Call = "matmul", "", lambda x: x.T @ x, (10,)
    program = [*calls(2), loss, gradient, ("step", "", lambda g: 1e-3 * np.sign(g), (12,))]
    port = changed([(name, "", *call) for name, _, *call in program], 10, lambda x: x * 1.2)
    one = record(updated(program, 1, {13: 1}))
    other = record(updated(port, 2, {13: 1}), framework="jax", name="jax.rec")
    found = polymp.compare(*((other, one) if swapped else (one, other)))
    assert first_of(found)[0] == "add", str(found)


def test_noise_is_no_counterpart_where_weights_are_packed() -> None:
    """Arrays that only updates of packed weights read are compared in neither run; nor is noise."""

    def ran(rows: int, seed: int, *more: Call) -> list[RecordedArray]:
        packed: Call = "weight", "packed", lambda: normal(9, rows), ()
        noise: Call = "mul", "", lambda _: normal(seed, SIZE), (6 + len(more),)
        program = [*calls(1), packed, *more, noise]
        last = len(program)
        step: Call = "step", "", lambda *x: np.resize(x[-1], (rows, SIZE)), (*range(7, last),)
        made = updated([*program, step], seed, {last: 6})
        return [a._replace(spread=(9.0,) * 20) if a.name == "mul" else a for a in made]

    lone: Call = "linear", "", lambda w: w[:, :SIZE] * 0.3, (6,)
    pair = [
        record(ran(2 * SIZE, 1, lone), framework="jax", name="jax.rec"),
        record(ran(SIZE, 2)),
    ]
    for found in (polymp.compare(*pair), polymp.compare(*reversed(pair))):
        assert found.explained, str(found)


def test_the_state_of_an_optimizer_is_new_though_weights_of_its_size_are_stacked() -> None:
    """All are zeros, so that their numbers do not tell them apart."""

    def zeros(name: str, *shape: int) -> Call:
        return "weight", name, lambda: np.zeros((*shape, SIZE)), ()

    given: Call = "operand 1 of norm", "", lambda: normal(0, 8), ()

    def step(seed: int, *reads: int) -> Call:
        return "step", "", lambda w, *_: w + normal(seed, 1)[0], reads

    one = [given, zeros("a"), zeros("b"), zeros("c")]
    one += [("add", "", lambda x, *w: x + sum(w), (0, 1, 2, 3))]
    one += [step(at, at) for at in (1, 2, 3)]
    other = [given, zeros("stacked", 2), zeros("p"), zeros("state")]
    other += [("add", "", lambda x, s, p: x + s[0] + s[1] + p, (0, 1, 2))]
    other += [step(4, 1), step(3, 2, 3), step(5, 3, 2)]
    pair = [
        record(updated(one, 1, {5: 1, 6: 2, 7: 3})),
        record(updated(other, 2, {5: 1, 6: 2, 7: 3}), framework="jax", name="jax.rec"),
    ]
    for found in (polymp.compare(*pair), polymp.compare(*reversed(pair))):
        assert found.explained, str(found)


@pytest.mark.parametrize("swapped", [False, True])
def test_weights_that_rounding_has_moved_apart_end_a_port_too(swapped: bool) -> None:
    def steps(seed: int, apart: float, prefix: str, framework: str) -> RunRecord:
        made = []
        for factor in (1.0, 1.0 + apart):
            program = [*calls(2), ("step", "blocks.0.linear", lambda w: w / 8, (1,))]
            ran = arrays(changed(program, 1, lambda w, by=factor: w * by), seed)
            ran[1] = ran[1]._replace(name=f"{prefix}weight")
            ran[-1] = ran[-1]._replace(kind=UPDATE, name=f"{prefix}weight", source="")
            made.append(ran)
        return record(*made, framework=framework, name=framework)

    pair = [steps(1, 0.0, "blocks.0.", "torch"), steps(2, 1e-4, "p.", "jax")]
    found = polymp.compare(*(reversed(pair) if swapped else pair))
    assert (found.explained, found.step) == (True, 0), str(found)
    assert any("steps from 1 on" in note and "copy the weights" in note for note in found.notes)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
def test_of_a_port_a_weight_without_an_update_is_named_and_not_a_copy_with_one(
    averaged: bool, swapped: bool
) -> None:
    """Such as an average of weights, which one run alone has: its sums may have other digits."""

    def stepped(prefix: str, weights: Sequence[int]) -> list[RecordedArray]:
        program = [*calls(2), ("copy", "", lambda: normal(2, SIZE) / SIZE**0.5, ())]
        by = {at: lambda w, by=at: w / by for at in weights}
        ran = arrays([*program, *(("step", "", by[at], (at,)) for at in weights)])
        digits = [1 + (2.0**-50 if at == RMS else 0) for at in range(len(ran[11].values))]
        ran[11] = ran[11]._replace(values=tuple(np.multiply(ran[11].values, digits).tolist()))
        for end, at in enumerate(weights, len(program)):
            ran[at] = ran[at]._replace(name=f"{prefix}{at}")
            ran[end] = ran[end]._replace(kind=UPDATE, name=ran[at].name, source="")
        return ran if 11 in weights else [*ran[:11], *ran[12:]]

    one = record(stepped("w.", [1, 6]))
    port = record(stepped("p.", [1, 6, 11] if averaged else [1]), framework="jax", name="jax.rec")
    found = polymp.compare(*((port, one) if swapped else (one, port))).first
    named = found and (found.array.kind, found.array.name, found.verdict)
    assert named == (None if averaged else (UPDATE, "w.6", ALONE))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_weight_that_one_run_leaves_as_it_is_is_named(frozen: int) -> None:
    """Of Adam's first updates, all of one size, another weight's differs in two elements alone."""
    program = calls(2)
    weights = [at for at, call in enumerate(program) if call[0] == "weight"]

    def signs(at: int) -> Any:
        return lambda w: 1e-3 * np.where(np.arange(w.size).reshape(w.shape) == at, -1.0, 1.0)

    ends = [("step", program[at][1], signs(at), (at,)) for at in weights]
    ran = arrays([*program, *ends], 1)
    for end, at in enumerate(weights, len(program)):
        ran[end] = ran[end]._replace(kind=UPDATE, name=ran[at].name)
    gone = len(program) + frozen
    pair = record(ran), record([*ran[:gone], *ran[gone + 1 :]], name="other.rec")
    for one, other in (pair, pair[::-1]):
        found = polymp.compare(one, other).first
        assert found is not None
        assert (found.array.kind, found.array.name) == (UPDATE, f"blocks.{frozen}.linear.weight")


def test_elements_of_an_update_may_jump_where_a_few_probes_have_others_that_do() -> None:
    """Adam's first update has the sign of a gradient, which rounding turns where it is small."""

    def stepped(turned: int) -> RunRecord:
        update = ("step", "", lambda w: 1e-3 * np.sign(np.arange(w.size) - turned + 0.5), (1,))
        ran = arrays([*calls(1), update], 1)
        ran[-1] = ran[-1]._replace(kind=UPDATE, name=ran[1].name, spread=(1e-4,) * 20)
        return record(ran)

    assert polymp.compare(stepped(0), stepped(4)).explained
    assert polymp.compare(stepped(0), stepped(2000)).first is not None


def test_elements_of_an_update_may_jump_that_no_probe_has_shown() -> None:
    """One may in any run of 16 probes that show none, beside much noise of the others."""

    def stepped(turned: int) -> RunRecord:
        gradient = ("linear", "blocks.0.linear", lambda w: normal(9, SIZE), (1,))
        update = ("step", "", lambda g: 1e-3 * np.sign(np.arange(g.size) - turned + 0.5), (6,))
        ran = arrays([*calls(1), gradient, update], 1)
        ran[-2] = ran[-2]._replace(spread=(2e-3,) * 20)
        ran[-1] = ran[-1]._replace(kind=UPDATE, name=ran[1].name, spread=(4e-6,) * 20)
        return record(ran)

    for turned, explained in ((1, True), (3, True), (64, False)):
        assert polymp.compare(stepped(0), stepped(turned)).explained == explained


@pytest.mark.parametrize("swapped", [False, True])
def test_an_update_of_a_few_elements_is_off_by_more_than_is_said_to_be_explained(
    swapped: bool,
) -> None:
    """None of a few may jump, as where gradients are clipped: of six equal scales, say."""

    def stepped(framework: str, seed: int, size: float) -> RunRecord:
        program: list[Call] = [
            ("weight", "net", lambda: np.full(6, 0.3), ()),
            ("mul", "net", lambda w: w * 3, (0,)),
            ("step", "net", lambda w: w * size * normal(1, 1)[0, :6], (0,)),
        ]
        return record(updated(program, seed, {2: 0}), framework=framework, name=framework)

    pair = [stepped("torch", 1, 0.1), stepped("jax", 2, 0.2)]
    found = polymp.compare(*(reversed(pair) if swapped else pair))
    assert found.first is not None
    assert found.first.array.kind == UPDATE
    assert found.first.difference > 100 * found.first.allowed, str(found)


@pytest.mark.parametrize("transposed", [True, False])
def test_an_update_has_its_elements_in_the_order_of_its_weight(transposed: bool) -> None:
    """Adam's first update has two values alone: eight of them may agree by chance."""

    def stepped(framework: str, seed: int, turn: bool) -> RunRecord:
        def turned(array: Any) -> Any:
            return array.T if turn else array

        def signs(_: Any) -> Any:
            shape = SIZE, SIZE
            return turned(1e-3 * np.sign(np.random.default_rng(seed).standard_normal(shape)))

        program = [
            ("operand 1 of norm", "", lambda: normal(0, 8), ()),
            ("weight", "net", lambda: turned(normal(1, SIZE)), ()),
            ("linear", "net", lambda x, w: x @ turned(w), (0, 1)),
            ("step", "net", signs, (1,)),
        ]
        ran = arrays(program, 1)
        ran[-1] = ran[-1]._replace(kind=UPDATE, name=ran[1].name, source="", spread=(5e-7,) * 20)
        return record(ran, framework=framework, name=framework)

    other = stepped("jax", 355 if transposed else 356, transposed)
    assert polymp.compare(stepped("torch", 355, False), other).explained == transposed


# --- ranks, and records that cannot be compared ---------------------------------------------------


def ranks(folder: Path, name: str, *programs: list[Call]) -> Path:
    path = folder / name
    for rank, program in enumerate(programs):
        made = record(arrays(program, rank), rank=rank, ranks=len(programs))
        run_records.written(path, made)  # each writes its own file
    return path


def test_ranks_are_compared_with_ranks(tmp_path: Path) -> None:
    fine, off = calls(2), calls(2, epsilon=1e-3)
    one, same = (ranks(tmp_path, name, fine, fine) for name in ("one.rec", "same.rec"))
    other = ranks(tmp_path, "other.rec", fine, off)
    assert polymp.compare(one, same).explained
    found = polymp.compare(one, str(other))
    assert (found.rank, found.explained) == (1, False)
    assert "step 0, rank 1" in str(found)
    pair = tmp_path / "one.rank0.rec", tmp_path / "other.rank1.rec"
    assert not polymp.compare(*pair).explained, "a rank's own file"
    alone = ranks(tmp_path, "alone.rec", fine)
    with pytest.raises(
        RecordError, match=r"has 2 ranks, 'alone\.rec' has 1\. Compare runs on the same"
    ):
        polymp.compare(one, alone)
    (tmp_path / "same.rank1.rec").unlink()
    with pytest.raises(RecordError, match=r"same\.rank1\.rec': No such file"):
        polymp.compare(one, tmp_path / "same.rec")


def test_records_that_share_nothing() -> None:
    rng = np.random.default_rng(5)
    other: list[Call] = [
        ("operand 1 of exp", "", lambda: rng.standard_normal(7), ()),
        ("exp", "net", np.exp, (0,)),
    ]
    with pytest.raises(RecordError, match="share nothing: no array of one has a counterpart"):
        against(other)
    with pytest.raises(RecordError, match=r"step 0 of 'other\.rec' has no calls to compare"):
        against(other[:1])


@pytest.mark.parametrize("wrong", [3, None, b"one.rec", ["one.rec"]])
def test_what_is_no_record_at_all(wrong: Any) -> None:
    told = (
        r"^compare\(\) compares records and paths of records, got (int|NoneType|bytes|list)\. "
        r"Write the path of the file, or recorder\.record\.$"
    )
    with pytest.raises(TypeError, match=told):
        polymp.compare(wrong, record(arrays(calls(1))))


@pytest.mark.parametrize("wrong", [{"a": 3}, ["a=b"], "a=b"])
def test_modules_that_are_no_dict_of_paths(wrong: Any) -> None:
    one = record(arrays(calls(1)))
    with pytest.raises(TypeError, match=r"is no dict of module paths\. Write"):
        polymp.compare(one, one, modules=wrong)


# --- what is shown --------------------------------------------------------------------------------


def hostile(made: RunRecord) -> RunRecord:
    """A record whose every text is markup, with an order to a terminal."""

    def nasty(a: RecordedArray) -> RecordedArray:
        fields = "kind name module source direction rule run dtype".split()
        return a._replace(**{f: getattr(a, f) + NASTY for f in fields[1:]}, inputs=(NASTY,))

    (step,) = made.steps
    named = step._replace(
        arrays=tuple(map(nasty, step.arrays)), left_out={NASTY: 2}, settings={NASTY: {NASTY: 1}}
    )
    header = {"versions": {NASTY: NASTY}, "modules": [NASTY], "framework": NASTY}
    return made._replace(header={**made.header, **header}, steps=(named,), name=NASTY)


def test_names_give_no_orders_to_a_terminal_and_are_text_on_a_page() -> None:
    one, other = run_records.pair(2, epsilon=1e-3)
    found = polymp.compare(hostile(one), hostile(other))
    assert found
    assert "\x1b" not in str(found)
    page = found.to_html()
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
    json.dumps(found.to_dict())


def test_the_data_is_plain_and_whole(tmp_path: Path) -> None:
    one, other = run_records.pair(2, epsilon=1e-3)
    found = polymp.compare(one, other)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(data["rows"]) == len(found.rows) == 11
    assert data["first"] in data["rows"]
    assert data["first"]["one"]["shape"] == [8, run_records.SIZE]
    assert "terms" not in data["first"]["one"], 'no more than "own", it is for the estimate'
    assert {row["verdict"] for row in data["rows"]} <= {EXPLAINED, PASSED, ALONE, "not explained"}
    page = found.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert page.count("<tr") == 1 + len(found.rows)


def test_notes_say_what_was_not_compared(tmp_path: Path) -> None:
    path = run_records.written(tmp_path / "cut.rec", record(arrays(calls(1)), modules=["blocks.*"]))
    with path.open("a") as file:
        file.write('{"step": 1')
    found = polymp.compare(path, path)
    notes = " ".join(found.notes)
    assert "calls of one outside of blocks.*, which it recorded alone" in notes
    assert "one ends in a step that is not whole, which was left out" in notes


@pytest.mark.parametrize(
    ("kind", "differ"),
    [
        ("AdamW 1", "AdamW 1 has eps=1e-08 in one run and 1e-06 in the other"),
        ("Adam 1", "AdamW 1 in one run and Adam 1 in the other"),
    ],
)
def test_optimizers_are_compared(kind: str, differ: str) -> None:
    one, other = run_records.pair(1)
    pair = [
        made._replace(steps=(made.steps[0]._replace(settings={kind: {"lr": 1e-3, "eps": eps}}),))
        for made, kind, eps in ((one, "AdamW 1", 1e-8), (other, kind, 1e-6))
    ]
    found = polymp.compare(*pair)
    assert f"the optimizers differ: {differ}" in found.notes
    # Other classes may compute the same, as AdamW and its fused forms of other libraries.
    assert found.explained == (kind != "AdamW 1")
    assert ("the optimizers differ" in repr(found)) == bool(found)
    told = " ".join(str(found).split())
    assert (f"THE OPTIMIZERS DIFFER: {differ}. Rounding explains all" in told) == bool(found)
    given = {"lr": 1e-3, "eps": 1e-8}
    for other in (
        {kind: given | {"fused": True}},
        {kind: given | {"eps": 1e-8 * (1 + 1e-15)}},
        {kind: given | {"decay": 1.0}},
        {kind: given | {"lr": 1.0}, "AdamW 2": given},
    ):
        again = pair[1]._replace(steps=(pair[1].steps[0]._replace(settings=other),))
        assert polymp.compare(pair[0], again).explained


def test_a_folder_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is a folder"):
        polymp.compare(tmp_path, tmp_path)
