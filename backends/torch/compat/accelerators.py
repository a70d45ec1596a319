"""The devices of this machine and of this build of torch, and a stand-in for a missing one."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch


def cuda_missing() -> bool:
    """Return whether neither CUDA nor torch_xla can be used: torch.amp then disables itself."""
    return not _standing_in.get() and bool(torch.cuda.amp.common.amp_definitely_not_available())


def accelerator() -> str:
    """Return the type of the devices that this machine trains on: "cuda", ..., or "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else "cpu"


_standing_in: ContextVar[bool] = ContextVar("polymp.standing_in", default=False)


@contextmanager
def stand_in(device: str) -> Iterator[bool]:
    """Let code run on fake tensors of a device, with regions as on a machine that has it.

    A torch that is built without the device has no guard for it. Autograd, indexing and many fake
    kernels need one, though it has nothing to do for tensors without memory. So the device gets the
    guard of meta tensors, as torch does for a CUDA build on a machine without a GPU
    (`_ensureCUDADeviceGuardSet`). The numbers are those of `c10::DeviceType`.
    """
    token = _standing_in.set(True)
    there = device in ("cpu", "meta") or torch._C._get_accelerator().type == device
    guards: Any = None if there or device not in _NUMBERS else _guards()
    lent = guards is not None and not guards[_NUMBERS[device]]
    if lent:
        guards[_NUMBERS[device]] = guards[_META]
    try:
        yield there or guards is not None
    finally:
        if lent:
            guards[_NUMBERS[device]] = None
        _standing_in.reset(token)


_META = 14
_NUMBERS = {"cuda": 1, "xpu": 12, "mps": 13}


@functools.cache
def _guards() -> Any:
    """Return the guards of all device types; None where the library does not export them."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        name = "_ZN3c104impl26device_guard_impl_registryE"
        return (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(path)), name)
    except (OSError, ValueError):
        return None


def is_here(device: str) -> bool:
    """Return whether real tensors can be on the device type."""
    return device == "cpu" or (
        torch._C._get_accelerator().type == device and torch.accelerator.is_available()
    )


def cuda_lacks_bfloat16() -> bool:
    """Return whether the GPU of this machine cannot compute in bfloat16."""
    return not _standing_in.get() and not torch.cuda.is_bf16_supported()


def is_private(device: str) -> bool:
    """Return whether an extension registered the device type."""
    return device == torch._C._get_privateuse1_backend_name()


def private_dtypes(device: str) -> list[torch.dtype]:
    """Return the low dtypes of a device that an extension registered as PrivateUse1.

    Raises where the extension has not registered its module, or not all of it.
    """
    if not hasattr(getattr(torch, device, None), "get_amp_supported_dtype"):
        torch.autocast(device)  # raises the error of this version of torch
    found: list[torch.dtype] = getattr(torch, device).get_amp_supported_dtype()
    return found
