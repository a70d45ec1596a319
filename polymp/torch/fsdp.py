"""FSDP2 and regions: parameters are gathered in the dtype in which the policy uses them.

    for block in model.blocks:
        polymp.torch.fsdp.fully_shard(block, "lean", torch.bfloat16)
    polymp.torch.fsdp.fully_shard(model, "lean", torch.bfloat16)
    with polymp.torch.autocast("cuda", torch.bfloat16, policy="lean"): ...

A weight that a region casts can be cast before it is sent: half the bytes, and the same bits. One
that the policy uses in float32 has to be sent in float32. Gradients are added up in float32.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, regions, torch_table
from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.compat import distributed
from polymp.backends.torch.compat.accelerators import accelerator
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Rule

M = TypeVar("M", bound=nn.Module)

__all__ = ["fully_shard"]


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
    gathered in `dtype`, all others in float32; the two kinds make two groups. On one rank the
    results are those of the region without FSDP, bit for bit. Shard from the inside out, as with
    torch's. The module warns, once, if it runs in a region that uses a parameter in another dtype.

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
    uses = _ParameterUses(policy, dtype, path, _device_of(module))
    low = uses.of(module)
    most = low.get(module, any(low.values()))  # of the module's own group
    others: list[nn.Module] = []
    settled = set[nn.Module]()
    for name, m in module.named_modules():
        if m in settled or low.get(m, most) is most:
            continue
        inside = [n for n in m.modules() if n in low]
        settled.update(inside)
        if any(low[n] is most for n in inside):
            fully_shard(m, policy, dtype, path=_joined(path, name), **kwargs)
        else:
            others.append(m)
    if others:
        fsdp.fully_shard(others, mp_policy=uses.sent(not most), **kwargs)
    fsdp.fully_shard(module, mp_policy=uses.sent(most), **kwargs)
    module.register_forward_pre_hook(_RegionCheck(uses, low, [module, *others[:1]]))
    return module


# The op that reads the parameters of a module itself. Those of other classes are sent in float32.
_OPS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.MultiheadAttention: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}


class _ParameterUses:
    """How the region of a policy, or of the device's table, uses the parameters of a module."""

    def __init__(self, policy: Any, dtype: Any, path: object, device: str) -> None:
        if not isinstance(path, str):
            raise TypeError(
                "fully_shard(): path is that of the module in the model, such as 'layers.0', got "
                f"{path!r}"
            )
        self.dtype = dtype_names.of(dtype, "fully_shard(): dtype", LOW)
        self.low = dtype_names.NAMES[self.dtype]
        self.path, self.device = path, device
        table = torch_table.policy(device)
        self.policy: Policy = table if policy is None else policy_files.load(policy)

    def sent(self, low: bool) -> fsdp.MixedPrecisionPolicy:
        """Return the FSDP policy of a group of parameters that the region uses low, or does not."""
        return fsdp.MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    def are_low(self, kind: type[nn.Module], name: str = "") -> bool:
        """Return whether the op that reads the parameters of such a module runs low."""
        op = next((op for known, op in _OPS.items() if issubclass(kind, known)), "")
        policy = self.policy.at(_joined(self.path, name))
        row = policy.winner(op, self.low) if op else None
        return row is not None and row.rule is Rule.LOWER

    def of(self, module: nn.Module) -> dict[nn.Module, bool]:
        """Return modules with parameters that are not sharded yet, and whether all are low."""
        found: dict[nn.Module, bool] = {}
        full: set[nn.Parameter] = set()
        for name, m in module.named_modules():
            own = list(m.parameters(recurse=False))
            if own and not any(isinstance(p, DTensor) for p in own):
                found[m] = self.are_low(type(m), name)
                full.update(() if found[m] else own)
        return {m: low and full.isdisjoint(m.parameters(recurse=False)) for m, low in found.items()}


class _RegionCheck:
    """A hook that warns if the region in force uses parameters in dtypes that are not sent."""

    def __init__(
        self, uses: _ParameterUses, inside: Iterable[nn.Module], sharded: Sequence[nn.Module]
    ) -> None:
        self._uses, self._sharded = uses, sharded
        self._kinds = {type(m) for m in inside}
        self._warned = False

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        for one in self._sharded:
            distributed.settle_dtypes(one)
        uses, device = self._uses, self._uses.device
        region = regions.in_force(device)
        policy = region.policy or torch_table.policy(device)
        same = (policy, region.dtype) == (uses.policy, uses.low)
        if self._warned or not region.enabled or same:
            return
        other = _ParameterUses(policy, region.dtype, uses.path, device)
        differ = [
            kind.__name__
            for kind in self._kinds
            if uses.are_low(kind) != other.are_low(kind)
            or (other.low != uses.low and uses.are_low(kind))
        ]
        if differ:
            self._warned = True
            warnings.warn(
                f"{type(module).__name__} was sharded for policy {uses.policy.name!r} in "
                f"{uses.low}, and runs in a region of policy {policy.name!r} in {other.low}, which "
                f"uses the weights of {', '.join(sorted(differ))} in another dtype than FSDP "
                f"sends. Write polymp.torch.fsdp.fully_shard(module, {policy.name!r}, "
                f"torch.{other.low}), or autocast({device!r}, torch.{uses.low}, "
                f"policy={uses.policy.name!r}).",
                stacklevel=code_origin.outside(),
            )


def _joined(path: str, name: str) -> str:
    """Return the path of a module below another."""
    return ".".join(filter(None, (path, name)))


def _device_of(module: nn.Module) -> str:
    """Return the device type of a module's parameters; the accelerator's if they have none."""
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    return kinds.pop() if kinds else accelerator()
