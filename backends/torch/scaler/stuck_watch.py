"""`StuckWatch`: warns, raises or calls a function when a loss scaler skips step after step."""

import torch

from polymp.backends.torch.scaler import device_state as device_state_module
from polymp.backends.torch.scaler.findings import Findings, Names
from polymp.scaling.gradient_report import tell
from polymp.scaling.scale_rule import ScaleState


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
        self._name = device_state_module.listen(self._updated)

    def updated(self) -> None:
        """Note an update of the state on the device, in compiled code, too."""
        state = self.findings.state.tensors()
        if torch.compiler.is_compiling():
            device_state_module.tell(self._name, *state)
        else:
            self._updated(*state)

    def _updated(self, *state: torch.Tensor) -> None:
        device_state = self.findings.state
        replayed = torch.compiler.is_compiling() or device_state.capturing()  # when no Python runs
        if not replayed and device_state.arriving.updated(*state):
            assert device_state.arriving.seen is not None
            self.look(device_state.arriving.seen)

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
