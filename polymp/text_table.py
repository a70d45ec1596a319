"""Plain text in columns, and the short words of tables: what `print` of a report or audit uses.

    heads and rows of cells -> lines no wider than the terminal

No package is needed for it, so that a report can be printed wherever it can be made.
"""

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

# The field's own abbreviations.
_SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_SHORT |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}

WIDTH = 100  # where nothing is known of a terminal: in a pipe, in a log
_NARROWEST, _WIDEST = 80, 180  # a table is no use below, and its lines are hard to follow beyond
_GAP = 2
_LEAST = 6  # of a column
_WORD = re.compile(r"\S+")
_PLACE = re.compile(r"[^\s/]+:\d+")  # a file and a line of it


def terminal_width() -> int:
    """The width of tables: that of the terminal, or of `COLUMNS`, within reason; or else 100."""
    return min(max(shutil.get_terminal_size((WIDTH, 0)).columns, _NARROWEST), _WIDEST)


def columns(
    heads: Sequence[str],
    rows: Iterable[str | Sequence[str]],
    right: Container[str] = (),
) -> list[str]:
    """Lines of a table: the heads, then the rows; columns that are empty are left out."""
    # Cells may have several lines. Where a table has no room, the widest columns become narrower,
    # but for those of numbers, and cells are broken between words. If that is not enough, words are
    # broken, too; but a file and its line, such as "train.py:12", stay in one piece.
    rows = list(rows)
    cells = [row for row in rows if not isinstance(row, str)]
    used = [i for i in range(len(heads)) if any(row[i] for row in cells)]
    wide = {i: max(len(x) for row in [heads, *cells] for x in row[i].split("\n")) for i in used}
    room = terminal_width() - _GAP * (len(used) - 1)
    texts = {i: " ".join(row[i] for row in cells) for i in used if heads[i] not in right}
    for whole in (_WORD, _PLACE):
        longest = {i: max(map(len, whole.findall(text)), default=0) for i, text in texts.items()}
        # Lines after the first are indented, and those of the first column are so in any case.
        least = {i: max(_LEAST, len(heads[i]), _GAP + _GAP * (i == 0) + longest[i]) for i in texts}
        while sum(wide.values()) > room and (wider := [i for i in texts if wide[i] > least[i]]):
            wide[max(wider, key=wide.__getitem__)] -= 1

    def lines(row: Sequence[str]) -> Iterator[str]:
        broken = ([x for y in row[i].split("\n") for x in folded(y, wide[i])] for i in used)
        for line in zip_longest(*broken, fillvalue=""):
            parts = zip(used, line, strict=True)
            placed = (x.rjust(wide[i]) if heads[i] in right else x.ljust(wide[i]) for i, x in parts)
            yield (" " * _GAP).join(placed).rstrip()

    table = [*lines(heads), (" " * _GAP).join("-" * wide[i] for i in used)] if used else []
    for row in rows:
        table += [row] if isinstance(row, str) else lines(row)
    return table


def side_by_side(names: tuple[str, str], sides: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of a table with a column for each of two things, and a row for each of their fields."""
    fields = dict.fromkeys(field for side in sides for field in side)
    rows = [(field, *(side.get(field, "") for side in sides)) for field in fields]
    return columns(("", *names), [row for row in rows if any(row[1:])])


def folded(text: str, width: int | None = None) -> list[str]:
    """The lines of a text, those that are wider than the terminal broken between words."""
    width = terminal_width() if width is None else width
    found = list[str]()
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + _GAP)
        found += (
            textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
            if len(line) > width
            else [line]
        )
    return found


def short(dtype: str) -> str:
    """The abbreviation of a dtype: "bf16"."""
    return _SHORT.get(dtype, dtype)


def dtypes(inputs: Sequence[str], run: str, outputs: Sequence[str]) -> str:
    """The dtypes of an op's inputs and outputs, and the one it ran in if that is another."""
    # As "fp32, bf16 x2 -> bf16 (in fp32)".
    between = f" (in {short(run)})" if run and {run} != {*outputs} else ""
    read, made = (counted(map(short, names)) or "none" for names in (inputs, outputs))
    return f"{read} -> {made}{between}"


def counted(names: Iterable[str]) -> str:
    """Names, each once with its number: "fp32 x3, bf16"."""
    return ", ".join(f"{n} x{count}" if count > 1 else n for n, count in Counter(names).items())


def size(count: int) -> str:
    """Bytes, to three digits: "1.50 MiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def amount(count: int) -> str:
    """A large number, to three digits: "1.50 G"."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    value, power = float(count), 0
    # 999.6 of a unit would be written as 1000 of it.
    while value >= base - 0.5 and power + 1 < len(units):
        value, power = value / base, power + 1
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[power]}".rstrip()


def share(part: float) -> str:
    """A share of 1, in percent, to two digits; "" for 0."""
    if part == 0:
        return ""
    percent = 100 * part
    if percent < 0.01:
        return "<0.01 %"
    if 99 < percent < 100:
        return ">99.9 %" if percent > 99.9 else f"{percent:.1f} %"
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def plural(count: int, what: str) -> str:
    """A number of things: "1 cast", "2 casts"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
