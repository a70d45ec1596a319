"""Fixtures of the tests of modules."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    import torch.distributed as dist  # this file is read where torch is missing, too

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
