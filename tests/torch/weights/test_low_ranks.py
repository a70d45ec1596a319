"""Low weights on two ranks of FSDP2 and of DDP, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.torch.low_ranks import MODES, alone
from tests.support.torch.ranks import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return launch("tests.support.torch.low_ranks", 2, tmp_path_factory.mktemp("low"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["fsdp2", "ddp", "resumed"])
def test_two_ranks_have_the_bits_of_one_process(
    how: str, mode: str, ranks: list[dict[Any, Any]]
) -> None:
    """Weights, what is beside them and Adam's state; "resumed": from a checkpoint of the ranks."""
    expected = alone(mode)
    for notes in ranks:
        assert notes[how, mode] == expected


def test_the_comparison_tells_modes_apart(ranks: list[dict[Any, Any]], tmp_path: Path) -> None:
    assert ranks[0]["fsdp2", "stochastic"] != ranks[0]["fsdp2", "split"]
