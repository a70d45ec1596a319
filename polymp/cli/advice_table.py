"""The tables of a measurement by `polymp doctor`; see `measurement` for the data. Needs rich."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from polymp.speed.advice import FLOAT32, HELD

Data = dict[str, Any]

ROWS = 20  # of products, those that take the most time


def advice_parts(data: Data) -> Iterator[RenderableType]:
    """A measurement: a table of products, the dtype to use, and the ops that were left out."""
    rows = sorted(data["products"], key=lambda row: -row["times"] * row["seconds"][FLOAT32])
    measured = sum(row["measured"] for row in rows)
    yield (
        f"{data['framework']} on {data['device']}, {data['clock']}: {measured} of {len(rows)} "
        f"products measured in {data['took']:.1f} s"
    )
    yield f"casts: {data['casts']}\n"
    low = [way for way in data["ratio"] if way != FLOAT32]
    runs = any(row["times"] > 1 for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("product", *(["runs"] if runs else []), FLOAT32, *map(_head, low), "use"):
        table.add_column(head, justify="left" if head in ("product", "use") else "right")
    shown = rows[:ROWS]
    directions = dict.fromkeys(row["direction"] for row in sorted(shown, key=_order))
    for direction in directions:
        if len(directions) > 1:
            table.add_row(direction)
        for row in (row for row in shown if row["direction"] == direction):
            table.add_row(
                _name(row),
                *([str(row["times"])] if runs else []),
                ("" if row["measured"] else "~") + _time(row["seconds"][FLOAT32]),
                *(_ratio(row, way) for way in low),
                row["use"],
            )
    if len(rows) > 1:
        total = sum(row["times"] * row["seconds"][FLOAT32] for row in rows)
        totals = [f"{data['ratio'][way]['ratio']:.2f}" for way in low]
        every = [str(sum(row["times"] for row in rows))] if runs else []
        table.add_section()
        table.add_row(f"all {len(rows)}", *every, _time(total), *totals, data["use"])
    yield table
    if len(rows) > ROWS:
        yield f"\nand {len(rows) - ROWS} more, which take less time"
    yield "\nlow dtypes: their time as a multiple of float32's, casts included"
    if any(way.endswith(HELD) for way in low):
        yield "held: with weights that were cast before, as freeze and hold_casts do"
    if measured < len(rows):
        yield "~: predicted from the products that were measured"
    yield f"\nuse {data['use']}: {data['why']}"
    yield from data["more"]
    yield from _left_out(data["left_out"], data["flops"])
    yield from (f"{way}: not measured: {why}" for way, why in data["lacking"].items())


def _head(way: str) -> str:
    """A way in at most two lines: a dtype, and whether weights are cast before."""
    return f"{way.removesuffix(HELD)}\nheld" if way.endswith(HELD) else way.replace("_", "\n_")


def _order(row: Data) -> bool:
    return bool(row["direction"] != "forward")


def _name(row: Data) -> str:
    return f"{'' if row['op'] == 'matmul' else row['op'] + ' '}{row['shape']}"


def _ratio(row: Data, way: str) -> str:
    return f"{row['ratio'][way]:.2f}" if way in row["ratio"] else ""


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _left_out(left: Mapping[str, int], flops: int) -> Iterator[str]:
    total = flops + sum(left.values())
    for name, own in left.items():
        yield f"not among the products: {name}, {100 * own / total:.0f} % of all FLOPs"
