"""The CPU spellings, with the arguments of torch.cpu.amp."""

import torch

from polymp.backends.torch.autocast import api
from polymp.backends.torch.scaler import grad_scaler
from polymp.torch._spelling import deprecated


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cpu", ...)`, with bfloat16 as the low dtype."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
        *,
        policy: api.PolicyLike | None = None,
    ) -> None:
        """As `polymp.torch.autocast`, with torch.amp's warning that the spelling is old."""
        deprecated("autocast", "cpu")
        super().__init__("cpu", dtype, enabled, cache_enabled, policy=policy)


class GradScaler(grad_scaler.GradScaler):
    """`polymp.torch.GradScaler("cpu", ...)`."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """As `polymp.torch.GradScaler`, with torch.amp's warning that the spelling is old."""
        deprecated("GradScaler", "cpu")
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
