"""The devices of this machine and of this build of torch."""

import torch


def cuda_missing() -> bool:
    """Return whether neither CUDA nor torch_xla can be used: torch.amp then disables itself."""
    return bool(torch.cuda.amp.common.amp_definitely_not_available())


def accelerator() -> str:
    """Return the type of the devices that this machine trains on: "cuda", ..., or "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else "cpu"


def private_dtypes(device: str) -> list[torch.dtype] | None:
    """Return the low dtypes of a device that an extension registered as PrivateUse1; else None."""
    # Raises where the extension has not registered its module, or not all of it.
    if device != torch._C._get_privateuse1_backend_name():
        return None
    if not hasattr(getattr(torch, device, None), "get_amp_supported_dtype"):
        torch.autocast(device)  # raises the error of this version of torch
    found: list[torch.dtype] = getattr(torch, device).get_amp_supported_dtype()
    return found
