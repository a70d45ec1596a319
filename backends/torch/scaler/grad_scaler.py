"""`GradScaler`: dynamic loss scaling for torch optimizers.

The drop-in for `torch.amp.GradScaler`: scale the loss, unscale and check the gradients, step or
skip, update the scale. The rule is `polymp.scaling.scale_rule.step`. Where the host knows what was
found, it applies the rule to Python numbers and writes what has changed; where only the device
knows, the same lines run on tensors. Names with a leading underscore that other libraries reach for
are torch.amp's.
"""

import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState as OptState  # readers of the stages compare with it

from polymp.backends.torch import compat
from polymp.backends.torch.autocast import regions
from polymp.backends.torch.scaler import (
    async_read,
    closure_step,
    device_skip,
    distributed,
    fused_step,
    gradient_stats,
    scale_update,
    unscale,
)
from polymp.backends.torch.scaler.async_read import Watch
from polymp.backends.torch.scaler.findings import (
    Options,
    SkipOn,
    Teller,
    _fresh_states,
)
from polymp.backends.torch.scaler.findings import (
    _refresh_per_optimizer_state as _refresh_per_optimizer_state,
)
from polymp.callsite import outside
from polymp.errors import ScalerWarning
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import (
    NO_EFFECT,
    OnStuck,
    checked_on_stuck,
)
from polymp.scaling.scale_rule import ScaleRule

Outputs = TypeVar("Outputs")


class GradScaler(Teller):
    """Keeps small float16 gradients from vanishing.

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
        dtype: the low format of the region, if the scaler is to be disabled for all but float16.
        min_scale: no overflow brings the scale below it; from 2**-126, the default.
        max_scale: no growth brings the scale above it; up to 2**126, the default.
        hysteresis: overflows in a row that do not lower the scale yet.
        on_stuck: what happens after `stuck_after` skips in a row, once: "warn", "raise", or a
            function that is called with a `GradientReport`.
        stuck_after: see `on_stuck`. Where the host does not wait for the device, it learns of the
            skips a few steps later.
        named: a module, or pairs of a name and a parameter: names for reports.
        strict: True raises, as torch.amp does, if an optimizer has no gradient; otherwise its step
            does nothing.
        allow_fp16: True takes float16 gradients. Unscaled they are float16 again, and small ones
            vanish there.
        check_loss: True skips a step whose loss is not finite even before it is scaled, and leaves
            the scale as it is. Several processes can only do so where what they found is exchanged
            among all: with FSDP and DTensors on a mesh of all ranks, or with `process_group`.
        skip_on: where a step is skipped by. "host" waits for what was found; "device" takes the
            step and undoes it (see `device_skip.step`). "auto" is "device" for optimizers whose
            groups are all `capturable` and in compiled code, and "host" for others. Fused
            optimizers skip by themselves.
        process_group: ranks that what is found is exchanged with, besides the meshes of DTensors;
            for models that a pipeline cuts in pieces, or under DDP for `check_loss`.

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
        dtype: torch.dtype | None = None,
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
        if not isinstance(device, (str, torch.device)):
            raise TypeError(
                f"device must be a name such as 'cuda' or 'cpu', got {device!r}. The first scale "
                "is GradScaler(device, init_scale)."
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}.")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be the region's low format, a float dtype, got {dtype}.")
        self._device = device
        self._enabled = enabled and dtype in (None, torch.float16)
        if self._enabled and device == "cuda" and compat.cuda_missing():
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
                stacklevel=2,
            )
            self._enabled = False
        if not self._enabled:
            return
        if scale_rule.number("growth_factor", growth_factor) <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if scale_rule.number("backoff_factor", backoff_factor) >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        if skip_on not in ("auto", "host", "device"):
            raise ValueError(f"skip_on must be 'auto', 'host' or 'device', got {skip_on!r}.")
        checked_on_stuck(on_stuck, stuck_after)
        distributed.check_group(process_group)
        rule = scale_rule.checked(
            ScaleRule(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
            )
        )
        self._hold(rule, scale_rule.checked_first_scale("init_scale", init_scale, rule))
        self._options = Options(
            on_stuck, stuck_after, strict, allow_fp16, check_loss, skip_on, process_group
        )
        self._names = gradient_stats.Names(named)
        regions.entries.latest.clear()  # regions from before say nothing about this scaler's
        self._begin()

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
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            scale = unscale.moved(self._scale, outputs.device)
            return cast(Outputs, outputs * self._factor(outputs, scale))
        copies: list[unscale.OnDevices] = []

        def multiply(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not copies:
                    if self._scale is None:
                        self._lazy_init_scale_growth_tracker(value.device)
                    assert self._scale is not None
                    copies.append(unscale.OnDevices(self._scale))
                # A copy, so that `update` between two backwards does not change what is saved.
                return value * self._factor(value, copies[0].get(value.device))
            if isinstance(value, Iterable):
                items = map(multiply, value)
                if isinstance(value, tuple) and hasattr(value, "_fields"):
                    return type(value)(*items)
                return type(value)(items) if isinstance(value, (list, tuple)) else items
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")

        return cast(Outputs, multiply(outputs))

    def _factor(self, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The factor of a loss: the scale, or NaN if the loss is not finite.

        So its gradients are NaN, and the step that they are for is skipped, whenever that is; a
        loss that never goes backward leaves no trace in a gradient. That it was the loss is noted
        on the device besides, so that an overflow can be told apart. Nothing waits for either.

        Args:
            loss: not scaled.
            scale: float32 [], on the loss's device.
        """
        if not self._looked and (low := regions.latest_low(loss.device.type)) is not None:
            self._looked = True
            if low is torch.bfloat16:
                level = 3 if torch.compiler.is_compiling() else outside()
                warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=level)
        self._scaled_in = self._per_optimizer_states
        if not self._options.check_loss:
            return scale
        self._tensors()
        noted = self._loss
        assert noted is not None
        values = compat.local(loss.detach())
        if values.is_complex():
            values = values.abs()
        if torch.compiler.is_compiling():  # inductor takes x * 0 for 0
            fine = values.isfinite().all()
            noted.copy_(torch.where(unscale.moved(fine, noted.device), noted, math.nan))
            return torch.where(fine, scale, math.nan)
        if values.dim():
            values = (values * 0).sum()
        factor = torch.add(scale, values, alpha=0)
        if not compat.in_transform(factor):  # of torch.func, which writes to nothing from outside
            noted.add_(unscale.moved(factor, noted.device), alpha=0)
        return factor

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inv_scale`; returns found_inf of each device, float32 []."""
        return unscale.unscale(optimizer, inv_scale, found_inf, float16=allow_fp16)

    def _look(
        self,
        optimizer: torch.optim.Optimizer,
        inverse: torch.Tensor | None,
        *,
        allow_fp16: bool,
        divisor: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Multiply the gradients by `inverse`, if it is given, and note what all ranks found.

        `divisor` is given where the optimizer divides by it itself.
        """
        scale = self._tensors()[0]
        state = self._per_optimizer_states[id(optimizer)]
        circle = distributed.ALONE
        if distributed.distributed():
            params = unscale.parameters(optimizer)
            circle = distributed.circle(params, self._options.process_group)
        loss = self._loss if circle.everybody and self._options.check_loss else None
        start = torch.zeros_like(scale)
        by = torch.ones_like(scale) if inverse is None else inverse
        found = self._unscale_grads_(optimizer, by, start, allow_fp16)
        divided = inverse is not None or divisor is not None
        if divided and self._may_be_below_one():
            # A quotient can be Inf where the scaled gradient was not.
            by = torch.ones_like(scale) if divisor is None else divisor
            for device, finding in unscale.overflows(optimizer, by).items():
                before = found.get(device)
                found[device] = finding if before is None else torch.maximum(before, finding)
        if circle.groups:
            together = start.clone()
            for finding in found.values():
                together.copy_(torch.maximum(together, finding.to(scale.device)))
            # A rank may have no loss, or no gradient, where others have: stages of a pipeline.
            bad = start.clone() if loss is None else (loss != 0).float()
            any_gradient = torch.full_like(scale, bool(found))
            distributed.agree([together, bad, any_gradient], circle.groups)
            if not found and any_gradient.item():
                found = {scale.device: together}
            for finding in found.values():
                finding.copy_(together)
            loss = None if loss is None else bad
        if not torch.compiler.is_compiling():
            regions.entries.unscaled.clear()
        state["found_inf_per_device"] = found
        state["loss"] = loss
        state["optimizer"] = weakref.ref(optimizer)
        state["inverse"] = inverse
        return state

    def _may_be_below_one(self) -> bool:
        """False where the host can rule out that the scale is below 1.

        Above 1 no quotient overflows, so that looking for one finds nothing: the answer saves a
        pass, and what is found does not follow from what the host happens to know.
        """
        if self._rule.min_scale >= 1:
            return False
        if self._replays():
            return True
        state = self._recall()
        if state is not None:
            return bool(state.scale < 1)
        if not self._watch.follows(self._tensors()[0]):
            return True
        return self._watch.at_least(self._rule.backoff, self._rule.min_scale) < 1

    def _inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """1/scale as torch.amp computes it, through float64.

        Of the tensor that the loss was multiplied by: `torch.distributed` and `.data` write to it
        without a new version.
        """
        if scale.device.type == "mps":
            return scale.reciprocal()
        return scale.double().reciprocal().float()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note Inf and NaN.

        For looking at or clipping true gradients between `backward` and `step`; `step` does it by
        itself otherwise. No host sync. Sparse float16 gradients are replaced by coalesced ones.
        Ranks that hold pieces of the parameters exchange what they found.

        Raises:
            RuntimeError: called twice for the optimizer since `update`, or after its `step`.
            ValueError: a gradient is float16 and `allow_fp16` is False.
            AssertionError: nothing was scaled yet.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._look(optimizer, self._inverse(scale), allow_fp16=self._options.allow_fp16)
        state["stage"] = OptState.UNSCALED

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
        """Unscale if that is not done, then `optimizer.step(*args, **kwargs)`, or skip it.

        A fused optimizer gets `grad_scale` and `found_inf` and decides on the device; for others
        see `skip_on`. An optimizer without any gradient is left alone.

        A closure has to call `scaler.scale(loss).backward()` and return the loss as it was before
        scaling. Every evaluation is unscaled and checked; one with Inf or NaN ends the step, which
        is taken back as a whole and counts as skipped.

        Returns:
            What `optimizer.step` returned; None if the host skipped it.

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
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if closure is not None:
            return self._step_with_closure(optimizer, state, args, kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_fused(optimizer, state, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if self._without_gradients(state):
            return None
        if self._skips_on_device(optimizer):
            found = self._found(state)
            result = device_skip.step(optimizer, found, *args, **kwargs)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def _skips_on_device(self, optimizer: torch.optim.Optimizer) -> bool:
        wish = self._options.skip_on
        if wish == "auto":
            return torch.compiler.is_compiling() or device_skip.possible(optimizer)
        return wish == "device"

    def _without_gradients(self, state: dict[str, Any]) -> bool:
        """True if there was nothing to look at, so that the step does nothing."""
        if state["found_inf_per_device"]:
            return False
        if self._options.strict:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        state["stage"] = OptState.STEPPED
        return True

    def _step_fused(
        self, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        if fused_step.takes_scaler(optimizer):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
                "directly.",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            state["stage"] = OptState.STEPPED
            return cast("float | None", result)
        outer = getattr(optimizer, "grad_scale", None)
        scale = outer
        if state["stage"] is OptState.READY:
            scale = self._get_scale_async()
            assert scale is not None
            scale = scale * (1 if outer is None else outer)
            self._check_inf_per_device(optimizer, scale)
            state["grad_scale"] = scale
        if self._without_gradients(state):
            return None
        result = fused_step.step(optimizer, scale, self._found(state), args, kwargs)
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def _step_with_closure(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        def spoiled() -> bool:
            if not self._has_scaled():
                raise RuntimeError(
                    "the closure given to step() did not scale its loss: call "
                    "scaler.scale(loss).backward() in it, and return the loss itself."
                )
            if state["stage"] is not OptState.UNSCALED:
                self.unscale_(optimizer)
            state["stage"] = OptState.READY  # for the next evaluation
            bad = any(f.item() for f in state["found_inf_per_device"].values())
            if not bad:
                self._scaled_in = None
            return bad

        # Gradients that are there already are for an optimizer that uses them before it calls the
        # closure (SAM), if they were made in this iteration.
        if self._has_scaled() and spoiled():
            result, state["skipped"] = None, True
        else:
            result, state["skipped"] = closure_step.step(optimizer, spoiled, args, kwargs)
        state["stage"] = OptState.STEPPED
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
        scale, _ = self._check_scale_growth_tracker("update")
        given = new_scale is not None
        if given:
            self._set_scale(scale, new_scale)
        states = list(self._per_optimizer_states.values())
        looked = [s for s in states if s["found_inf_per_device"]]
        if not looked and not given and (self._options.strict or not states):
            raise AssertionError("No inf checks were recorded prior to update.")
        self._end_iteration()
        if not looked:
            return
        if not torch.compiler.is_compiling() and all("skipped" in s for s in looked):
            self._update_on_host(looked, given)
        else:
            self._update_on_device(looked, given)

    def _forget_losses(self) -> None:
        assert self._loss is not None
        self._loss.zero_()

    def _end_iteration(self) -> None:
        self._before, self._per_optimizer_states = self._per_optimizer_states, _fresh_states()

    def _update_on_host(self, looked: list[dict[str, Any]], given: bool) -> None:
        """Go on by the rule; the counts of skips alone, if the scale is `given`."""
        skipped = any(s["skipped"] for s in looked)
        loss = [s["loss"] for s in looked if s.get("loss") is not None] if skipped else []
        before = self._read()
        after = scale_rule.step(
            self._rule, before, not skipped, loss_finite=not any(t.item() for t in loss)
        )
        if given:
            after = scale_rule.ScaleState(*before[:2], *after[2:])
        self._write(before, after)
        if self._options.check_loss:
            self._forget_losses()
        self._watch = Watch()
        self._look_if_stuck(after)

    def _update_on_device(self, looked: list[dict[str, Any]], given: bool) -> None:
        """The same where only the device knows."""
        scale, tracker, counts = self._tensors()
        found = unscale.either(self._largest(s) for s in looked)
        assert found is not None
        losses = [s["loss"] for s in looked if s.get("loss") is not None]
        loss = unscale.either(losses)
        if self._capturing():
            self._captured = scale
        bars = self._bars if self._regular else None
        if bars is not None and loss is not None and loss is not self._loss:
            assert self._loss is not None  # the ranks have agreed on another
            self._loss.copy_(loss)
        elif loss is None and self._options.check_loss:
            self._forget_losses()
        moved = (scale.clone(), tracker.clone()) if given else (scale, tracker)
        scale_update.update(self._rule, *moved, counts, found, loss, bars)
        if loss is not None:
            self._forget_losses()
        self._known = None
        if torch.compiler.is_compiling():
            async_read.tell(self._name, scale, tracker, counts)
        else:
            self._watch.wrote(scale)
            self._updated(scale, tracker, counts)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._enabled:
            if self._per_optimizer_states:
                raise AssertionError(
                    "A GradScaler instance may only be pickled at the beginning "
                    "of an iteration, or at the end after scaler.update()."
                )
            # Numbers, not tensors, so that it can be loaded where the device is missing.
            now = self._read()
            state["_init_scale"], state["_init_growth_tracker"] = now[:2]
            state["_init_counts"] = now[2:]
            for name in (
                "_scale", "_growth_tracker", "_counts", "_bars", "_loss", "_known", "_captured",
            ):  # fmt: skip
                state[name] = None
            for name in ("_before", "_scaled_in", "_name"):
                del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["_enabled"]:
            self._begin()
        self.__dict__.update(state)

    def _check_inf_per_device(
        self, optimizer: torch.optim.Optimizer, divisor: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Look for Inf and NaN without unscaling; for optimizers that unscale by themselves.

        Given the `divisor`, float32 [], also for quotients that overflow.
        """
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._look(optimizer, None, allow_fp16=True, divisor=divisor)
        return cast(dict[str, Any], state["found_inf_per_device"])

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return cast(
            dict[str, Any], self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        )
