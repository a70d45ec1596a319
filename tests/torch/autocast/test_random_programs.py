"""Random programs of regions, run with polymp and with torch.autocast used well: equal bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from polymp.torch import autocast
from tests.support.processes import in_thread
from tests.support.sizes import size
from tests.support.torch import programs, run_programs
from tests.support.torch.kernels import all_python
from tests.support.torch.programs import Block, Inside, Op, Program, Spec, Thread
from tests.torch import conftest

KINDS = get_args(programs.Node)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

low = st.sampled_from(["bfloat16", "float16"])
enabled = st.sampled_from([True, True, True, True, False])
shared_specs = st.builds(Spec, low, enabled, st.sampled_from([True, True, False]), st.just(True))
fresh_specs = st.builds(
    Spec,
    st.one_of(low, st.none()),
    enabled,
    st.sampled_from([None, True, False]),
    st.just(False),
)
number = st.integers(0, 3)
activation = st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9])
op = st.builds(Op, number, activation, activation)
weight = st.sampled_from(["w", "w", "u", "b", "conv"])
write = st.builds(programs.Write, st.sampled_from(sorted(programs.WRITES)), weight)
step = st.builds(programs.Step, st.sampled_from(sorted(programs.OPTIMIZERS)), st.booleans())


def times(n: int, strategy: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    """For `one_of`: so often, in spite of its dropping what it has already."""
    return [strategy.map(lambda x: x) for _ in range(n)]


@cache
def blocks(
    depth: int, *, caught: bool = False, outermost: bool = False
) -> st.SearchStrategy[Block]:
    """Bodies with so many levels below them; they may raise if there is somebody to catch it."""
    nodes = [] if outermost else times(6, op)
    nodes += [write, step]
    if caught:
        nodes.append(st.builds(programs.Raise))
    if depth:
        body, stoppable = (blocks(depth - 1, caught=each) for each in (caught, True))
        inside = st.builds(Inside, number, body)
        thread = st.builds(Thread, st.tuples(st.builds(Inside, number, stoppable)) | stoppable)
        nodes += [
            *times(3, inside),
            st.builds(programs.Call, number, st.integers(0, 2), body),
            st.builds(programs.Yielding, number, body, body, body),
            st.builds(programs.NoGrad, body),
            st.builds(programs.Inference, body),
            st.builds(programs.Catch, stoppable),
            thread,
            st.builds(Inside, number, st.tuples(op, thread, op)),
        ]
    return st.lists(st.one_of(nodes), min_size=1, max_size=4).map(tuple)


# Where things go wrong is known: two dtypes and one weight. So every program has them.
KEEPING = (Spec("bfloat16", True, True, True), Spec("float16", True, True, True))
random_programs = st.builds(
    Program,
    st.integers(0, 3),
    st.tuples(
        st.sampled_from(["linear", "two layers", "mm weight", "conv1d"]),
        *[st.sampled_from(sorted(programs.OPS))] * 2,
    ),
    st.tuples(*map(st.just, KEEPING), shared_specs, fresh_specs),
    blocks(3, outermost=True),
)


class Polymp:
    """polymp as it comes: shared objects, nothing cleared by hand."""

    def __init__(self) -> None:
        self.objects: dict[Spec, autocast] = {}

    def region(self, spec: Spec) -> autocast:
        if not spec.shared:
            return self.make(spec)
        if spec not in self.objects:
            self.objects[spec] = self.make(spec)
        return self.objects[spec]

    def make(self, spec: Spec) -> autocast:
        dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
        return autocast("cpu", dtype, spec.enabled, spec.cache)

    def function(self, spec: Spec, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.region(spec)(function)

    def generator(
        self, spec: Spec, generator: Callable[[], Iterator[None]]
    ) -> Callable[[], Iterator[None]]:
        return self.region(spec)(generator)

    def thread(self, body: Callable[[], None]) -> None:
        in_thread(body)

    def wrote(self) -> None:
        pass


@pytest.fixture(scope="module")
def torchs() -> Iterator[run_programs.Child]:
    child, threads = run_programs.Child(), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the child
    programs.count_up()
    yield child
    torch.set_num_threads(threads)
    child.close()


def difference(ours: list[Any], theirs: list[Any]) -> str | None:
    for at, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"polymp saw at {at} {our}, torch {their}"
    return None if len(ours) == len(theirs) else f"polymp saw {len(ours)}, torch {len(theirs)}"


def nodes(body: Block) -> Iterator[Any]:
    for node in body:
        yield node
        for part in vars(node).values():
            if isinstance(part, tuple):
                yield from nodes(part)


def run_ours(program: Program) -> list[Any]:
    before = conftest.state()
    ours = programs.run(program, Polymp())
    assert conftest.state() == before
    return ours


def compare(child: run_programs.Child, examples: int) -> tuple[int, Counter[Any], Counter[str]]:
    """Run so many programs; counts of programs, of node kinds and of what was seen."""
    programs_run, kinds, seen = 0, Counter[Any](), Counter[str]()

    @settings(max_examples=examples, suppress_health_check=QUIET)
    @given(random_programs)
    def check(program: Program) -> None:
        nonlocal programs_run
        answer = child.ask(program)
        try:
            ours = run_ours(program)
        finally:
            theirs = answer()
        if found := difference(ours, theirs):
            raise AssertionError(found)
        programs_run += 1
        kinds.update(type(node) for node in nodes(program.body))
        seen.update(str(entry[0]) for entry in ours)

    check()
    return programs_run, kinds, seen


@pytest.mark.sized
def test_a_thousand_programs(torchs: run_programs.Child) -> None:
    """Or a fifth of them in `make test`."""
    asked = size(200, 1000)
    count, kinds, seen = compare(torchs, asked)
    assert count >= asked
    assert all(kinds[kind] >= asked / 2 for kind in KINDS), kinds
    rare = [name for name in programs.OPS if seen[name] < size(1, 20)]
    assert len(rare) <= size(3, 0), rare
    assert all(seen[name] >= asked * size(1, 3) / 10 for name in programs.OPTIMIZERS), seen


@pytest.mark.sized
def test_programs_on_our_own_kernels(torchs: run_programs.Child) -> None:
    asked = size(40, 300)
    with all_python("cpu"):
        count, kinds, _ = compare(torchs, asked)
    assert count >= asked
    assert all(kinds[kind] >= count / 3 for kind in KINDS), kinds


@pytest.mark.long
def test_wrong_runs_are_told_from_right_ones(torchs: run_programs.Child) -> None:
    """The random programs reach every mistake of `run_programs`, and the comparison sees it."""
    unseen = run_programs.LIBRARIES.keys() - {"Correct"}

    @settings(max_examples=150, suppress_health_check=QUIET, phases=[Phase.generate])
    @given(random_programs)
    def look(program: Program) -> None:
        if unseen:
            ours = run_ours(program)
            unseen.difference_update(
                [wrong for wrong in unseen if difference(ours, torchs.ask(program, wrong)())]
            )

    look()
    assert unseen == set()
