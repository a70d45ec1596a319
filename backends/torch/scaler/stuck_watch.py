"""`StuckWatch`: says of a loss scaler that it skips one step after the other."""

import torch

from polymp.backends.torch.scaler import async_read, gradient_stats
from polymp.backends.torch.scaler.findings import Findings
from polymp.scaling.gradient_report import tell
from polymp.scaling.scale_rule import ScaleState


class StuckWatch:
    """Does what `on_stuck` says, once in each row of skips.

    Args:
        findings: the scaler's.
        names: of parameters, for the report.
        told: of which row of skips it was said: how many skips came before the row.
    """

    def __init__(
        self, findings: Findings, names: gradient_stats.Names, told: int | None = None
    ) -> None:
        self.findings = findings
        self.names = names
        self.told = told
        self._name = async_read.listen(self._updated)

    def updated(self) -> None:
        """Note an update of the state on the device, be it in code that is being compiled."""
        state = self.findings.state.tensors()
        if torch.compiler.is_compiling():
            async_read.tell(self._name, *state)
        else:
            self._updated(*state)

    def _updated(self, *state: torch.Tensor) -> None:
        device_state = self.findings.state
        replayed = torch.compiler.is_compiling() or device_state.capturing()  # when no Python runs
        if not replayed and device_state.arriving.updated(*state):
            assert device_state.arriving.seen is not None
            self.look(device_state.arriving.seen)

    def look(self, state: ScaleState) -> None:
        """Say that the scaler is stuck, if the state has that many skips in a row."""
        options = self.findings.options
        stuck = state.skips >= options.stuck_after
        row = state.skipped - state.skips if stuck else None  # skips before it
        if stuck and row != self.told:
            self.told = row
            report = self.findings.report(self.names, last=True)._replace(state=state)
            tell(options.on_stuck, report)
        self.told = row
