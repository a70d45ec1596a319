"""accelerate's DDP in two processes, with polymp's scaler and policy."""

from __future__ import annotations

import math

import pytest

from tests.conftest import need

need("accelerate")

from tests.support.torch.accelerate_ranks import OVERFLOW  # noqa: E402
from tests.support.torch.ranks import launch  # noqa: E402


@pytest.mark.long
def test_all_ranks_skip_the_step_in_which_one_overflows(tmp_path_factory) -> None:
    first, second = launch(
        "tests.support.torch.accelerate_ranks", 2, tmp_path_factory.mktemp("ranks")
    )
    assert first["kind"] == "DistributedDataParallel"
    assert first["skipped"] == [at == OVERFLOW for at in range(6)]
    assert first["scale"] == 2.0**9
    assert not math.isfinite(first["norms"][OVERFLOW])
    for name in ("kind", "skipped", "scale", "weights"):
        assert first[name] == second[name]
