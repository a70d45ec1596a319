"""`polymp compare`: what it prints, its exit codes, and files that are no records."""

import pytest

from tests.support import run_records
from tests.support.commands import process


@pytest.fixture
def files(tmp_path):
    """Records in the folder that the command runs in: the same twice, and another epsilon."""
    made = dict(zip(("one", "again"), run_records.pair(), strict=True))
    made["other"] = run_records.pair(epsilon=1e-3)[1]
    for name, record in made.items():
        run_records.written(tmp_path / f"{name}.rec", record)
    return tmp_path


def test_rounding_explains_all(polymp, answer, files):
    code, out, err = polymp("compare", "one.rec", "again.rec")
    assert (code, err) == (0, "")
    assert out.startswith("one.rec (torch 2.13.0) and again.rec (torch 2.13.0), step 0\n")
    assert "rounding explains all" in out
    assert max(map(len, out.splitlines())) <= 80
    data = answer("compare", "one.rec", "again.rec")
    assert (data["explained"], data["first"]) == (True, None)


def test_rounding_does_not_explain_it(polymp, answer, files):
    code, out, err = polymp("compare", "one.rec", "other.rec")
    assert (code, err) == (1, "")
    assert "ROUNDING DOES NOT EXPLAIN layer_norm in blocks.0.norm (model.py:12)" in out
    data = answer("compare", "one.rec", "other.rec", code=1)
    assert data["first"]["one"]["name"] == "layer_norm"
    assert data["names"] == ["one.rec", "other.rec"]


def test_a_page_is_written(polymp, files):
    assert polymp("compare", "one.rec", "other.rec", "--html", "page.html")[0] == 1
    assert (files / "page.html").read_text().startswith("<!DOCTYPE html>")
    code, out, err = polymp("compare", "one.rec", "other.rec", "--html", "no/page.html")
    assert (code, out) == (2, "")
    assert err == "polymp: --html: cannot write 'no/page.html': there is no folder 'no'.\n"


def test_modules_of_other_names(polymp, answer, files):
    program = run_records.calls(4, "model.layers.{}")
    renamed = run_records.record(run_records.arrays(program, seed=3))
    run_records.written(files / "renamed.rec", renamed)
    pair = ("compare", "one.rec", "renamed.rec", "--modules")
    assert answer(*pair, "model.layers=blocks")["parted"] is None
    assert "begins with 'no.such'" in polymp(*pair, "no.such=else")[2]
    bare = run_records.record([a._replace(module="") for a in renamed.steps[0].arrays])
    run_records.written(files / "bare.rec", bare)
    said = polymp("compare", "one.rec", "bare.rec", "--modules", "no=else")[2]
    assert "It has no module paths." in said
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp(*pair, "model.layers")


# A name of a file, what is in it, and what the error says.
NO_RECORDS = [
    ("gone.rec", None, "polymp: 'gone.rec': No such file or directory.\n"),
    ("a.toml", b"[rules]\n", "polymp: 'a.toml' is no record of polymp: it does not begin as one."),
    ("a.bin", b"\xff\xfe", "polymp: 'a.bin' is no record of polymp: it is no text in UTF-8.\n"),
    ("\x1b[31m.rec", b"{}", "polymp: '\\x1b[31m.rec' is no record of polymp"),
    ("old.rec", b'{"polymp record": 0}\n', "polymp: 'old.rec' is a record of format 0, by"),
]


@pytest.mark.parametrize(("name", "content", "said"), NO_RECORDS, ids=lambda x: str(x)[:6])
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_what_is_no_record_is_an_error_of_one_line(name, content, said, flags, polymp, files):
    if content is not None:
        (files / name).write_bytes(content)
    for pair in ((name, "one.rec"), ("one.rec", name)):
        code, out, err = polymp("compare", *pair, *flags)
        assert (code, out) == (2, "")
        assert err.startswith(said)
        assert err.count("\n") == 1


def test_without_numpy_an_error_names_it(files):
    run = process("compare", "one.rec", "again.rec", blocked=("numpy",), cwd=files)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "polymp: compare needs the package numpy: pip install numpy.\n"
