"""`Precision`: the plugin for `lightning.Trainer`."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch.plugins.precision as plugins
import torch
import torch.nn as nn
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.scaler import optimizer_step, trainer_steps
from polymp.lightning.region import Region
from polymp.torch import GradScaler
from polymp.torch import catch as catch_steps

# Lightning's plugins, by the names under which its checkpoints have the states of their scalers.
_THEIRS = ("MixedPrecision", "FSDPPrecision")


class Precision(Region, plugins.FSDPPrecision):
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
        precision: "bf16-mixed", "16-mixed", or "32-true", which opens no region.
        policy: which ops run in which dtype, as in `polymp.torch.autocast`; None for 32-true.
        scaler: for 16-mixed, a loss scaler with other settings than `GradScaler(device)`.

    Attributes:
        scaler: the loss scaler; None until the fit begins, and for other modes than 16-mixed.
        policy: the policy, loaded.
        device: the device type, "cpu", "cuda", ...; None until the fit begins.

    Raises:
        ValueError: `precision` is another one, a policy is given for 32-true, a scaler is given for
            another mode than 16-mixed, or it is disabled.
        TypeError: `scaler` is no `polymp.torch.GradScaler`.
        PolicyError: the policy cannot be read, or has rules for modules; later, when a step begins:
            a region around `fit` has another dtype or policy.

    Source:
        Lightning 2.6, `lightning.pytorch.plugins.precision.MixedPrecision`.
    """

    convert_output = plugins.Precision.convert_output  # as other plugins of the Trainer

    def __init__(
        self,
        precision: str = "bf16-mixed",
        policy: PolicyLike | None = None,
        *,
        scaler: GradScaler | None = None,
    ) -> None:
        super().__init__(precision, policy, scaler)
        self._root: nn.Module | None = None
        self._logged: object = None  # the epoch, and the figures that were logged last

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Learn the device, and the model; called by the strategy.

        Args:
            model: as the strategy has wrapped it.
            optimizers: of the model.
            lr_schedulers: of the optimizers.

        Returns:
            The three.
        """
        module = next(m for m in model.modules() if isinstance(m, LightningModule))
        self._begin(module.trainer.strategy.root_device.type)
        self._root = model
        return super().connect(model, optimizers, lr_schedulers)

    def _find_device(self) -> None:
        """Raise: no trainer has called `connect`."""
        raise RuntimeError(
            "Precision is for lightning.Trainer, and no Trainer has set it up. In Fabric write "
            f"Fabric(plugins=[FabricPrecision({self.precision!r}, policy=...)])."
        )

    def teardown(self) -> None:
        """Let the model go."""
        self._root = None

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step, or skip if a gradient is not finite.

        Args:
            optimizer: to step.
            model: of the trainer.
            closure: evaluates the loss and its gradients.
            kwargs: of the step.

        Returns:
            The result of the step, or of a closure that computed no loss.
        """
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
        """Scale the loss.

        Args:
            tensor: the loss.
            module: of the trainer.

        Returns:
            The scaled loss.
        """
        trainer_steps.update_pending(self.scaler)
        return super().pre_backward(tensor, module)

    def _log(self, model: LightningModule) -> None:
        """Log where a logger writes, after a change, and once an epoch: a log takes 1 ms."""
        loop: Any = model.trainer  # whose type lacks an attribute
        every, scaler = loop.log_every_n_steps, self.scaler
        known = loop.current_epoch, trainer_steps.known_metrics(scaler)
        written = every > 0 and (loop.global_step + 1) % every == 0
        if not loop.barebones and (written or known != self._logged):
            self._logged = known
            model.log_dict(trainer_steps.metrics_on_device(scaler), prog_bar=True)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of all gradients; under FSDP by that of the whole model's.

        Args:
            optimizer: whose gradients are clipped.
            clip_val: the largest norm.
        """
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
        options: of `polymp.torch.catch`: `every`, `on_bad`, `jump`, `of`.

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
    inner, result = plugin.optimizer_step, [None]

    def step(optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> list[Any]:
        losses: list[Any] = []

        def evaluate() -> Any:
            losses.append(closure())
            return losses[-1]

        result[0] = inner(optimizer, model=model, closure=evaluate, **kwargs)
        return losses

    caught = catch_steps(step, **options)

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        caught(*args, **kwargs)
        return result[0]

    plugin.optimizer_step = optimizer_step
    return trainer
