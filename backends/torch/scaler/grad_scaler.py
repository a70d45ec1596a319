"""`GradScaler`: dynamic loss scaling for torch optimizers.

The drop-in for `torch.amp.GradScaler`: scale the loss, unscale and check the gradients, step or
skip, update the scale. The state and its update are in `device_state`, the passes over gradients
in `unscale`, the ways to step in `optimizer_step`.
"""

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState as OptState  # readers of the stages compare with it

from polymp import scaling
from polymp.backends.torch.compat import accelerators, distributed, modes, optimizers
from polymp.backends.torch.scaler import device_state, optimizer_step, unscale
from polymp.backends.torch.scaler.device_state import DeviceState
from polymp.scaling import (
    Gradient,
    GradientReport,
    OnStuck,
    ScaleRule,
    ScaleState,
    checked_on_stuck,
    tell,
    to_state_dict,
)

Outputs = TypeVar("Outputs")

# What an iteration knows of an optimizer. Other libraries read and write it, so it has torch.amp's
# keys `stage` and `found_inf_per_device`, and once they are known: `loss`, float32 [], 0 if no loss
# was lost; `optimizer`, a weak reference; `inverse`, by which the gradients were multiplied;
# `grad_scale`, the scale that an optimizer divides by itself;
# `skipped`, where the host knows it; and `mixed`, in trainers: whether a backward pass added scaled
# gradients to unscaled ones.
Entry = dict[str, Any]


def _refresh_per_optimizer_state() -> Entry:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _fresh_entries() -> dict[int, Entry]:
    make: Callable[[], Entry] = _refresh_per_optimizer_state
    return defaultdict(make)


def _constant(name: str) -> Any:
    """Make a property for a constant of a scaler's rule."""
    return property(
        lambda scaler: getattr(scaler._rule, name),
        lambda scaler, value: scaler._change(scaler._rule._replace(**{name: value})),
    )


class GradScaler(DeviceState):
    """Loss scaling, which keeps small float16 gradients from becoming zero.

        scaler = GradScaler("cuda")
        with autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()    # gradients come out multiplied by the scale
        scaler.step(optimizer)           # unscale; step, or skip if one is Inf or NaN
        scaler.update()                  # back off after an overflow, grow after a good streak

    Args:
        device: of the training: "cuda", "cpu", ... The scale lives where the first loss is.
        init_scale: the first scale; any positive float32 number, or one from `min_scale` to
            `max_scale` where these are given.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without a skip.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: see `growth_factor`. A count already past a lowered interval grows the
            scale at the next good step.
        enabled: False makes every method pass through: `step` steps, `scale` returns its argument.
        min_scale: no overflow brings the scale below it; from 2**-126, the default.
        max_scale: no growth brings the scale above it; up to 2**126, the default.
        hysteresis: how many overflows in a row leave the scale as it is.
        on_stuck: the reaction to `stuck_after` skips in a row, once: "warn", "raise", or a
            function that is called with a `GradientReport`.
        stuck_after: see `on_stuck`. Where the host does not wait for the device, it reacts a few
            steps later; in compiled code it does not.
        strict: True raises, as torch.amp does, if an optimizer has no gradient; otherwise its step
            does nothing.
        allow_fp16: True accepts float16 gradients. Unscaled they are still float16, and small ones
            become zero.
        process_group: ranks to exchange findings with, besides the meshes of DTensors; for models
            that a pipeline cuts in pieces, or under DDP for reports on losses.

    Raises:
        AssertionError: `growth_factor` is not above 1 or `backoff_factor` not below 1.
        TypeError: an argument is not a number, or not whole where it has to be.
        ValueError: an argument is out of its range.

    Warns:
        UserWarning: CUDA is asked for and absent; the scaler is then disabled, as in torch.amp.

    Source:
        torch.amp, "Automatic Mixed Precision package", `torch.amp.GradScaler`.
    """

    _per_optimizer_states: dict[int, Entry]
    _before: dict[int, Entry]  # the entries of the last iteration
    _scaled_in: object  # the entries of the iteration in which a loss was scaled last

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = scaling.SMALLEST,
        max_scale: float = scaling.LARGEST,
        hysteresis: int = 0,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 50,
        strict: bool = False,
        allow_fp16: bool = False,
        process_group: Any = None,
    ) -> None:
        self._device = device
        self._enabled = _acts_on(device, enabled)
        if not self._enabled:
            return
        # The errors are torch.amp's where torch.amp has one.
        if scaling.number("growth_factor", growth_factor) <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if scaling.number("backoff_factor", backoff_factor) >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        self._rule = scaling.checked(
            ScaleRule(
                growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
            )
        )
        checked_on_stuck(on_stuck, stuck_after)
        unscale.check_group(process_group)
        self._on_stuck, self._stuck_after = on_stuck, stuck_after
        self._strict, self._allow_fp16, self._process_group = strict, allow_fp16, process_group
        first = scaling.checked_scale("init_scale", init_scale, self._rule, first=True)
        self._reported_row: int | None = None  # of skips, by the number of skips before it
        self._set_first(ScaleState(first))
        self._begin()

    # As attributes of torch.amp's, which programs set: nothing is checked.
    _growth_factor, _backoff_factor, _growth_interval = map(_constant, ScaleRule._fields[:3])

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply one output or many by the scale.

        Args:
            outputs: a tensor, or an iterable of outputs; tensors may be on several devices.

        Returns:
            The same structure; lists and tuples keep their type, other iterables become iterators.
            A product has the dtype that torch's promotion with a float32 scalar gives.

        Raises:
            ValueError: something in `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        return scaled(outputs, self._scale_of)

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
        entry = self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if entry["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._look(optimizer, device_state.inverse(scale), allow_fp16=self._allow_fp16)
        entry["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that is not done, then call `optimizer.step(*args, **kwargs)` or skip it.

        A fused optimizer gets `grad_scale` and `found_inf` and decides on the device. For others
        the host waits for the finding, except in a graph of torch.compile, where the device puts
        back what a bad step wrote. An optimizer without any gradient is left alone.

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
        entry = self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        result: Any
        if closure is not None:
            result = self._step_with_closure(optimizer, entry, args, kwargs)
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_fused(optimizer, entry, args, kwargs)
        else:
            if entry["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if self._has_nothing_to_step(entry):
                result = None
            elif optimizers.fits_a_graph(optimizer):
                found = self._found(entry)
                result = optimizer_step.step_in_graph(optimizer, found, *args, **kwargs)
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
        given = new_scale is not None
        if given:
            self._set_scale(new_scale, self._device)
        looked = [e for e in self._per_optimizer_states.values() if e["found_inf_per_device"]]
        if not looked and not given:
            raise AssertionError("No inf checks were recorded prior to update.")
        self._before, self._per_optimizer_states = self._per_optimizer_states, _fresh_entries()
        if not looked:
            return
        losses = [e["loss"] for e in looked if e.get("loss") is not None]
        if not torch.compiler.is_compiling() and all("skipped" in e for e in looked):
            skipped = any(e["skipped"] for e in looked)
            lost = skipped and any(loss.item() for loss in losses)
            state = self._update_on_host(skipped=skipped, loss_lost=lost, given=given)
            self._react_if_stuck(state)
        else:
            found = cast(torch.Tensor, unscale.largest(self._largest(e) for e in looked))
            self._update_on_device(found, losses, given=given)
            # No Python runs with the updates of a graph.
            replayed = torch.compiler.is_compiling() or self._capturing()
            if not replayed and self._arriving.updated(*self._tensors()):
                assert self._arriving.seen is not None
                self._react_if_stuck(self._arriving.seen)

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled. Waits for the device if the host does not know it."""
        return cast(float, self._read().scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the growth factor."""
        return self._rule.growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor.

        Args:
            new_factor: a number above 1; others raise a ValueError.
        """
        if self._enabled:
            self._change(scaling.checked(self._rule._replace(growth=new_factor)))

    def get_backoff_factor(self) -> float:
        """Return the backoff factor."""
        return self._rule.backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor.

        Args:
            new_factor: a number between 0 and 1; others raise a ValueError.
        """
        if self._enabled:
            self._change(scaling.checked(self._rule._replace(backoff=new_factor)))

    def get_growth_interval(self) -> int:
        """Return the growth interval, in steps."""
        return self._rule.interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval.

        Args:
            new_interval: in steps, from 1; other numbers raise a ValueError.
        """
        if self._enabled:
            self._change(scaling.checked(self._rule._replace(interval=new_interval)))

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
        return to_state_dict(self._rule, self._read()) if self._enabled else {}

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
        self._load(state_dict)

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether the last `step` of the optimizer was skipped, or the next one will be.

        It is skipped for Inf or NaN in a gradient on any rank, before or after it was unscaled. An
        optimizer without a gradient skips nothing. Call it after `unscale_` or `step`, before or
        after `update`. The host waits for the device when the tensor is read.

        Args:
            optimizer: the optimizer.

        Returns:
            bool [], on the scale's device; on the CPU where it is False for certain.

        Raises:
            RuntimeError: the scaler has not looked at the optimizer in this iteration or the last.
        """
        if not self._enabled:
            return torch.tensor(False)
        entry = self._latest(optimizer)
        return self._found(entry) != 0 if entry["found_inf_per_device"] else torch.tensor(False)

    @property
    def skipped_steps(self) -> torch.Tensor:
        """The number of iterations so far with a skipped step; int32 [], on the scale's device."""
        if not self._enabled or self._scale is None:
            return torch.tensor(self._init_counts[2] if self._enabled else 0, dtype=torch.int32)
        return self._tensors()[2][2].to(torch.int32)

    def report(self) -> GradientReport:
        """Report on the gradients of the optimizers of this iteration, or of the last one.

        Counts Inf, NaN, zeros and values too small for float16, gradient by gradient, with the
        names of an optimizer that was made with `model.named_parameters()`. Call it after `step` or
        `unscale_`, and before `zero_grad`; before them it has no entries. Waits for the device. Of
        a DTensor, this rank's part is counted.

        Returns:
            The report.
        """
        if not self._enabled:
            return GradientReport(ScaleRule(), ScaleState(1.0), ())
        # Once a loss of this iteration is scaled, gradients of the last one may have changed.
        return self._reported(last=not self._has_scaled())

    # Names of torch.amp's that other libraries use or override.

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        scale, tracker = self._scale, self._growth_tracker
        if scale is None or tracker is None:
            name = "_scale" if scale is None else "_growth_tracker"
            raise AssertionError(
                f"Attempted {funcname} but {name} is None.  This may indicate your script did "
                "not use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return scale, tracker

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return int(self._read().tracker) if self._enabled else 0

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inv_scale`; returns found_inf of each device, float32 []."""
        return unscale.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(
        self, optimizer: torch.optim.Optimizer, divisor: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Look for Inf and NaN, also in quotients by a `divisor`, for who unscales by himself."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        entry = self._look(optimizer, None, allow_fp16=True, divisor=divisor)
        return cast(dict[str, Any], entry["found_inf_per_device"])

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        entry = self._per_optimizer_states[id(optimizer)]
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

    # Beginnings: without tensors, and without entries.

    def _begin(self) -> None:
        super()._begin()
        self._per_optimizer_states, self._before, self._scaled_in = _fresh_entries(), {}, None

    def __getstate__(self) -> dict[str, object]:
        if not self._enabled:
            return self.__dict__.copy()
        if self._per_optimizer_states:
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        self._set_first(self._read())
        return {name: value for name, value in vars(self).items() if name not in _NOT_KEPT}

    def __setstate__(self, kept: Mapping[str, object]) -> None:
        self.__dict__.update(kept)
        if self._enabled:
            self._begin()

    # The steps of an iteration.

    def _scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        self._scaled_in = self._per_optimizer_states
        note(loss, self._noted_loss())
        return self._tensors()[0]

    def _has_scaled(self) -> bool:
        """Return whether a loss was scaled in this iteration, outside of compiled code."""
        # They are told apart by this object, which the `update` of a subclass replaces, too.
        return self._scaled_in is self._per_optimizer_states

    def _look(
        self,
        optimizer: torch.optim.Optimizer,
        inverse: torch.Tensor | None,
        *,
        allow_fp16: bool,
        divisor: torch.Tensor | None = None,
    ) -> Entry:
        """Multiply the gradients by `inverse`, if it is given, and note what all ranks found."""
        scale = self._tensors()[0]
        entry = self._per_optimizer_states[id(optimizer)]
        ranks = unscale.rank_groups(optimizer, self._process_group)
        loss = self._loss if ranks.everybody else None
        by = torch.ones_like(scale) if inverse is None else inverse
        found = self._unscale_grads_(optimizer, by, torch.zeros_like(scale), allow_fp16)
        divided = inverse is not None or divisor is not None
        if divided and self._may_be_below_one():
            # A quotient can be Inf where the scaled gradient was not.
            by = torch.ones_like(scale) if divisor is None else divisor
            unscale.add_overflows(found, optimizer, by)
        if ranks.groups:
            found, loss = unscale.agreed(found, loss, scale, ranks.groups)
        if not torch.compiler.is_compiling():
            optimizer_step.settle(optimizer)
        entry["found_inf_per_device"] = found
        entry["loss"] = loss
        entry["optimizer"] = weakref.ref(optimizer)
        entry["inverse"] = inverse
        return entry

    def _has_nothing_to_step(self, entry: Entry) -> bool:
        """Return whether there was no gradient to look at, so that the step does nothing."""
        if entry["found_inf_per_device"]:
            return False
        if self._strict:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        return True

    def _step_fused(
        self, optimizer: Any, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `optimizer.step(*args, **kwargs)`, with scale and finding set on the optimizer."""
        if optimizer_step.takes_scaler(optimizer):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
                "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
                "directly.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        outer = getattr(optimizer, "grad_scale", None)
        scale = outer
        if entry["stage"] is OptState.READY:
            scale = cast(torch.Tensor, self._get_scale_async()) * (1 if outer is None else outer)
            self._check_inf_per_device(optimizer, scale)
            entry["grad_scale"] = scale
        if self._has_nothing_to_step(entry):
            return None
        return optimizer_step.step_fused(optimizer, scale, self._found(entry), args, kwargs)

    def _step_with_closure(
        self, optimizer: Any, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `optimizer.step(*args, **kwargs)`; take it back if an evaluation had Inf or NaN."""

        def spoiled() -> bool:
            if not self._has_scaled():
                raise RuntimeError(
                    "the closure given to step() did not scale its loss: call "
                    "scaler.scale(loss).backward() in it, and return the loss itself."
                )
            if entry["stage"] is not OptState.UNSCALED:
                self.unscale_(optimizer)
            entry["stage"] = OptState.READY  # for the next evaluation
            bad = any(f.item() for f in entry["found_inf_per_device"].values())
            if not bad:
                self._scaled_in = None
            return bad

        # Gradients that this iteration has made already are for an optimizer that uses them before
        # it calls the closure (SAM).
        if self._has_scaled() and spoiled():
            entry["skipped"] = True
            return None
        result, entry["skipped"] = optimizer_step.step_or_take_back(
            optimizer, spoiled, args, kwargs
        )
        return result

    # What was found.

    def _found(self, entry: Entry) -> torch.Tensor:
        """Return 1 if any device found Inf or NaN, else 0; float32 [], on the scale's device."""
        # torch's sharded scaler adds up the findings of ranks, other libraries take their mean;
        # but fused kernels skip for 1 and for nothing else.
        return self._largest(entry).sign()

    def _largest(self, entry: Entry) -> torch.Tensor:
        """Return the largest finding of all devices: 0, or above 0."""
        device = self._tensors()[0].device
        moved = (unscale.moved(t, device) for t in entry["found_inf_per_device"].values())
        most = cast(torch.Tensor, unscale.largest(moved))
        # The findings of torch's sharded scaler have the shape [1].
        return most if most.dim() == 0 else most.reshape(())

    def _latest(self, optimizer: torch.optim.Optimizer) -> Entry:
        """Return the optimizer's entry of this iteration, or else of the one before."""
        for entries in (self._per_optimizer_states, self._before):
            entry = entries.get(id(optimizer))
            if entry is not None and "optimizer" in entry and entry["optimizer"]() is optimizer:
                return entry
        raise RuntimeError(
            f"this scaler has not looked at the gradients of this {type(optimizer).__name__} in "
            "this iteration or the last: call step(optimizer) or unscale_(optimizer) first."
        )

    def _reported(self, *, last: bool) -> GradientReport:
        """Report on the gradients; if asked for, with optimizers of the `last` iteration."""
        rows: list[Gradient] = []
        for entry in {**(self._before if last else {}), **self._per_optimizer_states}.values():
            optimizer = entry["optimizer"]() if "optimizer" in entry else None
            if optimizer is not None:
                inverse = entry["inverse"]
                one = torch.ones_like(self._tensors()[0])
                factor = one if inverse is None else inverse.reciprocal()
                if inverse is None and "grad_scale" in entry and entry["found_inf_per_device"]:
                    # torch's fused optimizers leave true gradients, if they have stepped.
                    factor = torch.where(self._found(entry) != 0, one, entry["grad_scale"])
                rows += unscale.rows(optimizer, factor)
        state = self._read()
        return GradientReport(self._rule, state, tuple(rows))

    def _react_if_stuck(self, state: ScaleState) -> None:
        """React to `stuck_after` skips in a row, once in each row."""
        stuck = state.skips >= self._stuck_after
        row = state.skipped - state.skips if stuck else None
        if stuck and row != self._reported_row:
            self._reported_row = row
            report = self._reported(last=True)._replace(state=state)
            tell(self._on_stuck, report)
        self._reported_row = row


# The attributes that `_begin` makes. A copy makes its own: it has no tensors, so that it can be
# loaded where the device is missing.
_NOT_KEPT = (
    *("_scale", "_growth_tracker", "_counts", "_bars", "_loss", "_captured", "_known", "_noted"),
    *("_regular", "_arriving", "_per_optimizer_states", "_before", "_scaled_in"),
)


def _acts_on(device: object, enabled: bool) -> bool:
    """Return whether a scaler with these arguments is enabled."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a name such as 'cuda' or 'cpu', got {device!r}. The first scale "
            "is GradScaler(device, init_scale)."
        )
    if enabled and device == "cuda" and accelerators.cuda_missing():
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
            stacklevel=3,
        )
        return False
    return enabled


# Outputs multiplied by the scale, and a note of those that are not finite.


def scaled(outputs: Outputs, scale_of: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Multiply every tensor of a structure by the scale."""
    # Autograd saves the scale itself, where it is on the tensor's device: a backward pass after an
    # update that has changed it raises, as with torch.amp.
    if isinstance(outputs, torch.Tensor):
        return cast(Outputs, outputs * unscale.moved(scale_of(outputs), outputs.device))
    if isinstance(outputs, Iterable):
        items: Any = map(lambda item: scaled(item, scale_of), outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*items)
        return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


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
