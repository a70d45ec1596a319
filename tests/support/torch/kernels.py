"""torch's own autocast kernels: those that our table lacks, and regions that use none of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from polymp.backends.torch.autocast import kernel_registry, torch_table
from polymp.backends.torch.autocast.autocast_kernel import OpInRegion, OpOnDevice
from polymp.rules.policy import Region
from polymp.rules.row import Rule


def drift(device: str) -> tuple[list[str], list[str]]:
    """The ops that torch registers and our table lacks, and those the other way round.

    Ops that this build of torch leaves out do not count as ops of the table.
    """
    ours = torch_table.table(torch_table.policy(device), "float16")
    known = {op for op in ours if "::" not in op and torch_table.BUILDS.get(op, True)}
    registered = torch_table.kernels(device)
    return sorted(registered - known), sorted(known - registered)


@contextmanager
def all_python(device: str) -> Iterator[None]:
    """Run every op of a device that has a rule on our kernels.

    But for recurrent layers: torch's kernels cast to float16, in bfloat16 regions too, and bring
    the weights into the one buffer that cuDNN needs. Source: torch v2.13
    aten/src/ATen/cudnn/AutocastRNN.cpp, miopen/AutocastRNN.cpp.
    """
    kernel_registry.put(device, sorted(torch_table.kernels(device)))
    unused = torch_table.kernels(device) - torch_table.BUILDS.keys()
    looked_up = OpOnDevice.in_region

    def without_torch(op: OpOnDevice, region: Region, args: Any = None) -> OpInRegion:
        found = looked_up(op, region, args)
        raises = found.row is not None and found.row.rule is Rule.FORBID  # torch's own error
        return found if raises or op.name not in unused else replace(found, agrees=False)

    with mock.patch.object(OpOnDevice, "in_region", without_torch):
        yield
