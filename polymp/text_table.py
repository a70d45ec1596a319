"""Plain text in columns, and the short words of tables: what `print` of a report or audit uses.

    heads and rows of cells -> lines no wider than asked

No package is needed for it, so that a report can be printed wherever it can be made.
"""

import re
import shutil
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
_NEEDED = 4  # right of an indent
_PLACE = re.compile(r"[^\s/]+:\d+")  # a file and a line of it
_PART = re.compile(rf"{_PLACE.pattern}|[^\s/._-]*[/._-]|[^\s/._-]+")  # of a word that is too long


def terminal_width() -> int:
    """The width of tables: that of the terminal, or of `COLUMNS`, within reason; or else 100."""
    return min(max(shutil.get_terminal_size((WIDTH, 0)).columns, _NARROWEST), _WIDEST)


def columns(
    heads: Sequence[str],
    rows: Iterable[str | Sequence[str]],
    right: Iterable[str] = (),
    width: int | None = None,
) -> list[str]:
    """Lines of a table: the heads, then the rows; columns that are empty are left out.

    Cells may have several lines. Lines that do not fit are broken: the widest columns first, and
    those of numbers never. They are broken at spaces, and words that are too long after dots and
    dashes, or anywhere; but a file and its line, such as "train.py:12", stay in one piece.
    """
    width = terminal_width() if width is None else width
    listed = list(rows)
    cells = [row for row in listed if not isinstance(row, str)]
    used = [i for i in range(len(heads)) if any(row[i] for row in cells)]
    numeric = {i for i in used if heads[i] in right}
    every = {i: Counter(part for row in cells for part in row[i].split("\n")) for i in used}
    wide = {i: max(len(heads[i]), *map(len, every[i])) for i in used}
    texts = {i: every[i] for i in used if i not in numeric}
    wide |= _narrowed(texts, {i: wide[i] for i in texts}, width - _total(wide), heads)

    def lines(row: Sequence[str]) -> list[str]:
        broken = [
            [part for line in row[i].split("\n") for part in _broken(line, wide[i])] for i in used
        ]
        parts = zip_longest(*broken, fillvalue="")
        return [_line(dict(zip(used, part, strict=True)), wide, numeric) for part in parts]

    if not used:
        return [row for row in listed if isinstance(row, str)]
    rule = (" " * _GAP).join("-" * wide[i] for i in used)
    table = [*lines(heads), rule]
    for row in listed:
        table += [row] if isinstance(row, str) else lines(row)
    return table


def side_by_side(
    names: tuple[str, str], sides: Sequence[Mapping[str, str]], width: int | None = None
) -> list[str]:
    """Lines of a table with a column for each of two things, and a row for each of their fields."""
    fields = dict.fromkeys(field for side in sides for field in side)
    rows = [(field, *(side.get(field, "") for side in sides)) for field in fields]
    return columns(("", *names), [row for row in rows if any(row[1:])], (), width)


def needed(heads: Sequence[str], rows: Iterable[str | Sequence[str]]) -> int:
    """The width of a table in which no cell is broken."""
    cells = [heads, *(row for row in rows if not isinstance(row, str))]
    wide = [max(map(len, column)) if any(column[1:]) else 0 for column in zip(*cells, strict=True)]
    return _total({i: w for i, w in enumerate(wide) if w})


def aligned(rows: Sequence[Sequence[str]], numeric: Container[int]) -> list[str]:
    """Lines of a table as wide as its cells need."""
    wide = {i: max(map(len, column)) for i, column in enumerate(zip(*rows, strict=True))}
    return [_line(dict(enumerate(row)), wide, numeric) for row in rows]


def _line(parts: Mapping[int, str], wide: Mapping[int, int], numeric: Container[int]) -> str:
    placed = (p.rjust(wide[i]) if i in numeric else p.ljust(wide[i]) for i, p in parts.items())
    return (" " * _GAP).join(placed).rstrip()


def heading(name: str, width: int | None = None) -> str:
    """The line above a section of a table."""
    return f"-- {name} ".ljust(terminal_width() if width is None else width, "-")


def _total(wide: Mapping[int, int]) -> int:
    """The width of a table with these columns."""
    return sum(wide.values()) + _GAP * (len(wide) - 1)


def _narrowed(
    texts: Mapping[int, Counter[str]], wide: Mapping[int, int], room: int, heads: Sequence[str]
) -> dict[int, int]:
    """The widths of columns that share what room there is, or less if there is too little.

    Character by character, the column is narrowed that then has the fewest lines more.
    """
    narrowed = dict(wide)
    least = {
        i: max(_LEAST, len(heads[i]), *map(_longest_place, texts[i])) for i in texts if texts[i]
    }
    price = {i: _price(texts[i], narrowed[i] - 1) - _price(texts[i], narrowed[i]) for i in least}
    for _ in range(-room):
        narrower = [i for i in least if narrowed[i] > least[i]]
        if not narrower:
            break
        i = min(narrower, key=lambda i: (price[i], -narrowed[i]))
        narrowed[i] -= 1
        price[i] = _price(texts[i], narrowed[i] - 1) - _price(texts[i], narrowed[i])
    return narrowed


def _price(texts: Counter[str], width: int) -> int:
    """How many lines more cells need at a width; a word in two counts as one more, or as three."""
    return sum(
        count * (len(_broken(text, width)) - 1 + _torn(text, width))
        for text, count in texts.items()
        if len(text) > width
    )


def _torn(cell: str, width: int) -> int:
    """0 if every word of a cell fits, 1 if one is broken at a dash or a dot, 3 if elsewhere."""
    room = width - (len(cell) - len(cell.lstrip())) - _GAP
    if max(map(len, cell.split()), default=room) <= room:
        return 0
    return 1 if max(len(match[0]) for match in _PART.finditer(cell)) <= room else 3


def _longest_place(cell: str) -> int:
    """The width below which a file and its line would not fit."""
    return max((_GAP + len(place) for place in _PLACE.findall(cell)), default=0)


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell."""
    if len(cell) <= width:
        return [cell]
    text = cell.lstrip()
    lead = " " * min(len(cell) - len(text), max(width - _NEEDED, 0))
    rest = lead + " " * _GAP if width >= len(lead) + _GAP + _NEEDED else lead
    parts = [part for word in text.split() for part in _pieces(word, width - len(rest))]
    lines, line = list[str](), lead
    for gap, piece in parts:
        if line.strip() and len(line + gap + piece) > width:
            lines.append(line)
            line = rest
        line += gap + piece if line.strip() else piece
    return [*lines, line]


def _pieces(word: str, most: int) -> Iterator[tuple[str, str]]:
    """The parts of a word of which each fits into a line, with what is in front of each."""
    gap = " "
    for part in [word] if len(word) <= most else [match[0] for match in _PART.finditer(word)]:
        length = len(part) if _PLACE.fullmatch(part) else max(most, 1)
        for at in range(0, len(part), length):
            yield gap, part[at : at + length]
            gap = ""


def folded(text: str, width: int | None = None) -> list[str]:
    """The lines of a text, those that are too long broken at spaces."""
    width = terminal_width() if width is None else width
    return [part for line in text.splitlines() for part in _broken(line, width)]


def short(dtype: str) -> str:
    """The abbreviation of a dtype: "bf16"."""
    return _SHORT.get(dtype, dtype)


def dtypes(inputs: Sequence[str], run: str, outputs: Sequence[str]) -> str:
    """The dtypes of an op's inputs and outputs, and the one it ran in if that is another.

    "fp32, bf16 x2 -> bf16 (in fp32)"
    """
    between = f" (in {short(run)})" if run and {run} != {*outputs} else ""
    return f"{_counted(inputs)} -> {_counted(outputs)}{between}"


def _counted(names: Sequence[str]) -> str:
    counts = Counter(map(short, names))
    return ", ".join(f"{n} x{count}" if count > 1 else n for n, count in counts.items()) or "none"


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
