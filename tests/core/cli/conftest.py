"""Fixtures that run a command and read what it prints."""

import json

import pytest

from polymp import cli

MINE = """\
extends = "amp"
[rules]
softmax = "fp32_keep"
tanh = "fp32"
exp = { float16 = "fp32", bfloat16 = "keep" }
"aten:max.dim" = "keep"
[scopes."*.lm_head"]
linear = "fp32"
[scopes."block[ab].attn"]
softmax = "fp32"
"""


@pytest.fixture
def polymp(capsys, tmp_path, monkeypatch):
    """Runs a command in a folder with mine.toml, 80 columns wide: (exit code, stdout, stderr)."""
    (tmp_path / "mine.toml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*argv):
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def answer(polymp):
    """Runs a command with --json and returns the data."""

    def run(*argv, code=0):
        found, out, err = polymp(*argv, "--json")
        assert found == code, err
        return json.loads(out)

    return run
