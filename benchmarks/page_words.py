"""The words of benchmarks/results/FIGURES.md for the texts of records, from words.toml.

A record keeps the words with which it was made. The page has a text in other words if words.toml
names it, whole; a key that ends in * stands for every text that starts so.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

WORDS = Path(__file__).parent / "words.toml"


@dataclass
class Words:
    """The contents of words.toml.

    Attributes:
        texts: a whole text of a record -> the same for the page.
        rows: a piece of a row's name, between " / ", ": " and ", " -> the same for the page.
        about: a part, or a title on the page -> a paragraph under its heading.
        columns: a title on the page -> the names of its columns: of the row, of A, and of B.
        omitted: a part -> patterns of rows that the page leaves out.
        used: every key that was looked up and found.
    """

    texts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    omitted: dict[str, list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path) -> Words:
        """The words of a TOML file; none if there is no such file."""
        return cls(**tomllib.loads(path.read_text())) if path.exists() else cls()

    def text(self, said: str) -> str:
        """A text of a record, such as a title, a note, a cell or the head of a column."""
        for key, new in self.texts.items():
            if key == said or (key.endswith("*") and said.startswith(key[:-1])):
                self.used.add(key)
                return new
        return said

    def row(self, what: str) -> str:
        """The name of a row: whole if words.toml has it, or else piece by piece."""
        if what in self.texts:
            return self.text(what)
        pieces = re.split(r"( / |: |, )", what)
        self.used.update(piece for piece in pieces if piece in self.rows)
        return "".join(self.rows.get(piece, piece) for piece in pieces)

    def names(self, title: str) -> list[str] | None:
        """The names of the columns of a table."""
        title = self.text(title)
        if title in self.columns:
            self.used.add(title)
        return self.columns.get(title)

    def lead(self, name: str) -> list[str]:
        """The paragraph under a heading, with an empty line below it."""
        name = self.text(name)
        if name not in self.about:
            return []
        self.used.add(name)
        return [self.about[name].strip(), ""]

    def omits(self, part: str, what: str) -> bool:
        """Whether the page leaves a row out."""
        fits = [pattern for pattern in self.omitted.get(part, ()) if fnmatch(what, pattern)]
        self.used.update(fits)
        return bool(fits)

    def unused(self) -> list[str]:
        """Keys that no record had a text for."""
        patterns = [p for many in self.omitted.values() for p in many]
        known = {*self.texts, *self.rows, *self.about, *self.columns, *patterns}
        return sorted(known - self.used)
