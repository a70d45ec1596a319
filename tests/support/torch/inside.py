"""A region of any device, whether or not this machine has one; for fake tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

from polymp.backends.torch.autocast import kernel_registry, regions
from polymp.rules.policy import Policy
from polymp.rules.region import Region


@contextmanager
def inside(
    device: str,
    dtype: str = "float16",
    *,
    enabled: bool = True,
    cache: bool = True,
    policy: Policy | None = None,
) -> Iterator[Region]:
    region = Region("torch", device, enabled, dtype, cache, policy)
    kernel_registry.prepare(region)
    ticket = regions.ticket(region)
    regions.enter(ticket, region)
    try:
        yield region
    finally:
        regions.leave(ticket, regions.stack.frames)
