"""`DeviceState`: a loss scaler's rule, and its state on a device, often known to the host.

The state is tensors, because other libraries read and write them under torch.amp's names. The next
one comes from `scaling.step` in two ways:

    on the host      on Python numbers, where the host knows what was found; it notes the numbers
                     with the versions of the tensors that it writes, and as long as the versions
                     stay, the state can be read without waiting for the device
    on the device    on the tensors, or by the kernel of torch.amp, which does the same
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from polymp import scaling
from polymp.backends.torch.compat import dynamo
from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.snapshot import AsyncCopy
from polymp.scaling import ScaleRule, ScaleState, from_state_dict


class DeviceState:
    """The base of `GradScaler`: its rule, and its state, tensors once the first loss is scaled."""

    _rule: ScaleRule
    # The numbers that the tensors are made from; the counts are `skips`, `spoiled` and `skipped`.
    _init_scale: float
    _init_growth_tracker: int
    _init_counts: tuple[int, int, int]
    # Others may write to these two, or put other tensors here.
    _scale: torch.Tensor | None  # float32 []
    _growth_tracker: torch.Tensor | None  # int32 []
    _counts: torch.Tensor | None  # float32 [3], of `counted`
    _bars: torch.Tensor | None  # of `new_bars`
    _loss: torch.Tensor | None  # float32 [], one of the bars: not 0 if a loss was not finite
    _captured: torch.Tensor | None  # the scale that a CUDA graph updates, without a new version
    _known: ScaleState | None  # the state as Python numbers; None if only the device knows it
    # The tensors that hold it, with their versions; () where the host cannot tell who wrote last.
    _noted: tuple[tuple[torch.Tensor, int], ...]
    _regular: bool  # see `regular`
    _arriving: "AsyncRead"

    def _begin(self) -> None:
        """Have no tensors yet."""
        self._scale = self._growth_tracker = self._counts = None
        self._bars = self._loss = self._captured = self._known = None
        self._noted = ()
        self._regular = regular(self._rule, self._first())
        self._arriving = AsyncRead()

    def _first(self) -> ScaleState:
        return ScaleState(self._init_scale, self._init_growth_tracker, *self._init_counts)

    def _set_first(self, state: ScaleState) -> None:
        self._init_scale, self._init_growth_tracker, *counts = state
        self._init_counts = cast(tuple[int, int, int], tuple(counts))

    def _change(self, rule: ScaleRule) -> None:
        """Go on with another rule."""
        self._regular = self._regular and rule.interval >= self._rule.interval
        if rule.backoff != self._rule.backoff:
            self._arriving = AsyncRead()  # its bound of the scale followed from the old factor
        self._rule = rule

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        first = self._first()
        with _versioned():
            scale = torch.full((), first.scale, dtype=torch.float32, device=dev)
            tracker = torch.full((), first.tracker, dtype=torch.int32, device=dev)
        self._scale, self._growth_tracker = scale, tracker  # at once: half of it would be no state
        self._tensors()
        self._remember(first._replace(scale=scaling.as_float32(float(first.scale))))

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scale, tracker and counts. Other libraries may have made the first two."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        if self._counts is None:
            with _versioned():
                counts = torch.zeros(3, dtype=torch.float32, device=self._scale.device)
                for at, number in enumerate(counted(self._first())):
                    if number:  # without a copy from the host, which a CUDA graph cannot capture
                        counts.select(0, at).fill_(number)
                self._bars, self._loss = new_bars(self._scale.device)
            self._counts = counts
            if not torch.compiler.is_compiling():  # compiled code writes to them where they are
                for tensor in (self._scale, self._growth_tracker, counts, self._loss):
                    dynamo.stays(tensor)
        return self._scale, self._growth_tracker, self._counts

    def _noted_loss(self) -> torch.Tensor:
        """Return `_loss`, made if it is not there."""
        self._tensors()
        assert self._loss is not None
        return self._loss

    # What the host knows.

    def _remember(self, state: ScaleState | None) -> None:
        """Note that the tensors hold this state now, or one that only the device knows."""
        if state is not None:
            self._regular = regular(self._rule, state)
        self._known, self._noted = None, ()
        if self._capturing():  # every replay writes to them
            self._captured = self._scale
        elif not torch.compiler.is_compiling():
            self._known, self._noted = state, tuple((t, t._version) for t in self._tensors())

    def _capturing(self) -> bool:
        """Return whether a CUDA graph is captured, other than by a compiler."""
        if torch.compiler.is_compiling() or self._scale is None:
            return False
        return self._scale.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _recall(self) -> ScaleState | None:
        """Return the state if the host knows it."""
        return self._known if self._are_as_noted() else None

    def _are_as_noted(self) -> bool:
        """Return False if something but an update may have written to the tensors."""
        if torch.compiler.is_compiling() or self._capturing():
            return False  # this code may run again without Python, and no number may decide
        if not self._noted or self._scale is None or self._captured is self._scale:
            return False
        pairs = zip(self._noted, self._tensors(), strict=True)
        return all(was is now and was._version == version for (was, version), now in pairs)

    def _read(self) -> ScaleState:
        """Return the state as Python numbers. Waits for the device if the host does not know it."""
        if self._scale is None:
            return self._first()
        state = self._recall()
        if state is None:
            scale, tracker, counts = self._tensors()
            state = state_of(scale.item(), tracker.item(), *counts.tolist())
            self._remember(state)
        return state

    def _may_be_below_one(self) -> bool:
        """Return False where the host can rule out that the scale is below 1."""
        # With a scale of 1 or more no quotient overflows, so that the pass that looks for overflows
        # is saved. What is found does not depend on the answer.
        if self._rule.min_scale >= 1:
            return False
        if not self._are_as_noted():
            return True
        if self._known is not None:
            return bool(self._known.scale < 1)
        return self._arriving.at_least(self._rule.backoff) < 1

    # The next state.

    def _set_scale(self, new: Any, device: str) -> None:
        """Set the scale to a number, or a tensor on the device type."""
        scale, *_ = self._tensors()
        before, state = self._recall(), None
        if isinstance(new, torch.Tensor):
            _check_new_scale(new, device)
            bounded = new.detach().reshape(()).to(scale.dtype)
            bounded = bounded.clamp(self._rule.min_scale, self._rule.max_scale)
            scale.copy_(torch.where(bounded.isnan(), scale, bounded))
        else:
            number = scaling.checked_scale("new_scale", new, self._rule)
            scale.fill_(number)
            if before is not None:
                state = before._replace(scale=scaling.as_float32(number))
        self._arriving.age = self._arriving.sent = math.inf  # no copy on its way has this scale
        self._remember(state)

    def _update_on_host(self, *, skipped: bool, loss_lost: bool, given: bool) -> ScaleState:
        """Apply the rule to Python numbers, and write the ones that have changed."""
        before = self._read()
        after = scaling.step(self._rule, before, not skipped, loss_finite=not loss_lost)
        if given:
            after = ScaleState(*before[:2], *after[2:])
        scale, tracker, counts = self._tensors()
        if after.scale != before.scale:
            scale.fill_(after.scale)
        if after.tracker != before.tracker:
            tracker.fill_(after.tracker)
        numbers = zip(counted(before), counted(after), strict=True)
        for at, (old, new) in enumerate(numbers):
            if new != old:
                counts[at].fill_(new)
        self._remember(after)
        self._noted_loss().zero_()
        self._arriving = AsyncRead()
        return after

    def _update_on_device(
        self, found: torch.Tensor, losses: Sequence[torch.Tensor], *, given: bool
    ) -> None:
        """Apply the rule on the device, where only the device knows what was found."""
        if not torch.compiler.is_compiling() and not self._noted:
            # Compiled code has updated the state since it was copied.
            self._arriving.age = self._arriving.sent = math.inf
        scale, tracker, counts = self._tensors()
        loss = unscale.largest(losses)
        bars = self._bars if self._regular else None
        if bars is not None and loss is not None and loss is not self._loss:
            self._noted_loss().copy_(loss)  # the ranks have found another together
        elif loss is None:
            self._noted_loss().zero_()
        moved = (scale.clone(), tracker.clone()) if given else (scale, tracker)
        update(self._rule, *moved, counts, found, loss, bars)
        if loss is not None:
            self._noted_loss().zero_()
        self._remember(None)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `from_state_dict` accepts; raises as that does."""
        self._rule, first = from_state_dict(state_dict, self._rule)
        self._set_first(first)
        self._arriving = AsyncRead()
        if self._scale is not None:
            values = (*first[:2], counted(first))
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(torch.tensor(value, dtype=tensor.dtype))
            self._remember(first)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1/scale as torch.amp computes it, in float64 and rounded once; float32 []."""
    # It is computed from the tensor that the loss was multiplied by, not from a number that the
    # host knows: `torch.distributed` and `.data` write to the tensor without a new version.
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def _versioned() -> Any:
    """Return a context whose tensors have versions and can be trained, in inference mode, too."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()


def _check_new_scale(new_scale: torch.Tensor, device: str) -> None:
    on_device, one = new_scale.device.type == device, new_scale.numel() == 1
    if not (on_device and one and new_scale.requires_grad is False):
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )


# `scaling.step` on a device: state and findings are tensors, and the host does not wait.
#
# A scale of at most 2**126 that grows by no more than this is finite, or was at its bound already:
# then torch's kernel, which drops an infinite scale, and a clamp do what the rule says.
_TAME = 4.0


def counted(state: ScaleState) -> tuple[Any, Any, Any]:
    """Return the counts as tensors hold them: skips in a row, overflows among them, all skips."""
    return state.skips, state.skips - state.spoiled, state.skipped


def state_of(scale: Any, tracker: Any, skips: Any, overflows: Any, skipped: Any) -> ScaleState:
    """Return the state as Python numbers, from a scale, a tracker and counts of `counted`."""
    counts = map(int, (tracker, skips, skips - overflows, skipped))
    return ScaleState(scale, *counts)


def new_bars(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the thresholds of a finding, float32 [6], and a view of the second one, float32 []."""
    # A finding above the first three adds 1 to the three counts; one above the last three keeps a
    # count. The second threshold is 0, and NaN or 1 if a loss was not finite: no finding is above
    # it then, and no overflow is counted.
    bars = torch.zeros(6, dtype=torch.float32, device=device)
    bars.select(0, 5).fill_(-1.0)
    return bars, bars.select(0, 1)


def regular(rule: ScaleRule, state: ScaleState) -> bool:
    """Return whether the rule can lead to a state: within the bounds and the growth interval."""
    inside = rule.min_scale <= scaling.as_float32(state.scale) <= rule.max_scale
    return bool(inside and state.tracker < rule.interval)


def update(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    loss: torch.Tensor | None,
    bars: torch.Tensor | None = None,
) -> None:
    """Bring the tensors to the state after one optimizer step, in place."""
    # With `bars` by the kernel that torch.amp uses, in a quarter of the launches.
    wild = rule.hysteresis or rule.growth > _TAME
    if bars is None or wild or torch.compiler.is_compiling():
        # The factors act in float64, as in torch's kernel; the scale is rounded when it is stored.
        wide = scale if scale.device.type == "mps" else scale.double()
        skips, overflows, skipped = counts.unbind()
        state = ScaleState(wide, tracker, skips, skips - overflows, skipped)
        fine = None if loss is None else loss == 0
        after = scaling.step(rule, state, found == 0, torch.where, loss_finite=fine)
        scale.copy_(after.scale)
        tracker.copy_(after.tracker)
        counts.copy_(torch.stack(counted(after)))
    else:
        above = torch.gt(found, bars, out=torch.empty_like(bars))  # 1 or 0, float32
        more, goes_on = above.view(2, 3).unbind()
        torch.addcmul(more, goes_on, counts, out=counts)
        skip = more.select(0, 0)
        torch._amp_update_scale_(scale, tracker, skip, rule.growth, rule.backoff, rule.interval)
        scale.clamp_(rule.min_scale, rule.max_scale)


# Updates between two copies of a state to the host. A copy costs the host some microseconds.
_EVERY = 4


class AsyncRead:
    """Copies the state to the host every few updates, without a wait; keeps the last arrived."""

    def __init__(self) -> None:
        self.seen: ScaleState | None = None  # the state of that copy
        self.age: float = 0  # updates since that state; Inf if its scale says nothing about this
        self.sent: float = 0  # the same, of the copy on its way
        self._copy: AsyncCopy | None = None

    def updated(self, *state: torch.Tensor) -> bool:
        """Note an update; read a copy that has arrived, and start another."""
        self.age += 1
        self.sent += 1
        new = self._copy is not None and self._copy.is_ready()
        if self._copy is not None and new:
            copy = self._copy.values()
            (tracker,), numbers = copy[:1].tolist(), copy[1:].view(torch.float32).tolist()
            self.seen = state_of(numbers[0], tracker, *numbers[1:])
            self.age, self._copy = self.sent, None
        if self._copy is None and self.sent >= _EVERY:
            # One copy for all, as bits, so that no number is converted or rounded.
            together = torch.cat([state[at].reshape(-1).view(torch.int32) for at in (1, 0, 2)])
            self._copy, self.sent = AsyncCopy(together), 0
        return new

    def at_least(self, backoff: float) -> float:
        """Return a lower bound of the scale, which holds as long as only updates write it."""
        lowest = backoff * (1 - 2.0**-23)  # each time the scale is rounded to float32
        return 0.0 if self.seen is None else float(self.seen.scale * lowest**self.age)
