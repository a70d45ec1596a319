"""Starting the ranks of a distributed run, and what they noted.

A program that is run as a rank is a module with a `main(rank, ranks, folder)` that returns notes.
The ranks meet in a file and talk gloo over the loopback interface.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import STRICT

ROOT = Path(__file__).parents[3]
LIMIT = 240  # seconds; a rank that waits for a dead one gives up before


def launch(program: str, ranks: int, folder: Path, *, backend: str = "gloo") -> list[Any]:
    """What `main` of the module `program` returned on each rank.

    Args:
        program: dotted name of the module.
        ranks: how many processes.
        folder: where the ranks meet and put their notes; each has a folder of its own below it.
        backend: of the default process group.
    """
    meeting = folder / f"{program}-{ranks}"
    meeting.mkdir()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *STRICT, "-m", "tests.support.torch.ranks", program, backend]
    logs = [(meeting / f"errors{rank}").open("w") for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder)], cwd=ROOT, env=environment, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for rank in started:
            rank.wait(LIMIT)
    finally:
        for rank, log in zip(started, logs, strict=True):
            rank.kill()
            rank.wait()
            log.close()
    errors = [(meeting / f"errors{rank}").read_text()[-3000:] for rank in range(ranks)]
    assert [rank.returncode for rank in started] == [0] * ranks, "\n".join(errors)
    return [pickle.loads((meeting / f"notes{rank}").read_bytes()) for rank in range(ranks)]


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What two tensors have to share to be the same, bit for bit."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().cpu().numpy().tobytes()


def run(program: str, backend: str, rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = folder / f"{program}-{ranks}"
    dist.init_process_group(
        backend,
        init_method=(meeting / "meeting").as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT / 4),
    )
    notes = importlib.import_module(program).main(rank, ranks, folder)
    (meeting / f"notes{rank}").write_bytes(pickle.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, given, spoken, at, of, where = sys.argv
    run(given, spoken, int(at), int(of), Path(where))
