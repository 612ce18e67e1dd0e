"""The benchmark of the server runs, and its percentiles are right."""

import math

from benchmarks.harness import BENCHES, Settings, run_bench
from benchmarks.serve.benchmark import percentile


def test_a_quick_run():
    found = run_bench("serve", Settings(quick=True))
    names = [figure["name"] for figure in found["figures"]]
    assert names[:2] == [
        "tokens/s of 1 client, over one request at a time",
        "tokens/s of 4 clients, over one request at a time",
    ]
    assert all(figure["value"] > 0 for figure in found["figures"])
    assert found["details"]["runner"] == "SlotRunner"
    assert found["details"]["clients"][4][0]["tokens"] > 0
    assert "T19" in BENCHES.about("serve")


def test_percentiles():
    values = [float(i) for i in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([7.0], 0.95)) == (50, 95, 7)
    assert math.isnan(percentile([], 0.5))
