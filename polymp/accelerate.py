"""Mixed precision for accelerate: a policy and polymp's loss scaler for an `Accelerator`.

    accelerator = polymp.accelerate.use(Accelerator(mixed_precision="bf16"), policy="lean")

accelerate goes on opening its own region around the forward of each model that is prepared, and
calling the scaler. The policy is put on the models, and the scaler takes the place of torch's.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from polymp.backends.torch.autocast.api import PolicyLike, autocast
from polymp.backends.torch.modules.scoped import Scoping, scoped
from polymp.backends.torch.scaler import trainer_steps
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.torch import GradScaler
from polymp.versions import require

require("accelerate")

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

__all__ = ["use"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WRITE = "Accelerator(mixed_precision={0!r}) or TrainingArguments({0}=True)"
A = TypeVar("A", bound=Accelerator)


def use(accelerator: A, policy: PolicyLike | None = None, *, scaler: GradScaler | None = None) -> A:
    """Have an `Accelerator` use a policy, and polymp's loss scaler if it trains in float16.

        accelerator = use(Accelerator(mixed_precision="fp16"), policy="lean")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Call it before `prepare`, which scopes models with the policy: it may have rules for modules.
    `accelerator.autocast()` uses it, too. `backward`, `clip_grad_norm_`, `save_state` and
    `load_state` work as before, also with states of torch's scaler, and `step_was_skipped` is right
    for fused optimizers. In float16, `accelerator.log` adds `loss_scale` and `skipped_steps`, and
    fp16 works on the CPU as well.

    With a policy, FSDP sends parameters and gradients in float32, and the policy decides about
    every cast; a `mixed_precision_policy` of your own in the FSDP plugin overrules that.

    Args:
        accelerator: with mixed_precision "bf16" or "fp16", and nothing prepared yet. It is changed
            in place.
        policy: which ops run in which dtype, as in `polymp.torch.scoped`.
        scaler: for fp16, a loss scaler with other settings than those of the accelerator's
            `GradScalerKwargs`.

    Returns:
        The accelerator.

    Raises:
        TypeError: `accelerator` is no Accelerator, or `scaler` no `polymp.torch.GradScaler`.
        ValueError: the accelerator's mode has no region or no loss scaling, another engine casts
            for it, it has two scalers, something is prepared already, or `use` was called before.
        PolicyError: the policy cannot be read.

    Source:
        accelerate 1.15, `accelerate.Accelerator`.
    """
    return use_in("polymp.accelerate.use()", accelerator, policy, scaler)


def use_in(call: str, accelerator: A, policy: PolicyLike | None, scaler: GradScaler | None) -> A:
    """Do what `use` does, for a user who wrote `call`."""
    _check(call, accelerator, scaler)
    mode, device = accelerator.mixed_precision, accelerator.device.type
    loaded = None if policy is None else policy_files.load(policy)
    outside = None if loaded is None else loaded.at("")  # of modules
    region = autocast(device, _DTYPES[mode], policy=outside)
    if mode == "fp16" and scaler is None:
        handler = accelerator.scaler_handler
        scaler = GradScaler(device, **({} if handler is None else handler.to_kwargs()))
    asked = f"{call} with mixed_precision={mode!r}"
    trainer_steps.check_scaler(scaler, asked, mode == "fp16", _WRITE.format("fp16"))
    if scaler is not None:
        accelerator.scaler = scaler
        accelerator.native_amp = True  # accelerate has no fp16 on the CPU, and would do nothing
    if accelerator.distributed_type is DistributedType.FSDP and loaded is not None:
        _let_the_policy_cast(accelerator.state.fsdp_plugin, mode)
    extend(accelerator, InUse)
    accelerator.polymp, accelerator.polymp_policy = region, loaded
    return accelerator


def _let_the_policy_cast(plugin: Any, mode: str) -> None:
    """Have FSDP send parameters and gradients in float32, unless the user chose dtypes for it."""
    untouched = copy.copy(plugin)
    untouched.mixed_precision_policy = None
    untouched.set_mixed_precision(mode)
    if plugin.mixed_precision_policy == untouched.mixed_precision_policy:
        plugin.mixed_precision_policy = None


def _check(call: str, accelerator: object, scaler: object) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"{call} takes an accelerate.Accelerator, got {type(accelerator).__name__}. "
            "Write accelerator = polymp.accelerate.use(Accelerator(...), policy=...); for a "
            "Trainer of transformers, polymp.transformers.use(trainer, policy=...)."
        )
    mode, engine = accelerator.mixed_precision, accelerator.distributed_type
    why, handler = "", accelerator.scaler_handler
    if isinstance(accelerator, InUse):
        why = " was called before. Call it once, with the policy and the scaler."
    elif mode not in _DTYPES:
        why = (
            f": with mixed_precision={mode!r} there is no region that a policy could act in. Write "
            f"{_WRITE.format('bf16')}, or the same with fp16."
        )
    elif engine in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        why = (
            f": {engine.value} casts and scales by itself, and no policy sees it. Use DDP or FSDP."
        )
    elif accelerator._models or accelerator._optimizers:
        why = (
            " comes too late: a model or an optimizer is prepared already. Call it right after "
            "Accelerator(...) or Trainer(...)."
        )
    elif mode == "fp16" and scaler is None and handler is not None and not handler.enabled:
        why = (
            ": GradScalerKwargs(enabled=False) leaves float16 without a loss scaler, so that small "
            "gradients would become zero. Leave enabled=False out."
        )
    elif mode == "fp16" and scaler is not None and handler is not None:
        why = (
            ": there are two loss scalers: scaler=... and the Accelerator's GradScalerKwargs. "
            "Leave one of them out."
        )
    if why:
        raise ValueError(call + why)


_attached: WeakKeyDictionary[nn.Module, Scoping] = WeakKeyDictionary()


def _attach(model: nn.Module, policy: Policy | None) -> None:
    """Put a policy on a model whose forward accelerate calls in a region, in place of another."""
    before = _attached.get(model)
    if policy == (before and before.policy):
        return
    if before is not None:
        _attached.pop(model).remove()
    if policy is not None:
        _attached[model] = scoped(model, policy)


class InUse:
    """The methods of an `Accelerator` that differ after `use`; the first base of its class."""

    polymp: autocast  # its region
    polymp_policy: Policy | None  # whose rules by module path `_attach` puts on models
    scaler: GradScaler | None
    _optimizers: Any

    def prepare(self, *args: Any, **kwargs: object) -> Any:
        region, policy = self.polymp, self.polymp_policy
        if self.is_fsdp2 and policy is not None:  # type: ignore[attr-defined]
            for model in args:  # with FSDP2 accelerate opens no region
                if isinstance(model, nn.Module):
                    _attach(model, policy)
                    if not getattr(model, "_is_accelerate_prepared", False):
                        model.forward = region(model.forward)
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self, model: nn.Module, *args: object, **kwargs: object) -> Any:
        _attach(model, self.polymp_policy)
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
        with self.polymp, super().autocast(*args, **kwargs):  # type: ignore[misc]
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


def extend(instance: Any, mixin: type) -> None:
    """Give an object the methods of a mixin, before those of its own class."""
    base = type(instance)
    instance.__class__ = type(base.__name__, (mixin, base), {"__module__": base.__module__})
