"""The page as a file: its policy fits it, its colours are the reports', and it needs nothing else."""

import base64
import hashlib
import re

from freemoe.report.palette import COLOURS
from freemoe.serve.page import content_security_policy, load_page

HTML, HEADERS = load_page()[0].decode(), load_page()[1]


def hashed(inside):
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def test_the_policy_names_what_stands_in_the_file_and_nothing_else():
    policy = dict(rule.split(" ", 1) for rule in HEADERS["content-security-policy"].split("; "))
    (script,) = re.findall(r"<script>(.*)</script>", HTML, re.DOTALL)
    (style,) = re.findall(r"<style>(.*)</style>", HTML, re.DOTALL)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == hashed(script)
    assert policy["style-src"] == hashed(style)
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


def test_the_policy_of_other_pages():
    policy = content_security_policy("<script>a()</script><style>b{}</style><script>c()\n</script>")
    assert f"script-src {hashed('a()')} {hashed('c()' + chr(10))};" in policy
    assert f"style-src {hashed('b{}')};" in policy
    assert "script-src 'none'; style-src 'none';" in content_security_policy("<p>no code</p>")


def test_the_page_needs_no_other_file_and_no_other_place():
    assert "//" not in re.sub(r"^\s*//.*$|(?<= )// .*$|[\"']//?[\"']", "", HTML, flags=re.MULTILINE)
    assert not re.search(
        r"""\bon\w+\s*=\s*["']|style\s*=\s*["']|\bsrc\s*=|@import|url\(|innerHTML|insertAdjacent|eval\(""", HTML
    )
    assert "\r" not in HTML


def test_its_colours_are_the_reports():
    found = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);", HTML)
    assert len(found) > 8
    assert {name: (light, dark) for name, light, dark in found} == {name: COLOURS[name] for name, _, _ in found}


def test_its_headers():
    assert HEADERS["content-type"] == "text/html; charset=utf-8"
    assert HEADERS["x-content-type-options"] == "nosniff"
    assert all(re.fullmatch(r"[\x20-\x7e]+", value) for value in HEADERS.values())
