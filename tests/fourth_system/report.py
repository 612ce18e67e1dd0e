"""The report of the toy."""

from freemoe.evals.verdict import GainVerdict
from freemoe.report.page import PageTable, ReportPage, TableGroup, common_facts, record_line, render_page
from freemoe.report.tables import plain_table


def tables(result):
    return [plain_table(("factor",), [(f"{result.factor}",)])], ["nothing was measured"]


def page(result):
    verdict = GainVerdict("same", "Not measured", "Nothing was measured.")
    table = PageTable("What was made.", ("", "factor"), [TableGroup([(None, ["damped", f"{result.factor}"])])], (1,))
    shown = ReportPage(
        title="Damped", about="", verdict=verdict, heading="Factor", reading="", readings=[], facts=common_facts(result),
        table=table,
        splits=[record_line(result.seen)],
    )  # fmt: skip
    return render_page(shown, result)
