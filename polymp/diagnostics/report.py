"""The report that `explain` makes of a program.

    report = polymp.explain(model, x)
    print(report)                         # totals, then a table; equal layers are one
    report.to_html("report.html")
    report.diff(polymp.explain(model, x, policy="lean"))

It is a list of calls (`call_record`) that can be drawn (`report_text`, `page`) and compared
with another one (`report_diff`).
"""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from polymp.diagnostics import page, report_text
from polymp.diagnostics.call_record import Call, CallList
from polymp.diagnostics.report_diff import ReportDiff
from polymp.errors import escaped


class Report(CallList):
    """The op calls of a program, with rules, dtypes and casts; `print` shows them as a table.

    Iterating gives a `Call` for each call site, in the order in which the sites were first reached.

    Attributes:
        calls: the call sites.
        title: name of the function or model that was explained.
        low: the low dtype of the regions, "" if there was none.
        policy: name of the policy, "" if there was no region.
    """

    def fill(self, calls: Iterable[Call], low: str, policy: str) -> None:
        """Fill a report that was empty until its block ended.

        Args:
            calls: that ran in the block.
            low: the low dtype of the regions.
            policy: name of the policy.
        """
        self._calls = calls
        self.low = low
        self.policy = policy
        self.__dict__.pop("calls", None)

    def table(
        self,
        modules: str | Iterable[str] | None = None,
        ops: str | Iterable[str] | None = None,
        limit: int | None = None,
        width: int | None = None,
        *,
        sort: str = "program",
        fold: bool = True,
    ) -> str:
        """Return the report, or a part of it, as the text that `print(report)` shows.

        Calls are grouped by direction and module. "fp32 x2 -> bf16 (in fp32)" is an op with two
        float32 inputs and a bfloat16 result that ran in float32. "layers.*.attn x24" are 24 modules
        whose calls are alike; their counts are added up.

        Args:
            modules: patterns of module paths, as in policies: "blocks.*.attn"; "" for calls outside
                of modules. The totals are then of these alone.
            ops: names in the vocabulary or the framework's; the totals are then of these alone.
            limit: how many rows to list, those with the highest costs.
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program" for the order in which modules and calls were first reached; "cost" to
                put those first whose casts move the most bytes, and of these, or where nothing is
                cast, those with the most FLOPs.
            fold: False to show equal layers one by one.

        Returns:
            The text.

        Raises:
            ValueError: a pattern matches no call, an op is not in the report, `limit` is not a
                positive number, or `sort` neither "program" nor "cost".
        """
        part = report_text.chosen(self, modules, ops)
        return escaped(report_text.report_table(part, limit, width, sort, fold))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data: "title", "low", "policy", "totals" and "calls"."""
        return {
            "title": self.title,
            "low": self.low,
            "policy": self.policy,
            "totals": {
                "flops": self.flops,
                "casts": self.casts,
                "cast_bytes": self.cast_bytes,
                "saved": self.saved,
                "kept": self.kept,
                "kept_fp8": self.kept_fp8,
                "fallbacks": self.fallbacks,
                "widened": len(self.widened()),
            },
            "calls": [call.to_dict() for call in self.calls],
        }

    def to_html(
        self,
        path: str | PathLike[str] | None = None,
        *,
        sort: str = "cost",
        fold: bool = True,
    ) -> str:
        """Return an HTML page: totals, and a table to sort and to filter.

        The page loads nothing, so it can be mailed or kept with a run.

        Args:
            path: file to write it to as well, in UTF-8.
            sort: "cost" or "program", as in `table`, but of all rows together; in a browser the
                page can be sorted by any column.
            fold: False to show equal layers one by one.

        Returns:
            The page as text.

        Raises:
            ValueError: `sort` is neither "program" nor "cost".
        """
        return page.written(page.html(report_text.report_page(self, sort, fold)), path)

    def diff(self, other: "Report", modules: Callable[[str], str] | None = None) -> ReportDiff:
        """Compare with another report: under another policy, or from the other framework.

            print(polymp.explain(model, x).diff(polymp.explain(model, x, policy="lean")))

        Calls are compared by module, direction and op, in order.

        Args:
            other: of the same model.
            modules: from a module path of `other` to the path here. By default paths are the same
                in both; for a path that this report lacks, the parts "layers" of flax's containers
                and a class name in front, as linen has it, are left out if the rest then matches.

        Returns:
            The differences; false if there are none.
        """
        return ReportDiff(self, other, modules)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), self.title or "report")

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self)} calls, {self.casts} casts)"
