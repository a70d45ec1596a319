"""Two processes that share every array: both see the run of one device, bit for bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import STRICT
from tests.support.jax import planted_run

MESHES = ("data", "model")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Return the output of each process."""
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *STRICT,
                "-m",
                "tests.support.jax.scaler_over_processes",
                rank,
                address,
            ],
            cwd=Path(__file__).parents[3],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        outs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outs, strict=True):
        assert process.returncode == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outs]


@pytest.fixture(scope="module")
def alone() -> planted_run.Run:
    return planted_run.alone()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_both_see_the_history_of_one_device(found, alone, rank, mesh):
    assert found[rank].keys() == set(MESHES)
    assert found[rank][mesh]["history"] == alone.history


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_shard_is_a_part_of_the_parameters_of_one_device(found, alone, rank, mesh):
    for name, shards in found[rank][mesh]["params"].items():
        whole = np.asarray(alone.params[name])
        assert len(shards) == 1
        for starts, values in shards:
            rows, columns = (start or 0 for start in starts)
            values = np.asarray(values)
            part = whole[rows:, columns:][: values.shape[0], : values.shape[1]]
            assert np.array_equal(part, values)


def test_the_two_hold_different_shards_of_what_is_split_over_them(found):
    mine, theirs = ([starts for starts, _ in ranks["model"]["params"]["a"]] for ranks in found)
    assert [*mine, *theirs] == [[None, 0], [None, 4]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_report_counts_the_shards_of_both(found, rank, mesh):
    assert found[rank][mesh]["report"] == ["b (1 Inf, 0 NaN of 128)"]
