"""Mixed precision for Lightning: a precision plugin for `Trainer`, and `catch`.

    Trainer(plugins=[polymp.lightning.Precision("16-mixed", policy="lean")])

The plugin opens the region around the steps of a `LightningModule`, and has the loss scaler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.versions import require

require("torch")
require("lightning")

import lightning.pytorch.plugins.precision as plugins  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from lightning.fabric.plugins.precision import Precision as Plain  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402

from polymp.backends.torch.autocast.api import PolicyLike, autocast  # noqa: E402
from polymp.backends.torch.scaler import optimizer_step, trainer_steps  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402
from polymp.torch import catch as catch_steps  # noqa: E402

__all__ = ["Precision", "catch"]


def __dir__() -> list[str]:
    return __all__


_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Lightning's plugins, by the names under which its checkpoints have the states of their scalers.
_THEIRS = ("MixedPrecision", "FSDPPrecision")


class Precision(plugins.FSDPPrecision):
    """A precision plugin for `lightning.Trainer`, with a policy and polymp's loss scaler.

        trainer = lightning.Trainer(plugins=[Precision("16-mixed", policy="lean")])

    It does what Lightning's own plugin for `precision` does, on one device and with DDP, FSDP, and
    ModelParallelStrategy (FSDP2), and each loads the other's checkpoints. Beyond that, it trains
    with LBFGS in float16, clips the gradients of fused optimizers and, by their norm, those of
    FSDP, and hands true gradients to `on_before_optimizer_step`. In float16 it logs `loss_scale`
    and `skipped_steps`.

    With a policy, FSDP leaves parameters and gradients float32, and the policy decides about every
    cast; `FSDPStrategy(mixed_precision=...)` overrules that.

    Args:
        precision: "bf16-mixed" or "16-mixed".
        policy: which ops run in which dtype, as in `polymp.torch.autocast`.
        scaler: for 16-mixed, a loss scaler with other settings than `GradScaler(device)`.

    Attributes:
        scaler: the loss scaler; None until the fit begins, and in bf16-mixed.
        policy: the policy, loaded.
        device: the device type, "cpu", "cuda", ...; None until the fit begins.

    Raises:
        ValueError: `precision` is another one, a scaler is given for bf16-mixed, or is disabled.
        TypeError: `scaler` is no `polymp.torch.GradScaler`.
        PolicyError: the policy cannot be read, or has rules for modules.

    Source:
        Lightning 2.6, `lightning.pytorch.plugins.precision.MixedPrecision`.
    """

    # Lightning's FSDP strategy accepts no plugin but one of this base, which converts batches to
    # float32. Here they stay as they are.
    convert_input = Plain.convert_input
    convert_output = Plain.convert_output
    tensor_init_context = Plain.tensor_init_context
    module_init_context = Plain.module_init_context

    def __init__(
        self,
        precision: str = "bf16-mixed",
        policy: PolicyLike | None = None,
        *,
        scaler: GradScaler | None = None,
    ) -> None:
        super().__init__("32-true")
        if precision not in _DTYPES:
            raise ValueError(
                f"Precision({precision!r}): precision must be 'bf16-mixed' or '16-mixed'. Write "
                "Precision('bf16-mixed', policy=...). Lightning's other modes work without it."
            )
        self.policy = None if policy is None else policy_files.load(policy)
        asked, half = f"Precision({precision!r})", precision == "16-mixed"
        if self.policy is not None and self.policy.scopes:
            raise PolicyError(
                f"policy {self.policy.name!r} has rules for modules "
                f"({', '.join(self.policy.scopes)}), whose paths a region does not see. Write "
                f"polymp.torch.scoped(model, policy), and then plugins=[{asked}]."
            )
        trainer_steps.check_scaler(scaler, asked, half, "Precision('16-mixed', scaler=scaler)")
        self.precision: Any = precision
        self.scaler: Any = scaler
        self.device: str | None = None
        self._root: nn.Module | None = None
        self._logged: object = None  # the epoch, and the figures that were logged last

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        # Called by the strategy, once the device is known, with the model as it has wrapped it.
        module = next(m for m in model.modules() if isinstance(m, LightningModule))
        device, dtype = module.trainer.strategy.root_device.type, _DTYPES[self.precision]
        if device != self.device:
            self.device, self._region = device, autocast(device, dtype, policy=self.policy)
        if dtype is torch.float16 and self.scaler is None:
            self.scaler = GradScaler(device)
        self._root = model
        return super().connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        self._root = None

    def forward_context(self) -> AbstractContextManager[Any]:
        if self.device is None:
            raise RuntimeError(
                "Precision is for lightning.Trainer, and no Trainer has set it up. In Fabric, put "
                "the policy on the model, polymp.torch.scoped(model, policy), and write "
                "Fabric(precision='bf16-mixed')."
            )
        return self._region

    @property
    def mixed_precision_config(self) -> Any:
        """The dtypes that FSDP casts to; None with a policy, which decides about every cast."""
        return super().mixed_precision_config if self.policy is None else None

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; {} without one."""
        trainer_steps.update_pending(self.scaler)
        return super().state_dict()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

        def evaluate() -> Any:
            loss = closure()
            if loss is not None or not model.automatic_optimization:
                scaler.unscale_(optimizer)
                self._after_closure(model, optimizer)
            return loss

        inside = optimizer_step.needs_closure(optimizer)
        if not inside and evaluate() is None and model.automatic_optimization:
            return None  # training_step returned None
        result = trainer_steps.step(
            scaler, optimizer, evaluate if inside else None, model.trainer.optimizers, **kwargs
        )
        self._log(model)
        return result

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> Any:  # type: ignore[override]
        trainer_steps.update_pending(self.scaler)
        return super().pre_backward(tensor, module)

    def _log(self, model: LightningModule) -> None:
        """Log where a logger writes, after a change, and once an epoch: a log takes 1 ms."""
        loop: Any = model.trainer  # whose type lacks an attribute
        every, scaler = loop.log_every_n_steps, self.scaler
        state = scaler._recall()  # None where the host does not know it
        known = loop.current_epoch, state and (state.scale, state.skipped)
        written = every > 0 and (loop.global_step + 1) % every == 0
        if not loop.barebones and (written or known != self._logged):
            self._logged = known
            skipped = scaler.skipped_steps.float()  # on the device, as the scale: no wait
            figures = {"loss_scale": scaler._get_scale_async(), "skipped_steps": skipped}
            model.log_dict(figures, prog_bar=True)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        # Under FSDP, by the norm of the gradients on all ranks.
        if isinstance(self._root, FullyShardedDataParallel):
            self._root.clip_grad_norm_(clip_val)
        else:
            plugins.Precision.clip_grad_by_norm(self, optimizer, clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Under the names of Lightning's own plugins.
        if state := checkpoint.pop(type(self).__qualname__, None):
            checkpoint.update(dict.fromkeys(_THEIRS, state))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = next((checkpoint[name] for name in _THEIRS if name in checkpoint), None)
        if state is not None:
            self.load_state_dict(state)


def catch(trainer: Trainer, **options: Any) -> Trainer:
    """Have a Trainer stop at the first step whose numbers break, and name the op.

        trainer = polymp.lightning.catch(lightning.Trainer(...))
        trainer.fit(model, batches)

    It wraps what the Trainer does for an optimizer step, with any precision plugin: the forward and
    the backward pass, and the optimizer's step. With manual optimization, write
    `model.training_step = polymp.torch.catch(model.training_step)` instead.

    Args:
        trainer: of Lightning. It is changed in place.
        options: of `polymp.torch.catch`: `every`, `on_bad`, `of`.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is no `lightning.Trainer`, or as `polymp.torch.catch` raises it.
        ValueError: as `polymp.torch.catch` raises it.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"polymp.lightning.catch() takes a lightning.Trainer, got {type(trainer).__name__}. "
            "Write trainer = polymp.lightning.catch(lightning.Trainer(...))."
        )
    plugin: Any = trainer.precision_plugin
    inner = plugin.optimizer_step

    def step(optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        losses: list[Any] = []

        def evaluate() -> Any:
            losses.append(closure())
            return losses[-1]

        inner(optimizer, model=model, closure=evaluate, **kwargs)
        return losses[-1] if losses else None  # an optimizer need not call its closure

    of = options.pop("of", ())
    of = [plugin, *(of if isinstance(of, (list, tuple)) else [of])]  # the plugin has a scaler
    plugin.optimizer_step = catch_steps(step, of=of, **options)
    return trainer
