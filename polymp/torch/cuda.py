"""The deprecated names of torch.cuda.amp, with their arguments."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from polymp.backends.torch.autocast import api, custom_ops
from polymp.backends.torch.scaler import grad_scaler
from polymp.torch.cpu import _deprecated

P = ParamSpec("P")
R = TypeVar("R")


class autocast(api.autocast):  # the name is torch's
    """`polymp.torch.autocast("cuda", ...)`, by default in float16; warns that it is deprecated.

    Args:
        enabled: as in `polymp.torch.autocast`.
        dtype: likewise.
        cache_enabled: likewise.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype | str = torch.float16,
        cache_enabled: bool = True,
    ) -> None:
        _deprecated("autocast", "cuda")
        super().__init__("cuda", dtype, enabled, cache_enabled)


class GradScaler(grad_scaler.GradScaler):
    """`polymp.torch.GradScaler("cuda", ...)`; warns that it is deprecated.

    Args:
        args: of `polymp.torch.GradScaler`, after the device.
        kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _deprecated("GradScaler", "cuda")
        super().__init__("cuda", *args, **kwargs)


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | str | None = None
) -> Any:
    """Call `polymp.torch.custom_fwd` for "cuda"; warns that it is deprecated.

    Args:
        fwd: as in `polymp.torch.custom_fwd`.
        cast_inputs: likewise.

    Returns:
        The decorated forward; without `fwd`, a decorator.
    """
    _deprecated("custom_fwd", "cuda")
    return custom_ops.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[P, R]) -> Callable[P, R]:
    """Call `polymp.torch.custom_bwd` for "cuda"; warns that it is deprecated.

    Args:
        bwd: the backward, whose first argument is the ctx.

    Returns:
        The decorated backward.
    """
    _deprecated("custom_bwd", "cuda")
    return custom_ops.custom_bwd(bwd, device_type="cuda")
