"""The report that `explain` makes of a program.

    report = polymp.explain(model, x)
    print(report)                         # a table, widest costs first
    report.to_html("report.html")
    report.diff(polymp.explain(model, x, policy="lean"))

It is a list of calls (`call_record`) that can be drawn (`report_text`, `report_html`) and held
against another one (`report_diff`).
"""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from polymp.diagnostics import page, report_html, report_text
from polymp.diagnostics.call_record import Call, CallList
from polymp.diagnostics.report_diff import ReportDiff


class Report(CallList):
    """What ran, call site by call site, in the order in which the sites were first reached.

    Attributes:
        title: what was explained.
        low: the low dtype of the regions, "" if there was none.
        policy: name of the policy, "" if there was no region.
    """

    def fill(self, calls: Iterable[Call], low: str, policy: str) -> None:
        """Give a report that was handed out empty what ran in the block it was made for."""
        self._calls, self.low, self.policy = calls, low, policy
        self.__dict__.pop("calls", None)

    def table(
        self,
        modules: str | Iterable[str] | None = None,
        ops: str | Iterable[str] | None = None,
        limit: int | None = None,
        width: int = 100,
    ) -> str:
        """The report as text, or a part of it: what `print(report)` shows.

        Calls are grouped by direction and module; in a module, those whose casts move the most
        bytes come first, then those with the most FLOPs. In "fp32 x2 -> bf16 (in fp32)", the last
        is the dtype it ran in, where that is not the dtype of what came out.

        Args:
            modules: patterns of module paths, as in policies: "blocks.*.attn"; "" for what lies
                outside of modules. The totals are then of these alone.
            ops: names in the vocabulary or the framework's; likewise.
            limit: how many calls to list, those with the widest costs.
            width: of a line, in characters.

        Raises:
            ValueError: a pattern matches no call, an op is not in the report, or `limit` is not a
                positive number.
        """
        return report_text.report_table(report_text.chosen(self, modules, ops), limit, width)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: "title", "low", "policy", "totals" and "calls"."""
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
                "widened": len(self.widened()),
            },
            "calls": [call.to_dict() for call in self.calls],
        }

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A page of its own: totals, and a table to sort and to filter.

        It holds all that it needs: nothing is loaded, so it can be mailed or kept with a run.

        Args:
            path: file to write it to as well, in UTF-8.
        """
        return page.written(page.html(report_html.page(self)), path)

    def diff(self, other: "Report", modules: Callable[[str], str] | None = None) -> ReportDiff:
        """Where another report differs: of another policy, or of the other framework.

        Calls are held against each other by module, direction and op, in order.

        Args:
            other: of the same model.
            modules: from a module path of `other` to the path here. By default the paths are
                equal; where one has no equal, the parts "layers" of flax's containers and a class
                name in front, as linen has it, are left out if the rest then matches.
        """
        return ReportDiff(self, other, modules)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), self.title or "report")

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self)} calls, {self.casts} casts)"
