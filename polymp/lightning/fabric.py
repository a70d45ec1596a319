"""`FabricPrecision`: the plugin for `lightning.Fabric`."""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import lightning.fabric.plugins.precision as fabric
import torch
import torch.nn as nn
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.lightning.region import Region
from polymp.torch import GradScaler
from polymp.torch._trainers import metrics, stage, update_pending


class FabricPrecision(Region, FSDPPrecision):
    """A precision plugin for `lightning.Fabric`, with a policy and polymp's loss scaler.

        fabric = lightning.Fabric(plugins=[FabricPrecision("16-mixed", policy="lean")])

    `fabric.backward`, `fabric.clip_gradients`, `fabric.autocast` and `optimizer.step` work as with
    Fabric's own plugin. LBFGS trains in float16, and gradients of fused optimizers are clipped.
    Outputs of modules become float32, as with Fabric's plugin; their inputs are not rounded before
    they come in. To cast less, write `with polymp.torch.hold_casts(model):` around the loop.

    Args:
        precision: "bf16-mixed", "16-mixed", or "32-true", in which no region is opened and the
            policy has no effect.
        policy: which ops run in which dtype, as in `polymp.torch.autocast`.
        scaler: for 16-mixed, a loss scaler with other settings than `GradScaler(device)`.
        device: the device type; None for that of the parameters of the module set up last, which
            differs from it where FSDP offloads them.

    Attributes:
        scaler: the loss scaler; None for other modes than 16-mixed. Save it with the rest:
            `fabric.save(path, {"model": model, "precision": plugin})`.
        policy: the policy, loaded.
        device: the device type; None until it is known.

    Raises:
        ValueError: as in `Precision`.
        TypeError: likewise.
        PolicyError: likewise.
        RuntimeError: later: the device is needed before a module was set up.

    Source:
        Lightning 2.6, `lightning.fabric.plugins.precision.MixedPrecision`.
    """

    convert_input = fabric.Precision.convert_input
    tensor_init_context = fabric.Precision.tensor_init_context
    module_init_context = fabric.Precision.module_init_context

    def __init__(
        self,
        precision: str = "bf16-mixed",
        policy: PolicyLike | None = None,
        *,
        scaler: GradScaler | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__("32-true")
        self.configure(precision, policy, scaler)
        self._module: Any = lambda: None
        if device is not None:
            self.begin(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the module, to look at its device; called by `fabric.setup`."""
        self._module = weakref.ref(module)
        return module

    def metrics(self) -> dict[str, float]:
        """Return `loss_scale` and `skipped_steps`, for a logger; nothing without a scaler.

        Call it after the step of the last optimizer.
        """
        update_pending(self.scaler)
        return metrics(self.scaler)

    def backward(
        self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kw: Any
    ) -> None:
        """Scale the loss, and run its backward pass."""
        update_pending(self.scaler)
        super().backward(tensor, model, *args, **kw)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, or skip if a gradient is not finite; the scale changes before the next backward."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if kwargs.get("closure") is not None:
            update_pending(self.scaler)  # not in the closure, where this step has begun
        return self.scaler.step(optimizer, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; {} without one."""
        update_pending(self.scaler)
        return super().state_dict()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region; a context that does nothing for 32-true."""
        self._find_device()
        return super().forward_context()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scaler's state, of polymp's plugin or of Fabric's; call it after `setup`."""
        self._find_device()
        super().load_state_dict(state_dict)

    def _find_device(self) -> None:
        if self.device is not None:
            return
        parameter = next(iter(getattr(self._module(), "parameters", tuple)()), None)
        if parameter is None:
            raise RuntimeError(
                "FabricPrecision does not know its device before fabric.setup(model). Write "
                f"FabricPrecision({self.precision!r}, device='cuda')."
            )
        self.begin(parameter.device.type)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, before they are clipped."""
        if self.scaler is None:
            return
        if stage(self.scaler, optimizer) is OptState.UNSCALED:
            raise RuntimeError(
                "the gradients of this optimizer were clipped before, and are clipped again. Clip "
                "once, after the last fabric.backward(...) and before optimizer.step()."
            )
        self.scaler.unscale_(optimizer)
