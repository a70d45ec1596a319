"""Makes the table of costs in README.md, of the newest records in benchmarks/results.

speed_page.py writes it together with benchmarks/results/FIGURES.md; a test holds it to the records.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from records import DEVICES, FEW_DEVICES, Devices, Record, medians, rows, table

README = Path(__file__).parent.parent / "README.md"
PROJECT = Path(__file__).parent.parent / "pyproject.toml"
BEGIN, END = "<!-- cost: made by benchmarks/speed_page.py -->", "<!-- end of cost -->"

# The rows, by part: row of the record, and how README calls it.
COST = {
    "torch-overhead": {
        "region: enter and leave": (
            "PyTorch: entering and leaving a region, `autocast` / torch.autocast"
        ),
    },
    "torch-speed": {
        "train: polymp / torch.autocast": "PyTorch: training step, `autocast` / torch.autocast",
        "mlp 1: frozen / torch.autocast": "PyTorch: MLP on one row, `freeze` / torch.autocast",
    },
    "jax-speed": {
        "train: autocast / float32": "JAX: training step, `autocast` / float32",
        "train: autocast / by hand": "JAX: training step, `autocast` / casts by hand",
        "train, kept: autocast / by hand": (
            "JAX: memory kept for the backward pass, `autocast` / casts by hand"
        ),
        "decode: frozen / autocast": "JAX: decoding token by token, `freeze` / `autocast`",
    },
}
SOURCES = {
    "torch-overhead": "Figures of the first row",
    "torch-speed": "Figures of the other PyTorch rows",
    "jax-speed": "Figures of the JAX rows",
}
LAYOUT = (
    "- In JAX on a CPU, casts by hand take as long as float32, because XLA computes most bfloat16 "
    "products in float32. polymp lays out the operands so that XLA uses its bfloat16 kernel. That "
    "kernel needs a processor with AVX512-BF16, as here; without it, polymp casts the rounded "
    "operands to float32 again for XLA's float32 kernel, and a step takes about 0.9 of its time."
)


def cost(parts: dict[str, Devices]) -> str:
    """The rows of `COST`, on every device that was measured.

    Links are absolute, so that they work where a package index shows README.
    """
    urls = tomllib.loads(PROJECT.read_text())["project"]["urls"]
    folder = f"{urls['Repository']}/blob/main/benchmarks/results"
    chosen = {part: parts.get(part, {}) for part in COST}
    devices = [d for d in FEW_DEVICES if any(d in records for records in chosen.values())]
    files, lines = [], []
    for part, records in chosen.items():
        by = {d: {r.what: r for r in rows(record)} for d, record in records.items()}
        for what, label in COST[part].items():
            cells, measured = [], False
            for d in devices:
                r = by.get(d, {}).get(what)
                measured = measured or r is not None
                cells += ["not measured", ""] if r is None else _cells(medians(r), r.ratio)
            if measured:
                lines.append([label, *cells])
        made = [
            f"[{DEVICES[d]}]({folder}/{record['file']}) ({_measured(record)})"
            for d, record in records.items()
            if d in FEW_DEVICES
        ]
        if made:
            files.append(f"- {SOURCES[part]}: {', '.join(made)}.")
    head = ["A / B", *(x for d in devices for x in (f"{DEVICES[d]}: A / B", "ratio"))]
    text = [*table(head, lines)]
    if any("casts by hand" in line[0] for line in lines):
        text.append(LAYOUT)
    text += files
    if "cuda" not in devices:
        text += ["", "No GPU has been measured; `make gpu` does it where there is one."]
    return "\n".join(text)


def _cells(both: tuple[str, str], ratio: float) -> list[str]:
    return [" / ".join(both), f"{ratio:.2f}"]


def _measured(record: Record) -> str:
    """Where and when a record was made, in a few words."""
    m = record["machine"]
    versions = [f"{name} {v}" for name, v in m["versions"].items() if name in ("torch", "jax")]
    return "; ".join([m["kind"], *versions, record["date"]])


def with_cost(readme: str, parts: dict[str, Devices]) -> str:
    """README.md with its table of costs made again.

    Raises:
        ValueError: it has not both marks.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has to have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{cost(parts)}\n\n{END}{after}"
