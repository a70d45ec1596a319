"""The deprecated names of torch.cpu.amp, with their arguments."""

import warnings
from typing import Any

import torch

from polymp.backends.torch.autocast import api
from polymp.backends.torch.scaler import grad_scaler


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cpu", ...)`, by default in bfloat16; warns that it is deprecated.

    Args:
        enabled: as in `polymp.torch.autocast`.
        dtype: likewise.
        cache_enabled: likewise.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype | str = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        _deprecated("autocast", "cpu")
        super().__init__("cpu", dtype, enabled, cache_enabled)


class GradScaler(grad_scaler.GradScaler):
    """`polymp.torch.GradScaler("cpu", ...)`; warns that it is deprecated.

    Args:
        args: of `polymp.torch.GradScaler`, after the device.
        kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _deprecated("GradScaler", "cpu")
        super().__init__("cpu", *args, **kwargs)


def _deprecated(name: str, device: str) -> None:
    """Warn, as torch.amp does, that `torch.<device>.amp.<name>` is an old spelling."""
    custom = name.startswith("custom_")
    call = f"args..., device_type='{device}'" if custom else f"'{device}', args..."
    warnings.warn(
        f"`torch.{device}.amp.{name}(args...)` is deprecated. Please use "
        f"`torch.amp.{name}({call})` instead. With polymp: `polymp.torch.{name}({call})`.",
        FutureWarning,
        stacklevel=3,
    )
