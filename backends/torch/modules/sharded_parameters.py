"""In which dtype a region uses the parameters of a module, and FSDP2 sends them."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from polymp import code_origin
from polymp.backends.torch.autocast import dtype_names, regions, torch_table
from polymp.backends.torch.compat import distributed
from polymp.backends.torch.compat.accelerators import accelerator
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Rule

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


class ParameterUses:
    """How the region of a policy uses parameters.

    Args:
        policy: of the region.
        dtype: its low dtype.
        path: of the module in the model.
        what: the call, for messages.
        device: whose table is used without a policy.

    Raises:
        TypeError: `dtype` is no dtype, or `path` no string.
        ValueError: `dtype` is not a low dtype.
        PolicyError: the policy cannot be read.
    """

    def __init__(self, policy: Any, dtype: Any, path: object, what: str, device: str) -> None:
        if not isinstance(path, str):
            raise TypeError(
                f"{what}: path is that of the module in the model, such as 'layers.0', got {path!r}"
            )
        self.dtype = dtype_names.of(dtype, f"{what}: dtype", LOW)
        table = torch_table.policy(device)
        self.policy: Policy = table if policy is None else policy_files.load(policy)

    def sent(self, low: bool) -> fsdp.MixedPrecisionPolicy:
        """Return the FSDP policy of a group of parameters that the region uses low, or does not."""
        return fsdp.MixedPrecisionPolicy(
            param_dtype=self.dtype if low else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    def are_low(self, kind: type[nn.Module], path: str) -> bool:
        """Return whether the op that reads the parameters of such a module runs low at a path."""
        op = next((op for known, op in _OPS.items() if issubclass(kind, known)), "")
        row = self.policy.at(path).winner(op, dtype_names.NAMES[self.dtype]) if op else None
        return row is not None and row.rule is Rule.LOWER

    def of(self, module: nn.Module, path: str) -> dict[nn.Module, bool]:
        """Return modules with parameters that are not sharded yet, and whether all are low."""
        found: dict[nn.Module, bool] = {}
        full: set[nn.Parameter] = set()
        for name, m in module.named_modules():
            own = list(m.parameters(recurse=False))
            if own and not any(isinstance(p, DTensor) for p in own):
                found[m] = self.are_low(type(m), joined(path, name))
                full.update(() if found[m] else own)
        return {m: low and full.isdisjoint(m.parameters(recurse=False)) for m, low in found.items()}


class RegionCheck:
    """A hook that warns if the region in force uses parameters in other dtypes than they are sent.

    Args:
        uses: what the parameters are sent for.
        device: theirs.
        path: of the module in the model.
        inside: the modules that have parameters.
        sharded: a module of each group.
    """

    def __init__(
        self,
        uses: ParameterUses,
        device: str,
        path: str,
        inside: Sequence[nn.Module],
        sharded: Sequence[nn.Module],
    ) -> None:
        self._sharded = sharded
        self._uses, self._device, self._path = uses, device, path
        self._kinds = {type(m) for m in inside}
        self._warned = False

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        for one in self._sharded:
            distributed.settle_dtypes(one)
        if self._warned:
            return
        region, uses = regions.in_force(self._device), self._uses
        policy = region.policy or torch_table.policy(self._device)
        low = dtype_names.NAMES[uses.dtype]
        if not region.enabled or (policy, region.dtype) == (uses.policy, low):
            return
        other = ParameterUses(policy, region.dtype, self._path, "fully_shard()", self._device)
        differ = [
            kind.__name__
            for kind in self._kinds
            if uses.are_low(kind, self._path) != other.are_low(kind, self._path)
            or (region.dtype != low and uses.are_low(kind, self._path))
        ]
        if differ:
            self._warned = True
            warnings.warn(
                f"{type(module).__name__} was sharded for policy {uses.policy.name!r} in {low}, "
                f"and runs in a region of policy {policy.name!r} in {region.dtype}, which uses the "
                f"weights of {', '.join(sorted(differ))} in another dtype than FSDP sends. Write "
                f"polymp.torch.fsdp.fully_shard(module, {policy.name!r}, torch.{region.dtype}), or "
                f"autocast({self._device!r}, torch.{low}, policy={uses.policy.name!r}).",
                stacklevel=code_origin.outside(),
            )


def joined(path: str, name: str) -> str:
    """Return the path of a module below another."""
    return ".".join(filter(None, (path, name)))


def device_of(module: nn.Module) -> str:
    """Return the device type of a module's parameters; the accelerator's if they have none."""
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    return kinds.pop() if kinds else accelerator()
