"""The CUDA spellings, with the arguments of torch.cuda.amp."""

from collections.abc import Callable
from typing import Any

import torch

from polymp.backends.torch.autocast import api, custom_function
from polymp.backends.torch.scaler import grad_scaler
from polymp.torch._spelling import deprecated


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cuda", ...)`, with float16 as the low dtype."""

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
        *,
        policy: api.PolicyLike | None = None,
    ) -> None:
        """As `polymp.torch.autocast`, with torch.amp's warning that the spelling is old."""
        deprecated("autocast", "cuda")
        super().__init__("cuda", dtype, enabled, cache_enabled, policy=policy)


class GradScaler(grad_scaler.GradScaler):
    """`polymp.torch.GradScaler("cuda", ...)`."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """As `polymp.torch.GradScaler`, with torch.amp's warning that the spelling is old."""
        deprecated("GradScaler", "cuda")
        super().__init__(
            "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
) -> Callable[..., Any]:
    """`polymp.torch.custom_fwd(..., device_type="cuda")`."""
    deprecated("custom_fwd", "cuda")
    return custom_function.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """`polymp.torch.custom_bwd(..., device_type="cuda")`."""
    deprecated("custom_bwd", "cuda")
    return custom_function.custom_bwd(bwd, device_type="cuda")
