"""Lightning's strategies in two processes: DDP, FSDP, and ModelParallelStrategy with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import need

need("lightning")

from tests.support.torch.ranks import launch  # noqa: E402

pytestmark = pytest.mark.long
STRATEGIES = ("ddp", "fsdp", "fsdp2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, ...], Any]]:
    return launch("tests.support.torch.lightning_ranks", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_are_lightnings_bit_for_bit(ranks: Any, name: str) -> None:
    for notes in ranks:
        assert notes[name, "ours"] == notes[name, "theirs"]
        assert notes[name, "ours"]["losses"] != notes[name, "16-mixed", "None"]["losses"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_with_a_policy_every_strategy_computes_the_same(ranks: Any, precision: str) -> None:
    """With clipping by norm; FSDP gathers the weights in float32, and the policy casts them."""
    for notes in ranks:
        first, *others = (notes[name, precision, "lean"] for name in STRATEGIES)
        assert others == [first, first]
        assert notes["fsdp", precision, "None"] != first, "FSDP casts by itself without a policy"


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_skip_the_step_in_which_one_overflows(ranks: Any, name: str) -> None:
    for notes in ranks:
        assert notes[name, "16-mixed", "lean"]["metrics"] == {
            "loss_scale": 2.0**9,
            "skipped_steps": 1.0,
        }
