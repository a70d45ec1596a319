"""Makes docs/speed.md of the newest record of each part and device in benchmarks/results.

Only records as pairing.py has them are read. `make bench` and `make gpu` run this last. The table
of costs in README.md is made here, too; a test holds both to the records. Why a bar is missed
stands in the record, or in reasons.toml:

    [torch-speed.cpu]
    "row: ours / base" = "One sentence, with what was measured."
    "*, float16: ours / base" = "The same for all rows whose name fits."
    [words]
    "a text of a record" = "the same in clearer words, for the page"
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pairing import RESULTS, Row, number

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "speed.md"
README = HERE.parent / "README.md"
PROJECT = HERE.parent / "pyproject.toml"
REASONS = HERE / "reasons.toml"

Record = dict[str, Any]
Devices = dict[str, Record]  # by device

# In this order; others follow by name.
PARTS = {
    "torch-speed": "PyTorch",
    "jax-speed": "JAX",
    "torch-overhead": "The cost of a region in PyTorch, compared with torch.amp",
    "jax-overhead": "The cost of the rewrite in JAX",
    "contraction": "Ways to write a matrix product in JAX",
    "scaler": "Loss scaling",
    "seeing": "The cost of explain and audit",
    "advice": "Predictions of polymp doctor",
    "policies": "Policies in compiled programs",
    "gpu-machine": "The machine with the GPU",
    "exactness": "Every op on a GPU",
    "gpu-tests": "Tests on a GPU",
    "gpu-questions": "Measured on a GPU only",
    "fp8": "Products of 8-bit operands",
}

# The rows of README.md, by part: row of the record, and how README calls it.
COST = {
    "torch-overhead": {
        "region: enter and leave": "PyTorch: enter and leave a region / torch.autocast",
    },
    "torch-speed": {
        "train: polymp / torch.autocast": "PyTorch: training step, `autocast` / torch.autocast",
        "accumulate: held / torch.autocast": (
            "PyTorch: step of 8 microbatches, `hold_casts` / torch.autocast"
        ),
        "mlp 1: frozen / torch.autocast": "PyTorch: MLP on one row, `freeze` / torch.autocast",
    },
    "jax-speed": {
        "train: autocast / float32": "JAX: training step, `autocast` / float32",
        "train: autocast / by hand": "JAX: training step, `autocast` / casts by hand",
        "train, kept: autocast / by hand": (
            "JAX: memory kept for the backward pass, `autocast` / casts by hand"
        ),
        "decode: frozen / autocast": "JAX: decode token by token, `freeze` / `autocast`",
    },
}
BEGIN, END = "<!-- cost: made by benchmarks/speed_page.py -->", "<!-- end of cost -->"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
UNSAID = "no reason is recorded."

HEAD = """# How fast it is

![Time of workloads under polymp and in float32](pictures/speed-light.svg#only-light)
![Time of workloads under polymp and in float32](pictures/speed-dark.svg#only-dark)

The picture shows rows of the tables below, measured on a CPU: the times of polymp and of float32,
divided by the time of torch.autocast in PyTorch, and of casts by hand in JAX.

How to read a table: a row "A / B" compares two programs that were timed alternately. The columns
of ratios have the median of A divided by the median of B, so below 1 means that A is faster, or
needs less memory. The interquartile range is that of the ratios; each round gives one ratio. Each
workload has a table. These programs are compared:

| program | is |
| --- | --- |
| torch.autocast | a region of torch |
| fp32, float32 | no region |
| by hand | weights and activations cast by hand; norms and the loss in float32 |
| polymp, autocast | a region of polymp, without a policy in PyTorch |
| held | polymp with `hold_casts` |
| frozen | polymp with `freeze` |
| compiled | with `torch.compile` |

A ratio in bold is above a limit that the project set itself; [Limits](#limits) has all limits, and
why some are missed. [Where it was measured](#where-it-was-measured) has the machines and versions.
[Fast: casting once](fast.md#what-each-feature-costs) has a summary by feature.

`make bench` measures on a CPU, `make gpu` on a GPU, and both write this page from the newest
records.
"""


def newest(results: Path) -> dict[str, Devices]:
    """The newest record of each part and device, by part in the order of the page.

    Raises:
        ValueError: a record is not what its name says.
    """
    found: dict[str, Devices] = {}
    for path in sorted(results.glob("*.json")):  # the name starts with the date
        record = json.loads(path.read_text())
        if "tables" not in record:
            continue  # of another kind
        said = f"{record['date']}-{record['part']}-{record['device']}.json"
        if path.name != said or record["device"] not in DEVICES:
            raise ValueError(f"{path.name} has the record of {said}")
        found.setdefault(record["part"], {})[record["device"]] = record | {"file": path.name}
    order = [*PARTS, *sorted(set(found) - set(PARTS))]
    return {part: found[part] for part in order if part in found}


def page(results: Path, reasons: Path) -> str:
    """The page, as Markdown.

    Raises:
        ValueError: see `newest`; or a reason is for a row that no record has.
    """
    parts = newest(results)
    why = tomllib.loads(reasons.read_text()) if reasons.exists() else {}
    words = why.pop("words", {})
    for part, devices in why.items():
        for device, said in devices.items():
            record = parts.get(part, {}).get(device, {"tables": {}})
            known = {r.what for r in _rows(record)} | set(record.get("unmeasured", ()))
            for name, reason in said.items():
                fits = fnmatch.filter(known, name)
                if not fits:
                    raise ValueError(f"{reasons.name}: {part}.{device} has no row {name!r}")
                record["reasons"] = record.get("reasons", {}) | dict.fromkeys(fits, reason)
    text = [HEAD]
    for part, records in parts.items():
        text += _part(part, records)
    text += [*_bars(parts), *_machines(parts)]
    made = "\n".join(text).rstrip() + "\n"
    for old, new in words.items():
        made = made.replace(old, new)
    return made


def without_reason(page: str) -> list[str]:
    """Lines of the page with a bar that is missed, or not measured, without a reason."""
    return [line for line in page.splitlines() if line.startswith("- ") and line.endswith(UNSAID)]


def _rows(record: Record, title: str | None = None) -> list[Row]:
    tables = record["tables"]
    chosen = tables.values() if title is None else [tables.get(title, [])]
    return [Row(**r) for table in chosen for r in table]


def _table(head: list[str], lines: list[list[str]], words: Sequence[str] = ()) -> list[str]:
    """A table; the first column and those of words to the left, the rest to the right."""
    rule = ["---" if name in (head[0], *words) else "---:" for name in head]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *lines)] + [""]


def _machines(parts: dict[str, Devices]) -> list[str]:
    lines = []
    for part, devices in parts.items():
        for device, record in devices.items():
            m = record["machine"]
            versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items())
            kind = f"{m['kind']} ({m['architecture']})" if device == "cpu" else m["kind"]
            lines.append(
                [f"[{part}](../benchmarks/results/{record['file']})", DEVICES[device],
                 record["date"], kind, str(m["cores"]), str(m["load"]), m["python"], versions]
            )  # fmt: skip
    if not lines:
        return ["Nothing has been measured.", ""]
    head = ["record", "device", "date", "machine", "cores", "load", "Python", "versions"]
    text = ["## Where it was measured", "", *_table(head, lines)]
    if not any("cuda" in devices for devices in parts.values()):
        text += [
            "No GPU has been measured. On a machine that has one, each `make gpu` measures for 9",
            "minutes; [a table](../benchmarks/gpu_steps/plan.py) has its steps.",
            "",
        ]
    return text


def _ratio(r: Row | None) -> str:
    """A ratio, in bold where a bar is missed, with as many digits as differ from the bar's."""
    if r is None:
        return ""
    differ = (n for n in range(2, 9) if f"{r.ratio:.{n}f}" != f"{r.bar:.{n}f}")
    return f"**{r.ratio:.{next(differ, 9)}f}**" if r.met is False else f"{r.ratio:.2f}"


def _bars(parts: dict[str, Devices]) -> list[str]:
    """Every row with a limit, of all parts, and the reasons of those that are above it."""
    devices = _present(parts)
    lines, notes = [], []
    for part, records in parts.items():
        by = {d: {r.what: r for r in _rows(record)} for d, record in records.items()}
        whats = dict.fromkeys(
            what
            for d, record in records.items()
            for what in (
                *(r.what for r in by[d].values() if r.bar is not None),
                *record.get("unmeasured", ()),
            )
        )
        for what in whats:
            bars = {records[d].get("unmeasured", {}).get(what) for d in records}
            bars |= {by[d][what].bar for d in by if what in by[d]}
            line = [f"{part}, {what}", " or ".join(f"{b:.2f}" for b in sorted(bars - {None}))]
            for d in devices:
                r = by.get(d, {}).get(what)
                gone = r is None and what in records.get(d, {}).get("unmeasured", ())
                line += [_ratio(r), _verdict(r, gone)]
                if gone or (r is not None and r.met is False):
                    reason = records[d].get("reasons", {}).get(what, UNSAID)
                    word = "not measured" if gone else "missed"
                    notes.append(f"- {part}, {what}: {word}, {DEVICES[d]}: {reason}")
            lines.append(line)
    if not lines:
        return []
    head = ["what", "at most", *(x for d in devices for x in (DEVICES[d], ""))]
    return ["## Limits", "", *_table(head, lines), *notes, *([""] if notes else [])]


def _verdict(r: Row | None, gone: bool) -> str:
    if gone:
        return "not measured"
    return "" if r is None or r.met is None else "met" if r.met else "missed"


def _present(parts: dict[str, Devices]) -> list[str]:
    return [d for d in DEVICES if any(d in devices for devices in parts.values())]


def _part(part: str, records: Devices) -> Iterator[str]:
    """A part: a table for each of its workloads, notes, and what is missing."""
    yield from (f"## {PARTS.get(part, part)}", "")
    devices = [d for d in DEVICES if d in records]
    for title in dict.fromkeys(t for d in devices for t in records[d]["tables"]):
        by = {d: {r.what: r for r in _rows(records[d], title)} for d in devices}
        if any(by.values()):
            yield from (f"### {title}", "", *_workload(by))
    for d in devices:
        for title, rows in records[d].get("lists", {}).items():
            if rows:
                yield from (f"### {title}, {DEVICES[d]}", "", *_list(rows))
    notes = dict.fromkeys(note for d in devices for note in records[d].get("notes", ()))
    if notes:
        yield from (*(f"- {note}" for note in notes), "")
    for d in devices:
        if waits := {k: v for k, v in records[d].get("host_sync", {}).items() if v}:
            yield from (f"These wait for the {DEVICES[d]}; the others do not:", "")
            yield from (*(f"- {what}: {why}" for what, why in waits.items()), "")
        if missing := records[d].get("missing", {}):
            yield from (f"Not measured on the {DEVICES[d]}:", "")
            yield from (*(f"- {what}: {_line(why)}" for what, why in missing.items()), "")


def _list(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as they are, with a column for each key that any of them has."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    words = [key for key in head if any(isinstance(row.get(key), str) for row in rows)]
    return _table(head, [[_line(str(row.get(key, ""))) for key in head] for row in rows], words)


def _line(text: str) -> str:
    """Text of others in one line, in which Markdown finds no table, link or reference."""
    return re.sub(r"([|\[\]])", r"\\\1", " ".join(text.split()))


def _workload(by: dict[str, dict[str, Row]]) -> list[str]:
    """One table: ratios of all devices that have it first, then medians."""
    by = {d: rows for d, rows in by.items() if rows}
    whats = list(dict.fromkeys(what for rows in by.values() for what in rows))
    head = ["A / B"]
    for d in by:
        head += [DEVICES[d], "interquartile range"]
    head += [x for d in by for x in (f"B, {DEVICES[d]}", f"A, {DEVICES[d]}")]
    lines = []
    for what in whats:
        rows = [found.get(what) for found in by.values()]
        ratios = [x for r in rows for x in (_ratio(r), "" if r is None else _spread(r))]
        medians = [x for r in rows for x in _medians(r)]
        lines.append([_short(what, whats), *ratios, *medians])
    return _table(head, lines)


def _short(what: str, whats: list[str]) -> str:
    """Without what all rows of the table start with."""
    start = what.partition(": ")[0]
    shared = all(other.partition(": ")[0] == start for other in whats) and ": " in what
    return what.partition(": ")[2] if shared else what


def _spread(r: Row) -> str:
    return f"{r.low:.2f} - {r.high:.2f}"


def _medians(r: Row | None) -> tuple[str, str]:
    if r is None:
        return "", ""
    return f"{number(r.base)} {r.unit}", f"{number(r.ours)} {r.unit}"


def cost(parts: dict[str, Devices]) -> str:
    """README's table of costs: the rows of `COST`, on every device that was measured.

    Links are absolute, so that they work where a package index shows README.
    """
    urls = tomllib.loads(PROJECT.read_text())["project"]["urls"]
    folder = f"{urls['Repository']}/blob/main/benchmarks/results"
    chosen = {part: parts.get(part, {}) for part in COST}
    devices = _present(chosen)
    text, files, lines = [], [], []
    for part, records in chosen.items():
        by = {d: {r.what: r for r in _rows(record)} for d, record in records.items()}
        for what, label in COST[part].items():
            cells = []
            for d in devices:
                r = by.get(d, {}).get(what)
                cells += (
                    ["", ""] if r is None else [" / ".join(_medians(r)[::-1]), f"{r.ratio:.2f}"]
                )
            if any(cells):
                lines.append([label, *cells])
        made = [
            f"[{DEVICES[d]}]({folder}/{record['file']}) ({_measured(record)})"
            for d, record in records.items()
        ]
        if made:
            files.append(f"- {part}: {', '.join(made)}.")
    head = ["A / B", *(x for d in devices for x in (f"{DEVICES[d]}: A / B", "ratio"))]
    text += [*_table(head, lines), *files]
    if "cuda" not in devices:
        text += ["", "No GPU has been measured; `make gpu` does it where there is one."]
    return "\n".join(text)


def _measured(record: Record) -> str:
    """Where and when a record was made, in a few words."""
    m = record["machine"]
    versions = [f"{name} {v}" for name, v in m["versions"].items() if name in ("torch", "jax")]
    return "; ".join([m["kind"], *versions, record["date"]])


def with_cost(readme: str, parts: dict[str, Devices]) -> str:
    """README.md with its table of costs made anew.

    Raises:
        ValueError: it has not both marks.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has to have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{cost(parts)}\n\n{END}{after}"


def write(results: Path, reasons: Path, to: Path, readme: Path) -> str:
    """Write the page, and the table of costs in README.md; returns the page."""
    text = page(results, reasons)
    to.write_text(text)
    readme.write_text(with_cost(readme.read_text(), newest(results)))
    print(f"saved {to} and {readme}")
    return text


def main() -> int:
    """Write the page; 1 if a bar is missed or not measured and no reason is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records")
    parser.add_argument("--reasons", type=Path, default=REASONS, help="TOML file")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    parser.add_argument("--readme", type=Path, default=README, help="with the table of costs")
    args = parser.parse_args()
    gone = without_reason(write(args.results, args.reasons, args.out, args.readme))
    print(*gone, sep="\n")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
