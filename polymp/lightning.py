"""Mixed precision for Lightning: a precision plugin for `Trainer`, and one for `Fabric`.

    Trainer(plugins=[polymp.lightning.Precision("16-mixed", policy="lean")])
    Fabric(plugins=[polymp.lightning.FabricPrecision("16-mixed", policy="lean")])

A plugin opens the region around the steps of a `LightningModule`, or around the modules that Fabric
has set up, and has the loss scaler.
"""

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import FullyShardedDataParallel

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.errors import BackendMissingError
from polymp.torch import GradScaler, autocast
from polymp.torch import hold_casts as held
from polymp.torch._trainers import (
    check_scaler,
    figures,
    metrics,
    refuse_outer_region,
    region_policy,
    stage,
    update_after,
    update_pending,
)

try:
    import lightning.fabric.plugins.precision as fabric
    import lightning.pytorch.plugins.precision as trainer
    from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
    from lightning.pytorch import LightningModule
except ImportError as error:
    raise BackendMissingError(
        "polymp.lightning needs the lightning package: pip install 'polymp[lightning]'."
    ) from error

__all__ = ["FabricPrecision", "Precision"]

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": None}
# Names of Lightning's, and of other libraries', for these modes.
_ALIASES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", torch.bfloat16), "bf16-mixed"),
    **dict.fromkeys(("16", 16, "fp16", "float16", "16-true", torch.float16), "16-mixed"),
    **dict.fromkeys(("32", 32, "fp32", "float32", torch.float32), "32-true"),
}
# Lightning's plugins, by the names under which its checkpoints have the states of their scalers.
_THEIRS = ("MixedPrecision", "FSDPPrecision")


class _Region:
    """The region of a plugin and its loss scaler, which are made once the device is known."""

    precision: Any
    scaler: Any

    def _configure(
        self, precision: str, policy: PolicyLike | None, scaler: GradScaler | None
    ) -> None:
        name = type(self).__name__
        if precision not in _DTYPES:
            meant = _ALIASES.get(precision, "bf16-mixed")
            raise ValueError(
                f"{name}({precision!r}): precision must be 'bf16-mixed', '16-mixed' or '32-true'. "
                f"Write {name}({meant!r}, policy=...). Lightning's other modes work without this "
                "plugin."
            )
        self.policy = region_policy(policy, f"plugins=[{name}({precision!r})]")
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"{name}({precision!r}) takes no scaler: loss scaling is for float16. Leave it "
                f"out, or write {name}('16-mixed', scaler=scaler)."
            )
        if scaler is not None:
            check_scaler(scaler, f"{name}('16-mixed')")
        self.precision, self.scaler = precision, scaler
        self.device: str | None = None
        self._autocast: autocast | None = None

    def _begin(self, device: str) -> None:
        if device == self.device:
            return
        self.device, dtype = device, _DTYPES[self.precision]
        if dtype is not None:
            self._autocast = autocast(device, dtype=dtype, policy=self.policy)
        if dtype is torch.float16 and self.scaler is None:
            self.scaler = GradScaler(device)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region; a context that does nothing for 32-true."""
        region = self._autocast
        if region is None:
            return nullcontext()
        name = type(self).__name__
        line = f"{name}({self.precision!r}, policy=...)"
        refuse_outer_region(region.device, region.fast_dtype, self.policy, name, line)
        return region


class Precision(_Region, trainer.FSDPPrecision):
    """A precision plugin for `lightning.Trainer`, with a policy and polymp's loss scaler.

        trainer = lightning.Trainer(plugins=[Precision("16-mixed", policy="lean")])

    It does what Lightning's own plugin for `precision` does, with every strategy of Lightning's
    that trains torch modules: one device, DDP, FSDP, and ModelParallelStrategy (FSDP2). Beyond
    that, it trains with LBFGS in float16, clips the gradients of fused optimizers and, by their
    norm, those of FSDP, and hands true gradients to `on_before_optimizer_step`. In float16 it logs
    `loss_scale` and `skipped_steps`.

    Checkpoints have the scaler's state as Lightning's own plugins write it, so that these load
    checkpoints of runs with polymp, and the other way round.

    With a policy, FSDP leaves parameters and gradients float32, and the policy decides about every
    cast; `FSDPStrategy(mixed_precision=...)` overrules that. Without one, FSDP casts as with
    Lightning's plugin.

    Args:
        precision: "bf16-mixed", "16-mixed", or "32-true", in which no region is opened and the
            policy has no effect.
        policy: which ops run in which dtype, as in `polymp.torch.autocast`.
        scaler: for 16-mixed, a loss scaler with other settings than `GradScaler(device)`.
        hold_casts: keep the casts of weights until the next optimizer step; pays with
            `accumulate_grad_batches`.

    Attributes:
        scaler: the loss scaler; None until the fit begins, and for other modes than 16-mixed.
        policy: the policy, loaded.
        device: the device type, "cpu", "cuda", ...; None until the fit begins.

    Raises:
        ValueError: `precision` is another one, a scaler is given for another mode than 16-mixed, or
            it is disabled.
        TypeError: `scaler` is no `polymp.torch.GradScaler`.
        PolicyError: the policy cannot be read, or has rules for modules; later, when a step begins:
            a region around `fit` has another dtype or policy.

    Source:
        Lightning 2.6, `lightning.pytorch.plugins.precision.MixedPrecision`.
    """

    # The base is the one plugin that the FSDP strategy accepts. It converts modules and batches to
    # float32; as with other plugins, they stay as they are.
    convert_module = trainer.Precision.convert_module
    convert_input = trainer.Precision.convert_input
    convert_output = trainer.Precision.convert_output
    tensor_init_context = trainer.Precision.tensor_init_context
    module_init_context = trainer.Precision.module_init_context

    def __init__(
        self,
        precision: str = "bf16-mixed",
        policy: PolicyLike | None = None,
        *,
        scaler: GradScaler | None = None,
        hold_casts: bool = False,
    ) -> None:
        super().__init__("32-true")
        self._configure(precision, policy, scaler)
        self._holds = hold_casts
        self._held: held | None = None
        self._root: nn.Module | None = None
        self._logged: object = None  # the epoch, and the figures that were logged last

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Learn the device, and the model; called by the strategy."""
        module = next(m for m in model.modules() if isinstance(m, LightningModule))
        self._begin(module.trainer.strategy.root_device.type)
        self.teardown()
        self._root = model
        if self._holds:
            self._held = held(model).__enter__()
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region; a context that does nothing for 32-true."""
        if self.device is None:
            raise RuntimeError(
                "Precision is for lightning.Trainer, and no Trainer has set it up. In Fabric write "
                f"Fabric(plugins=[FabricPrecision({self.precision!r}, policy=...)])."
            )
        return super().forward_context()

    def teardown(self) -> None:
        """Let the model and its casts go."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
        self._held = self._root = None

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step, or skip if a gradient is not finite."""
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

        def evaluate() -> Any:
            loss = closure()
            if loss is not None or not model.automatic_optimization:
                scaler.unscale_(optimizer)
                self._after_closure(model, optimizer)
            return loss

        if _needs_closure(type(optimizer)):  # type: ignore[arg-type]
            update_pending(scaler)  # not in the closure, where this step has begun
            result = scaler.step(optimizer, evaluate, **kwargs)
        else:
            result = evaluate()
            if result is None and model.automatic_optimization:
                return None  # training_step returned None
            result = scaler.step(optimizer, **kwargs)
        update_after(scaler, model.trainer.optimizers)
        self._log(model)
        return result

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> Any:  # type: ignore[override]
        """Scale the loss."""
        update_pending(self.scaler)
        return super().pre_backward(tensor, module)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; {} without one."""
        update_pending(self.scaler)
        return super().state_dict()

    def _log(self, model: LightningModule) -> None:
        """Log where a logger writes, when a figure has changed, and in each epoch once.

        A log takes a millisecond. The host may not know the figures: fused optimizers skip on the
        device.
        """
        loop: Any = model.trainer  # whose type lacks an attribute
        every, known = loop.log_every_n_steps, (loop.current_epoch, figures(self.scaler))
        written = every > 0 and (loop.global_step + 1) % every == 0
        if not loop.barebones and (written or known != self._logged):
            self._logged = known
            values = {
                "loss_scale": self.scaler._get_scale_async(),  # a tensor: nothing waits
                "skipped_steps": self.scaler.skipped_steps.float(),
            }
            model.log_dict(values, prog_bar=True)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of all gradients; under FSDP by that of the whole model's."""
        if isinstance(self._root, FullyShardedDataParallel):
            self._root.clip_grad_norm_(clip_val)
        else:
            trainer.Precision.clip_grad_by_norm(self, optimizer, clip_val)

    @property
    def mixed_precision_config(self) -> Any:
        """The dtypes that FSDP casts to; None with a policy."""
        return super().mixed_precision_config if self.policy is None else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the scaler's state under the names of Lightning's own plugins."""
        if state := checkpoint.pop(type(self).__qualname__, None):
            checkpoint.update(dict.fromkeys(_THEIRS, state))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scaler's state, from a run with polymp or with Lightning's own plugins."""
        state = next((checkpoint[name] for name in _THEIRS if name in checkpoint), None)
        if state is not None:
            self.load_state_dict(state)


class FabricPrecision(_Region, FabricFSDPPrecision):
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
        self._configure(precision, policy, scaler)
        self._module: Any = lambda: None
        if device is not None:
            self._begin(device)

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
        self._begin(parameter.device.type)

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


@cache
def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether `step` cannot be called without a closure, as that of LBFGS."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
