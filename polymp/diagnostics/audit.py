"""The audit of a run: what was measured in it, to print, to draw and to draw conclusions from.

    Measured ... -> Audit -> table, picture, first fault, fitting scale, suggestion

`suggest` says which rows to change, `audit_plot` and `audit_text` draw.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

from polymp.diagnostics import audit_plot, audit_text
from polymp.diagnostics.audit_records import AuditRecord
from polymp.diagnostics.suggest import suggest
from polymp.diagnostics.suggestion import Suggestion
from polymp.rules.policy_files import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Audit(AuditRecord):
    """What was measured; filled when the run ends.

    Attributes:
        results: of ops, in the order in which they were first reached.
        gradients: of parameters, by name.
        fault: where the first value that is not finite came from; None if all were finite.
        steps: how many steps were measured.
        scale: the loss scale that the gradients came with, 1 if none was known.
    """

    def suggest(self, base: Source = "amp") -> Suggestion:
        """What to change so that what was audited trains: rows, another dtype, or a loss scale.

        What lies behind the first Inf is not seen: where a step still breaks, audit it again.

        Args:
            base: the policy that the steps ran by. An op that ran by a float32 row of it gets no
                other.

        Raises:
            PolicyError: no such policy.
            ValueError: nothing was measured.
        """
        if not self.results:
            raise ValueError("nothing was measured: run a step in the audit's block, and ask then.")
        return suggest(self, base)

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        dtype: object = None,
        dark: bool = False,
    ) -> "Figure":
        """A picture of the magnitudes, layer by layer, against the ranges of the dtypes.

        A row for every module, with its results in the panel at the left and its gradients at the
        right: a band from the 5 % to the 95 % quantile of what is not zero, a tick at the largest.
        Gradients are drawn as they are without the loss scale.

        Args:
            path: file to write it to as well: ".png", ".svg" or ".pdf".
            dtype: the one whose range to show, by name or as a dtype object; None for float16,
                bfloat16, float8_e4m3fn and float8_e5m2.
            dark: True for light marks on a dark page.

        Raises:
            TypeError: `dtype` is neither a string nor a dtype.
            ValueError: nothing was measured, `dtype` is another dtype than these four, or there is
                no such suffix.
            ImportError: matplotlib is not installed.
        """
        return audit_plot.audit_figure(self, path, dtype, dark)

    def __str__(self) -> str:
        return audit_text.audit_table(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "steps": self.steps,
            "scale": self.scale,
            "fitting_scale": self.fitting_scale(),
            "fault": None if self.fault is None else str(self.fault),
            "results": [m.to_dict() for m in self.results],
            "gradients": [m.to_dict() for m in self.gradients],
        }
