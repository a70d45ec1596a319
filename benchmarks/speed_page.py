"""Makes benchmarks/results/FIGURES.md of the newest record of each part and device beside it.

Only records as pairing.py has them are read. `make bench` and `make gpu` run this last; a test
holds the page to the records. words.toml has the page's words for texts of records, see
page_words.py. Why a limit is missed stands in the record, or in reasons.toml:

    [torch-speed.cpu]
    "row: ours / base" = "One sentence, with what was measured."
    "*, float16: ours / base" = "The same for all rows whose name fits."
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_table import README, with_cost
from page_words import WORDS, Words
from pairing import RESULTS, Row
from records import DEVICES, PARTS, Devices, Record, medians, newest, rows, table, with_reasons

HERE = Path(__file__).parent
PAGE = RESULTS / "FIGURES.md"
REASONS = HERE / "reasons.toml"
UNSAID = "No reason is recorded."

HEAD = """# All measured figures

[How fast polymp is](../../docs/speed.md) has the figures that most users need.

A row "A / B" compares two programs. They run alternately, many times. One run of A and one of B
are a round.

- **ratio**: the median of A's times, divided by the median of B's. Below 1, A is faster, or needs
  less memory.
- **range**: each round gives a ratio, too. The middle half of these ratios lies in this range. The
  ratio of the medians is another figure, so it can lie outside.
- **limit**: the largest ratio that the project allows itself. A ratio above it is printed in bold;
  [Limits](#limits) says why.

The names of the programs:

| name | program |
| --- | --- |
| torch.autocast | in a region of torch |
| torch.autocast, low weights | in a region of torch; weights of products stored in the low dtype |
| torch.autocast, one region | one region of torch around all microbatches |
| fp32, float32 | without a region |
| by hand | weights and activations cast by hand; norms and the loss in float32 |
| polymp, autocast | in a region of polymp; in PyTorch without a policy |
| frozen | polymp with `freeze` |
| few_rows | polymp under a policy with `few_rows = 32` |
| compiled | with `torch.compile` |

[The last section](#where-it-was-measured) lists machines and versions.

`make bench` measures on a CPU, `make gpu` on a GPU. Both write this page again, from the newest
record of each benchmark.
"""


def page(results: Path, reasons: Path, words: Words | None = None) -> str:
    """The page, as Markdown.

    Args:
        results: the folder of records.
        reasons: a TOML file, see the top of this file.
        words: by default those of words.toml.

    Raises:
        ValueError: a record is not what its name says, or a reason is for a row that no record has.
    """
    words = Words.of(WORDS) if words is None else words
    parts = with_reasons(newest(results), reasons)
    text = [HEAD]
    for part, records in parts.items():
        text += _part(part, records, words)
    text += [*_limits(parts, words), *_machines(parts)]
    return "\n".join(text).rstrip() + "\n"


def without_reason(results: Path, reasons: Path) -> list[str]:
    """Rows that are above their limit, or not measured, without a reason."""
    return [
        f"{part}, {DEVICES[device]}: {what}"
        for part, devices in with_reasons(newest(results), reasons).items()
        for device, record in devices.items()
        for what in _unmet(record)
        if what not in record.get("reasons", {})
    ]


def _unmet(record: Record) -> list[str]:
    """The rows of a record that are above their limit, and those that were not measured."""
    missed = [r.what for r in rows(record) if r.met is False]
    known = {r.what for r in rows(record)}
    return [*missed, *(what for what in record.get("unmeasured", ()) if what not in known)]


# --- a part --------------------------------------------------------------------------------------


def _part(part: str, records: Devices, words: Words) -> Iterator[str]:
    """A part: a table for each of its workloads, notes, and what is missing."""
    yield from (f"## {PARTS.get(part, part)}", "", *words.lead(part))
    devices = [d for d in DEVICES if d in records]
    for title in dict.fromkeys(t for d in devices for t in records[d]["tables"]):
        by = {
            d: {r.what: r for r in rows(records[d], title) if not words.omits(part, r.what)}
            for d in devices
        }
        by = {d: found for d, found in by.items() if found}
        shared = set.intersection(*map(set, by.values())) if by else set()
        for some in [by] if shared else [{d: found} for d, found in by.items()]:
            on = "" if shared or len(by) == 1 else f", {DEVICES[next(iter(some))]}"
            lead = words.lead(title) if next(iter(some)) == next(iter(by)) else []
            yield from (f"### {words.text(title)}{on}", "", *lead)
            yield from _workload(title, some, words)
    for d in devices:
        for title, found in records[d].get("lists", {}).items():
            if found:
                yield from (f"### {words.text(title)}", "", *words.lead(title))
                yield from _list(found, words)
    notes: dict[str, list[str]] = {}
    for d in devices:
        for note in records[d].get("notes", ()):
            notes.setdefault(words.text(note), []).append(d)
    everywhere = [note for note, on in notes.items() if on == devices]
    alone = [f"On the {DEVICES[on[0]]}: {note}" for note, on in notes.items() if on != devices]
    if notes:
        yield from (*(f"- {note}" for note in (*everywhere, *alone) if note), "")
    for d in devices:
        if waits := {k: v for k, v in records[d].get("host_sync", {}).items() if v}:
            yield from (f"These wait for the {DEVICES[d]}; the others do not:", "")
            yield from (*(f"- {what}: {why}" for what, why in waits.items()), "")
        if missing := records[d].get("missing", {}):
            said = (words.text(f"{what}: {' '.join(why.split())}") for what, why in missing.items())
            yield from (f"Not measured on the {DEVICES[d]}:", "")
            yield from (*(f"- {_line(text)}" for text in dict.fromkeys(said)), "")


def _list(found: list[dict[str, Any]], words: Words) -> list[str]:
    """Rows as they are, with a column for each key that any of them has."""
    head = list(dict.fromkeys(key for row in found for key in row))
    left = [key for key in head if any(isinstance(row.get(key), str | bool) for row in found)]
    lines = [[_cell(row.get(key, ""), words) for key in head] for row in found]
    return table([words.text(key) for key in head], lines, [words.text(key) for key in left])


def _cell(value: Any, words: Words) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and abs(value) >= 10_000:
        return f"{value:,.0f}"
    return _line(words.text(str(value)))


def _line(text: str) -> str:
    """Text of others in one line, in which Markdown finds no table, link or reference."""
    return re.sub(r"([|\[\]])", r"\\\1", " ".join(text.split()))


def _workload(title: str, by: dict[str, dict[str, Row]], words: Words) -> list[str]:
    """One table: ratios of all devices that have it first, then medians."""
    whats = list(dict.fromkeys(what for found in by.values() for what in found))
    first, a, b = words.names(title) or ("A / B", "A", "B")
    limited = any(r.bar is not None for found in by.values() for r in found.values())
    head = [first, *(x for d in by for x in (f"ratio, {DEVICES[d]}", "range"))]
    head += ["limit"] * limited
    head += [f"{name}, {DEVICES[d]}" for d in by for name in (a, b)]
    lines = []
    for what, name in _names(title, whats, words).items():
        of = [found.get(what) for found in by.values()]
        cells = [x for r in of for x in (_ratio(r), _spread(r))]
        limit = [_limit({d: found[what].bar for d, found in by.items() if what in found})]
        both = [_unit(x, words) for r in of for x in medians(r)]
        lines.append([name, *cells, *limit * limited, *both])
    return table(head, lines)


def _unit(median: str, words: Words) -> str:
    value, _, unit = median.partition(" ")
    return f"{value} {words.text(unit)}" if unit else value


def _names(title: str, whats: list[str], words: Words) -> dict[str, str]:
    """How a table calls its rows: without the workload, or the comparison, that all have."""
    names = {what: what for what in whats}
    starts = [what.partition(": ")[0].split(", ") for what in whats]
    workload = min(map(", ".join, starts), key=len)
    if all(": " in what and workload in start for what, start in zip(whats, starts, strict=True)):
        for what, start in zip(whats, starts, strict=True):
            quantity = ", ".join(piece for piece in start if piece != workload)
            names[what] = ": ".join(filter(None, (quantity, what.partition(": ")[2])))
    if words.names(title):
        ends = (sign + whats[0].rpartition(sign)[2] for sign in (": ", " / "))
        end = next((e for e in ends if all(what.endswith(e) for what in whats)), "")
        names = {what: name.removesuffix(end) for what, name in names.items()}
        while len({name.partition(", ")[0] for name in names.values()}) == 1 < len(names):
            names = {what: name.partition(", ")[2] for what, name in names.items()}
    return {what: words.row(name) for what, name in names.items()}


def _ratio(r: Row | None) -> str:
    """A ratio, in bold where a limit is missed, with as many digits as differ from the limit's."""
    if r is None:
        return ""
    if r.met is False:
        differ = (n for n in range(2, 9) if f"{r.ratio:.{n}f}" != f"{r.bar:.{n}f}")
        return f"**{r.ratio:.{next(differ, 9)}f}**"
    return _figure(r.ratio)


def _figure(value: float) -> str:
    return f"{value:.4f}" if 0 < value < 0.01 else f"{value:.2f}"


def _spread(r: Row | None) -> str:
    return "" if r is None else f"{_figure(r.low)} - {_figure(r.high)}"


def _limit(bars: dict[str, float | None]) -> str:
    """The limit, or that of each device where they differ."""
    texts = {d: "" if bar is None else f"{bar:.2f}" for d, bar in bars.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{DEVICES[d]} {text}" for d, text in texts.items() if text)


# --- limits and machines -------------------------------------------------------------------------


def _limits(parts: dict[str, Devices], words: Words) -> Iterator[str]:
    """How many limits are met, and the reason of each that is not, with the rows that it is for."""
    limited = {
        d: [r for devices in parts.values() if d in devices for r in rows(devices[d])]
        for d in DEVICES
    }
    limited = {d: [r for r in found if r.bar is not None] for d, found in limited.items()}
    unmet = {
        d: {part: _unmet(records[d]) for part, records in parts.items() if d in records}
        for d in DEVICES
    }
    if not any(limited.values()) and not any(many for by in unmet.values() for many in by.values()):
        return
    counts = [
        f"{sum(bool(r.met) for r in found)} of {len(found)} limits are met on the {DEVICES[d]}"
        for d, found in limited.items()
        if found
    ]
    yield from ("## Limits", "")
    if counts:
        yield from (f"{', '.join(counts)}. The others:", "")
    for d, by in unmet.items():
        reasons: dict[str, list[tuple[str, str]]] = {}
        for part, whats in by.items():
            why = parts[part][d].get("reasons", {})
            for what in whats:
                reasons.setdefault(why.get(what, UNSAID), []).append((part, what))
        if reasons:
            yield from (f"### Not met on the {DEVICES[d]}", "")
        for reason, missed in reasons.items():
            lines = [_missed(part, parts[part][d], what, words) for part, what in missed]
            head = ["section", "table", "row", "limit", "ratio"]
            yield from (reason, "", *table(head, lines, ("table", "row")))


def _missed(part: str, record: Record, what: str, words: Words) -> list[str]:
    """A line of a row above its limit, or of one that was not measured."""
    section = PARTS.get(part, part)
    for title in record["tables"]:
        found = {r.what: r for r in rows(record, title)}
        if what in found:
            r = found[what]
            name = _names(title, list(found), words)[what]
            return [section, words.text(title), name, f"{r.bar:.2f}", _ratio(r)]
    return [section, "", words.row(what), f"{record['unmeasured'][what]:.2f}", "not measured"]


def _machines(parts: dict[str, Devices]) -> list[str]:
    lines = []
    for part, devices in parts.items():
        for device, record in devices.items():
            m = record["machine"]
            versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items())
            kind = f"{m['kind']} ({m['architecture']})" if device != "cuda" else m["kind"]
            link = f"[{DEVICES[device]}]({record['file']})"
            lines.append(
                [PARTS.get(part, part), link, record["date"], kind, str(m["cores"]),
                 str(m["load"]), m["python"], versions]
            )  # fmt: skip
    if not lines:
        return ["Nothing has been measured.", ""]
    head = ["section", "record", "date", "machine", "cores", "load", "Python", "versions"]
    text = ["## Where it was measured", ""]
    text += ["Load: the mean number of programs that wanted to run, in the five minutes before."]
    text += ["", *table(head, lines, ("record", "machine", "versions"))]
    if not any("cuda" in devices for devices in parts.values()):
        text += [
            "No GPU has been measured. On a machine that has one, each `make gpu` measures for 9",
            "minutes; [a table](../gpu_steps/plan.py) has its steps.",
            "",
        ]
    return text


# --- the program ---------------------------------------------------------------------------------


def write(results: Path, reasons: Path, to: Path, readme: Path) -> str:
    """Write the page, and the table of costs in README.md; returns the page."""
    text = page(results, reasons)
    to.write_text(text)
    readme.write_text(with_cost(readme.read_text(), newest(results)))
    print(f"saved {to} and {readme}")
    return text


def main() -> int:
    """Write the page; 1 if a limit is missed or not measured and no reason is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records")
    parser.add_argument("--reasons", type=Path, default=REASONS, help="TOML file")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    parser.add_argument("--readme", type=Path, default=README, help="with the table of costs")
    args = parser.parse_args()
    write(args.results, args.reasons, args.out, args.readme)
    gone = without_reason(args.results, args.reasons)
    print(*gone, sep="\n")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
