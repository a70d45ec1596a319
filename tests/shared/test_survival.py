"""Faults that can kill a run: 500 overflows, and NaN in the forward pass.

Ours lives, and says why. The programs are those of `kills`, and the other scalers run them too:
docs/rivals.md has what became of each, and is held to it here.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache

import pytest

from polymp.scaling import SMALLEST
from tests.conftest import need
from tests.support import kills
from tests.support.blocks import ROOT
from tests.support.kills import KILLS, SUBJECTS, Outcome

OURS = [name for name, subject in SUBJECTS.items() if subject.package == "polymp"]
PAGE = ROOT / "docs" / "rivals.md"


@cache
def outcome(name: str, kill: str) -> Outcome:
    subject = SUBJECTS[name]
    need(subject.framework)
    need(subject.package)
    return kills.run(subject.make, KILLS[kill])


def alive(it: Outcome) -> None:
    """Raise unless the run has lived and has said once what was wrong."""
    assert it.finite, "NaN in the parameters"
    assert it.after < it.before / 100, "it does not train any more"
    assert len(it.said) == 1, "silent, or it says it more than once"


# By program: parts of the message, and of the other one's.
SAID = {
    "overflows": ("Gradients that overflow at any loss scale",
                  "weight (4 Inf, 0 NaN of 4)", "bias (1 Inf, 0 NaN of 1)"),
    "lost losses": ("the loss itself was not finite before it was scaled",
                    "no loss scale can change that, unless", "weight (0 Inf, 4 NaN of 4)"),
}  # fmt: skip


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("name", OURS)
def test_a_bad_row_of_steps_does_not_kill_the_run_and_is_named(name: str, kill: str) -> None:
    it = outcome(name, kill)
    alive(it)
    assert it.first == 2.0 ** (16 + kills.BEFORE // kills.INTERVAL)
    assert it.scale == (SMALLEST if kill == "overflows" else it.first * 2.0**-60)
    for part in (*SAID[kill], "steps in a row were skipped; the loss scale is "):
        assert part in it.said[0]
    assert not any(said[0] in it.said[0] for other, said in SAID.items() if other != kill)


def test_the_page_has_what_the_programs_print() -> None:
    for subject in SUBJECTS.values():
        need(subject.framework)
        need(subject.package)
    text = PAGE.read_text(encoding="utf-8")
    again = "run python -m tests.support.kills, and put what it prints into the page"
    assert kills.page(outcome) in text, again
    for name in ("flax", "jmp", "torch"):  # torch's has a tag of the build behind it
        version = importlib.metadata.version(name).partition("+")[0]
        assert f"{name} {version}" in text, again
