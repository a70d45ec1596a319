"""docs/scaling.md names every entry of both scalers, and no other."""

import inspect
import re

import pytest

from tests.conftest import need
from tests.support.blocks import ROOT

TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
CODE = " ".join(re.findall(r"`([^`\n]+)`", TEXT))

# What the page says of both under one name.
HELPERS = {
    "torch": {"GradScaler", "expect_scaler"},
    "jax": {
        "GradScaler", "expect_scaler",
    },
}  # fmt: skip


def entries(kind):
    """The public names of a framework's scaler, its arguments, and the helpers beside it."""
    if kind == "torch":
        import polymp.torch as module
    else:
        import polymp.jax as module
    scaler = module.GradScaler
    names = {name for name in dir(scaler) if not name.startswith("_")}
    names |= set(inspect.signature(scaler).parameters)
    if kind == "jax":
        names |= {"state", "rule", "enabled"}
    missing = HELPERS[kind] - set(dir(module))
    assert not missing, f"polymp.{kind} has no {missing}"
    return names | HELPERS[kind]


def unmentioned(names, text):
    return sorted(name for name in names if not re.search(rf"\b{name}\b", text))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_every_entry_is_in_the_page(kind):
    need(kind)
    assert unmentioned(entries(kind), CODE) == []


def test_a_missing_entry_is_seen():
    assert unmentioned({"scale", "no_such_entry"}, CODE) == ["no_such_entry"]


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_helpers_are_in_a_block_that_runs(kind):
    blocks = "\n".join(re.findall(r"^ *```python\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE))
    for name in HELPERS[kind]:
        assert f"polymp.{kind}.{name}" in blocks
