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


def test_the_pages_have_the_figures_of_the_records() -> None:
    figures, costs, features = map(benchmark, ("speed_page", "cost_table", "feature_costs"))
    newest = figures.newest(figures.RESULTS)
    for page, made in (
        (figures.PAGE, lambda text: figures.page(figures.RESULTS, figures.REASONS)),
        (costs.README, lambda text: costs.with_cost(text, newest)),
        (features.PAGE, lambda text: features.with_costs(text, features.newest(features.RESULTS))),
    ):
        text = page.read_text(encoding="utf-8")
        assert made(text) == text, "run benchmarks/speed_page.py and benchmarks/feature_costs.py"


def test_the_steps_of_make_gpu_name_functions_that_are_there() -> None:
    need("torch", "jax")
    for step in benchmark("gpu_steps.plan").STEPS:
        module, _, function = step.run.partition(":")
        assert callable(getattr(benchmark(module), function)), step.run


@pytest.mark.long
def test_the_dry_run_of_make_gpu(tmp_path: Path) -> None:
    """Every step that makes sense on a CPU, at tiny sizes; and the page that is made of them."""
    need("torch", "jax", "flax", "optax", "matplotlib", "rich", "tqdm")
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
