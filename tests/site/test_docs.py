"""README.md, its like and docs/: the code blocks run, the links lead somewhere.

`blocks` finds and runs them, in one process for each file. A block needs the frameworks that it and
the blocks before it, whose names it sees, import.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from polymp.rules.policy_files import shipped, summary
from polymp.rules.row import Rule
from tests.conftest import FRAMEWORKS, need
from tests.support import forks, processes
from tests.support.blocks import FILES as REPOSITORY
from tests.support.blocks import (
    ROOT,
    URLS,
    Block,
    Outcome,
    dead_links,
    is_absolute,
    links,
    read,
    table,
)
from tests.support.forks import Call

TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FILES = (*map(ROOT.joinpath, TOP), *sorted(ROOT.glob("docs/**/*.md")))
BLOCKS = [block for path in FILES for block in read(path)]

# The pages that take longest and whose every function has tests of its own: for `make test-long`.
LONG = (
    "compare fp8 jax keras low-weights recipes-jax recipes-torch scaling-jax scaling-torch seeing "
    "testing trainers"
).split()
RUN = [
    pytest.param(
        block,
        id=f"{block.file}:{block.line}",
        marks=[pytest.mark.long] if block.path.stem in LONG else [],
    )
    for block in BLOCKS
    if block.runs
]

FENCED = "# Title\n\n```python\n{}\n```\n"
IMPORT = re.compile(r"^\s*(?:import|from)\s+(?:polymp\.)?(\w+)", re.MULTILINE)


@cache
def outcomes(path: Path, folder: Path) -> tuple[dict[int, Outcome], str]:
    """Return the outcome of each block of the file, by line, and the end of the output."""
    report, printed = folder / "report", folder / "printed"
    call = Call("tests.support.blocks", "report_on", (str(path), str(report)), str(printed))
    (code,) = forks.run(forks.BOTH, [call._replace(strict=False)])
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    found = {line: Outcome(*rest) for line, *rest in map(json.loads, lines)}
    return found, f"exit code {code}\n{printed.read_text(encoding='utf-8')[-2000:]}"


def frameworks(block: Block) -> list[str]:
    """Return the frameworks that the block, and those whose names it sees, import."""
    together = [b.code for b in read(block.path) if b.runs and block.sees(b)]
    return sorted({name for code in together for name in IMPORT.findall(code)} & {*FRAMEWORKS})


def outcome(block: Block, folder: Path) -> Outcome:
    found, end = outcomes(block.path, folder)
    lost = Outcome("failed", f"{block.file}:{block.line}: its process ended before it: {end}")
    return found.get(block.line, lost)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {path: tmp_path_factory.mktemp(path.stem) for path in FILES}


@pytest.mark.parametrize("block", RUN)
def test_block(block, folders):
    for framework in frameworks(block):
        need(framework)
    status, text = outcome(block, folders[block.path])
    if status == "skipped":
        pytest.skip(text)
    if status != "passed":
        pytest.fail(text, pytrace=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["quickstart-torch.md", "quickstart-jax.md"])
def test_a_quickstart_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """As a reader types it: in one process, every block after those before it."""
    blocks = [block for block in read(ROOT / "docs" / name) if block.runs]
    for block in blocks:
        for framework in frameworks(block):
            need(framework)
    page = tmp_path / "page.md"
    page.write_text(FENCED.format("\n".join(block.code for block in blocks)), encoding="utf-8")
    (whole,) = read(page)
    assert outcome(whole, tmp_path) == Outcome("passed")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links(path):
    assert dead_links(path) == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_console_blocks_name_what_is_there():
    text = "".join(block.code for block in BLOCKS if block.language == "console")
    assert {"demo", "test"} <= set(re.findall(r"^\$ make ([\w-]+)", text, re.M)) <= make_targets()
    scripts = re.findall(r"^\$ .*?(\S+\.py)\b", text, re.MULTILINE)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


POLICIES = ROOT / "docs" / "policies.md"


def test_the_tables_of_policies_are_the_data():
    listed = {name: summary for name, summary in table(POLICIES, "Shipped policies")}
    links = {f"[{name}](../policies/{name}.toml)": summary(name) for name in shipped()}
    assert listed == links
    rules = [rule for rule, *_ in table(POLICIES, "Rules")]
    assert rules == [f"`{rule}`" for rule in Rule]


@pytest.mark.parametrize("code", ["x = 1\nassert x == 2", "import os\nos._exit(0)"])
def test_a_broken_block_fails_with_file_and_line(code: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(FENCED.format(code), encoding="utf-8")
    (block,) = read(path)
    status, text = outcome(block, tmp_path)
    assert status == "failed"
    assert re.match(rf"{re.escape(str(path))}:(5: Assertion|4: its process ended)", text)


@pytest.mark.parametrize("door", ["polymp", "polymp.torch", "polymp.jax"])
def test_every_public_name_is_in_the_table_of_names(door: str) -> None:
    """And the table has no other."""
    if door != "polymp":
        need(door.partition(".")[2])
    section = (ROOT / "docs/names.md").read_text().partition(f"\n## {door}\n")[2]
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    names = [name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(names) == sorted({*importlib.import_module(door).__all__} - {"__version__"})


# --- README.md, as the repository and a package index show it -------------------------------------

README = ROOT / "README.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_page_is_plain_markdown(path: Path) -> None:
    """README leads to the pages on a code host, where the syntax of a site would show as it is."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r" *(===|!!!|\?\?\?\+?) |:::|.*\]\{", line)] == []


def test_every_link_is_absolute() -> None:
    """A package index shows README at an address of its own, where no file stands beside it."""
    found = [link for _, link in links(README)]
    assert len(found) > 30
    assert [link for link in found if not link.startswith(REPOSITORY)] == []


def test_the_addresses_of_the_project_lead_to_its_repository() -> None:
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= {*URLS}
    for name, address in URLS.items():
        assert is_absolute(address)
        assert address.startswith(URLS["Repository"])
        if address.startswith(REPOSITORY):
            assert (ROOT / address.removeprefix(REPOSITORY)).is_file(), name


SCALING = ROOT / "docs" / "scaling.md"


def entries(kind: str) -> set[str]:
    """The public names of a framework's scaler, its arguments, and the helper beside it."""
    module = importlib.import_module(f"polymp.{kind}")
    scaler = module.GradScaler
    names = {name for name in dir(scaler) if not name.startswith("_")}
    names |= {*inspect.signature(scaler).parameters, "GradScaler", "expect_scaler"}
    return names | ({"state", "rule", "enabled"} if kind == "jax" else set())


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_the_page_names_every_entry_of_the_scaler(kind: str) -> None:
    need(kind)
    code = " ".join(re.findall(r"`([^`\n]+)`", SCALING.read_text(encoding="utf-8")))
    assert [name for name in entries(kind) if not re.search(rf"\b{name}\b", code)] == []
    blocks = [block.code for block in read(SCALING.with_stem(f"scaling-{kind}")) if block.runs]
    for name in ("GradScaler", "expect_scaler"):
        assert any(f"polymp.{kind}.{name}" in code for code in blocks)


# --- the pages that benchmarks/ makes are those of the records ------------------------------------


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
