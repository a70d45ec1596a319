"""The deprecated names of torch.cpu.amp, with their arguments."""

import torch

from polymp.backends.torch.autocast import api
from polymp.backends.torch.scaler import grad_scaler
from polymp.torch._spelling import deprecated


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cpu", ...)`, with bfloat16 as the default dtype; deprecated.

    Args:
        enabled: as in `polymp.torch.autocast`.
        dtype: likewise.
        cache_enabled: likewise.
        policy: likewise.

    Warns:
        FutureWarning: always, as in torch: the spelling is deprecated.
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
    """`polymp.torch.GradScaler("cpu", ...)`; deprecated.

    Args:
        init_scale: as in `polymp.torch.GradScaler`.
        growth_factor: likewise.
        backoff_factor: likewise.
        growth_interval: likewise.
        enabled: likewise.

    Warns:
        FutureWarning: always, as in torch: the spelling is deprecated.
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
