"""`ScalerProperties`: the getters and setters of a loss scaler, its state, and its reports.

Nothing here writes a gradient: each name reads or sets something in a `DeviceState`, `Findings` or
a `StuckWatch`. Other libraries use the names with a leading underscore, which are torch.amp's.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.scaler import clipping, gradient_stats
from polymp.backends.torch.scaler.async_read import AsyncRead
from polymp.backends.torch.scaler.device_state import DeviceState
from polymp.backends.torch.scaler.findings import Entry, Findings
from polymp.backends.torch.scaler.options import Options
from polymp.backends.torch.scaler.stuck_watch import StuckWatch
from polymp.scaling import scale_rule
from polymp.scaling.gradient_report import GradientReport
from polymp.scaling.scale_rule import ScaleRule, ScaleState
from polymp.scaling.state_dict import to_state_dict


def _part(part: str, name: str) -> Any:
    """Make a property for an attribute of one of a scaler's parts."""

    def get(scaler: "ScalerProperties") -> Any:
        return getattr(getattr(scaler, part), name)

    def put(scaler: "ScalerProperties", value: object) -> None:
        setattr(getattr(scaler, part), name, value)

    return property(get, put)


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


# The classes whose objects change as a scaler is used.
PARTS = (DeviceState, AsyncRead, Findings, StuckWatch)


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
        names: gradient_stats.Names,
        told: int | None = None,
    ) -> None:
        self._state = state
        self._findings = Findings(state, asked)
        self._stuck = StuckWatch(self._findings, names, told)
        clipping.watch(self._findings)

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

    def report(self, named: gradient_stats.Named | None = None) -> GradientReport:
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
        names = self._stuck.names if named is None else gradient_stats.Names(named)
        # Once a loss of this iteration is scaled, gradients of the last one may have changed.
        return self._findings.report(names, last=not self._findings.has_scaled())


def findings_of(scaler: ScalerProperties) -> Findings:
    """Return the findings of an enabled scaler, for code that combines those of several."""
    return scaler._findings
