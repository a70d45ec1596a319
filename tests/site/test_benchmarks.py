"""The pages that benchmarks/ makes are those of the records, and what `make gpu` runs is there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import need
from tests.support import processes
from tests.support.blocks import ROOT


def benchmark(name: str) -> ModuleType:
    """The program benchmarks/`name`.py, imported from where it finds those beside it."""
    need("rich")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)


# --- pages made of the records --------------------------------------------------------------------


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return benchmark("speed_page")


def test_the_tables_of_all_figures_are_those_of_the_records(figures: ModuleType) -> None:
    assert figures.PAGE == ROOT / "benchmarks" / "results" / "FIGURES.md"
    text = figures.PAGE.read_text(encoding="utf-8")
    assert text == figures.page(figures.RESULTS, figures.REASONS), "run benchmarks/speed_page.py"
    changed = text.replace("| 0.", "| 1.", 1)
    assert changed != figures.page(figures.RESULTS, figures.REASONS)


def test_every_missed_bar_has_its_reason(figures: ModuleType) -> None:
    assert figures.without_reason(figures.RESULTS, figures.REASONS) == []


def test_every_line_of_the_words_is_used(figures: ModuleType) -> None:
    words = benchmark("page_words")
    said = words.Words.of(words.WORDS)
    figures.page(figures.RESULTS, figures.REASONS, said)
    assert said.unused() == [], "benchmarks/words.toml: no newest record has these; drop them"


def test_the_readme_has_the_costs_of_the_records(figures: ModuleType) -> None:
    costs = benchmark("cost_table")
    text = costs.README.read_text(encoding="utf-8")
    made = costs.with_cost(text, figures.newest(figures.RESULTS))
    assert made == text, "run benchmarks/speed_page.py"
    with pytest.raises(ValueError, match=r"README\.md has to have the lines '<!-- cost"):
        costs.with_cost("# polymp", figures.newest(figures.RESULTS))


def test_docs_speed_has_the_costs_of_the_records() -> None:
    costs = benchmark("feature_costs")
    text = costs.PAGE.read_text(encoding="utf-8")
    assert costs.with_costs(text, costs.newest(costs.RESULTS)) == text, (
        "run benchmarks/feature_costs.py"
    )
    lines = costs.table(costs.newest(costs.RESULTS)).splitlines()[2:]
    assert len(lines) == len(costs.FEATURES)
    assert [line for line in lines if line.count("not measured") == 2] == []
    with pytest.raises(ValueError, match=r"docs/speed\.md has to have the lines '<!-- costs"):
        costs.with_costs("# Fast", {})


# --- make gpu -------------------------------------------------------------------------------------


def test_the_steps_of_make_gpu_name_functions_that_are_there() -> None:
    for name in ("torch", "jax"):
        need(name)
    for step in benchmark("gpu_steps.plan").STEPS:
        module, _, function = step.run.partition(":")
        assert callable(getattr(benchmark(module), function)), step.run


@pytest.mark.long
def test_the_dry_run_of_make_gpu(tmp_path: Path) -> None:
    """Every step that makes sense on a CPU, at tiny sizes; and the page that is made of them."""
    for name in ("torch", "jax", "flax", "optax", "matplotlib", "rich", "tqdm"):
        need(name)
    steps = benchmark("gpu_steps.plan").STEPS
    done = processes.python("benchmarks/gpu.py", "--device", "cpu", "--out", tmp_path, code=None)
    log = (tmp_path / "gpu-cpu.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    journal = (tmp_path / "gpu-cpu.jsonl").read_text().splitlines()
    entries = {entry["step"]: entry for entry in map(json.loads, journal)}
    assert entries.keys() == {step.name for step in steps}
    for step in steps:
        entry = entries[step.name]
        wanted = "absent" if step.cuda or not step.dry else "done"
        assert (entry["status"], bool(entry["why"])) == (wanted, wanted == "absent"), step.name
    page = (tmp_path / "speed.md").read_text()
    for text in ("## PyTorch", "## JAX", "## Every op on a GPU", "### Tests that need a GPU"):
        assert text in page
    ops = entries["ops, torch"]["record"]["lists"]["Ops on this device, against torch.autocast"]
    assert [line["different"] for line in ops] == [0, 0]
    assert all(line["same bits"] == line["calls"] > 50 for line in ops)
