"""All commands: exit codes, imports, width, help and errors."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polymp import cli
from tests.conftest import need
from tests.site.test_package import HEAVY, loaded_after
from tests.support.blocks import ROOT, read
from tests.support.commands import process, project


def test_the_script_is_this_function():
    module, _, name = project()["scripts"]["polymp"].partition(":")
    assert getattr(importlib.import_module(module), name) is cli.main


COMMANDS = [
    ("policies",),
    ("show", "amp"),
    ("show", "lean", "--op", "softmax"),
    ("diff", "amp", "lean"),
]


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_no_package_is_needed(argv, flags):
    loaded = loaded_after(
        "import contextlib, io; from polymp.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()) as out: main({(*argv, *flags)!r})\n"
        "assert out.getvalue()"
    )
    assert "polymp" in loaded
    assert not loaded & {*HEAVY, "rich", "tqdm"}


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_tables_fit_80_columns(argv, polymp):
    _, out, _ = polymp(*argv)
    assert max(map(len, out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in out.splitlines())


def test_tables_in_plain_ascii():
    run = process("show", "amp", "--op", "class:softmax", PYTHONIOENCODING="ascii")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"softmax +fp32", run.stdout)


@pytest.mark.parametrize("flags", [("show", "amp"), ("show", "amp", "--json")], ids=len)
def test_a_reader_that_leaves_early_is_no_error(flags):
    command = [sys.executable, "-m", "polymp", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("show", "ampp"), "no policy 'ampp'. Did you mean amp?"),
        (("show", "no.toml"), "cannot read policy file 'no.toml': No such file or directory."),
        (("show", "amp", "--op", "sofmax"), "--op: no op 'sofmax'. Did you mean softmax"),
        (("show", "amp", "--op", "class:fff"), "--op: no class 'fff'. Did you mean fft?"),
        (("show", "amp", "--op", "default"), "--op: neither the vocabulary nor policy 'amp' has"),
        (("show", "amp", "--op", "aten:zzz"), "--op: neither the vocabulary nor policy 'amp' has"),
        (("show", "amp", "--scope", "a/b"), "--scope: 'a/b' is no pattern of module paths."),
        (("diff", "amp", "no"), "no policy 'no'."),
        (("check", "no.toml"), "cannot read policy file 'no.toml': No such file or directory."),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_an_error_is_one_line(argv, said, flags, polymp):
    code, out, err = polymp(*argv, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: {said}")
    assert err.count("\n") == 1


def test_alone_it_prints_its_help(polymp):
    code, out, err = polymp()
    assert (code, err) == (0, "")
    assert out.startswith("usage: polymp")
    assert cli.EXIT in out


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_output_that_cannot_be_written_is_an_error_of_one_line(flags):
    command = [sys.executable, "-m", "polymp", "show", "amp", *flags]
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert re.fullmatch(r"polymp: cannot write to standard output: .*\n", run.stderr)
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (2, "polymp: standard output is closed.\n")


def test_a_name_that_the_encoding_lacks_is_an_error_of_one_line(tmp_path):
    (tmp_path / "é.toml").write_text('rules.exp = "fp32"')
    argv = ("check", "é.toml", "--backend", "jax")
    run = process(*argv, cwd=tmp_path, PYTHONIOENCODING="ascii:strict")
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"polymp: cannot write to standard output: 'ascii' .*\n", run.stderr)


def test_names_cannot_give_orders_to_a_terminal(polymp, tmp_path):
    (tmp_path / "red.toml").write_text('scopes."\\u001b[31mhead".linear = "fp32"')
    for argv in (("show", "red.toml"), ("diff", "red.toml", "amp"), ("check", "\x1b[31m.toml")):
        _, out, err = polymp(*argv)
        assert "\x1b" not in out + err
        assert "\\x1b[31m" in (out + err).replace("\n", "")


@pytest.mark.parametrize("argv", [("shw",), ("show",), ("diff", "amp"), ("show", "amp", "--x")])
def test_bad_arguments(argv, polymp, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp(*argv)
    assert "polymp" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "policies", "show", "diff", "check", "doctor", "compare"])
def test_help_has_the_exit_codes_and_fits_a_terminal(command, polymp, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        polymp(*command.split(), "--help")
    out = capsys.readouterr().out
    assert cli.EXIT in out
    assert max(map(len, out.splitlines())) <= 80


# --- docs/command-line.md shows what the commands print -------------------------------------------


PAGE = read(ROOT / "docs/command-line.md")
EXAMPLES = [
    block
    for block in PAGE
    if block.language == "console" and "$ polymp" in block.code and block.kind != "skip"
]


def examples():
    for block in EXAMPLES:
        command, _, shown = block.code.partition("\n")
        yield pytest.param(command.removeprefix("$ polymp ").split(), shown, id=command[9:])


@pytest.mark.parametrize(("argv", "shown"), list(examples()))
def test_the_page_shows_what_is_printed(argv, shown, polymp, tmp_path):
    if argv[0] == "check":
        need("torch", "jax")
    for block in PAGE:
        if block.kind == "file":
            (tmp_path / block.value).write_text(block.code)
    _, out, err = polymp(*argv)
    assert (out, err) == (shown, "")


def test_the_page_has_an_example_of_each_command():
    shown = {block.code.split()[2] for block in PAGE if "$ polymp" in block.code}
    assert shown == {"policies", "show", "diff", "check", "doctor", "compare"}
