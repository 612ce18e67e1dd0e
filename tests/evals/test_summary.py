"""Tables of results: the average over tasks."""

import pytest

from freemoe.evals.summary import average_rows


def test_the_average_counts_every_task_the_same_and_leaves_texts_out():
    def domain(unit, **ways):
        count = len(next(iter(ways.values())))
        documents = [{"key": str(n), **{way: values[n] for way, values in ways.items()}} for n in range(count)]
        rows = {way: {"score": 100 * sum(values) / count} for way, values in ways.items()}
        return {"unit": unit, "rows": rows, "documents": documents}

    large = domain("points", base=[1.0] * 10 + [0.0] * 30, other=[1.0] * 20 + [0.0] * 20)
    small = domain("points", base=[1.0, 0.0], other=[0.0, 0.0])
    found = average_rows([large, small, domain("perplexity", base=[9.0], other=[3.0])])
    assert found["base"]["score"] == 37.5
    assert found["other"]["score"] == 25.0
    assert found["other"]["gain"]["mean"] == pytest.approx(-12.5)
    assert found["other"]["gain"]["low"] < -12.5 < found["other"]["gain"]["high"]
    assert found["base"]["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert average_rows([large]) == {}
