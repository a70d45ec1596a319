"""The example for several ranks, started as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import need
from tests.support.examples import EXAMPLES, ROOT

need("torch")
pytest.importorskip("numpy", reason="the examples need numpy")

LINE = re.compile(r"step +(\d+)  loss +([\d.]+)  scale +([\d.]+)  skipped (yes|no)")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*argv: object, by: tuple[str, ...] = TORCHRUN) -> Any:
    settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *by, str(EXAMPLES / "train_ranks.py"), *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**environment, **settings},
    )


def test_an_overflow_on_the_last_rank_is_skipped_by_all() -> None:
    done = run("--overflow-at", 5, "--steps", 12, "--width", 32)
    assert done.returncode == 0, done.stderr
    *lines, end = done.stdout.splitlines()
    assert end == "parameters are finite on all 2 ranks"
    cells = [match.groups() for match in map(LINE.fullmatch, lines) if match]
    assert [int(step) for step, *_ in cells] == list(range(12)) == list(range(len(lines)))
    assert [at for at, (*_, skipped) in enumerate(cells) if skipped == "yes"] == [5]
    scales = [float(scale) for _, _, scale, _ in cells]
    assert scales == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 4 + [2048.0] * 3
    losses = [float(loss) for _, loss, *_ in cells]
    assert losses[-1] < losses[0] / 2


@pytest.mark.long  # other examples say as much of bad arguments
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            (),
            "this is one rank of several. Start it with "
            "torchrun --nproc-per-node 2 examples/train_ranks.py",
        ),
        (
            ("--steps", 3, "--overflow-at", 3),
            "--overflow-at 3 is never reached: the steps are 0 to 2. Give one of these, or more "
            "--steps.",
        ),
    ],
)
def test_what_is_said_of_a_start_that_cannot_work(argv: Any, said: str) -> None:
    done = run(*argv, by=())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"train_ranks.py: error: {said}\n"
