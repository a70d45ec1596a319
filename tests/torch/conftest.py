"""Fixtures for the tests of regions: torch's autocast state must be left as it was found.

Torch is imported where it is used, for this file is loaded where torch is missing, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from tests.support.torch.compiled import Count, Net

DEVICES = ("cpu", "cuda", "xpu", "mps", "ipu", "maia")


def state() -> tuple[Any, ...]:
    """All that a region may change in this thread, and must restore."""
    import torch

    from polymp.backends.torch.autocast import regions

    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    each = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    return depth, torch.is_autocast_cache_enabled(), len(regions.local.thread.frames), *each


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of `main` of the test's module on two ranks."""
    from tests.support.torch.ranks import launch

    program = request.module.__name__
    strict = ".trainers." not in program  # whose libraries warn
    return launch(program, 2, tmp_path_factory.mktemp("ranks"), strict=strict)


@pytest.fixture(scope="session", autouse=True)
def guards_untimed() -> Iterator[None]:
    """torch times the guards of all that it compiles, for its log: a tenth of compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture
def left_as_found() -> Iterator[None]:
    import torch

    before = state()
    yield
    after = state()
    torch.set_autocast_enabled("cpu", before[3][0])  # one leak is one failure
    torch.set_autocast_dtype("cpu", before[3][1])
    assert after == before


@pytest.fixture
def x() -> torch.Tensor:
    import torch

    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def w() -> torch.Tensor:
    import torch

    return torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.fixture
def count() -> Iterator[Count]:
    """A backend for torch.compile; nothing compiled before or after counts."""
    import torch._dynamo

    from tests.support.torch.compiled import Count

    torch._dynamo.reset()
    yield Count()
    torch._dynamo.reset()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh of one device, for a process group of this process only."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def capturable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows `capturable` on accelerators only, but what it does works on the CPU."""
    name = "_get_capturable_supported_devices"
    for module in [m for at, m in sys.modules.items() if at.startswith("torch.optim.")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_, **__: ["cpu", "cuda"])


@pytest.fixture
def net() -> Net:
    from tests.support.torch.compiled import Net

    return Net()
