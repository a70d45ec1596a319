"""`needs_float32`: which parameters a forward pass uses otherwise than by a cast to the low dtype.

`freeze` finds the same of weights that are not trained.
"""

from collections.abc import Callable

import torch

from polymp.backends.torch.autocast import dtype_names, region_casts
from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.compat import distributed
from polymp.backends.torch.compat.modes import storage_key
from polymp.backends.torch.weights import freeze_usage
from polymp.weights import store


def needs_float32(
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], object],
    dtype: torch.dtype | str = torch.bfloat16,
) -> dict[torch.Tensor, str]:
    """Return the parameters that the region does not only cast to the low dtype, and why.

        keep = needs_float32(optimizer, lambda: loss_of(model, batch))   # opens its region
        optimizer = low_weights(optimizer, keep=keep)

    `low_weights(optimizer, keep=forward)` is the same in one call.

    `forward` runs once, and every use of a parameter is watched below autocast and autograd, as
    `freeze` does. A parameter that an op reads in float32, such as that of a norm or an embedding
    where the policy keeps these, would be rounded there if it were stored low.

    Args:
        optimizer: whose parameters they are.
        forward: runs the model in its region, as the training loop does. What it changes besides,
            such as running means, stays changed.
        dtype: the low dtype, bfloat16 or float16.

    Returns:
        A reason by parameter: the op that reads it, or that none does. Tensors
        that share memory are in it together.

    Raises:
        TypeError: `optimizer` is no optimizer, or `forward` cannot be called.
        ValueError: no parameter was cast to the low dtype, or it is another dtype.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not callable(forward):
        raise TypeError(
            "needs_float32() takes an optimizer and a function that runs the model in its region, "
            f"got {type(optimizer).__name__} and {type(forward).__name__}. Write: "
            "needs_float32(optimizer, lambda: loss_of(model, batch))."
        )
    name = store.low_name(dtype, "needs_float32(): dtype")
    return reads(optimizer, forward, name, "needs_float32(): forward()")


def reads(
    optimizer: torch.optim.Optimizer, forward: Callable[[], object], name: str, said: str
) -> dict[torch.Tensor, str]:
    """Return what `needs_float32` does."""
    sharing: dict[int, dict[str, torch.Tensor]] = {}
    for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        key = storage_key(distributed.local(p)) or id(p)
        sharing.setdefault(key, {})[str(at)] = p
    groups = [freeze_usage.Group(tensors) for tensors in sharing.values()]
    region_casts.drop()  # a cast that a region around this has kept would not be seen
    with freeze_usage.Uses(groups, DTYPES[name], {}):
        forward()
    if not any(group.cast for group in groups):
        given = dtype_names.NAMES[DTYPES[name]]
        raise ValueError(
            f"{said} cast no parameter of the optimizer to {given}. It has to run the model in its "
            f"region: with autocast(device, dtype=torch.{given}): model(x)."
        )
    for group in groups:
        if not group.cast:
            group.stays("is not used in the forward pass")
    return {p: group.why for group in groups if group.why for p in group.each()}
