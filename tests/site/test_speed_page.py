"""The tables of all figures are what its generator makes of the records that are kept."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark
from tests.support.blocks import ROOT
from tests.support.sizes import LONG


@pytest.fixture(scope="module")
def speed_page() -> ModuleType:
    need("rich")
    return benchmark("speed_page")


def row(what: str, ratio: float, bar: float | None = None, unit: str = "ms") -> dict[str, Any]:
    low, high = ratio * 0.9, ratio * 1.1
    found = {"what": what, "base": 2.0, "ours": 2.0 * ratio, "ratio": ratio}
    return found | {"low": low, "high": high, "bar": bar, "unit": unit}


def record(part: str, device: str, date: str, **data: Any) -> dict[str, Any]:
    machine = {
        "kind": f"a {device} of some kind",
        "architecture": "x86_64",
        "cores": 2,
        "load": 0.1,
        "python": "3.11.7",
        "versions": {"torch": "2.13.0", "polymp": "0.1.0"},
    }
    return {"part": part, "device": device, "date": date, "machine": machine, "tables": {}} | data


Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes a record into the folder of records."""

    def write(part: str, device: str, date: str, **data: Any) -> Path:
        path = tmp_path / f"{date}-{part}-{device}.json"
        path.write_text(json.dumps(record(part, device, date, **data)))
        return path

    return write


@pytest.fixture(scope="module")
def words() -> ModuleType:
    return benchmark("page_words")


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    return benchmark("cost_table")


def made(speed_page: ModuleType, folder: Path) -> str:
    """The page of the records in a folder, in the words of its words.toml."""
    words = benchmark("page_words").Words.of(folder / "words.toml")
    return str(speed_page.page(folder, folder / "reasons.toml", words))


def unexplained(speed_page: ModuleType, folder: Path) -> list[str]:
    return list(speed_page.without_reason(folder, folder / "reasons.toml"))


# --- the repository ------------------------------------------------------------------------------


def test_the_page_is_made_of_the_records(speed_page: ModuleType) -> None:
    assert speed_page.PAGE == ROOT / "benchmarks" / "results" / "FIGURES.md"
    text = speed_page.PAGE.read_text(encoding="utf-8")
    assert text == speed_page.page(speed_page.RESULTS, speed_page.REASONS), (
        "FIGURES.md is not what benchmarks/speed_page.py makes of benchmarks/results; run it"
    )


def test_the_readme_has_the_costs_of_the_records(speed_page: ModuleType, costs: ModuleType) -> None:
    text = costs.README.read_text(encoding="utf-8")
    assert costs.with_cost(text, speed_page.newest(speed_page.RESULTS)) == text, (
        "README.md's costs are not what benchmarks/speed_page.py makes of the records; run it"
    )


def test_every_missed_bar_has_its_reason(speed_page: ModuleType) -> None:
    assert speed_page.without_reason(speed_page.RESULTS, speed_page.REASONS) == []


def test_every_line_of_the_words_is_used(speed_page: ModuleType, words: ModuleType) -> None:
    said = words.Words.of(words.WORDS)
    speed_page.page(speed_page.RESULTS, speed_page.REASONS, said)
    assert said.unused() == [], "benchmarks/words.toml: no newest record has these; drop them"
    said.texts["a text of no record"] = "never seen"
    assert said.unused() == ["a text of no record"]


@pytest.mark.sized
def test_a_changed_figure_is_noticed(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    """In every table that is kept, and in one that is there for certain.

    `make test-long` changes each figure of a row, `make test` one in turn.
    """
    figures = ("base", "ours", "ratio", "low", "high")
    turn = itertools.cycle([figures] if LONG else [(figure,) for figure in figures])
    for path in speed_page.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    put("some", "cpu", "2026-01-01", tables={"some": [row("a / b", 0.5)]})
    before = made(speed_page, tmp_path)
    for devices in speed_page.newest(tmp_path).values():
        for kept in devices.values():
            path = tmp_path / kept["file"]
            was = path.read_text()
            changed = json.loads(was)
            for rows in filter(None, changed["tables"].values()):
                for figure in next(turn):
                    old = rows[0][figure]
                    rows[0][figure] = old * 1.5 + 1
                    path.write_text(json.dumps(changed))
                    assert made(speed_page, tmp_path) != before, (path.name, rows[0], figure)
                    rows[0][figure] = old
            path.write_text(was)
    assert made(speed_page, tmp_path) == before


# --- what the generator makes of any records ------------------------------------------------------


def test_nothing_was_measured(speed_page: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "2026-01-01-other-cpu.json").write_text('{"date": "2026-01-01"}')  # no tables
    assert "Nothing has been measured." in made(speed_page, tmp_path)


def test_the_newest_record_of_each_device(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    for date, ratio in (("2026-01-31", 0.5), ("2026-02-01", 0.25), ("2025-12-31", 4.0)):
        put("jax-speed", "cpu", date, tables={"Some work": [row("x: a / b", ratio)]})
    put("jax-speed", "cuda", "2025-01-01", tables={"Some work": [row("x: a / b", 0.125)]})
    text = made(speed_page, tmp_path)
    assert (
        "| a / b | 0.25 | 0.23 - 0.28 | 0.12 | 0.11 - 0.14 | 0.5 ms | 2 ms | 0.25 ms | 2 ms |"
        in (text.splitlines())
    )
    assert "a cpu of some kind (x86_64) | 2 | 0.1 | 3.11.7 | torch 2.13.0, polymp 0.1.0 |" in text
    assert "| a cuda of some kind |" in text
    assert "(2026-02-01-jax-speed-cpu.json)" in text
    assert "2026-01-31" not in text
    assert "No GPU" not in text


def test_a_missed_bar_differs_from_its_ratio(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    ratios = {"far": 1.5, "near": 1.0213, "very near": 1.02004, "met": 1.0199}
    rows = [row(f"{what}: a / b", ratio, bar=1.02) for what, ratio in ratios.items()]
    put("some", "cpu", "2026-01-01", tables={"T": rows})
    lines = made(speed_page, tmp_path).splitlines()
    assert "| some | T | far: a / b | 1.02 | **1.50** |" in lines
    assert "| some | T | near: a / b | 1.02 | **1.021** |" in lines
    assert "| some | T | very near: a / b | 1.02 | **1.02004** |" in lines
    assert "| met: a / b | 1.02 | 0.92 - 1.12 | 1.02 | 2.04 ms | 2 ms |" in lines
    assert "1 of 4 limits are met on the CPU. The others:" in lines


def test_texts_of_records_in_other_words(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    rows = [row("mlp 1, base: a / b", 0.5), row("mlp 1, other: a / b", 0.5)]
    odd = {"x": "RuntimeError: line 7"}
    notes = ["Taken in turns.", "In turns it is."]
    asked = {"Asked": [{"way": "as it comes", "is": 123456}]}
    put("some", "cpu", "2026-01-01", tables={"T": rows}, notes=notes, missing=odd, lists=asked)
    (tmp_path / "words.toml").write_text("""
[texts]
"Taken in turns." = "Timed alternately."
"x: RuntimeError: *" = "x: it fails."
"way" = "program"
"as it comes" = "default"
[rows]
"mlp 1" = "MLP"
[about]
"T" = "About T."
[columns]
"T" = ["program", "mine", "yours"]
[omitted]
"some" = ["*other*"]
""")
    lines = made(speed_page, tmp_path).splitlines()
    assert "- Timed alternately." in lines
    assert "- In turns it is." in lines, "a part of a text is not a text"
    assert "- x: it fails." in lines
    assert "About T." in lines
    assert "| program | ratio, CPU | range | mine, CPU | yours, CPU |" in lines
    assert "| MLP, base | 0.50 | 0.45 - 0.55 | 1 ms | 2 ms |" in lines
    assert not any("MLP, other" in line for line in lines)
    assert "| program | is |" in lines
    assert "| default | 123,456 |" in lines


def test_rows_are_called_without_what_all_of_a_table_have(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    rows = ["mlp 1: a / b", "kernels, mlp 1: a / b", "train, kept: a / b", "train: a / b", "c / d"]
    tables = {"M": rows[:2], "T": rows[2:4], "Mixed": [f"{rows[0]}, again", rows[4]]}
    made_rows = {title: [row(what, 0.5) for what in whats] for title, whats in tables.items()}
    put("some", "cpu", "2026-01-01", tables=made_rows)
    lines = made(speed_page, tmp_path).splitlines()
    named = [line.split(" | ")[0] for line in lines if "0.45 - 0.55" in line]
    shown = ["a / b", "kernels: a / b", "kept: a / b", "a / b", "mlp 1: a / b, again", "c / d"]
    assert named == [f"| {name}" for name in shown]


def test_a_note_of_one_device_says_so(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    put("some", "cpu", "2026-01-01", tables={"T": [row("a / b", 0.5)]}, notes=["Both.", "One."])
    put("some", "cuda", "2026-01-01", tables={"T": [row("a / b", 0.5)]}, notes=["Both."])
    lines = made(speed_page, tmp_path).splitlines()
    assert "- Both." in lines
    assert "- On the CPU: One." in lines


def test_lists_are_shown_as_they_are(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    asked = [{"what": "kernels", "is": 12}, {"what": "a | b", "because": "both"}]
    put("some", "cuda", "2026-01-01", lists={"Asked": asked, "Empty": []})
    text = made(speed_page, tmp_path)
    table = ["### Asked", "", "| what | is | because |", "| --- | ---: | --- |",
             "| kernels | 12 |  |", "| a \\| b |  | both |"]  # fmt: skip
    assert "\n".join(table) in text
    assert "Empty" not in text
    assert "No GPU" not in text


def test_costs_of_the_readme_have_a_column_for_each_device(
    speed_page: ModuleType, costs: ModuleType, put: Put, tmp_path: Path
) -> None:
    what, label = next(iter(costs.COST["jax-speed"].items()))
    put("jax-speed", "cpu", "2026-01-01", tables={"T": [row(what, 0.5), row("x: a / b", 0.5)]})
    alone = costs.cost(speed_page.newest(tmp_path))
    assert f"| {label} | 1 ms / 2 ms | 0.50 |" in alone
    assert "x: a / b" not in alone
    assert "No GPU has been measured; `make gpu` does it where there is one." in alone
    (other,) = list(costs.COST["jax-speed"].items())[1:2]
    rows = [row(what, 0.25), row(other[0], 0.25)]
    put("jax-speed", "cuda", "2026-01-01", tables={"T": rows})
    both = costs.cost(speed_page.newest(tmp_path))
    assert f"| {label} | 1 ms / 2 ms | 0.50 | 0.5 ms / 2 ms | 0.25 |" in both
    assert f"| {other[1]} | not measured |  | 0.5 ms / 2 ms | 0.25 |" in both
    assert "No GPU" not in both
    with pytest.raises(ValueError, match=r"README\.md has to have the lines '<!-- cost"):
        costs.with_cost("# polymp", speed_page.newest(tmp_path))


def test_a_row_of_one_device_leaves_the_others_cells_empty(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    both, alone = row("a / b", 0.5), row("c / b", 0.5, None, "kernels")
    put("some", "cpu", "2026-01-01", tables={"Work": [both]})
    put("some", "cuda", "2026-01-01", tables={"Work": [both, alone]})
    lines = made(speed_page, tmp_path).splitlines()
    assert "### Work" in lines
    assert "| c / b |  |  | 0.50 | 0.45 - 0.55 |  |  | 1 kernels | 2 kernels |" in lines


def test_devices_without_a_common_row_have_a_table_each(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    put("some", "cpu", "2026-01-01", tables={"Work": [row("a / b", 0.5)]})
    put("some", "cuda", "2026-01-01", tables={"Work": [row("c / b", 0.5)]})
    lines = made(speed_page, tmp_path).splitlines()
    assert "### Work, CPU" in lines
    assert "### Work, GPU" in lines
    assert "| a / b | 0.50 | 0.45 - 0.55 | 1 ms | 2 ms |" in lines


def test_bars_and_reasons(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    rows = [row("w: a / b", 0.5, 0.6), row("w: c / b", 0.7, 0.6), row("w: d / b", 0.8, 0.6)]
    put("some", "cpu", "2026-01-01", tables={"Work": rows}, reasons={"w: c / b": "So it is."})
    put("some", "cuda", "2026-01-01", tables={"Work": [row("w: a / b", 0.9, 0.6)]})
    lines = made(speed_page, tmp_path).splitlines()
    ratios, times = "0.50 | 0.45 - 0.55 | **0.90** | 0.81 - 0.99", "1 ms | 2 ms | 1.8 ms | 2 ms"
    assert f"| a / b | {ratios} | 0.60 | {times} |" in lines
    assert "| c / b | **0.70** | 0.63 - 0.77 |  |  | 0.60 | 1.4 ms | 2 ms |  |  |" in lines
    assert (
        "1 of 3 limits are met on the CPU, 0 of 1 limits are met on the GPU. The others:" in lines
    )
    head = ["", "| section | table | row | limit | ratio |", "| --- | --- | --- | ---: | ---: |"]
    start = lines.index("So it is.")
    assert lines[start + 1 : start + 5] == [*head, "| some | Work | c / b | 0.60 | **0.70** |"]
    start = lines.index(speed_page.UNSAID)
    assert lines[start + 1 : start + 5] == [*head, "| some | Work | d / b | 0.60 | **0.80** |"]
    assert unexplained(speed_page, tmp_path) == ["some, CPU: w: d / b", "some, GPU: w: a / b"]

    reasons = tmp_path / "reasons.toml"
    reasons.write_text('[some.cpu]\n"w: d / b" = "As measured."\n[some.cuda]\n"w: a / b" = "It."\n')
    lines = made(speed_page, tmp_path).splitlines()
    assert lines[lines.index("As measured.") + 4] == "| some | Work | d / b | 0.60 | **0.80** |"
    assert "So it is." in lines
    assert unexplained(speed_page, tmp_path) == []

    reasons.write_text('["some"]\ncpu = {"w: [cd] / *" = "Both."}\ncuda = {"*" = "All."}\n')
    assert unexplained(speed_page, tmp_path) == []
    lines = made(speed_page, tmp_path).splitlines()
    start = lines.index("Both.")
    assert lines[start + 4 : start + 6] == [
        "| some | Work | c / b | 0.60 | **0.70** |",
        "| some | Work | d / b | 0.60 | **0.80** |",
    ]


def test_limits_that_differ_between_devices(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    for device, bar in (("cpu", 2.0), ("cuda", 3.0)):
        put("some", device, "2026-01-01", tables={"T": [row("a / b", 0.5, bar)]})
    assert "| CPU 2.00, GPU 3.00 |" in made(speed_page, tmp_path)


def test_a_reason_for_what_is_not_there_is_refused(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    put("some", "cpu", "2026-01-01", tables={"Work": [row("a / b", 0.7, 0.6)]})
    (tmp_path / "reasons.toml").write_text('[some.cpu]\n"x / b" = "It is so."\n')
    with pytest.raises(ValueError, match=r"reasons.toml: some.cpu has no row 'x / b'"):
        made(speed_page, tmp_path)


def test_a_bar_without_a_row_is_not_dropped(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    put("some", "cpu", "2026-01-01", unmeasured={"w: a / b": 0.6}, missing={"a": "not | [there]"})
    text = made(speed_page, tmp_path)
    assert "| some |  | w: a / b | 0.60 | not measured |" in text.splitlines()
    assert "- a: not \\| \\[there\\]" in text.splitlines()
    assert unexplained(speed_page, tmp_path) == ["some, CPU: w: a / b"]


def test_what_waits_for_a_gpu_is_named(speed_page: ModuleType, put: Put, tmp_path: Path) -> None:
    put("some", "cuda", "2026-01-01", host_sync={"train: a": "", "train: b": "called item()"})
    text = made(speed_page, tmp_path)
    assert "- train: b: called item()" in text.splitlines()
    assert "train: a" not in text


def test_a_record_under_another_name_is_refused(
    speed_page: ModuleType, put: Put, tmp_path: Path
) -> None:
    path = put("some", "cpu", "2026-01-01")
    path.rename(tmp_path / "2026-01-02-some-cpu.json")
    with pytest.raises(ValueError, match=r"^2026-01-02-some-cpu.json has the record of 2026"):
        made(speed_page, tmp_path)


def test_the_program_writes_the_page_and_fails_for_a_bar_without_a_reason(
    speed_page: ModuleType,
    costs: ModuleType,
    put: Put,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    out, readme = tmp_path / "page.md", tmp_path / "README.md"
    readme.write_text(f"# x\n{costs.BEGIN}\nold\n{costs.END}\nmore\n")
    arguments = f"speed_page.py --results {tmp_path} --reasons {tmp_path}/no.toml --out {out}"
    monkeypatch.setattr("sys.argv", [*arguments.split(), "--readme", str(readme)])
    put("some", "cpu", "2026-01-01", tables={"Work": [row("a / b", 0.5, 0.6)]})
    assert speed_page.main() == 0
    assert "old" not in readme.read_text()
    assert readme.read_text().endswith(f"{costs.END}\nmore\n")
    assert out.read_text() == speed_page.page(tmp_path, tmp_path / "no.toml")
    put("some", "cpu", "2026-01-02", tables={"Work": [row("a / b", 0.7, 0.6)]})
    assert speed_page.main() == 1
    assert "some, CPU: a / b" in capsys.readouterr().out
