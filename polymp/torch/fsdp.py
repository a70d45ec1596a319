"""FSDP2 and regions: parameters are gathered in the dtype in which the policy uses them.

    for block in model.blocks:
        polymp.torch.fsdp.fully_shard(block, "lean", torch.bfloat16)
    polymp.torch.fsdp.fully_shard(model, "lean", torch.bfloat16)
    with polymp.torch.autocast("cuda", torch.bfloat16, policy="lean"): ...

A region casts the weight of a linear layer where it is used. FSDP can cast the piece of each rank
before it is sent: half the bytes, and the same bits. A weight that the policy uses in float32, such
as that of a normalisation, has to be sent in float32. Gradients are added up in float32.
"""

from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed import fsdp

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.compat.accelerators import accelerator
from polymp.backends.torch.modules.sharded_parameters import (
    ParameterUses,
    RegionCheck,
    device_of,
    joined,
)

M = TypeVar("M", bound=nn.Module)

__all__ = ["fully_shard", "mixed_precision"]


def mixed_precision(
    policy: PolicyLike | None = None, dtype: torch.dtype | str = torch.bfloat16, path: str = ""
) -> fsdp.MixedPrecisionPolicy:
    """Return the FSDP2 policy that goes with a region: gather low, add up gradients in float32.

        fully_shard(model, mp_policy=mixed_precision("lean", torch.bfloat16))

    For torch's own `fully_shard`, which sends all parameters of a group in one dtype: also those
    that the region uses in float32, which are rounded then. `polymp.torch.fsdp.fully_shard` sends
    these in float32. Inputs of the module are not cast: the region does it, op by op.

    Args:
        policy: of the region; None for torch's own table.
        dtype: the low dtype of the region, bfloat16 or float16.
        path: of the module in the model, for a policy with rules by module path.

    Returns:
        A `torch.distributed.fsdp.MixedPrecisionPolicy`; it gathers in the parameters' own dtype if
        the policy does not run linear layers low.

    Raises:
        TypeError: `dtype` is no dtype, or `path` no string.
        ValueError: `dtype` is not a low dtype.
        PolicyError: the policy cannot be read.
    """
    uses = ParameterUses(policy, dtype, path, "mixed_precision()", accelerator())
    return uses.sent(uses.are_low(nn.Linear, path))


def fully_shard(
    module: M,
    policy: PolicyLike | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    *,
    path: str = "",
    **kwargs: Any,
) -> M:
    """Shard a module as torch's `fully_shard` does, with each parameter sent as the region uses it.

    Parameters that the policy uses low (those of linear layers, convolutions and attention) are
    gathered in `dtype`, all others in float32; the two kinds make two groups. The results are the
    same bits as those of the region without FSDP, on one rank. Modules inside that are sharded
    already are left alone, so shard from the inside out, as with torch's.

    The module warns, once, if it runs in a region that uses a parameter in another dtype.

    Args:
        module: a block or the model, in float32.
        policy: of the region; None for torch's own table.
        dtype: the low dtype of the region, bfloat16 or float16.
        path: of the module in the model, for a policy with rules by module path.
        kwargs: of torch's `fully_shard`, but for `mp_policy`: mesh, reshard_after_forward, ...

    Returns:
        The module.

    Raises:
        TypeError: `module` is no module, `dtype` no dtype, `path` no string, or `mp_policy` was
            given.
        ValueError: `dtype` is not a low dtype.
        PolicyError: the policy cannot be read.
    """
    if "mp_policy" in kwargs:
        raise TypeError(
            "polymp.torch.fsdp.fully_shard() makes mp_policy from policy and dtype. Leave it out, "
            "or call torch.distributed.fsdp.fully_shard(module, mp_policy=...)."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"polymp.torch.fsdp.fully_shard() takes a torch.nn.Module, got {module!r}.")
    uses = ParameterUses(policy, dtype, path, "fully_shard()", device_of(module))
    low = uses.of(module, path)
    most = low.get(module, any(low.values()))  # of the module's own group
    others: list[nn.Module] = []
    settled = set[nn.Module]()
    for name, m in module.named_modules():
        if m in settled or low.get(m, most) is most:
            continue
        inside = [n for n in m.modules() if n in low]
        settled.update(inside)
        if any(low[n] is most for n in inside):
            fully_shard(m, policy, dtype, path=joined(path, name), **kwargs)
        else:
            others.append(m)
    if others:
        fsdp.fully_shard(others, mp_policy=uses.sent(not most), **kwargs)
    fsdp.fully_shard(module, mp_policy=uses.sent(most), **kwargs)
    check = RegionCheck(uses, device_of(module), path, [*low], [module, *others[:1]])
    module.register_forward_pre_hook(check)
    return module
