"""Mixed precision for accelerate: a policy and polymp's loss scaler for an `Accelerator`.

    accelerator = polymp.accelerate.use(Accelerator(mixed_precision="bf16"), policy="lean")

accelerate goes on opening its own region around the forward of each model that is prepared, and
calling the scaler. The policy is put on the models, and the scaler takes the place of torch's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.errors import BackendMissingError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.torch import GradScaler, autocast, scoped
from polymp.torch._trainers import (
    check_scaler,
    extend,
    metrics,
    refuse_outer_region,
    stage,
    update_after,
    update_pending,
)

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise BackendMissingError(
        "polymp.accelerate needs the accelerate package: pip install 'polymp[accelerate]'."
    ) from error

__all__ = ["use"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
A = TypeVar("A", bound=Accelerator)


class Words(NamedTuple):
    """The words of the messages: those of accelerate, or of the Trainer of transformers.

    Attributes:
        opener: who opens the region.
        use: the function, without parentheses.
        argument: the name of its first argument.
        mode: how mixed precision is asked for.
        order: how `use` is called in time.
    """

    opener: str = "accelerate"
    use: str = "polymp.accelerate.use"
    argument: str = "accelerator"
    mode: str = "Accelerator(mixed_precision={!r})"
    order: str = (
        "Write accelerator = polymp.accelerate.use(Accelerator(...), ...), and then "
        "accelerator.prepare(...)"
    )


def use(accelerator: A, policy: PolicyLike | None = None, *, scaler: GradScaler | None = None) -> A:
    """Have an `Accelerator` use a policy, and polymp's loss scaler if it trains in float16.

        accelerator = use(Accelerator(mixed_precision="fp16"), policy="lean")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Call it before `prepare`. Models that are prepared later are scoped with the policy, which may
    have rules for modules; `accelerator.autocast()` uses it, too. `backward`, `clip_grad_norm_`,
    `save_state` and `load_state` work as before, and load states that accelerate saved with torch's
    scaler. `step_was_skipped` of optimizers is right for fused ones. In float16, `accelerator.log`
    adds `loss_scale` and `skipped_steps` to what it logs. fp16 works on the CPU as well.

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
        PolicyError: the policy cannot be read; later, when a model is called: a region around the
            call has another dtype or policy.

    Source:
        accelerate 1.15, `accelerate.Accelerator`.
    """
    return use_as(Words(), accelerator, policy, scaler)


def use_as(words: Words, accelerator: A, policy: PolicyLike | None, scaler: GradScaler | None) -> A:
    """Do what `use` does, with messages in other words."""
    _check(words, accelerator, scaler)
    loaded = None if policy is None else policy_files.load(policy)
    dtype = _DTYPES[accelerator.mixed_precision]
    device = accelerator.device.type
    region = autocast(device, dtype=dtype, policy=loaded and loaded.at(""))
    if dtype is torch.float16:
        handler = accelerator.scaler_handler
        kwargs = {} if handler is None else handler.to_kwargs()
        accelerator.scaler = GradScaler(device, **kwargs) if scaler is None else scaler
        accelerator.native_amp = True  # accelerate has no fp16 on the CPU, and would do nothing
    extend(accelerator, _Accelerator)
    accelerator.polymp = _Settings(loaded, region, words)
    return accelerator


def _check(words: Words, accelerator: object, scaler: object) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            "polymp.accelerate.use() takes an accelerate.Accelerator, got "
            f"{type(accelerator).__name__}. Write accelerator = "
            "polymp.accelerate.use(Accelerator(...), policy=...); for a Trainer of transformers, "
            "polymp.transformers.use(trainer, policy=...)."
        )
    mode = accelerator.mixed_precision
    if isinstance(accelerator, _Accelerator):
        raise ValueError(
            "polymp.accelerate.use() was called for this Accelerator before. Call it once, with "
            "the policy and the scaler."
        )
    if mode not in _DTYPES:
        raise ValueError(
            f"polymp.accelerate.use(): Accelerator(mixed_precision={mode!r}) opens no region that "
            "a policy could act in, and does not unscale gradients before it clips them. Write "
            "Accelerator(mixed_precision='bf16') or Accelerator(mixed_precision='fp16')."
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{words.use}(): {accelerator.distributed_type.value} casts and scales by "
            "itself, and no policy sees it. Use DDP or FSDP."
        )
    if accelerator._models or accelerator._optimizers:
        raise ValueError(
            f"{words.use}() comes too late: a model or an optimizer is prepared already. "
            f"{words.order}."
        )
    handler = accelerator.scaler_handler
    if mode == "fp16" and scaler is None and handler is not None and not handler.enabled:
        raise ValueError(
            f"{words.use}(): GradScalerKwargs(enabled=False) leaves float16 without a loss scaler, "
            "so that small gradients would become zero. Leave enabled=False out."
        )
    if scaler is None:
        return
    if mode != "fp16":
        raise ValueError(
            f"{words.use}(): {words.mode.format(mode)} takes no scaler: loss scaling is for "
            f"float16. Leave it out, or write {words.mode.format('fp16')}."
        )
    check_scaler(scaler, f"{words.use}() with {words.mode.format('fp16')}")
    if handler is not None:
        raise ValueError(
            "polymp.accelerate.use(): there are two loss scalers: scaler=... and the Accelerator's "
            "GradScalerKwargs. Leave one of them out."
        )


class _OuterRegionCheck(NamedTuple):
    """A hook before the forward of a prepared model; it raises in a region of another policy."""

    device: str
    dtype: torch.dtype
    policy: Policy | None
    words: Words

    def __call__(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            write = f"{self.words.use}({self.words.argument}, policy=...)"
            refuse_outer_region(self.device, self.dtype, self.policy, self.words.opener, write)


class _Settings(NamedTuple):
    """The policy of an accelerator, its region, and the words of its messages."""

    policy: Policy | None
    region: autocast
    words: Words


class _Use:
    """The policy of an accelerator on a model that it has prepared."""

    def __init__(self, model: nn.Module, settings: _Settings) -> None:
        region, policy = settings.region, settings.policy
        self.settings = settings
        self._scoping = None if policy is None else scoped(model, policy)
        check: Any = _OuterRegionCheck(
            region.device, region.fast_dtype, policy and policy.at(""), settings.words
        )
        self._hook = model.register_forward_pre_hook(check)

    def remove(self) -> None:
        self._hook.remove()
        if self._scoping is not None:
            self._scoping.remove()


_uses: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()


class _Accelerator:
    """The methods of an `Accelerator` that differ after `use`; the first base of its class."""

    polymp: _Settings
    scaler: GradScaler | None
    _optimizers: Any
    # The optimizers whose gradients were unscaled when the last backward pass began.
    _unscaled: Sequence[torch.optim.Optimizer] = ()

    def prepare_model(self, model: nn.Module, *args: object, **kwargs: object) -> Any:
        before = _uses.get(model)
        if before is None or before.settings is not self.polymp:
            if before is not None:
                before.remove()  # of another Accelerator
            _uses[model] = _Use(model, self.polymp)
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
        scaler = self.scaler
        if scaler is not None:
            update_pending(scaler)
            plain = map(_plain, self._optimizers)
            self._unscaled = [one for one in plain if stage(scaler, one) is OptState.UNSCALED]
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def save_state(self, *args: object, **kwargs: object) -> Any:
        update_pending(self.scaler)
        return super().save_state(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def autocast(self, *args: object, **kwargs: object) -> Iterator[None]:
        with self.polymp.region, super().autocast(*args, **kwargs):  # type: ignore[misc]
            yield

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        if self.scaler is not None and not self.sync_gradients:  # type: ignore[attr-defined]
            raise RuntimeError(
                "gradients are accumulated here, and those that come later are scaled. Clip once, "
                "before the step: if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)."
            )
        if self.scaler is not None:
            asked: Any = self._optimizers if optimizer is None else optimizer
            asked = [_plain(one) for one in (asked if isinstance(asked, list | tuple) else [asked])]
            done = [one for one in asked if stage(self.scaler, one) is not OptState.READY]
            if any(one is before for one in done for before in self._unscaled):
                raise RuntimeError(
                    "these gradients were clipped before the last accelerator.backward(), which "
                    "has added scaled ones. Clip once, before the step. To accumulate gradients, "
                    "write Accelerator(gradient_accumulation_steps=...) and with "
                    "accelerator.accumulate(model): ..., and if accelerator.sync_gradients: "
                    "accelerator.clip_grad_norm_(...)."
                )
            optimizer = [one for one in asked if all(one is not other for other in done)]
        super().unscale_gradients(optimizer)  # type: ignore[misc]

    def log(self, values: Mapping[str, Any], *args: object, **kwargs: object) -> None:
        super().log({**values, **metrics(self.scaler)}, *args, **kwargs)  # type: ignore[misc]


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
            if closure is not None:
                update_pending(self.scaler)  # not in the closure, where this step has begun
            self.scaler.step(self.optimizer, closure)
            self._skipped = self.scaler.step_skipped(self.optimizer)
            update_after(self.scaler, [one.optimizer for one in self._together])

    @property
    def step_was_skipped(self) -> bool:
        return bool(self._skipped)
