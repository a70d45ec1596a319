"""The numbers of a loss scaler: constants, and a state on a device that the host may know as well.

The state is tensors, for others read and write them under torch.amp's names. Whatever brings it
from one state to the next by Python numbers notes them with the versions of the tensors; as long as
the versions stay, nothing has to wait for the device to read them.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from polymp.backends.torch import compat
from polymp.backends.torch.scaler import scale_update
from polymp.backends.torch.scaler.async_read import Watch
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import ScaleRule, ScaleState


class _Known(NamedTuple):
    """The state as Python numbers, and the tensors and versions of them that it was read from."""

    state: ScaleState
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]


class ScaleHolder:
    """What `GradScaler` is without gradients.

    Names with an underscore are torch.amp's, but for `_rule`, `_counts`, `_init_counts`, `_bars`,
    `_loss`, `_known`, `_regular`, `_watch` and `_captured`. A disabled one has `_device` and
    `_enabled` only, as in torch.amp.
    """

    _device: str
    _enabled: bool

    def _hold(self, rule: ScaleRule, init_scale: float) -> None:
        """Start with these numbers."""
        self._rule = rule
        self._init_scale = init_scale
        self._init_growth_tracker = 0
        self._init_counts = (0, 0, 0)
        self._scale: torch.Tensor | None = None  # float32 [], made on the first output's device
        self._growth_tracker: torch.Tensor | None = None  # int32 []
        self._counts: torch.Tensor | None = None  # of `scale_update.counted`
        self._bars: torch.Tensor | None = None  # of `scale_update.new_bars`
        self._loss: torch.Tensor | None = None  # that of the bars: not 0 if a loss was not finite
        self._known: _Known | None = None
        self._regular = scale_update.regular(rule, self._initial())
        self._watch = Watch()
        # The scale that a CUDA graph updates, whose replays write without a new version.
        self._captured: torch.Tensor | None = None

    # The constants, under the names that torch.amp gives them.

    @property
    def _growth_factor(self) -> float:
        return self._rule.growth

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._rule = self._rule._replace(growth=value)

    @property
    def _backoff_factor(self) -> float:
        return self._rule.backoff

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._rule = self._rule._replace(backoff=value)
        self._watch = Watch()  # what it said of the scale went by the old factor

    @property
    def _growth_interval(self) -> int:
        return self._rule.interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._regular = self._regular and value >= self._rule.interval
        self._rule = self._rule._replace(interval=value)

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
        with _versioned():
            self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
            self._growth_tracker = torch.full(
                (), self._init_growth_tracker, dtype=torch.int32, device=dev
            )
            self._make_counts(dev)
        self._stay()
        if self._capturing():
            self._captured = self._scale  # and every replay fills it anew
        state = self._initial()
        self._remember(state._replace(scale=scale_rule.as_float32(float(state.scale))))

    def _make_counts(self, device: torch.device) -> None:
        """Without a copy from the host, which a CUDA graph cannot capture."""
        self._counts = torch.zeros(3, device=device)
        for at, count in enumerate(scale_update.counted(self._initial())):
            if count:
                self._counts.select(0, at).fill_(count)
        self._bars, self._loss = scale_update.new_bars(device)

    def _stay(self) -> None:
        """Let compiled code write to the state where it is."""
        if not torch.compiler.is_compiling():
            for tensor in (*self._tensors(), self._loss):
                compat.stays(cast(torch.Tensor, tensor))

    def _initial(self) -> ScaleState:
        return ScaleState(self._init_scale, self._init_growth_tracker, *self._init_counts)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scale, tracker and counts. A subclass may have made the first two by itself."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        if self._counts is None:
            with _versioned():
                self._make_counts(self._scale.device)
                self._stay()
        assert self._counts is not None
        return self._scale, self._growth_tracker, self._counts

    def _remember(self, state: ScaleState) -> None:
        """Note that the tensors hold this state now."""
        self._regular = scale_update.regular(self._rule, state)
        if torch.compiler.is_compiling():
            return
        tensors = self._tensors()
        self._known = _Known(state, tensors, tuple(t._version for t in tensors))

    def _replays(self) -> bool:
        """True if what runs here may run again without the host: nothing it knows may decide.

        In code that is compiled, while a CUDA graph is captured, and for as long as the scale is
        one that a graph updates.
        """
        if torch.compiler.is_compiling() or self._capturing():
            return True
        return self._captured is not None and self._captured is self._scale

    def _capturing(self) -> bool:
        """True while a CUDA graph is captured; where code is compiled, that is the compiler's."""
        if torch.compiler.is_compiling() or self._scale is None:
            return False
        return self._scale.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _recall(self) -> ScaleState | None:
        """The state, if the host knows it: None if anything wrote to the tensors since."""
        if self._replays():
            return None
        known = self._known
        if known is None or self._scale is None:
            return None
        for tensor, now, version in zip(
            known.tensors, self._tensors(), known.versions, strict=True
        ):
            if tensor is not now or tensor._version != version:
                return None
        return known.state

    def _read(self) -> ScaleState:
        """The state as Python numbers. Waits for the device if the host does not know it."""
        if self._scale is None:
            return self._initial()
        state = self._recall()
        if state is None:
            scale, tracker, counts = self._tensors()
            state = scale_update.state_of(scale.item(), tracker.item(), *counts.tolist())
            self._remember(state)
        return state

    def _write(self, before: ScaleState, after: ScaleState) -> None:
        """Bring the tensors from one state to the next, where it differs."""
        scale, tracker, counts = self._tensors()
        if after.scale != before.scale:
            scale.fill_(after.scale)
        if after.tracker != before.tracker:
            tracker.fill_(after.tracker)
        numbers = zip(scale_update.counted(before), scale_update.counted(after), strict=True)
        for at, (old, new) in enumerate(numbers):
            if new != old:
                counts[at].fill_(new)
        self._remember(after)

    def _set_scale(self, scale: torch.Tensor, new: Any) -> None:
        least, most = self._rule.min_scale, self._rule.max_scale
        before = self._recall()
        if self._capturing():
            self._captured = scale
        if isinstance(new, torch.Tensor):
            _check_new_scale(new, self._device)
            bounded = new.detach().reshape(()).to(scale.dtype).clamp(least, most)
            scale.copy_(torch.where(bounded.isnan(), scale, bounded))
            self._watch.given()
            self._known = None
        else:
            number = scale_rule.checked_scale("new_scale", new, self._rule)
            scale.fill_(number)
            self._watch.given()
            self._known = None
            if before is not None:
                self._remember(before._replace(scale=scale_rule.as_float32(number)))

    # The numbers.

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """The scale, or 1.0 if disabled. Waits for the device if the host does not know it."""
        return cast(float, self._read().scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The growth factor."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Use another growth factor from now on; raises as `GradScaler` does for a wrong one."""
        if self._enabled:
            self._growth_factor = scale_rule.checked(self._rule._replace(growth=new_factor)).growth

    def get_backoff_factor(self) -> float:
        """The backoff factor."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Use another backoff factor from now on; raises as `GradScaler` does for a wrong one."""
        if self._enabled:
            self._backoff_factor = scale_rule.checked(
                self._rule._replace(backoff=new_factor)
            ).backoff

    def get_growth_interval(self) -> int:
        """The growth interval, in steps."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Use another growth interval from now on, in steps; raises for a wrong one."""
        if self._enabled:
            rule = scale_rule.checked(self._rule._replace(interval=new_interval))
            self._growth_interval = rule.interval

    def _get_growth_tracker(self) -> int:
        return int(self._read().tracker) if self._enabled else 0

    def is_enabled(self) -> bool:
        """False if every method passes through."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state as Python numbers, under torch.amp's names; see `scale_rule.to_state_dict`.

        torch.amp's scaler and polymp's for JAX load it, too. Empty if disabled. To be taken after
        `update`. Waits for the device if the host does not know the state.
        """
        return scale_rule.to_state_dict(self._rule, self._read()) if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; does nothing if disabled. Nothing is changed if it raises.

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
        self._rule, state = scale_rule.from_state_dict(state_dict, self._rule)
        self._init_scale, self._init_growth_tracker, *counts = state
        self._init_counts = cast(tuple[int, int, int], tuple(counts))
        self._watch = Watch()
        if self._scale is not None:
            values = (*state[:2], scale_update.counted(state))
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(torch.tensor(value, dtype=tensor.dtype))
            self._remember(state)


def _versioned() -> Any:
    """Tensors made in it have versions and can be trained with, in inference mode, too."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()


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
