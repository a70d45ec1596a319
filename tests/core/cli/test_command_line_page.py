"""docs/command-line.md shows what the commands print."""

from importlib import metadata

import pytest

from tests.conftest import need
from tests.support.blocks import ROOT, read

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
    if "--device" in argv or argv[0] == "check":
        need("torch"), need("jax")
    if "--device" in argv and not metadata.version("torch").startswith("2.13"):
        pytest.skip("the page shows what torch 2.13 has")
    for block in PAGE:
        if block.kind == "file":
            (tmp_path / block.value).write_text(block.code)
    _, out, err = polymp(*argv)
    assert (out, err) == (shown, "")


def test_the_page_has_an_example_of_each_command():
    shown = {block.code.split()[2] for block in PAGE if "$ polymp" in block.code}
    assert shown == {"policies", "show", "diff", "check", "doctor"}
