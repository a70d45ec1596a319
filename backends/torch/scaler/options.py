"""Checks of the arguments of a loss scaler; `Options` holds those that are not of the rule."""

import warnings
from typing import Any, Literal, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import accelerators
from polymp.backends.torch.scaler import distributed
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import OnStuck, checked_on_stuck
from polymp.scaling.scale_rule import ScaleRule

SkipOn = Literal["auto", "host", "device"]


class Options(NamedTuple):
    """Arguments of `GradScaler` by their names."""

    on_stuck: OnStuck
    stuck_after: int
    strict: bool
    allow_fp16: bool
    check_loss: bool
    skip_on: SkipOn
    process_group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Options":
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled. Save its state_dict() and load "
                "it into one that was made with the group."
            )
        return Options, tuple(self)


def acts_on(device: object, dtype: object, enabled: bool) -> bool:
    """Return whether a scaler with these arguments is enabled."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a name such as 'cuda' or 'cpu', got {device!r}. The first scale "
            "is GradScaler(device, init_scale)."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = dtype_names.of(dtype, "GradScaler(): dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be the region's low dtype, a float dtype, got {dtype}.")
    acts = enabled and dtype in (None, torch.float16)
    if acts and device == "cuda" and accelerators.cuda_missing():
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
            stacklevel=3,
        )
        return False
    return acts


def checked_rule(rule: ScaleRule) -> ScaleRule:
    """Check the constants of a rule; the errors are torch.amp's where torch.amp has one."""
    if scale_rule.number("growth_factor", rule.growth) <= 1.0:
        raise AssertionError("The growth factor must be > 1.0.")
    if scale_rule.number("backoff_factor", rule.backoff) >= 1.0:
        raise AssertionError("The backoff factor must be < 1.0.")
    return scale_rule.checked(rule)


def checked(options: Options) -> Options:
    """Check the options."""
    if options.skip_on not in ("auto", "host", "device"):
        raise ValueError(f"skip_on must be 'auto', 'host' or 'device', got {options.skip_on!r}.")
    checked_on_stuck(options.on_stuck, options.stuck_after)
    distributed.check_group(options.process_group)
    return options
