"""Starting the ranks of a distributed run, and what they noted.

A program that is run as a rank is a module with a `main(rank, ranks, folder)` that returns notes.
The ranks meet in a file and talk gloo over the loopback interface.
"""

from __future__ import annotations

import importlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import forks

LIMIT = 240  # seconds; a rank that waits for a dead one gives up before


def launch(
    program: str, ranks: int, folder: Path, *, backend: str = "gloo", strict: bool = True
) -> list[Any]:
    """Run `main` of the module `program` on each rank, and return the results."""
    meeting = folder / f"{program}-{ranks}"
    meeting.mkdir()
    printed = [meeting / f"errors{rank}" for rank in range(ranks)]
    calls = [
        forks.Call(
            __name__,
            "run",
            (program, backend, rank, ranks, str(folder)),
            str(path),
            env={"GLOO_SOCKET_IFNAME": "lo"},
            strict=strict,
        )
        for rank, path in enumerate(printed)
    ]
    codes = forks.run(forks.TORCH, calls, LIMIT)
    assert codes == [0] * ranks, "\n".join(path.read_text()[-3000:] for path in printed)
    return [pickle.loads((meeting / f"notes{rank}").read_bytes()) for rank in range(ranks)]


def run(program: str, backend: str, rank: int, ranks: int, folder: str) -> None:
    """Run a program as a rank, and write down what it notes."""
    torch.set_num_threads(1)
    meeting = Path(folder) / f"{program}-{ranks}"
    dist.init_process_group(
        backend,
        init_method=(meeting / "meeting").as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT / 4),
    )
    notes = importlib.import_module(program).main(rank, ranks, Path(folder))
    (meeting / f"notes{rank}").write_bytes(pickle.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()
