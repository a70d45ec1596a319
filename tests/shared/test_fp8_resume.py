"""A training with products in 8 bits goes on from a checkpoint with the bits of an unbroken one."""

import importlib

import pytest

import polymp
from polymp.fp8.recipes import RECIPES
from tests.conftest import FRAMEWORKS, need

# Not that bfloat16 needs a scaler: it is there to be saved.
pytestmark = pytest.mark.filterwarnings("ignore::polymp.errors.ScalerWarning")

STEPS, CUT = 6, 3


def run(framework, *args):
    need(framework)
    return importlib.import_module(f"tests.support.{framework}.fp8_run").Run(*args)


def policy(recipe):
    return polymp.policy("fp8").override(recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_goes_on_from_a_checkpoint(framework, recipe, tmp_path):
    whole = run(framework, policy(recipe))
    history = [whole.step(number) for number in range(STEPS)]
    first = run(framework, policy(recipe))
    assert [first.step(number) for number in range(CUT)] == history[:CUT]
    first.save(tmp_path / "half")
    second = run(framework, policy(recipe), 1)  # other weights
    second.load(tmp_path / "half")
    assert second.bits() == first.bits()
    rest = [second.step(number) for number in range(CUT, STEPS)]
    print(f"{framework}, {recipe}: losses {[round(loss, 4) for loss, _ in history]}")
    assert rest == history[CUT:]
    if recipe == "tensorwise":
        for part in ("model", "optimizer", "scaler"):
            other = run(framework, policy(recipe), 1)
            other.load(tmp_path / "half", without=part)
            found = [other.step(number) for number in range(CUT, STEPS)]
            assert found != rest, f"without {part} it is another run"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("before", "after"), [("lean", "fp8"), ("fp8", "lean")])
def test_a_checkpoint_of_one_policy_goes_on_under_another(framework, before, after, tmp_path):
    """There is no state of 8 bits: it goes on as a run does that changes without a checkpoint."""
    whole = run(framework, before)
    for number in range(CUT):
        whole.step(number)
    whole.save(tmp_path / "half")
    unchanged = run(framework, before, 1)
    unchanged.load(tmp_path / "half")
    changed = run(framework, after, 1)
    changed.load(tmp_path / "half")
    whole.policy = after
    expected = [whole.step(number) for number in range(CUT, STEPS)]
    assert [changed.step(number) for number in range(CUT, STEPS)] == expected
    assert [unchanged.step(number) for number in range(CUT, STEPS)] != expected
