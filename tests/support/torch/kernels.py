"""torch's own autocast kernels: those that our table lacks, and regions that use none of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from polymp.backends.torch.autocast import autocast_kernel, kernel_registry, torch_table


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
    autocast_kernel.TorchKernels.unused = torch_table.kernels(device) - torch_table.BUILDS.keys()
    try:
        yield
    finally:
        autocast_kernel.TorchKernels.unused = ()
