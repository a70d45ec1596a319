"""Links of Markdown files to files and headings of the repository, by path or by its address."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.support.blocks import ROOT

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
