"""accelerate in two processes, with polymp's scaler and policy: DDP, FSDP1 and FSDP2."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.conftest import need

need("accelerate")

from tests.support.torch.accelerate_ranks import OVERFLOW  # noqa: E402
from tests.support.torch.ranks import launch  # noqa: E402

pytestmark = pytest.mark.long
STRATEGIES = ("ddp", "fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, ...], Any]]:
    return launch("tests.support.torch.accelerate_ranks", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_accelerates_bit_for_bit(ranks: Any, strategy: str) -> None:
    for notes in ranks:
        assert notes[strategy, "None"] == notes[strategy, "theirs"]
        assert notes[strategy, "None"]["losses"] != notes[strategy, "fp16"]["losses"]


@pytest.mark.parametrize("mode", ["lean", "fp16"])
def test_with_a_policy_every_strategy_computes_the_same(ranks: Any, mode: str) -> None:
    """FSDP gathers the weights in float32, and the policy casts them."""
    for notes in ranks:
        first, *others = (notes[strategy, mode] for strategy in STRATEGIES)
        for other in others:
            assert other["losses"] == pytest.approx(first["losses"], rel=1e-6)
            assert other["norms"] == pytest.approx(first["norms"], rel=1e-5, nan_ok=True)
        assert notes["fsdp1", "None"]["losses"] != first["losses"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_the_step_in_which_one_overflows(ranks: Any, strategy: str) -> None:
    for notes in ranks:
        assert notes[strategy, "fp16"]["skipped"] == [at == OVERFLOW for at in range(6)]
        assert notes[strategy, "scale"] == 2.0**9
        assert not math.isfinite(notes[strategy, "fp16"]["norms"][OVERFLOW])
