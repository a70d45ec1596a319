"""The CUDA spellings, with the arguments of torch.cuda.amp."""

import functools

import torch

from polymp.backends import torch as _backend


class autocast(_backend.autocast):  # the name is torch's
    """`polymp.torch.autocast("cuda", ...)`, with float16 as the low format."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
        *,
        policy: _backend.PolicyLike | None = None,
    ) -> None:
        """As `polymp.torch.autocast`."""
        super().__init__("cuda", dtype, enabled, cache_enabled, policy=policy)


class GradScaler(_backend.GradScaler):
    """`polymp.torch.GradScaler("cuda", ...)`."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """As `polymp.torch.GradScaler`."""
        super().__init__(
            "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )


custom_fwd = functools.partial(_backend.custom_fwd, device_type="cuda")
custom_bwd = functools.partial(_backend.custom_bwd, device_type="cuda")
