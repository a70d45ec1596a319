"""A report as text: what is printed is what was counted, and it reads well without any package."""

from __future__ import annotations

import json

import pytest

from polymp import text_table
from polymp.diagnostics import report
from polymp.diagnostics.report import Report
from tests.support import processes, reports

PRINTED = """\
Net: 9 call sites, policy amp in bfloat16

FLOPs: 37.0 M (99.8 %) in bf16, 80.0 k (0.22 %) in fp32
casts: 11, 840 KiB read and written
saved: 2 cached
kept: 1.50 MiB of float32 for the backward pass
widened: to float32 by a float32 input: add in head, model.py:32

op           times  source       rule                  dtypes                casts     bytes   FLOPs
-----------  -----  -----------  --------------------  --------------------  -----  --------  ------

-- forward -----------------------------------------------------------------------------------------
embed
  embedding      1  model.py:9   no row                fp32 -> fp32
blocks.0.attn
  linear         3  model.py:20  lower, class:matmul,  fp32 x3 -> bf16           7   168 KiB  6.00 M
                                   torch-cuda
  softmax        1  model.py:22  fp32, torch-cuda      bf16 -> fp32              1   600 KiB
head
  linear         1  model.py:31  lower, class:matmul,  fp32 x3 -> bf16           3  72.0 KiB  9.00 M
                                   torch-cuda
  add            1  model.py:32  no row                bf16, fp32 -> fp32
(top level)
  sum            1  train.py:7                         fp32 -> fp16 (in                       80.0 k
                                                         fp32)

-- backward ----------------------------------------------------------------------------------------
head
  matmul         1  model.py:31  no row                bf16 -> bf16                           18.0 M
blocks.0.attn
  matmul         1  model.py:20  no row                bf16 -> bf16                           4.00 M

-- recompute: the forward again, for the backward --------------------------------------------------
blocks.0.attn
  relu           1  model.py:21  no row                bf16 -> bf16"""


def test_printed_by_module_in_the_order_of_the_program() -> None:
    assert str(reports.in_torch()) == PRINTED
    assert repr(reports.in_torch()) == "Report('Net', 9 calls, 11 casts)"


def ops(text: str) -> list[str]:
    """The indented first words of the listed rows, below the totals."""
    body = text.partition("\n-- ")[2].splitlines()
    return [line.split()[0] for line in body if line.startswith("  ") and line[2] != " "]


@pytest.mark.parametrize(("columns", "width"), [("", 100), ("120", 120), ("20", 80), ("900", 180)])
def test_the_width_is_the_terminals(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for each in (reports.in_torch(), reports.long(300)):
        lines = str(each).splitlines()
        assert max(map(len, lines)) == width
        assert all(line == line.rstrip() for line in lines)
    assert len(ops(str(each))) == 300


def test_a_narrow_terminal_leaves_room_for_ops_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else "scaled_dot_product_attention" is broken three times."""
    for width, shown in ((80, False), (100, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        head = next(line for line in str(reports.in_torch()).splitlines() if line[:3] == "op ")
        assert {"source", "rule", "dtypes"} <= {*head.split()}
        assert {"times", "bytes", "FLOPs"}.isdisjoint(head.split()) is not shown


@pytest.mark.parametrize("width", [80, 90, 100])
def test_a_file_and_its_line_are_never_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    places = [f"modeling_{'x' * n}_llama.py:{370 + n}" for n in range(0, 12, 2)]
    report = Report([reports.linear("m", place) for place in places])
    text = str(report)
    assert [place for place in places if place in text] == places


def test_widened_calls_are_named_and_counted() -> None:
    def add(line: int) -> object:
        given = {"inputs": ("bfloat16", "float32"), "outputs": ("float32",), "run": "float32"}
        return reports.call("add", "", source=f"model.py:{line}", **given)

    said = report.widening(Report([add(n) for n in range(8)]))
    assert said.count("model.py") == 5
    assert said.endswith("; and 3 more calls")
    assert report.widening(reports.in_jax()) == ""


@pytest.mark.parametrize(
    ("given", "widened"),
    [
        ({}, True),
        ({"outputs": ("float32", "float32")}, True),
        # As of layer_norm: the statistics are float32, and the result is not.
        ({"outputs": ("bfloat16", "float32", "float32")}, False),
        ({"inputs": ("float32", "float32")}, False),
        ({"inputs": ("bfloat16", "float16")}, False),
        ({"outputs": ("bfloat16",)}, False),
        ({"row": reports.ADD}, False),
        ({"region": ""}, False),
        ({"direction": "backward"}, False),
    ],
)
def test_widened_is_only_what_no_row_asked_for(given: dict, widened: bool) -> None:
    known = {"inputs": ("bfloat16", "float32"), "run": "float32", "outputs": ("float32",)}
    call = reports.call("add", "m", **(known | given))
    assert bool(report.widening(Report([call]))) == widened


def test_a_call_is_plain_data() -> None:
    linear = json.loads(json.dumps(reports.in_torch().calls[1].to_dict()))
    assert (linear["times"], linear["casts"], linear["saved"]) == (3, 7, {"cached": 2})
    assert linear["row"] == "class:matmul = lower, policies/torch-cuda.toml"
    assert linear["rule"] == "lower"
    assert linear["inputs"] == ["float32"] * 3


def test_an_empty_report_says_whose_ops_it_sees() -> None:
    sees = "no op on floats ran in this thread; polymp.torch sees torch's only, polymp.jax JAX's"
    assert str(Report(title="nothing")) == f"nothing: 0 call sites\n\n{sees}"
    assert str(Report()) == f"report: 0 call sites\n\n{sees}"


def test_no_package_is_needed_to_print() -> None:
    # None in sys.modules makes an import of that name fail.
    program = """if True:
        import sys
        for name in ("rich", "numpy", "matplotlib", "torch", "jax"):
            sys.modules[name] = None
        from tests.support import reports
        print(reports.in_torch())
        report = reports.in_torch()
        print(len(report.to_html()) > 1000, bool(report.diff(reports.in_jax())))
    """
    ran = processes.python("-c", program)
    assert ran.stderr == ""
    assert ran.stdout == f"{PRINTED}\nTrue True\n"


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ((("float32", "bfloat16"), "bfloat16", ("bfloat16",)), "fp32, bf16 -> bf16"),
        ((("bfloat16",), "float32", ("bfloat16",)), "bf16 -> bf16 (in fp32)"),
        ((("float32",), "float32", ("float32", "float16")), "fp32 -> fp32, fp16 (in fp32)"),
        ((("float16",) * 3, "float16", ("float16",)), "fp16 x3 -> fp16"),
        ((("float32",), "", ("float32",)), "fp32 -> fp32"),
        (((), "float64", ("float64",) * 2), "none -> fp64 x2"),
        ((("float8_e4m3fn",), "float8_e5m2", ()), "e4m3 -> none (in e5m2)"),
    ],
)
def test_dtypes_in_short(dtypes: tuple, words: str) -> None:
    assert text_table.dtypes(*dtypes) == words


@pytest.mark.parametrize(
    ("count", "bytes", "number"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (1000, "1000 B", "1.00 k"),
        (1023, "1023 B", "1.02 k"),
        (1024, "1.00 KiB", "1.02 k"),
        (1536, "1.50 KiB", "1.54 k"),
        (123_456, "121 KiB", "123 k"),
        (999_600, "976 KiB", "1.00 M"),
        (1_048_575, "1.00 MiB", "1.05 M"),
        (5 * 2**40, "5.00 TiB", "5.50 T"),
    ],
)
def test_sizes_and_numbers_to_three_digits(count: int, bytes: str, number: str) -> None:
    assert (text_table.size(count), text_table.amount(count)) == (bytes, number)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (0, ""), (1e-9, "<0.01 %"), (0.0022, "0.22 %"), (0.051, "5.1 %"), (0.5, "50 %"),
        (0.992, "99.2 %"), (0.99999, ">99.9 %"), (1, "100 %"),
    ],
)  # fmt: skip
def test_a_share_is_all_or_nothing_only_if_it_is(part: float, words: str) -> None:
    assert text_table.share(part) == words


def test_names_cannot_give_orders_to_a_terminal() -> None:
    report = Report([reports.call("li\x1b[2Jnear", "blo\x9bck\x00")], "Ne\x1bt")
    for text in (str(report), str(report.diff(Report([], "other\x1b")))):
        assert text.replace("\n", "").isprintable()
        assert "li\\x1b[2Jnear" in text


def test_an_op_that_is_none_is_refused_and_one_that_did_not_run_is_not() -> None:
    empty = Report()
    for real in ("linear", "softmax.int", "aten:mm", "dot_general"):
        assert empty.of(real) == []
    with pytest.raises(ValueError, match=r"^of\('linaer'\): there is no such op\..* linear"):
        empty.of("linaer")
