"""Plain text in columns, and the short words of tables: what `print` of a report or audit uses.

    heads and rows of cells -> lines no wider than asked

No package is needed for it, so that a report can be printed wherever it can be made.
"""

import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

# The field's own abbreviations.
_SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_SHORT |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}

WIDTH = 100
_GAP = 2
_LEAST = 6


def columns(
    heads: Sequence[str],
    rows: Iterable[str | Sequence[str]],
    right: Iterable[str] = (),
    width: int = WIDTH,
) -> list[str]:
    """Lines of a table: the heads, then the rows; columns that are empty are left out.

    Cells that do not fit are broken, at spaces where there are any: the widest columns first, and
    those of numbers never.

    Args:
        heads: of the columns.
        rows: the cells of a row, as many as heads; or a text that stands alone on its line.
        right: heads of the columns that end at the right: numbers.
        width: of the longest line, in characters; a text that stands alone may be longer.

    Returns:
        The lines.
    """
    listed = list(rows)
    cells = [row for row in listed if not isinstance(row, str)]
    used = [i for i in range(len(heads)) if any(row[i] for row in cells)]
    numeric = {i for i in used if heads[i] in right}
    wide = {i: max(len(heads[i]), *(len(row[i]) for row in cells)) for i in used}
    words = {i: max(_longest(row[i]) for row in (heads, *cells)) for i in used}
    for least in (words, dict.fromkeys(used, _LEAST)):
        while sum(wide.values()) + _GAP * (len(used) - 1) > width:
            narrower = [i for i in used if i not in numeric and wide[i] > least[i]]
            if not narrower:
                break
            wide[max(narrower, key=wide.__getitem__)] -= 1

    def lines(row: Sequence[str]) -> list[str]:
        broken = {i: _broken(row[i], wide[i]) for i in used}
        height = max(map(len, broken.values()), default=0)
        made = []
        for at in range(height):
            parts = {i: broken[i][at] if at < len(broken[i]) else "" for i in used}
            made.append(_line(parts, wide, numeric))
        return made

    if not used:
        return [row for row in listed if isinstance(row, str)]
    rule = (" " * _GAP).join("-" * wide[i] for i in used)
    made = [*lines(heads), rule]
    for row in listed:
        made += [row] if isinstance(row, str) else lines(row)
    return made


def aligned(rows: Sequence[Sequence[str]], numeric: Container[int]) -> list[str]:
    """Lines of a table as wide as its cells need.

    Args:
        rows: the cells of each, the heads among them.
        numeric: places of the columns that end at the right.

    Returns:
        The lines.
    """
    wide = {i: max(map(len, column)) for i, column in enumerate(zip(*rows, strict=True))}
    return [_line(dict(enumerate(row)), wide, numeric) for row in rows]


def _line(parts: Mapping[int, str], wide: Mapping[int, int], numeric: Container[int]) -> str:
    placed = (p.rjust(wide[i]) if i in numeric else p.ljust(wide[i]) for i, p in parts.items())
    return (" " * _GAP).join(placed).rstrip()


def heading(name: str, width: int = WIDTH) -> str:
    """The line above a section of a table."""
    return f"-- {name} ".ljust(width, "-")


def _longest(cell: str) -> int:
    """The width below which a word of a cell would be broken."""
    indent = len(cell) - len(cell.lstrip())
    first, *others = cell.split() or [""]
    return max(indent + len(first), *(_GAP + len(word) for word in others), 0)


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell."""
    if len(cell) <= width:
        return [cell]
    text = cell.lstrip()
    lead = " " * min(len(cell) - len(text), max(width - _LEAST, 0))
    rest = lead + " " * _GAP if width > len(lead) + _GAP + _LEAST else lead
    return textwrap.wrap(
        text, width, initial_indent=lead, subsequent_indent=rest, break_on_hyphens=False
    )


def folded(text: str, width: int = WIDTH) -> list[str]:
    """The lines of a text, those that are too long broken at spaces."""
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
    found = Counter(map(short, names))
    return ", ".join(f"{n} x{count}" if count > 1 else n for n, count in found.items()) or "none"


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
