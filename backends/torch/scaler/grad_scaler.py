"""`GradScaler`: dynamic loss scaling for torch optimizers.

The drop-in for `torch.amp.GradScaler`: scale the loss, unscale and check the gradients, step or
skip, update the scale. The rule is `polymp.scaling.scale_rule.step`: the host applies it to Python
numbers where it knows what was found, else it runs on the device's tensors.

    scale      scaled_outputs
    unscale_   findings: unscale, distributed
    step       the host decides, or device_skip, fused_step, closure_step
    update     next_scale: device_state, scale_update, async_read; stuck_watch
    the rest   properties
"""

from typing import Any, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState as OptState  # readers of the stages compare with it

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.scaler import (
    closure_step,
    device_skip,
    device_state,
    fused_step,
    gradient_stats,
    next_scale,
    options,
    scaled_outputs,
    unscale,
)
from polymp.backends.torch.scaler.device_state import DeviceState
from polymp.backends.torch.scaler.findings import (
    _refresh_per_optimizer_state as _refresh_per_optimizer_state,
)
from polymp.backends.torch.scaler.options import Options, SkipOn
from polymp.backends.torch.scaler.properties import ScalerProperties
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import OnStuck
from polymp.scaling.scale_rule import ScaleRule, ScaleState

Outputs = TypeVar("Outputs")


class GradScaler(ScalerProperties):
    """Loss scaling, which keeps small float16 gradients from becoming zero.

        scaler = GradScaler("cuda")
        with autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()    # gradients come out multiplied by the scale
        scaler.step(optimizer)           # unscale; step, or skip if one is Inf or NaN
        scaler.update()                  # back off after an overflow, grow after a good streak

    Args:
        device: where the scale lives: "cuda", "cpu", ...
        init_scale: the first scale; any positive float32 number, or one from `min_scale` to
            `max_scale` where these are given.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without a skip.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: see `growth_factor`. A count already past a lowered interval grows the
            scale at the next good step.
        enabled: False makes every method pass through: `step` steps, `scale` returns its argument.
        dtype: the low dtype of the region, if the scaler is to be disabled for all but float16.
        min_scale: no overflow brings the scale below it; from 2**-126, the default.
        max_scale: no growth brings the scale above it; up to 2**126, the default.
        hysteresis: how many overflows in a row leave the scale as it is.
        on_stuck: the reaction to `stuck_after` skips in a row, once: "warn", "raise", or a
            function that is called with a `GradientReport`.
        stuck_after: see `on_stuck`. Where the host does not wait for the device, it reacts a few
            steps later.
        named: a module, or pairs of a name and a parameter: names for reports.
        strict: True raises, as torch.amp does, if an optimizer has no gradient; otherwise its step
            does nothing.
        allow_fp16: True accepts float16 gradients. Unscaled they are still float16, and small ones
            become zero.
        check_loss: True notes whether the losses of a skipped step were finite before they were
            scaled, for reports. The scale does not depend on it.
        skip_on: "host" waits for the finding and then steps or skips; "device" steps, and undoes
            the step on the device (see `device_skip.step`). "auto" is "device" in compiled code and
            for optimizers whose groups are all `capturable`, and "host" for others. Fused
            optimizers skip by themselves.
        process_group: ranks to exchange findings with, besides the meshes of DTensors; for models
            that a pipeline cuts in pieces, or under DDP for `check_loss`.

    Raises:
        AssertionError: `growth_factor` is not above 1 or `backoff_factor` not below 1.
        TypeError: an argument is not a number, or not whole where it has to be.
        ValueError: an argument is out of its range.

    Warns:
        UserWarning: CUDA is asked for and absent; the scaler is then disabled, as in torch.amp.
        ScalerWarning: the region of the loss is bfloat16, where scaling has no effect.

    Source:
        torch.amp, "Automatic Mixed Precision package", `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dtype: torch.dtype | str | None = None,
        min_scale: float = scale_rule.SMALLEST,
        max_scale: float = scale_rule.LARGEST,
        hysteresis: int = 0,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 50,
        named: gradient_stats.Named | None = None,
        strict: bool = False,
        allow_fp16: bool = False,
        check_loss: bool = True,
        skip_on: SkipOn = "auto",
        process_group: Any = None,
    ) -> None:
        self._device = device
        self._enabled = options.acts_on(device, dtype, enabled)
        if not self._enabled:
            return
        rule = options.checked_rule(
            ScaleRule(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
            )
        )
        asked = options.checked(
            Options(on_stuck, stuck_after, strict, allow_fp16, check_loss, skip_on, process_group)
        )
        first = ScaleState(scale_rule.checked_first_scale("init_scale", init_scale, rule))
        state = DeviceState(rule, first, notes_losses=check_loss)
        regions.entries.latest.clear()  # regions from before say nothing about this scaler's
        self._looked = False  # whether its region is bfloat16
        self._put_together(state, asked, gradient_stats.Names(named))

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply one output or many by the scale.

        Args:
            outputs: a tensor, or an iterable of outputs; tensors may be on several devices.

        Returns:
            The same structure; lists and tuples keep their type, other iterables become iterators.
            A product has the dtype that torch's promotion with a float32 scalar gives.

        Raises:
            ValueError: something in `outputs` is neither a tensor nor an iterable.

        Warns:
            ScalerWarning: the region is bfloat16; once.
        """
        if not self._enabled:
            return outputs
        return scaled_outputs.scaled(outputs, self._scale_of)

    def _scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        if self._state.scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        self._looked = self._looked or scaled_outputs.warned_of_bfloat16(loss.device.type)
        self._findings.note_scaled()
        if self._findings.options.check_loss:
            scaled_outputs.note(loss, self._state.noted_loss())
        return self._state.tensors()[0]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inv_scale`; returns found_inf of each device, float32 []."""
        return unscale.unscale(optimizer, inv_scale, found_inf, allow_fp16)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note Inf and NaN.

        Call it to look at or clip true gradients between `backward` and `step`; otherwise `step`
        does it. The host does not wait. Sparse float16 gradients are replaced by coalesced ones.
        Ranks that hold pieces of the parameters exchange what they found.

        Args:
            optimizer: whose gradients they are.

        Raises:
            RuntimeError: called twice for the optimizer since `update`, or after its `step`.
            ValueError: a gradient is float16 and `allow_fp16` is False.
            AssertionError: nothing was scaled yet.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        inverse = device_state.inverse(scale)
        self._findings.unscale(optimizer, inverse, self._unscale_grads_)

    def _check_inf_per_device(
        self, optimizer: torch.optim.Optimizer, divisor: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Look for Inf and NaN without unscaling; for optimizers that unscale by themselves.

        Given the `divisor`, float32 [], also for quotients that overflow.
        """
        self._check_scale_growth_tracker("_check_inf_per_device")
        entry = self._findings.look(
            optimizer, None, self._unscale_grads_, allow_fp16=True, divisor=divisor
        )
        return cast(dict[str, Any], entry["found_inf_per_device"])

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        found = sum(v.item() for v in optimizer_state["found_inf_per_device"].values())
        optimizer_state["skipped"] = bool(found)
        if found:
            return None
        return cast("float | None", optimizer.step(*args, **kwargs))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that is not done, then call `optimizer.step(*args, **kwargs)` or skip it.

        A fused optimizer gets `grad_scale` and `found_inf` and decides on the device; for others
        see `skip_on`. An optimizer without any gradient is left alone.

        A closure has to call `scaler.scale(loss).backward()` and return the loss as it was before
        scaling. Every evaluation is unscaled and checked; one with Inf or NaN ends the step, which
        is taken back as a whole and counts as skipped.

        Args:
            optimizer: the optimizer.
            args: of `optimizer.step`, such as a closure.
            kwargs: likewise.

        Returns:
            The result of `optimizer.step`; None if the host skipped it.

        Raises:
            RuntimeError: called twice for the optimizer since `update`, or the closure did not
                scale its loss.
            AssertionError: nothing was scaled, or, if `strict`, the optimizer has no gradient.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        closure = closure_step.closure_of(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        findings = self._findings
        entry = findings.entries[id(optimizer)]
        if entry["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        result: Any
        if closure is not None:
            result = closure_step.step(self.unscale_, findings, optimizer, entry, args, kwargs)
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            result = fused_step.step(self, findings, optimizer, entry, args, kwargs)
        else:
            if entry["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if findings.nothing_to_step(entry):
                result = None
            elif device_skip.wanted(findings.options.skip_on, optimizer):
                result = device_skip.step(optimizer, findings.found(entry), *args, **kwargs)
            else:
                result = self._maybe_opt_step(optimizer, entry, *args, **kwargs)
        entry["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale for the next iteration; once, after every optimizer's `step`.

        Args:
            new_scale: a scale to use from now on, a number or a float tensor of one element on the
                scaler's device; the growth count goes on. A tensor's value is brought between
                `min_scale` and `max_scale`; NaN leaves the scale as it is. Skips are counted all
                the same. None lets the findings of this iteration decide.

        Raises:
            AssertionError: nothing was scaled or checked, or the tensor is not as above.
            TypeError: `new_scale` is neither a number nor a tensor.
            ValueError: the number is not between `min_scale` and `max_scale`.
            StuckError: `on_stuck` is "raise", and this was one skip too many in a row.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._state.set_scale(new_scale, self._device)
        next_scale.advance(self._findings, self._stuck, given=new_scale is not None)
