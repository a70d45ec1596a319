"""`GradScaler`: dynamic loss scaling for torch optimizers.

The drop-in for `torch.amp.GradScaler`: scale the loss, unscale and check the gradients, step or
skip, update the scale. The rule is `polymp.scaling.step`; torch's fused kernels carry it out on
the device. Names with a leading underscore that other libraries reach for are torch.amp's.
"""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.amp.grad_scaler import OptState as OptState  # readers of the stages compare with it

from polymp import scaling
from polymp.backends.torch import compat
from polymp.scaling import ScaleRule, ScaleState

Outputs = TypeVar("Outputs")


class _OnDevices:
    """Copies of a scalar tensor, one for each device that asks."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master = master
        self.copies: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        if device not in self.copies:
            self.copies[device] = self.master.to(device=device, non_blocking=True, copy=True)
        return self.copies[device]


def _refresh_per_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler:
    """Keeps small float16 gradients from vanishing.

        scaler = GradScaler("cuda")
        with autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()    # gradients come out multiplied by the scale
        scaler.step(optimizer)           # unscale; step, or skip if one is Inf or NaN
        scaler.update()                  # back off after a skip, grow after a good streak

    Args:
        device: where the scale lives: "cuda", "cpu", ...
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without a skip.
        backoff_factor: multiplies the scale after a skip.
        growth_interval: see `growth_factor`. A count already past a lowered interval grows the
            scale at the next good step.
        enabled: False makes every method pass through: `step` steps, `scale` returns its argument.

    Raises:
        AssertionError: `growth_factor` is not above 1 or `backoff_factor` not below 1.

    Warns:
        UserWarning: CUDA is asked for and absent; the scaler is then disabled, as in torch.amp.

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
    ) -> None:
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and compat.cuda_missing():
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
                stacklevel=2,
            )
            self._enabled = False
        if not self._enabled:
            return
        if growth_factor <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if backoff_factor >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        self._init_scale = init_scale
        self._scale: torch.Tensor | None = None  # float32 [], made on the first output's device
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._growth_tracker: torch.Tensor | None = None  # int32 []
        self._per_optimizer_states: dict[int, dict[str, Any]] = _fresh_states()
        self._counted_against: int | None = None  # the interval that the count is known to be below

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        for name, value in (("_scale", self._scale), ("_growth_tracker", self._growth_tracker)):
            if value is None:
                raise AssertionError(
                    f"Attempted {funcname} but {name} is None.  This may indicate your script did "
                    "not use scaler.scale(loss or outputs) earlier in the iteration."
                )
        return cast(torch.Tensor, self._scale), cast(torch.Tensor, self._growth_tracker)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full(
            (), self._init_growth_tracker, dtype=torch.int32, device=dev
        )

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
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            return cast(Outputs, outputs * self._scale.to(outputs.device, non_blocking=True))
        copies: list[_OnDevices] = []

        def multiply(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not copies:
                    if self._scale is None:
                        self._lazy_init_scale_growth_tracker(value.device)
                    assert self._scale is not None
                    copies.append(_OnDevices(self._scale))
                # A copy, so that `update` between two backwards does not change what is saved.
                return value * copies[0].get(value.device)
            if isinstance(value, Iterable):
                items = map(multiply, value)
                if isinstance(value, tuple) and hasattr(value, "_fields"):
                    return type(value)(*items)
                return type(value)(items) if isinstance(value, (list, tuple)) else items
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")

        return cast(Outputs, multiply(outputs))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inv_scale`; returns found_inf of each device, float32 []."""
        inverse, found = _OnDevices(inv_scale), _OnDevices(found_inf)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if not isinstance(param, torch.Tensor):
                        raise AssertionError(
                            f"expected param to be torch.Tensor, got {type(param).__name__}"
                        )
                    grad = param.grad
                    if grad is None:
                        continue
                    if not allow_fp16 and grad.dtype is torch.float16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    if grad.is_sparse:
                        # Entries that share an index add up, and float16 can overflow there:
                        # only the sums can be judged.
                        if grad.dtype is torch.float16:
                            grad = param.grad = grad.coalesce()
                        grad = grad._values()
                    alike[grad.device, grad.dtype].append(grad)
            for (device, _), grads in alike.items():
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, found.get(device), inverse.get(device)
                )
        return found.copies

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note Inf and NaN.

        For looking at or clipping true gradients between `backward` and `step`; `step` does it by
        itself otherwise. No host sync. Sparse float16 gradients are replaced by coalesced ones.

        Raises:
            RuntimeError: called twice for the optimizer since `update`, or after its `step`.
            ValueError: a gradient is float16.
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
        # Through float64, for 1/scale is not a float32 unless scale is a power of two.
        inverse = (
            scale.reciprocal()
            if scale.device.type == "mps"
            else scale.double().reciprocal().float()
        )
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found_inf, False)
        state["stage"] = OptState.UNSCALED

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        if sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return None
        return cast("float | None", optimizer.step(*args, **kwargs))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that is not done, then `optimizer.step(*args, **kwargs)`, or skip it.

        A fused optimizer gets `grad_scale` and `found_inf` and decides on the device; for any
        other one the host waits for the finding.

        Returns:
            What `optimizer.step` returned; None if it was skipped.

        Raises:
            RuntimeError: called twice for the optimizer since `update`, or given a closure.
            AssertionError: nothing was scaled, or the optimizer has no gradient.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_on_device(optimizer, state, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _step_on_device(
        self, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
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
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        assert scale is not None
        found = state["found_inf_per_device"].values()
        outer = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            optimizer.grad_scale = scale * (1 if outer is None else outer)
        else:
            optimizer.grad_scale = outer
        optimizer.found_inf = sum(t.to(scale.device, non_blocking=True) for t in found)
        try:
            result = optimizer.step(*args, **kwargs)
            state["stage"] = OptState.STEPPED
        finally:  # left behind, they would scale the next try twice
            del optimizer.grad_scale
            del optimizer.found_inf
        return cast("float | None", result)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale for the next iteration; once, after every optimizer's `step`.

        Args:
            new_scale: a scale to use from now on, a number or a float tensor of one element on the
                scaler's device; the growth count goes on. None lets the findings of this
                iteration decide.

        Raises:
            AssertionError: nothing was scaled or checked, or `new_scale` is not as above.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor):
                _check_new_scale(new_scale, self._device)
                scale.copy_(new_scale)
            else:
                scale.fill_(new_scale)
        else:
            found = [
                f.to(device=scale.device, non_blocking=True)
                for state in self._per_optimizer_states.values()
                for f in state["found_inf_per_device"].values()
            ]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            interval = self._growth_interval
            lowered = self._counted_against is None or interval < self._counted_against
            if lowered and interval > 0:
                # torch's kernel compares the count by equality; a count past a lowered interval
                # is brought to just below it, so that the rule of `scaling.step`, >=, holds.
                tracker.clamp_(max=interval - 1)
            self._counted_against = interval
            torch._amp_update_scale_(
                scale,
                tracker,
                sum(found[1:], start=found[0]),
                self._growth_factor,
                self._backoff_factor,
                interval,
            )
        self._per_optimizer_states = _fresh_states()

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """The scale, or 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else cast(float, scale.item())

    def get_growth_factor(self) -> float:
        """The growth factor."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Use another growth factor from now on."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """The backoff factor."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Use another backoff factor from now on."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """The growth interval, in steps."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Use another growth interval from now on, in steps."""
        self._growth_interval = new_interval

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        if self._growth_tracker is None:
            return self._init_growth_tracker
        return cast(int, self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """False if every method passes through."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state as five Python numbers, under the names that torch.amp gives them.

        They are scale, growth_factor, backoff_factor, growth_interval and _growth_tracker; either
        scaler loads the other's. Empty if disabled. To be taken after `update`. Waits for the
        device.
        """
        if not self._enabled:
            return {}
        rule = ScaleRule(self._growth_factor, self._backoff_factor, self._growth_interval)
        state = ScaleState(self.get_scale(), self._get_growth_tracker())
        return scaling.to_state_dict(rule, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; does nothing if disabled. Nothing is changed if it raises.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler's is.
            KeyError: an entry is missing.
            TypeError: an entry is not a number.
        """
        if not self._enabled:
            return
        if len(state_dict) == 0:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved "
                "from a disabled instance of GradScaler."
            )
        rule, state = scaling.from_state_dict(state_dict)
        self._growth_factor, self._backoff_factor, self._growth_interval = rule
        self._init_scale, self._init_growth_tracker = state
        self._counted_against = None
        if self._scale is not None:
            self._scale.fill_(state.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(state.tracker)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._enabled:
            if self._per_optimizer_states:
                raise AssertionError(
                    "A GradScaler instance may only be pickled at the beginning "
                    "of an iteration, or at the end after scaler.update()."
                )
            # Numbers, not tensors, so that it can be loaded where the device is missing.
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
            state["_scale"] = None
            state["_growth_tracker"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Look for Inf and NaN without unscaling; for optimizers that unscale by themselves."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, one, found_inf, True)
        return cast(dict[str, Any], state["found_inf_per_device"])

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return cast(
            dict[str, Any], self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        )


def _fresh_states() -> dict[int, dict[str, Any]]:
    make: Callable[[], dict[str, Any]] = _refresh_per_optimizer_state
    return defaultdict(make)


def _check_new_scale(new_scale: torch.Tensor, device: str) -> None:
    reason = (
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
        "torch.FloatTensor with requires_grad=False."
    )
    if new_scale.device.type != device:
        raise AssertionError(reason)
    if new_scale.numel() != 1:
        raise AssertionError(reason)
    if new_scale.requires_grad is not False:
        raise AssertionError(reason)
