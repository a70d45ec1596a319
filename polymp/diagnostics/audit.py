"""The audit of a run: its measurements as a table, a picture and a suggestion of rows to change.

    Measured ... -> Audit -> table, picture, first fault, fitting scale, suggestion

`suggest` makes the suggestion, `audit_plot` the picture and `audit_text` the table.
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
    """The measurements of a run, filled when its block ends; `print` shows them as a table.

    Attributes:
        results: of ops, in the order in which they were first reached.
        gradients: of parameters, by name.
        lost_updates: of low parameters that an optimizer wrote, added up over the steps.
        fault: the op that the first value that is not finite came from; None if all were finite.
        steps: how many steps were measured.
        scale: the loss scale that the gradients were multiplied by, 1 if none was known.
    """

    def suggest(self, base: Source = "amp") -> Suggestion:
        """Suggest a change with which the audited steps train: rows, a dtype or a loss scale.

            mine = audit.suggest("amp").apply("amp")

        Ops after the first Inf cannot be judged: if a step still breaks, audit it again.

        Args:
            base: the policy that the steps ran by. An op that ran by a float32 row of it gets no
                other.

        Returns:
            The suggestion, which is false if nothing has to change.

        Raises:
            PolicyError: no such policy.
            ValueError: nothing was measured.
        """
        if not self.results:
            raise ValueError("nothing was measured: run a step in the audit's block first.")
        return suggest(self, base)

    def table(self, width: int | None = None, *, sort: str = "program", fold: bool = True) -> str:
        """Return the audit as the text that `print(audit)` shows.

        "layers.*.attn x24" are 24 modules with the same ops; the row has the largest magnitude of
        all of them, and the shares of all their values.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program" for the order in which modules and ops were first reached; "largest" to
                put those with the largest magnitudes first.
            fold: False to show equal layers one by one.

        Returns:
            The text.

        Raises:
            ValueError: `sort` is neither "program" nor "largest".
        """
        return audit_text.audit_table(self, width, sort, fold)

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        dtype: object = None,
        dark: bool = False,
        *,
        fold: bool = True,
    ) -> "Figure":
        """Draw the magnitudes, layer by layer, against the ranges of the dtypes.

        A row for every module, with its results in the panel at the left and its gradients at the
        right: a band from the 5 % to the 95 % quantile of the values that are not zero, and a tick
        at the largest. Gradients are drawn without the loss scale. Equal layers are one row, with
        the values of all of them.

        Args:
            path: file to write it to as well: ".png", ".svg" or ".pdf".
            dtype: the one whose range to show, by name or as a dtype object; None for float16,
                bfloat16, float8_e4m3fn and float8_e5m2.
            dark: True for light marks on a dark page.
            fold: False to draw equal layers one by one.

        Returns:
            The figure.

        Raises:
            TypeError: `dtype` is neither a string nor a dtype.
            ValueError: nothing was measured, `dtype` is another dtype than these four, or there is
                no such suffix.
            ImportError: matplotlib is not installed.
        """
        return audit_plot.audit_figure(self, path, dtype, dark, fold)

    def __str__(self) -> str:
        return audit_text.audit_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "steps": self.steps,
            "scale": self.scale,
            "fitting_scale": self.fitting_scale(),
            "fault": None if self.fault is None else str(self.fault),
            "results": [m.to_dict() for m in self.results],
            "gradients": [m.to_dict() for m in self.gradients],
            "lost_updates": [each._asdict() for each in self.lost_updates],
        }
