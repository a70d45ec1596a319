"""Runs the code blocks of Markdown files, for tests of the documentation.

In: the path of a file, and where to report. Out: in the report one line of JSON for each ```python
block, its line, status and text. Every file has a process of its own, from `forks`, for polymp's
kernels, once installed, stay.

The blocks of a section, from one level 2 heading to the next, share their names and run in order in
an empty folder, with warnings as errors. The blocks above the first level 2 heading run first in
every section. On a page that shows both frameworks, a line **PyTorch** or **JAX** begins a part for
one of them, and the next heading ends it. Its blocks see those of parts with the same label and
those outside of such parts, and no others.

A comment on the line before a block says more about it:

    <!-- skip: needs two GPUs -->   it is not run, and this is the reason that pytest shows
    <!-- needs: cuda -->            it is skipped where there is no GPU
    <!-- needs: lightning -->       or that package; warnings are no errors, for they are its own
    <!-- file: mine.toml -->        it is written to that file, for the blocks after it
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import re
import sys
import tempfile
import textwrap
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*)")
MARK = re.compile(r" *<!-- (?P<kind>skip|needs|file): (?P<value>.*\S) -->$")
LABEL = re.compile(r"\*\*(?P<label>PyTorch|JAX)\*\*$")
PACKAGES = ("lightning", "accelerate", "transformers", "peft")  # that a block can need
LIKE_A_MARK = re.compile(r" *<!-- *(skip|needs|file)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    path: Path  # the file
    line: int  # number of the first line of code
    language: str  # the word behind the opening fence
    code: str  # what is between the fences, without common indentation
    section: int  # number of level 2 headings above
    label: str = ""  # "PyTorch" or "JAX" in a part for one framework, or ""
    kind: str = ""  # "skip", "needs", "file", or "" without a mark
    value: str = ""  # what the mark says

    @property
    def file(self) -> str:
        """The file's name, from the top of the repository if it is in there."""
        inside = self.path.is_relative_to(ROOT)
        return str(self.path.relative_to(ROOT) if inside else self.path)

    @property
    def runs(self) -> bool:
        """True if it is Python to be run, not a file to be written or text to be read."""
        return self.language == "python" and self.kind != "file"

    def sees(self, other: "Block") -> bool:
        """Return True if the other block runs before this one, or is it, with the same names."""
        earlier = other.section in (0, self.section) and other.line <= self.line
        return earlier and other.label in ("", self.label)


class Outcome(NamedTuple):
    """How it went: "passed", "failed" or "skipped", and why."""

    status: str
    text: str = ""


def read(path: Path) -> list[Block]:
    """All fenced blocks of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks, section, start = [], 0, 0
    fence: re.Match[str] | None = None
    kind = value = label = ""
    for number, (above, line) in enumerate(pairwise(["", *lines]), 1):
        if fence is not None:
            if line.rstrip() == fence["indent"] + fence["ticks"]:
                code = textwrap.dedent("\n".join(lines[start : number - 1])) + "\n"
                place = (path, start + 1, fence["language"], code, section, label)
                blocks.append(Block(*place, kind, value))
                fence = None
            continue
        if (opened := LABEL.match(line)) is not None:
            label = opened["label"]
        elif line.startswith("#"):
            label = ""
        if (fence := FENCE.match(line)) is not None:
            start = number
            kind, value = _mark(above, f"{path}:{number - 1}")
            if fence["language"].lower().startswith("py") and fence["language"] != "python":
                raise ValueError(f"{path}:{number}: call it python; no test runs {line.strip()}")
        else:
            section += line.startswith("## ")
    if fence is not None:
        raise ValueError(f"{path}:{start}: this block is never closed")
    return blocks


def _mark(line: str, place: str) -> tuple[str, str]:
    mark = MARK.match(line)
    if mark is None:
        if LIKE_A_MARK.match(line):
            raise ValueError(f"{place}: a mark looks like <!-- skip: why -->, not {line.strip()}")
        return "", ""
    if mark["kind"] == "needs" and mark["value"] not in ("cuda", *PACKAGES):
        needs = ", ".join(("cuda", *PACKAGES))
        raise ValueError(f"{place}: a block can need one of {needs}, not {mark['value']}")
    return mark["kind"], mark["value"]


def run(blocks: Sequence[Block]) -> Iterator[tuple[Block, Outcome]]:
    """Run the Python blocks of one file, and say of each how it went."""
    for section, label in sorted({(b.section, b.label) for b in blocks}):
        last = next(b for b in reversed(blocks) if (b.section, b.label) == (section, label))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for block, outcome in _run_section([b for b in blocks if last.sees(b)]):
                if (block.section, block.label) == (section, label):
                    yield block, outcome


def _run_section(blocks: Sequence[Block]) -> Iterator[tuple[Block, Outcome]]:
    module = ModuleType("documented")
    sys.modules[module.__name__] = module  # where dataclasses and pickle look a class up
    broken = ""
    for block in blocks:
        if block.kind == "file":
            Path(block.value).write_text(block.code, encoding="utf-8")
        if not block.runs:
            continue
        if block.kind == "skip":
            outcome = Outcome("skipped", block.value)
        elif block.kind == "needs" and not _has(block.value):
            outcome = Outcome("skipped", f"needs {block.value}")
        elif broken:
            outcome = Outcome("failed", f"{block.file}:{block.line} was not run after {broken}")
        else:
            outcome = _run_block(block, module)
            if outcome.status == "failed":
                broken = outcome.text.partition("\n")[0]
        yield block, outcome


def _run_block(block: Block, module: ModuleType) -> Outcome:
    padding = "\n" * (block.line - 1)  # so that tracebacks name the line in the file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if block.value in PACKAGES else "error")
        # torch 2.13 warns of a module of its own that dynamo loads when it is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        try:
            code = compile(padding + block.code, str(block.path), "exec", dont_inherit=True)
            exec(code, vars(module))
        except BaseException as error:
            source = block.path.read_text(encoding="utf-8").splitlines()
            line = _line(error, block)
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            where = f"{block.file}:{line}: {said}\n    {source[line - 1].strip()}"
            return Outcome("failed", f"{where}\n\n{''.join(traceback.format_exception(error))}")
    return Outcome("passed")


def _line(error: BaseException, block: Block) -> int:
    """The line of the file in which it happened."""
    if isinstance(error, SyntaxError) and error.filename == str(block.path) and error.lineno:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    here = [frame.lineno for frame in frames if frame.filename == str(block.path)]
    return (here[-1] if here else None) or block.line


def _has(need: str) -> bool:
    """Whether a package is installed, or there is a GPU for "cuda"."""
    if importlib.util.find_spec("torch" if need == "cuda" else need) is None:
        return False
    import torch

    return need != "cuda" or torch.cuda.is_available()


def report_on(path: str, report: str) -> None:
    """Run a file; every line is written as soon as it is known, for a block may end the process."""
    with Path(report).open("w", encoding="utf-8") as out:
        for block, outcome in run(read(Path(path).absolute())):
            print(json.dumps([block.line, *outcome]), file=out, flush=True)


URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
FILES = f"{URLS['Repository']}/blob/main/"  # followed by the path of a file

LINK = re.compile(r"\]\(\s*([^)\s]+)|^\[[^\]]+\]: +(\S+)|\b(?:href|src)=[\"']([^\"']+)", re.M)


def prose(path: Path) -> str:
    """A file's text with its fenced blocks blanked out, line by line."""
    text = path.read_text(encoding="utf-8")
    fenced = re.compile(r"^( *`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)
    return fenced.sub(lambda block: "\n" * block.group().count("\n"), text)


def anchors(path: Path) -> set[str]:
    """The names under which a file's headings can be linked to."""
    headings = re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Line and target of every link in a file: inline, by reference, or in HTML."""
    text = prose(path)
    for link in LINK.finditer(text):
        yield text[: link.start()].count("\n") + 1, "".join(filter(None, link.groups()))


def is_absolute(link: str) -> bool:
    """True if the link has the address of a host."""
    return re.match(r"https?://", link) is not None


def dead_links(path: Path) -> list[str]:
    """The links of a file to files and headings of the repository that are not there."""
    dead = []
    for line, link in links(path):
        if is_absolute(link) and not link.startswith(FILES):
            continue
        file, _, heading = link.removeprefix(FILES).partition("#")
        target = ROOT / file if is_absolute(link) else path.parent / file if file else path
        named = heading and target.suffix == ".md"  # behind a picture stands its theme
        if not target.exists() or (named and heading not in anchors(target)):
            dead.append(f"{path.name}:{line}: {link}")
    return dead


def table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    _, _, below = path.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), below.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows][2:]
