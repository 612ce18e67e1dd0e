from rich.console import Console

from freemoe.domain_experts.report import subdomain_table, summary_table
from tests.report.synthetic import make_domain, make_result, typed


def _printed(table):
    console = Console(width=240, record=True, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_summary_has_every_row_with_its_interval():
    result = make_result()
    printed = _printed(summary_table(typed(result)))
    for domain in result["domains"]:
        for row in domain["rows"].values():
            assert f"{row['score']:.2f}" in printed
    gain = result["domains"][0]["rows"]["routed"]["gain"]
    assert f"{gain['mean']:+.1f} [{gain['low']:+.1f}, {gain['high']:+.1f}]" in printed
    assert printed.count("oracle (selected on test)") == 3
    assert "2 of 3 subdomains have an expert" in printed


def test_subdomains_show_the_guards_verdict():
    result = make_result()
    printed = _printed(subdomain_table(typed(result)))
    for domain in result["domains"]:
        for sub in domain["subdomains"]:
            assert sub["name"] in printed
    assert printed.count("no reliable gain") == 2


def test_rows_that_are_absent_are_left_out():
    result = make_result([make_domain("math", ("base",), rows=("base", "expert"))])
    result["domains"][0]["subdomains"][0]["rows"] = {}
    assert "oracle" not in _printed(summary_table(typed(result)))
    assert "–" in _printed(subdomain_table(typed(result)))
