"""README.md, CHANGELOG.md and docs/: the code blocks run, the links lead somewhere.

`blocks` finds and runs them, in one process for each file. A block that imports torch or jax needs
that framework, and so do the blocks that run after it.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from polymp.rules.policy_files import shipped, summary
from polymp.rules.row import Rule
from tests.conftest import FRAMEWORKS, need
from tests.support.blocks import ROOT, Block, Outcome, read, run

FILES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md")))
BLOCKS = [block for path in FILES for block in read(path)]

LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<heading>[^)\s]+))?\)")
IMPORT = re.compile(r"^\s*(?:import|from)\s+(?:polymp\.)?(\w+)", re.MULTILINE)


@cache
def outcomes(path: Path, folder: Path) -> tuple[dict[int, Outcome], str]:
    """What became of each block of the file, by line, and what its process said at the end."""
    report = folder / "report"
    command = [sys.executable, "-m", "tests.support.blocks", str(path), str(report)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    found = {line: Outcome(*rest) for line, *rest in map(json.loads, lines)}
    return found, f"exit code {child.returncode}\n{child.stderr[-2000:]}"


def frameworks(block: Block) -> list[str]:
    """What the block and those that run before it import."""
    together = [
        b.code
        for b in read(block.path)
        if b.runs and b.line <= block.line and b.section in (0, block.section)
    ]
    return sorted({name for code in together for name in IMPORT.findall(code)} & {*FRAMEWORKS})


def outcome(block: Block, folder: Path) -> Outcome:
    found, end = outcomes(block.path, folder)
    lost = Outcome("failed", f"{block.file}:{block.line}: its process ended before it: {end}")
    return found.get(block.line, lost)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {path: tmp_path_factory.mktemp(path.stem) for path in FILES}


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.runs], ids=lambda block: f"{block.file}:{block.line}"
)
def test_block(block, folders):
    for framework in frameworks(block):
        need(framework)
    status, text = outcome(block, folders[block.path])
    if status == "skipped":
        pytest.skip(text)
    if status != "passed":
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("name", ["quickstart-torch.md", "quickstart-jax.md"])
def test_a_quickstart_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """As a reader types it: in one process, every block after those before it."""
    blocks = [block for block in read(ROOT / "docs" / name) if block.runs]
    for block in blocks:
        for framework in frameworks(block):
            need(framework)
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.code for block in blocks), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    child = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]


def prose(path: Path) -> str:
    """A file's text with its fenced blocks blanked out, line by line."""
    text = path.read_text(encoding="utf-8")
    fenced = re.compile(r"^( *`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)
    return fenced.sub(lambda block: "\n" * block.group().count("\n"), text)


def anchors(path: Path) -> set[str]:
    """The names under which a file's headings can be linked to."""
    headings = re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(path: Path) -> list[str]:
    """The links of a file to files and headings that are not there."""
    text, dead = prose(path), []
    for link in LINK.finditer(text):
        target = (path.parent / link["path"]) if link["path"] else path
        heading = link["heading"] if target.suffix == ".md" else None  # a picture's is its theme
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(f"{path.name}:{text[: link.start()].count(chr(10)) + 1}: {link.group()}")
    return dead


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


def table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    _, _, below = path.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = itertools.takewhile(
        lambda line: line.startswith("|"),
        itertools.dropwhile(lambda line: not line.startswith("|"), below.splitlines()),
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


POLICIES = ROOT / "docs" / "policies.md"


def test_the_tables_of_policies_are_the_data():
    listed = {name: summary for name, summary in table(POLICIES, "Shipped policies")}
    links = {f"[{name}](../policies/{name}.toml)": summary(name) for name in shipped()}
    assert listed == links
    rules = [rule for rule, *_ in table(POLICIES, "Rules")]
    assert rules == [f"`{rule}`" for rule in Rule]


def test_the_recipes_have_five_lines_each():
    """Those for one framework; what only shows that they work, and the models, do not count."""
    starts = next(b.section for b in BLOCKS if b.path == POLICIES and b.section)
    recipes = [b.code for b in BLOCKS if b.path == POLICIES and b.section == starts][1:]
    counted = [code for code in recipes if not re.search(r"^( *)assert ", code, re.MULTILINE)]
    for package in ("polymp.torch.", "polymp.jax."):
        assert sum(package in code for code in counted) >= 4
    assert max(len(code.splitlines()) for code in counted) <= 5
    assert len(recipes) - len(counted) >= 5


# The rest shows that the runner can fail, and that it leaves nothing out.

FENCED = "# Title\n\n```python\n{}\n```\n"


def run_text(folder: Path, text: str) -> list[Outcome]:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return [outcome for _, outcome in run(read(path))]


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("x = 1\nassert x == 2", 5, "AssertionError\n    assert x == 2"),
        (
            "def f():\n    return 1 / 0\n\n\nf()",
            5,
            "ZeroDivisionError: division by zero\n    return",
        ),
        ("import warnings\nwarnings.warn('old')", 5, "UserWarning: old\n    warnings.warn("),
        ("x = 1\nx = = 2", 5, "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)", 5, "SystemExit: 0\n    sys.exit(0)"),
        ("import json\njson.loads('{')", 5, "JSONDecodeError: "),
    ],
)
def test_a_broken_block_fails_with_file_and_line(code, line, said, tmp_path):
    [(status, text)] = run_text(tmp_path, FENCED.format(code))
    assert status == "failed"
    assert text.startswith(f"{tmp_path / 'page.md'}:{line}: {said}")


def test_a_block_that_ends_the_process_fails(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("```python\nx = 1\n```\n\n```python\nimport os\nos._exit(3)\n```\n")
    first, second = read(path)
    assert outcome(first, tmp_path) == Outcome("passed")
    status, text = outcome(second, tmp_path)
    assert (status, text.partition("\n")[0]) == (
        "failed",
        f"{path}:6: its process ended before it: exit code 3",
    )


def test_blocks_share_names_within_their_section_alone(tmp_path):
    page = "```python\na = 1\n```\n## A\n```python\nb = a\n```\n```python\nassert a == b\n```\n"
    assert run_text(tmp_path, page) == [Outcome("passed")] * 3
    *_, (status, text) = run_text(tmp_path, f"{page}## B\n```python\nassert a == 1\nb\n```\n")
    assert status == "failed"
    assert "NameError: name 'b' is not defined" in text


def test_blocks_after_a_broken_one_fail_too(tmp_path):
    page = "## A\n```python\n1 / 0\n```\n```python\nx = 1\n```\n## B\n```python\nx = 1\n```\n"
    _, (status, text), last = run_text(tmp_path, page)
    here = tmp_path / "page.md"
    assert status == "failed"
    assert text == f"{here}:6 was not run after {here}:3: ZeroDivisionError: division by zero"
    assert last == Outcome("passed")


def test_marks(tmp_path):
    page = """
<!-- skip: needs two GPUs -->
```python
1 / 0
```

<!-- file: mine.toml -->
```toml
a = 1
```

- in a list:

  ```python
  from pathlib import Path
  assert Path("mine.toml").read_text() == "a = 1\\n"
  ```
"""
    assert run_text(tmp_path, page) == [Outcome("skipped", "needs two GPUs"), Outcome("passed")]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```py\n```\n", "1: call it python; nobody runs ```py"),
        ("\n```python\n", "2: this block is never closed"),
        (
            "<!-- skip -->\n```python\n```\n",
            "1: a mark looks like <!-- skip: why -->, not <!-- skip",
        ),
        ("<!-- needs: tpu -->\n```python\n```\n", "1: a block can need cuda, not tpu"),
    ],
)
def test_what_would_be_left_out_by_mistake_is_refused(page, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'page.md'}:{message}")):
        run_text(tmp_path, page)


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "## A `b`\n[1](#a-b) [2](page.md#a-b) [3](https://x.y)\n```python\n## C\nf[0](x)\n```\n"
        "[4](#c) [5](no.md)\n"
    )
    assert dead_links(page) == ["page.md:7: ](#c)", "page.md:7: ](no.md)"]
