"""`FabricPrecision`: the plugin for `lightning.Fabric`."""

import weakref
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.scaler import trainer_steps
from polymp.lightning.region import Region
from polymp.torch import GradScaler


class FabricPrecision(Region, FSDPPrecision):
    """A precision plugin for `lightning.Fabric`, with a policy and polymp's loss scaler.

        fabric = lightning.Fabric(plugins=[FabricPrecision("16-mixed", policy="lean")])

    `fabric.backward`, `fabric.clip_gradients`, `fabric.autocast` and `optimizer.step` work as with
    Fabric's own plugin. LBFGS trains in float16, and gradients of fused optimizers are clipped.
    Outputs of modules become float32, as with Fabric's plugin; their inputs are not rounded before
    they come in.

    Args:
        precision: "bf16-mixed", "16-mixed", or "32-true", which opens no region.
        policy: which ops run in which dtype, as in `polymp.torch.autocast`; None for 32-true.
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

    def __init__(
        self,
        precision: str = "bf16-mixed",
        policy: PolicyLike | None = None,
        *,
        scaler: GradScaler | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(precision, policy, scaler)
        self._module: Any = lambda: None
        if device is not None:
            self._begin(device)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the module, to look at its device; called by `fabric.setup`.

        Args:
            module: of the user.

        Returns:
            The module.
        """
        self._module = weakref.ref(module)
        return module

    def metrics(self) -> dict[str, float]:
        """Return `loss_scale` and `skipped_steps`, for a logger; nothing without a scaler.

        Call it after the step of the last optimizer.
        """
        trainer_steps.update_pending(self.scaler)
        return trainer_steps.metrics(self.scaler)

    def backward(
        self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Scale the loss, and run its backward pass; called by `fabric.backward`.

        Args:
            tensor: the loss.
            model: whose loss it is.
            args: of `torch.Tensor.backward`.
            kwargs: likewise.
        """
        trainer_steps.begin_backward(self.scaler)
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, or skip if a gradient is not finite; the scale changes before the next backward.

        Args:
            optimizer: of torch.
            kwargs: of its step, such as `closure`.

        Returns:
            The result of the step.
        """
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        return trainer_steps.step(self.scaler, optimizer, kwargs.pop("closure", None), **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scaler's state, of polymp's plugin or of Fabric's; call it after `setup`.

        Args:
            state_dict: from `state_dict` of such a plugin.
        """
        if self.device is None:
            self._find_device()
        super().load_state_dict(state_dict)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, before they are clipped.

        Args:
            optimizer: whose gradients are clipped.

        Raises:
            RuntimeError: gradients were clipped before the last backward pass.
        """
        if self.scaler is not None:
            trainer_steps.unscale_each(
                self.scaler, [optimizer], "Call fabric.clip_gradients(...) after the last "
                "fabric.backward(...) and before optimizer.step().",
            )  # fmt: skip

    def _find_device(self) -> None:
        """Take the device of the module that was set up last."""
        parameter = next(iter(getattr(self._module(), "parameters", tuple)()), None)
        if parameter is None:
            raise RuntimeError(
                "FabricPrecision does not know its device before fabric.setup(model). Write "
                f"FabricPrecision({self.precision!r}, device='cuda')."
            )
        self._begin(parameter.device.type)
