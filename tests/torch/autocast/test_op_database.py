"""Every op of torch's own database under every shipped policy on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.sizes import LONG

PARTS = 4 if LONG else 20
SAMPLES = 2  # of each op
MODULE = "tests.support.torch.op_database"

# torch's tables for GPUs are torch's: their compiled kernels have the same errors there.
TORCHS_OWN = {
    "matrix_exp": "writes a float32 sum into a low tensor",
    "torch.ops.aten._safe_softmax.default": "its gradient wants a result in its input's dtype",
}


@pytest.mark.sized
@pytest.mark.parametrize("part", range(PARTS) if LONG else [0])
def test_no_op_fails_that_runs_in_the_default_region(part: int, tmp_path: Path) -> None:
    """With its gradients, of float32 and of low inputs."""
    out, printed = tmp_path / "errors", tmp_path / "printed"
    call = forks.Call(MODULE, "main", (part, PARTS, SAMPLES, str(out)), str(printed), strict=False)
    assert forks.run((*forks.TORCH, MODULE), [call]) == [0], printed.read_text()[-3000:]
    called, errors = json.loads(out.read_text())
    assert called > 25
    ours = [
        e for e in errors if not (e.split()[0] in TORCHS_OWN and e.split()[1].startswith("torch-"))
    ]
    assert not ours
