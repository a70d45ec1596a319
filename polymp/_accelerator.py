"""The methods of an `Accelerator`, and of its optimizers, after `polymp.accelerate.use`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from accelerate.optimizer import AcceleratedOptimizer

from polymp.backends.torch.scaler import trainer_steps
from polymp.torch import GradScaler
from polymp.torch._trainers import RegionSettings, attach, open_in


class InUse:
    """The methods of an `Accelerator` that differ after `use`; the first base of its class."""

    polymp: RegionSettings
    scaler: GradScaler | None
    _optimizers: Any

    def prepare(self, *args: Any, **kwargs: object) -> Any:
        if self.is_fsdp2 and self.polymp.policy is not None:  # type: ignore[attr-defined]
            for model in args:
                if isinstance(model, nn.Module):
                    open_in(model, self.polymp)  # with FSDP2 accelerate opens no region
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self, model: nn.Module, *args: object, **kwargs: object) -> Any:
        attach(model, self.polymp)
        return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> Any:
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)  # type: ignore[misc]
        if self.scaler is not None:
            prepared.__class__ = _ScaledOptimizer
            prepared._together = self._optimizers
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        trainer_steps.begin_backward(self.scaler)
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def save_state(self, *args: object, **kwargs: object) -> Any:
        trainer_steps.update_pending(self.scaler)
        return super().save_state(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def autocast(self, *args: object, **kwargs: object) -> Iterator[None]:
        with self.polymp.region(), super().autocast(*args, **kwargs):  # type: ignore[misc]
            yield

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        if self.scaler is None:
            return
        if not self.sync_gradients:  # type: ignore[attr-defined]
            raise RuntimeError(
                "gradients are accumulated here, and those that come later are scaled. Clip once, "
                "before the step: if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)."
            )
        asked: Any = self._optimizers if optimizer is None else optimizer
        trainer_steps.unscale_each(
            self.scaler,
            map(_plain, asked if isinstance(asked, list | tuple) else [asked]),
            "To accumulate gradients, write Accelerator(gradient_accumulation_steps=...) and with "
            "accelerator.accumulate(model): ..., and if accelerator.sync_gradients: "
            "accelerator.clip_grad_norm_(...).",
        )

    def log(self, values: Mapping[str, Any], *args: object, **kwargs: object) -> None:
        figures = trainer_steps.metrics(self.scaler)
        super().log({**values, **figures}, *args, **kwargs)  # type: ignore[misc]


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class _ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer whose scale is updated when all have stepped that were prepared.

    accelerate updates it after each: the gradients of others, which `clip_grad_norm_` has unscaled,
    would be unscaled again. And it looks whether `step` was called to see whether it was skipped,
    but that of a fused optimizer is always called.
    """

    _skipped: Any = False
    _together: Sequence[AcceleratedOptimizer]

    def step(self, closure: Callable[[], object] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            together = map(_plain, self._together)
            trainer_steps.step(self.scaler, self.optimizer, closure, together)
            self._skipped = self.scaler.step_skipped(self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        return bool(self._skipped)
