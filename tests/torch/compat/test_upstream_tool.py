"""`upstream.py` on a source tree of our own: it must see a substitute that misbehaves."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.torch import upstream, upstream_child, upstream_standins
from tests.support.torch.upstream import STOCK, Run, Selection

FILE = "test/test_autocast.py"
LONG = pytest.mark.long  # what it makes is a run of a source tree

TESTS = """
    import os, unittest, torch

    class Tests(unittest.TestCase):
        def test_region(self):
            x = torch.ones(2, 2)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.assertIs(torch.mm(x, x).dtype, torch.bfloat16)

        def test_scaler(self):
            self.assertEqual(torch.amp.GradScaler("cpu", init_scale=4.0).get_scale(), 4.0)

        def test_that_fails(self):
            self.assertEqual(1, 2, "as it should")

        @unittest.skip("not here")
        def test_that_is_skipped(self):
            pass

        def test_with_parts(self):
            for part in range(3):
                with self.subTest(part=part):
                    self.assertNotEqual(part, 1)

        def test_without_torch(self):
            self.assertEqual(1, 1)

        def test_zz_availability(self):
            self.assertTrue(torch.amp.is_autocast_available("cpu"))

        def test_zz_afterwards(self):
            pass
"""
# The last test of the file, test_zz_availability, takes the process down.
BROKEN = """
    import os
    from contextlib import nullcontext
    from polymp.torch import GradScaler, custom_bwd, custom_fwd, cpu, cuda

    class autocast(nullcontext):
        def __init__(self, *args, **kwargs):
            super().__init__()

    def is_autocast_available(device):
        os._exit(3)
"""
DISGUISED = """
    import torch
    from polymp.torch import GradScaler, custom_bwd, custom_fwd, cpu, cuda, is_autocast_available

    STOCK = torch.amp.autocast_mode.autocast

    def autocast(*args, **kwargs):
        return STOCK(*args, **kwargs)
"""

Runs = dict[str, Run]  # by the module of the classes
Tool = Callable[..., int]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "test").mkdir()
    (folder / FILE).write_text(textwrap.dedent(TESTS))
    for name, text in (("broken", BROKEN), ("disguised", DISGUISED)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def runs(source: Path) -> Iterator[Runs]:
    """The file, run once with each set of classes that is asked for."""
    run_child = upstream.run_child  # `tool` puts what was run in its place

    class Made(Runs):
        def __missing__(self, classes: str) -> Run:
            self[classes] = run_child(source, Selection(FILE), classes, timeout=300.0)
            return self[classes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(source))
        yield Made()


@pytest.fixture
def tool(runs: Runs, source: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The command line, on runs that were made before."""
    monkeypatch.setattr(upstream, "run_child", lambda source, sel, classes, timeout: runs[classes])

    def main(*arguments: str) -> int:
        return upstream.main([str(source), "--only", "test_autocast.py", *arguments])

    return main


def outcomes(run: Run) -> dict[str, str]:
    return {name.rpartition("::")[2]: test["outcome"] for name, test in run.tests.items()}


@LONG
def test_both_runs_tell_what_became_of_each_test(runs: Runs) -> None:
    assert outcomes(runs[STOCK]) == {
        "test_region": "passed",
        "test_scaler": "passed",
        "test_that_fails": "failed",
        "test_that_is_skipped": "skipped",
        "test_with_parts": "failed",
        "test_without_torch": "passed",
        "test_zz_afterwards": "passed",
        "test_zz_availability": "passed",
    }
    assert outcomes(runs["polymp.torch"]) == outcomes(runs[STOCK])
    reasons = [test["why"] for test in runs[STOCK].tests.values()]
    assert "AssertionError: 1 != 2 : as it should" in reasons
    assert "not here" in " ".join(reasons)


@LONG
def test_the_classes_meant_are_the_ones_at_work(runs: Runs) -> None:
    assert (runs[STOCK].made, runs[STOCK].stock_made) == (2, 2)
    assert (runs["polymp.torch"].made, runs["polymp.torch"].stock_made) == (2, 0)
    assert set(runs["polymp.torch"].replaced) == set(upstream_child.NAMES)
    assert runs["polymp.torch"].left == []
    assert runs[STOCK].replaced == []


def test_every_place_of_torchs_classes_is_replaced() -> None:
    script = (
        "import sys, torch, torch.cpu.amp, torch.cuda.amp\n"
        "a, g = torch.amp.autocast_mode, torch.amp.grad_scaler\n"
        "own = (a.autocast, a.custom_fwd, a.custom_bwd, g.GradScaler)\n"
        "own = {id(each) for each in own}\n"
        "modules = [m for n, m in sys.modules.items() if n.startswith('torch')]\n"
        "print(*{f'{m.__name__}.{k}' for m in modules for k, v in list(vars(m).items())\n"
        "        if id(v) in own})\n"
    )
    done = processes.python("-c", script, code=None)
    found = set(done.stdout.split())
    assert len(found) >= 10, done.stderr
    assert found <= set(upstream_child.NAMES)


@LONG
def test_the_same_tests_pass(tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    written = tmp_path / "out.json"
    assert tool("--json", str(written)) == 0
    out = capsys.readouterr().out
    assert "SAME: exactly the same tests pass." in out
    assert "Passing with torch's classes: 5, with polymp's: 5." in out
    (file,) = json.loads(written.read_text())["files"]
    assert file["differences"] == []
    assert len(file["ours"]["tests"]) == 8


@LONG
def test_a_region_that_does_nothing_and_a_crash_are_named(
    tool: Tool, capsys: pytest.CaptureFixture
) -> None:
    assert tool("--substitute", "broken") == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: tests that pass in one run only: 2, named above." in out
    region, crash = f"{FILE}::Tests::test_region", f"{FILE}::Tests::test_zz_availability"
    failed = "failed: AssertionError: torch.float32 is not torch.bfloat16"
    assert f"\n{region}\n  torch:  passed\n  polymp: {failed}\n" in out
    assert f"\n{crash}\n  torch:  passed\n  polymp: crashed: the process ended in" in out
    assert "the run with polymp's classes did not reach its end" in out


@pytest.mark.long  # a run more; that the tool can fail, the run above shows
def test_torchs_own_class_in_disguise_proves_nothing(
    tool: Tool, capsys: pytest.CaptureFixture
) -> None:
    assert tool("--substitute", "disguised") == 1
    out = capsys.readouterr().out
    assert "objects of torch's classes were made: 1" in out
    assert "NOT SHOWN: the same tests pass, but" in out


@LONG
def test_a_place_that_was_forgotten_is_named(
    tool: Tool, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(runs["polymp.torch"], "left", ["torch.somewhere.autocast"])
    assert tool() == 1
    assert "torch's classes are still at torch.somewhere.autocast" in capsys.readouterr().out


def test_torchs_own_class_is_no_substitute() -> None:
    stock = {place: upstream_child.lookup(place) for place in upstream_child.NAMES}
    with pytest.raises(upstream_child.SubstitutionError, match=r"^torch.amp.autocast is torch's"):
        upstream_child.substitute("torch.amp", upstream_child.NAMES, stock)


def test_a_substitute_must_have_every_name() -> None:
    stock = {place: upstream_child.lookup(place) for place in upstream_child.NAMES}
    with pytest.raises(upstream_child.SubstitutionError, match="json has no 'autocast' to put at"):
        upstream_child.substitute("json", upstream_child.NAMES, stock)


@pytest.mark.long  # a run more; why it is refused, the two tests above show
def test_a_substitute_that_cannot_be_imported_is_refused(runs: Runs) -> None:
    assert (
        runs["no_such_module"].refused
        == "no_such_module has no 'autocast' to put at torch.autocast"
    )


def line(test: str, outcome: str, **more: Any) -> str:
    return json.dumps({"test": test, "outcome": outcome, "why": ""} | more)


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        (["crashed"], "crashed"),
        (["crashed", "passed"], "passed"),
        (["crashed", "skipped"], "skipped"),
        (["crashed", "failed", "passed"], "failed"),
        (["crashed", "passed", "error"], "error"),
        (["crashed", "xfailed"], "xfailed"),
    ],
)
def test_the_worst_report_is_the_outcome(reports: list[str], outcome: str) -> None:
    run = upstream.read_record([line("a", report) for report in reports])
    assert run.outcome("a") == outcome
    assert run.passing == ({"a"} if outcome == "passed" else set())


def test_a_file_without_a_passing_test_compares_nothing(
    runs: Runs, tool: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    empty = Run(replaced=["torch.autocast"], torch="0", ended=True)
    monkeypatch.setattr(upstream, "run_child", lambda *arguments: empty)
    assert tool() == 2
    assert "nothing was compared" in capsys.readouterr().out


def test_stand_ins_fill_gaps_only() -> None:
    text = "from torch._six import inf\n"
    added = upstream_standins.add_missing(text)
    try:
        assert added == ["torch._six.inf", "torch._six.nan", "torch._six.string_classes"]
        assert upstream_standins.add_missing(text) == []
        assert upstream_standins.add_missing("import torch") == []
    finally:
        del sys.modules["torch._six"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no/such/folder"], "no/such/folder is not a directory"),
        (["."], ". is no PyTorch source tree: it has no test/test_autocast.py"),
        ([".", "--only", "cuda"], ". has no test/test_cuda.py"),
        ([".", "--only", "test_ops"], "no test file is named like 'test_ops'; --slow?"),
    ],
)
def test_bad_arguments_get_one_line(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert upstream.main(arguments) == 2
    assert capsys.readouterr() == ("", f"upstream.py: {problem}\n")


def test_a_program_ends_with_the_code_of_its_main(tmp_path: Path) -> None:
    done = processes.python(upstream.__file__, "no/such/folder", code=2, cwd=tmp_path)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
