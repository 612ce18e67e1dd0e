"""The report of the toy."""

from __future__ import annotations

from typing import Any

from freemoe.evals.verdict import GainVerdict
from freemoe.report.page import PageTable, ReportPage, TableGroup, common_facts, record_line, render_page
from freemoe.report.tables import plain_table
from tests.fourth_system.result import DampResult


def tables(result: DampResult) -> tuple[list[Any], list[str]]:
    return [plain_table(("factor",), [(f"{result.factor}",)])], ["nothing was measured"]


def page(result: DampResult) -> str:
    verdict = GainVerdict("same", "Not measured", "Nothing was measured.")
    table = PageTable("What was made.", ("", "factor"), [TableGroup([(None, ["damped", f"{result.factor}"])])], (1,))
    shown = ReportPage(
        title="Damped", about="", verdict=verdict, heading="Factor", reading="", readings=[], facts=common_facts(result),
        table=table,
        splits=[record_line(result.seen)],
    )  # fmt: skip
    return render_page(shown, result)
