"""`GradScaler`: dynamic loss scaling for torch optimizers.

The drop-in for `torch.amp.GradScaler`: scale the loss, unscale and check the gradients, step or
skip, update the scale. The rule is `polymp.scaling.scale_rule.step`: the host applies it to Python
numbers where it knows what was found, else it runs on the device's tensors.

    scale      `scaled`, below
    unscale_   `findings`, which calls `unscale`
    step       the host decides, or one of the ways in `optimizer_step`
    update     `advance`, below: the state in `device_state`; then `StuckWatch`
    the rest   `ScalerProperties`
"""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState as OptState  # readers of the stages compare with it

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.compat import distributed, modes, optimizers
from polymp.backends.torch.scaler import device_state, optimizer_step, unscale
from polymp.backends.torch.scaler.device_state import AsyncRead, DeviceState
from polymp.backends.torch.scaler.findings import (
    Entry,
    Findings,
    Named,
    Names,
    Options,
    SkipOn,
    acts_on,
    checked,
    checked_rule,
)
from polymp.backends.torch.scaler.findings import (
    _refresh_per_optimizer_state as _refresh_per_optimizer_state,
)
from polymp.code_origin import outside
from polymp.errors import ScalerWarning
from polymp.mailbox import Mailbox
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import NO_EFFECT, GradientReport, OnStuck, tell
from polymp.scaling.scale_rule import ScaleRule, ScaleState, to_state_dict

Outputs = TypeVar("Outputs")


def _part(part: str, name: str) -> Any:
    """Make a property for an attribute of one of a scaler's parts."""

    def get(scaler: "ScalerProperties") -> Any:
        return getattr(getattr(scaler, part), name)

    def put(scaler: "ScalerProperties", value: object) -> None:
        setattr(getattr(scaler, part), name, value)

    return property(get, put)


class StuckWatch:
    """The reaction of a scaler to `stuck_after` skips in a row, once in each row.

    Args:
        findings: the scaler's.
        names: of parameters, for the report.
        told: the row of skips that was reported, by the number of skips before it; None if none.
    """

    def __init__(self, findings: Findings, names: Names, told: int | None = None) -> None:
        self.findings = findings
        self.names = names
        self.told = told
        self._name = device_state.listen(self._updated)

    def updated(self) -> None:
        """Note an update of the state on the device, in compiled code, too."""
        state = self.findings.state.tensors()
        if torch.compiler.is_compiling():
            device_state.tell(self._name, *state)
        else:
            self._updated(*state)

    def _updated(self, *state: torch.Tensor) -> None:
        ours = self.findings.state
        replayed = torch.compiler.is_compiling() or ours.capturing()  # when no Python runs
        if not replayed and ours.arriving.updated(*state):
            assert ours.arriving.seen is not None
            self.look(ours.arriving.seen)

    def look(self, state: ScaleState) -> None:
        """React if the state has `stuck_after` skips in a row, and this row had no reaction yet."""
        options = self.findings.options
        stuck = state.skips >= options.stuck_after
        row = state.skipped - state.skips if stuck else None  # skips before it
        if stuck and row != self.told:
            self.told = row
            report = self.findings.report(self.names, last=True)._replace(state=state)
            tell(options.on_stuck, report)
        self.told = row


# `ScalerProperties`: the getters and setters of a loss scaler, its state, and its reports.
#
# None of them writes a gradient: each name reads or sets something in a `DeviceState`,
# `Findings` or a `StuckWatch`. Other libraries use the names with a leading underscore, which
# are torch.amp's.


def _constant(name: str) -> Any:
    """Make a property for a constant of a scaler's rule; values are not checked."""

    def get(scaler: "ScalerProperties") -> Any:
        return getattr(scaler._state.rule, name)

    def put(scaler: "ScalerProperties", value: float) -> None:
        scaler._state.change(**{name: value})

    return property(get, put)


def _first(name: str) -> Any:
    """Make a property for a number that a scaler's state starts with."""

    def get(scaler: "ScalerProperties") -> Any:
        return getattr(scaler._state.first, name)

    def put(scaler: "ScalerProperties", value: object) -> None:
        scaler._state.first = scaler._state.first._replace(**{name: value})

    return property(get, put)


class ScalerProperties:
    """The base of `GradScaler`; disabled, it has `_device` and `_enabled` only, as in torch.amp."""

    _device: str
    _enabled: bool
    _state: DeviceState
    _findings: Findings
    _stuck: StuckWatch

    _scale = _part("_state", "scale")
    _growth_tracker = _part("_state", "tracker")
    _per_optimizer_states = _part("_findings", "entries")
    _options = _part("_findings", "options")
    _init_scale = _first("scale")
    _init_growth_tracker = _first("tracker")
    _growth_factor = _constant("growth")
    _backoff_factor = _constant("backoff")
    _growth_interval = _constant("interval")

    def _put_together(
        self,
        state: DeviceState,
        asked: Options,
        names: Names,
        told: int | None = None,
    ) -> None:
        self._state = state
        self._findings = Findings(state, asked)
        self._stuck = StuckWatch(self._findings, names, told)
        watch(self._findings)

    def __getstate__(self) -> dict[str, object]:
        kept = self.__dict__.copy()
        if self._enabled:
            if self._per_optimizer_states:
                raise AssertionError(
                    "A GradScaler instance may only be pickled at the beginning "
                    "of an iteration, or at the end after scaler.update()."
                )
            state, findings, stuck = (kept.pop(part) for part in ("_state", "_findings", "_stuck"))
            kept["_parts"] = state.at_rest(), findings.options, stuck.names, stuck.told
        return kept

    def __setstate__(self, kept: Mapping[str, object]) -> None:
        self.__dict__.update(kept)
        if self._enabled:
            self._put_together(*self.__dict__.pop("_parts"))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        scale, tracker = self._state.scale, self._state.tracker
        if scale is None or tracker is None:
            name = "_scale" if scale is None else "_growth_tracker"
            raise AssertionError(
                f"Attempted {funcname} but {name} is None.  This may indicate your script did "
                "not use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._state.make(dev)

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._state.scale

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        entry: Entry = self._per_optimizer_states[id(optimizer)]
        return cast(dict[str, Any], entry["found_inf_per_device"])

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled. Waits for the device if the host does not know it."""
        return cast(float, self._state.read().scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the growth factor."""
        return cast(float, self._growth_factor)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor.

        Args:
            new_factor: a number above 1; others raise as in `GradScaler`.
        """
        if self._enabled:
            self._growth_factor = self._checked(growth=new_factor).growth

    def get_backoff_factor(self) -> float:
        """Return the backoff factor."""
        return cast(float, self._backoff_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor.

        Args:
            new_factor: a number between 0 and 1; others raise as in `GradScaler`.
        """
        if self._enabled:
            self._backoff_factor = self._checked(backoff=new_factor).backoff

    def get_growth_interval(self) -> int:
        """Return the growth interval, in steps."""
        return cast(int, self._growth_interval)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval.

        Args:
            new_interval: in steps, from 1; other numbers raise as in `GradScaler`.
        """
        if self._enabled:
            self._growth_interval = self._checked(interval=new_interval).interval

    def _checked(self, **constants: float) -> ScaleRule:
        return scale_rule.checked(self._state.rule._replace(**constants))  # type: ignore[arg-type]

    def _get_growth_tracker(self) -> int:
        return int(self._state.read().tracker) if self._enabled else 0

    def is_enabled(self) -> bool:
        """Return False if every method passes through."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers under torch.amp's names; {} if disabled.

        torch.amp's scaler and polymp's for JAX load it, too. Call it after `update`. It waits for
        the device if the host does not know the state.

        Returns:
            A dictionary; see `polymp.scaling.to_state_dict` for its keys.
        """
        return to_state_dict(self._state.rule, self._state.read()) if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; does nothing if disabled. Nothing is changed if it raises.

        Args:
            state_dict: from `state_dict` of a scaler, polymp's or torch.amp's.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler's is.
            KeyError: an entry is missing.
            TypeError: an entry is not a number.
            ValueError: an entry is out of its range.
        """
        if not self._enabled:
            return
        if isinstance(state_dict, Mapping) and len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        self._state.load(state_dict)

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether Inf or NaN was last found for the optimizer.

        In a gradient on any rank, before or after it was unscaled, or in a loss. The host waits for
        the device when the tensor is read.

        Args:
            optimizer: the optimizer.

        Returns:
            bool [], on the scale's device.

        Raises:
            RuntimeError: the scaler has not looked at the optimizer in this iteration or the last.
        """
        if not self._enabled:
            return torch.tensor(False)
        return self._findings.found_inf(optimizer)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether the last `step` of the optimizer was skipped.

        It is skipped for Inf or NaN, or because the optimizer had no gradient. Call it after
        `step`, before or after `update`. `if scaler.step_skipped(optimizer):` waits for the device
        if the host does not know the answer.

        Args:
            optimizer: the optimizer.

        Returns:
            bool [], on the scale's device.

        Raises:
            RuntimeError: the scaler has not stepped the optimizer in this iteration or the last.
        """
        if not self._enabled:
            return torch.tensor(False)
        entry = self._findings.latest(optimizer)
        if entry["stage"] is not OptState.STEPPED:
            raise RuntimeError(
                f"step_skipped() was called before this {type(optimizer).__name__}'s step()."
            )
        return self.found_inf(optimizer) if entry["found_inf_per_device"] else torch.tensor(True)

    @property
    def skipped_steps(self) -> torch.Tensor:
        """The number of iterations so far with a skipped step; int32 [], on the scale's device."""
        if not self._enabled or self._state.scale is None:
            return torch.tensor(
                self._state.first.skipped if self._enabled else 0, dtype=torch.int32
            )
        return self._state.tensors()[2][2].to(torch.int32)

    def report(self, named: Named | None = None) -> GradientReport:
        """Report on the gradients of the optimizers of this iteration, or of the last one.

        Counts Inf, NaN, zeros and values too small for float16, gradient by gradient. Call it after
        `step` or `unscale_`, and before `zero_grad`; before them it has no entries. Waits for the
        device. Of a DTensor, this rank's part is counted.

        Args:
            named: a module, or pairs of a name and a parameter, for names in the report; None for
                the argument `named` of the scaler.

        Returns:
            The report.

        Raises:
            TypeError: `named` is something else.
        """
        if not self._enabled:
            return GradientReport(ScaleRule(), ScaleState(1.0), ())
        names = self._stuck.names if named is None else Names(named)
        # Once a loss of this iteration is scaled, gradients of the last one may have changed.
        return self._findings.report(names, last=not self._findings.has_scaled())


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
            the step on the device (see `step_or_undo` in `optimizer_step`). "auto" is "device" in
            compiled code and for optimizers whose groups are all `capturable`, and "host" for
            others. Fused optimizers skip by themselves.
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
        named: Named | None = None,
        strict: bool = False,
        allow_fp16: bool = False,
        check_loss: bool = True,
        skip_on: SkipOn = "auto",
        process_group: Any = None,
    ) -> None:
        self._device = device
        self._enabled = acts_on(device, dtype, enabled)
        if not self._enabled:
            return
        rule = checked_rule(
            ScaleRule(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
            )
        )
        asked = checked(
            Options(on_stuck, stuck_after, strict, allow_fp16, check_loss, skip_on, process_group)
        )
        first = ScaleState(scale_rule.checked_first_scale("init_scale", init_scale, rule))
        state = DeviceState(rule, first, notes_losses=check_loss)
        regions.entries.latest.clear()  # regions from before say nothing about this scaler's
        self._looked = False  # whether its region is bfloat16
        self._put_together(state, asked, Names(named))

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
        return scaled(outputs, self._scale_of)

    def _scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        if self._state.scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        self._looked = self._looked or warned_of_bfloat16(loss.device.type)
        self._findings.note_scaled()
        if self._findings.options.check_loss:
            note(loss, self._state.noted_loss())
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
        closure = optimizer_step.closure_of(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        findings = self._findings
        entry = findings.entries[id(optimizer)]
        if entry["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        result: Any
        if closure is not None:
            result = optimizer_step.step_with_closure(
                self.unscale_, findings, optimizer, entry, args, kwargs
            )
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            result = optimizer_step.fused_step(self, findings, optimizer, entry, args, kwargs)
        else:
            if entry["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if findings.nothing_to_step(entry):
                result = None
            elif optimizer_step.wanted(findings.options.skip_on, optimizer):
                result = optimizer_step.step_or_undo(
                    optimizer, findings.found(entry), *args, **kwargs
                )
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
        advance(self._findings, self._stuck, given=new_scale is not None)


# The classes whose objects change as a scaler is used.
PARTS = (DeviceState, AsyncRead, Mailbox, Findings, StuckWatch)


def findings_of(scaler: ScalerProperties) -> Findings:
    """Return the findings of an enabled scaler, for code that combines those of several."""
    return scaler._findings


# The end of an iteration: the next scale, by what was found for its optimizers.


def advance(findings: Findings, stuck: StuckWatch, *, given: bool) -> None:
    """End the iteration, and bring the state on: on the host where it knows what was found."""
    looked = findings.looked()
    if not looked and not given:
        raise AssertionError("No inf checks were recorded prior to update.")
    findings.end_iteration()
    if not looked:
        return
    losses = [e["loss"] for e in looked if e.get("loss") is not None]
    if not torch.compiler.is_compiling() and all("skipped" in e for e in looked):
        skipped = any(e["skipped"] for e in looked)
        lost = skipped and any(loss.item() for loss in losses)
        stuck.look(findings.state.update_on_host(skipped=skipped, loss_lost=lost, given=given))
    else:
        found = cast(torch.Tensor, unscale.either(findings.largest(e) for e in looked))
        findings.state.update_on_device(found, losses, given=given)
        stuck.updated()


# Outputs multiplied by the scale, and a note of those that are not finite.


def scaled(outputs: Outputs, scale_of: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Multiply every tensor of a structure by the scale.

    Autograd saves the scale itself, where it is on the tensor's device: a backward pass after an
    update that has changed it raises, as with torch.amp.

    Args:
        outputs: a tensor, or an iterable of outputs.
        scale_of: returns the scale, float32 []; called with each tensor.

    Returns:
        The same structure; lists and tuples keep their type, other iterables become iterators.

    Raises:
        ValueError: something in `outputs` is neither a tensor nor an iterable.
    """
    if isinstance(outputs, torch.Tensor):
        return cast(Outputs, outputs * unscale.moved(scale_of(outputs), outputs.device))
    if isinstance(outputs, Iterable):
        items: Any = map(lambda item: scaled(item, scale_of), outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*items)
        return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def warned_of_bfloat16(device: str) -> bool:
    """Warn if the region that a loss comes from is bfloat16, where scaling has no effect."""
    low = regions.latest_low(device)
    if low is torch.bfloat16:
        level = 5 if torch.compiler.is_compiling() else outside()
        warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=level)
    return low is not None


def note(loss: torch.Tensor, noted: torch.Tensor) -> None:
    """Make `noted`, float32 [], NaN if the loss is not finite. The host does not wait."""
    values = distributed.local(loss.detach())
    if values.is_complex():
        values = values.abs()
    if torch.compiler.is_compiling():  # inductor takes x * 0 for 0
        fine = unscale.moved(values.isfinite().all(), noted.device)
        noted.copy_(torch.where(fine, noted, math.nan))
    elif not modes.in_transform(values):  # torch.func's transforms cannot write to tensors outside
        values = (values * 0).sum() if values.dim() else values
        noted.add_(unscale.moved(values, noted.device), alpha=0)


# A warning for gradients that are clipped while they are still multiplied by a loss scale.
#
# The gradients that remain are then too small by the loss scale. torch.amp does not notice it,
# and accelerate does it where `accelerator.scaler` is set under `mixed_precision="no"`. A scaler
# knows its optimizers from the iteration before, so that nothing is noticed in the first one.


class Watched:
    """The scalers of this process whose gradients must not be clipped before they are unscaled.

    Attributes:
        warned: by the findings of a scaler, whether the warning was given for it.
        lock: held while it changes or is gone through.
    """

    def __init__(self) -> None:
        self.warned: weakref.WeakKeyDictionary[Findings, bool] = weakref.WeakKeyDictionary()
        self.lock: threading.Lock = threading.Lock()


watched: Watched = Watched()

TOO_EARLY = (
    "gradients were clipped while they were still multiplied by the loss scale, so what is left of "
    "them is too small by that factor. Call scaler.unscale_(optimizer) before clipping. With "
    'accelerate, whose clipping does so only under mixed_precision="fp16", write '
    "accelerator.scaler.unscale_(optimizer.optimizer) before accelerator.clip_grad_norm_(...)."
)


def watch(findings: Findings) -> None:
    """Warn of clipping between a scaler's `scale` and its `unscale_` from now on."""
    with watched.lock:
        watched.warned[findings] = False
    _install()


@cache
def _install() -> None:
    optimizers.before_clipping(_look)


def _look(parameters: Sequence[torch.Tensor]) -> None:
    """Warn once for each scaler that has not unscaled gradients that are about to be clipped."""
    if torch.compiler.is_compiling():
        return
    with watched.lock:
        unwarned = [findings for findings, warned in watched.warned.items() if not warned]
    for findings in unwarned:
        if findings.has_yet_to_unscale(parameters):
            watched.warned[findings] = True
            warnings.warn(TOO_EARLY, ScalerWarning, stacklevel=outside())
