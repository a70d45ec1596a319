"""The deprecated names of torch.cpu.amp, with their arguments."""

import warnings

import torch

from polymp.backends.torch.autocast import api
from polymp.backends.torch.scaler import grad_scaler


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cpu", ...)`, by default in bfloat16; warns that it is deprecated.

    Args:
        enabled: as in `polymp.torch.autocast`.
        dtype: likewise.
        cache_enabled: likewise.
        policy: likewise.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype | str = torch.bfloat16,
        cache_enabled: bool = True,
        *,
        policy: api.PolicyLike | None = None,
    ) -> None:
        deprecated("autocast", "cpu")
        super().__init__("cpu", dtype, enabled, cache_enabled, policy=policy)


class GradScaler(grad_scaler.GradScaler):
    """`polymp.torch.GradScaler("cpu", ...)`; warns that it is deprecated.

    Args:
        init_scale: as in `polymp.torch.GradScaler`.
        growth_factor: likewise.
        backoff_factor: likewise.
        growth_interval: likewise.
        enabled: likewise.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        deprecated("GradScaler", "cpu")
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def deprecated(name: str, device: str) -> None:
    """Warn, as torch.amp does, that `torch.<device>.amp.<name>` is an old spelling.

    Args:
        name: of the class or function.
        device: "cpu" or "cuda".
    """
    custom = name.startswith("custom_")
    call = f"args..., device_type='{device}'" if custom else f"'{device}', args..."
    warnings.warn(
        f"`torch.{device}.amp.{name}(args...)` is deprecated. Please use "
        f"`torch.amp.{name}({call})` instead. With polymp: `polymp.torch.{name}({call})`.",
        FutureWarning,
        stacklevel=3,
    )
