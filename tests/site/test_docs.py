"""README.md, its like and docs/: the code blocks run, the links lead somewhere.

`blocks` finds and runs them, in one process for each file. A block needs the frameworks that it and
the blocks before it, whose names it sees, import.
"""

import importlib
import inspect
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from polymp.rules.policy_files import shipped, summary
from polymp.rules.row import Rule
from tests.conftest import FRAMEWORKS, need
from tests.support import forks
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
    run,
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
        ("import warnings\nwarnings.warn('old')", 5, "UserWarning: old\n    warnings.warn("),
        ("x = 1\nx = = 2", 5, "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)", 5, "SystemExit: 0\n    sys.exit(0)"),
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


LABELLED = """
```python
a = 1
```

## A

**PyTorch**

```python
b = a
```

text, and a block again

```python
c = b + 1
```

**JAX**

```python
assert a == 1
{}
```

### Both

```python
assert a == 1
```

**PyTorch**

```python
assert c == a + 1
```
"""


def test_a_part_for_one_framework_sees_its_own_blocks_and_the_common_ones(tmp_path):
    assert run_text(tmp_path, LABELLED.format("c = 1")) == [Outcome("passed")] * 6
    statuses = []
    for status, text in run_text(tmp_path, LABELLED.format("b")):
        statuses.append(status)
        assert status == "passed" or "NameError: name 'b' is not defined" in text
    assert sorted(statuses) == ["failed", *["passed"] * 5]


def test_a_part_for_one_framework_needs_that_framework_alone(tmp_path):
    page = tmp_path / "page.md"
    parts = "".join(
        f"**{label}**\n\n```python\nimport {name}\n```\n\n"
        for label, name in (("PyTorch", "torch"), ("JAX", "jax"))
    )
    page.write_text(f"{parts}## A\n```python\nimport numpy\n```\n{parts}{parts}")
    assert [frameworks(block) for block in read(page)] == [
        ["torch"], ["jax"], [], *[["torch"], ["jax"]] * 2,
    ]  # fmt: skip


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
        ("```py\n```\n", "1: call it python; no test runs ```py"),
        ("\n```python\n", "2: this block is never closed"),
        (
            "<!-- skip -->\n```python\n```\n",
            "1: a mark looks like <!-- skip: why -->, not <!-- skip",
        ),
        (
            "<!-- needs: tpu -->\n```python\n```\n",
            "1: a block can need one of cuda, lightning, accelerate, transformers, peft, not tpu",
        ),
    ],
)
def test_what_would_be_left_out_by_mistake_is_refused(page, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'page.md'}:{message}")):
        run_text(tmp_path, page)


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "## A `b`\n[1](#a-b) [2](page.md#a-b) [3](https://x.y)\n```python\n## C\nf[0](x)\n```\n"
        f"[4](#c) [5](no.md)\n[6]({REPOSITORY}README.md#install) [7]({REPOSITORY}none.md)\n\n"
        f"[8]: {REPOSITORY}README.md#none\n"
        f"<a href='gone.md'><img src=\"{REPOSITORY}LICENSE\"></a>\n"
    )
    assert dead_links(page) == [
        "page.md:7: #c",
        "page.md:7: no.md",
        f"page.md:8: {REPOSITORY}none.md",
        f"page.md:10: {REPOSITORY}README.md#none",
        "page.md:11: gone.md",
    ]


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


def test_every_link_is_absolute_and_leads_to_a_file_of_the_repository() -> None:
    """A package index shows README at an address of its own, where no file stands beside it."""
    found = [link for _, link in links(README)]
    assert len(found) > 30
    assert [link for link in found if not link.startswith(REPOSITORY)] == []
    assert dead_links(README) == []


def test_the_addresses_of_the_project_lead_to_its_repository() -> None:
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= {*URLS}
    for name, address in URLS.items():
        assert is_absolute(address)
        assert address.startswith(URLS["Repository"])
        if address.startswith(REPOSITORY):
            assert (ROOT / address.removeprefix(REPOSITORY)).is_file(), name


# --- the pages on the scaler ----------------------------------------------------------------------

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
