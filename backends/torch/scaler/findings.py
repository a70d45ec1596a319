"""What a loss scaler has found, optimizer by optimizer, and what it says of that.

An iteration has a dictionary for each optimizer, which other libraries reach into: torch.amp's
entries `stage` and `found_inf_per_device`, and beside them, once they are known, `loss`, float32
[], 0 if no loss was lost, `optimizer`, a weak reference, `inverse`, by which the gradients were
multiplied, and `skipped`, where the host knows it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.scaler import async_read, clipping, gradient_stats, unscale
from polymp.backends.torch.scaler.device_state import ScaleHolder
from polymp.scaling.gradient_report import GradientReport, OnStuck, tell
from polymp.scaling.scale_rule import ScaleRule, ScaleState

SkipOn = Literal["auto", "host", "device"]


def _refresh_per_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _fresh_states() -> dict[int, dict[str, Any]]:
    make: Callable[[], dict[str, Any]] = _refresh_per_optimizer_state
    return defaultdict(make)


class Options(NamedTuple):
    """What is asked of a scaler beside the rule."""

    on_stuck: OnStuck
    stuck_after: int
    strict: bool
    allow_fp16: bool
    check_loss: bool
    skip_on: SkipOn
    process_group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "Options":
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled. Save its state_dict() and load "
                "it into one that was made with the group."
            )
        return Options, tuple(self)


class Teller(ScaleHolder):
    """What `GradScaler` is, without what it does to gradients and steps."""

    _options: Options
    _names: gradient_stats.Names

    def _begin(self) -> None:
        """What a scaler starts with, be it made, loaded or copied."""
        self._per_optimizer_states: dict[int, dict[str, Any]] = _fresh_states()
        self._before: dict[int, dict[str, Any]] = {}  # those of the last iteration
        self._scaled_in: Any = None  # the states of the iteration in which a loss was scaled last
        self._told: int | None = None  # of which row of skips: how many came before it
        self._looked = False  # whether its region is bfloat16
        self._of = ""  # the loss that it is for, if it is one of several
        self._name = async_read.listen(self._updated)
        clipping.watch(self)

    def _has_yet_to_unscale(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True between `scale` and `unscale_` or `step`, for parameters of an optimizer of its own.

        Its optimizers are those that it stepped in the iteration before.
        """
        if not self._has_scaled() or self._of:
            return False
        for key, before in self._before.items():
            now = self._per_optimizer_states.get(key)
            optimizer = before["optimizer"]() if "optimizer" in before else None
            if optimizer is not None and (now is None or now["stage"] is OptState.READY):
                given = {id(p) for p in parameters}
                if any(id(p) in given for p in unscale.parameters(optimizer)):
                    return True
        return False

    def _has_scaled(self) -> bool:
        """True if a loss was scaled in this iteration, on the host.

        Iterations are told apart by the states of the optimizers, which a subclass's own `update`
        exchanges, too.
        """
        return self._scaled_in is self._per_optimizer_states

    def _found(self, state: dict[str, Any]) -> torch.Tensor:
        """The finding for the optimizer on all devices, on the scale's: 0 or 1, float32 [].

        Torch's sharded scaler adds up what the ranks found; others take the mean. Fused kernels
        skip for 1 and for nothing else.
        """
        found: torch.Tensor = self._largest(state).sign()
        return found

    def _largest(self, state: dict[str, Any]) -> torch.Tensor:
        """The same as it was found: 0, or above 0."""
        device = self._tensors()[0].device
        findings = list(state["found_inf_per_device"].values())
        either: torch.Tensor = findings[0]
        if len(findings) > 1 or either.device != device:
            largest = unscale.either(unscale.moved(t, device) for t in findings)
            assert largest is not None
            either = largest
        # Torch's sharded scaler finds in shape [1].
        return either if either.dim() == 0 else either.reshape(())

    # What happened.

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What was last found for the optimizer, in this iteration or the one before."""
        for states in (self._per_optimizer_states, self._before):
            state = states.get(id(optimizer))
            if state is not None and "optimizer" in state and state["optimizer"]() is optimizer:
                return state
        raise RuntimeError(
            f"this scaler has not looked at the gradients of this {type(optimizer).__name__} in "
            "this iteration or the last: call step(optimizer) or unscale_(optimizer) first."
        )

    def found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """True if Inf or NaN was last found for the optimizer; bool [], on the scale's device.

        In a gradient on any rank, before or after it was unscaled, or in a loss. Nothing waits for
        the device until the tensor is read.

        Raises:
            RuntimeError: the scaler has not looked at the optimizer in this iteration or the last.
        """
        if not self._enabled:
            return torch.tensor(False)
        state = self._state_of(optimizer)
        if not state["found_inf_per_device"]:
            return torch.tensor(False)
        found: torch.Tensor = self._found(state) != 0
        return found

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """True if the last `step` of the optimizer was not taken; bool [], on the scale's device.

        For Inf or NaN, or because the optimizer had no gradient. To be asked after `step`, before
        or after `update`. `if scaler.step_skipped(optimizer):` waits for the device where the host
        does not know the answer.

        Raises:
            RuntimeError: the scaler has not stepped the optimizer in this iteration or the last.
        """
        if not self._enabled:
            return torch.tensor(False)
        state = self._state_of(optimizer)
        if state["stage"] is not OptState.STEPPED:
            raise RuntimeError(
                f"step_skipped() was called before this {type(optimizer).__name__}'s step()."
            )
        return self.found_inf(optimizer) if state["found_inf_per_device"] else torch.tensor(True)

    @property
    def skipped_steps(self) -> torch.Tensor:
        """Iterations so far in which an optimizer was skipped; int32 [], on the scale's device."""
        if not self._enabled or self._scale is None:
            return torch.tensor(0 if not self._enabled else self._init_counts[2], dtype=torch.int32)
        return self._tensors()[2][2].to(torch.int32)

    def report(self, named: gradient_stats.Named | None = None) -> GradientReport:
        """What is in the gradients of the optimizers of this iteration, or of the last one.

        Counts Inf, NaN, zeros and values too small for float16, gradient by gradient. To be asked
        after `step` or `unscale_`, and before `zero_grad`; before them there are no entries. Waits
        for the device. Of a DTensor, this rank's part is counted.

        Args:
            named: a module, or pairs of a name and a parameter; None for those that the scaler was
                made with.

        Raises:
            TypeError: `named` is something else.
        """
        if not self._enabled:
            return GradientReport(ScaleRule(), ScaleState(1.0), ())
        names = self._names if named is None else gradient_stats.Names(named)
        # Once a loss of this iteration is scaled, gradients are no longer what the last one left.
        return self._report(names, {} if self._has_scaled() else self._before)

    def _report(
        self, names: gradient_stats.Names, before: dict[int, dict[str, Any]]
    ) -> GradientReport:
        """The report, with optimizers that were looked at before this iteration."""
        rows = []
        for state in {**before, **self._per_optimizer_states}.values():
            optimizer = state["optimizer"]() if "optimizer" in state else None
            if optimizer is not None:
                inverse = state["inverse"]
                one = torch.ones((), device=self._tensors()[0].device)
                factor = one if inverse is None else inverse.reciprocal()
                if inverse is None and "grad_scale" in state and state["found_inf_per_device"]:
                    # torch's fused optimizers leave true gradients, if they have stepped.
                    factor = torch.where(self._found(state) != 0, one, state["grad_scale"])
                rows += gradient_stats.gradients(optimizer, names.of(optimizer), factor)
        return GradientReport(self._rule, self._read(), tuple(rows), self._of)

    def _updated(self, *state: torch.Tensor) -> None:
        replayed = torch.compiler.is_compiling() or self._capturing()  # when no Python runs
        if not replayed and self._watch.updated(*state):
            assert self._watch.seen is not None
            self._look_if_stuck(self._watch.seen)

    def _look_if_stuck(self, state: ScaleState) -> None:
        stuck = state.skips >= self._options.stuck_after
        row = state.skipped - state.skips if stuck else None  # skips before it
        if stuck and row != self._told:
            self._told = row
            report = self._report(self._names, self._before)._replace(state=state)
            tell(self._options.on_stuck, report)
        self._told = row
