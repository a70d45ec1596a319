"""The audit of a run: its measurements as a table, a picture and a suggestion of rows to change.

    Measured ... -> Audit -> table, picture, first fault, fitting scale, suggestion

`suggest` makes the suggestion, `audit_plot` the picture and `audit_text` the table.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any

from polymp import text_table
from polymp.diagnostics import audit_plot, audit_text, page
from polymp.diagnostics.audit_records import AuditRecord
from polymp.diagnostics.fp8_loss import LIMIT
from polymp.diagnostics.suggest import Suggestion, suggest, suggest_fp8
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
        rounding: True if rounding errors were measured.
        loss_effect: the sum of the ops' effects on the loss, None if none was measured.
        fp8: name of the recipe whose losses were measured, "" for none.
        fp8_losses: what each call site of a product would lose in 8 bits by that recipe.
    """

    def suggest(
        self, base: Source | None = None, *, fp8: bool = False, limit: float = LIMIT
    ) -> Suggestion:
        """Suggest a change with which the audited steps train: rows, a dtype or a loss scale.

            mine = audit.suggest("amp").apply("amp")

        Ops after the first Inf cannot be judged: if a step still breaks, audit it again.

        With `fp8=True`, suggest which products stay in bfloat16 before the others run in 8 bits.
        The audit needs the losses of a recipe, as of `audit(model, fp8="tensorwise")`. A product
        stays if one of its errors, of an operand or of a result, is more than `limit` times that of
        rounding alone: 2.4 % for a float8_e4m3fn operand, 4.7 % for one of float8_e5m2, and the
        root of the sum of their squares for a result. The printed text is a whole policy file.

            audit.suggest(fp8=True).apply("fp8")

        Args:
            base: the policy that the steps ran by, "amp" if left out. An op that ran by a float32
                row of it gets no other. With `fp8=True`, the policy that products are taken out
                of, "fp8" if left out.
            fp8: True for products that stay in bfloat16 under a policy with rule fp8.
            limit: with `fp8=True`, how many times the error of rounding alone an error may be.

        Returns:
            The suggestion, which is false if nothing has to change.

        Raises:
            PolicyError: no such policy; or with `fp8=True`, one without rule fp8.
            ValueError: nothing was measured; with `fp8=True`, no losses were, or `limit` is not a
                number above 0.
        """
        if fp8:
            return suggest_fp8(self, "fp8" if base is None else base, limit)
        if not self.results:
            raise ValueError("nothing was measured: run a step in the audit's block first.")
        return suggest(self, "amp" if base is None else base)

    def table(
        self,
        width: int | None = None,
        *,
        sort: str = "program",
        fold: bool = True,
        limit: int | None = None,
    ) -> str:
        """Return the audit as the text that `print(audit)` shows.

        "layers.*.attn x24" are 24 modules with the same ops; the row has the largest magnitude of
        all of them, and the shares of all their values.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program" for the order in which modules and ops were first reached; "cost" to put
                those first of which float16 would lose most: by the share of values that become
                Inf, of these that become zero, of these that become subnormal; "largest" to put
                those with the largest magnitudes first; "loss" those whose rounding changes the
                loss most.
            fold: False to show equal layers one by one.
            limit: how many rows to list: those that come first by `sort`, or by "cost".

        Returns:
            The text.

        Raises:
            ValueError: `sort` is none of these four, or `limit` no positive number.
        """
        return audit_text.audit_table(self, width, sort, fold, limit)

    def to_html(
        self, path: str | PathLike[str] | None = None, *, sort: str = "program", fold: bool = True
    ) -> str:
        """Return an HTML page: the same rows, to sort and to filter; see `Report.to_html`.

        Args:
            path: file to write it to as well, in UTF-8.
            sort: as in `table`.
            fold: False to show equal layers one by one.

        Returns:
            The page as text.

        Raises:
            ValueError: `sort` is none of the four.
        """
        return page.written(page.html(audit_text.audit_page(self, sort, fold)), path)

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        dtype: object = None,
        dark: bool = False,
        *,
        sort: str = "program",
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
            sort: as in `table`; a module stands where the first of its two sides would.
            fold: False to draw equal layers one by one.

        Returns:
            The figure.

        Raises:
            TypeError: `dtype` is neither a string nor a dtype.
            ValueError: nothing was measured, `dtype` is another dtype than these four, `sort` is no
                order, or there is no such suffix.
            ImportError: matplotlib is not installed.
        """
        return audit_plot.audit_figure(self, path, dtype, dark, fold, sort)

    def __str__(self) -> str:
        return audit_text.audit_table(self)

    def __repr__(self) -> str:
        rows = f"{len(self.results)} results, {len(self.gradients)} gradients"
        return f"Audit({text_table.plural(self.steps, 'step')}, {rows})"

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), "audit")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "steps": self.steps,
            "scale": self.scale,
            "rounding": self.rounding,
            "loss_effect": self.loss_effect,
            "fitting_scale": self.fitting_scale(),
            "fault": None if self.fault is None else str(self.fault),
            "results": [m.to_dict() for m in self.results],
            "gradients": [m.to_dict() for m in self.gradients],
            "lost_updates": [each._asdict() for each in self.lost_updates],
            "fp8": self.fp8,
            "fp8_losses": [one.to_dict() for one in self.fp8_losses],
        }
