import pytest

from freemoe.domain_experts.report import domain_sentence
from freemoe.report.reading import better, format_number, format_percent, gain_words
from tests.report.synthetic import make_domain, make_result, typed, typed_row


def _sentence(domain, **search):
    result = make_result([domain])
    result["recipe"]["search"] |= search
    read = typed(result)
    return domain_sentence(read, read.domains[0])


def test_a_gain_beyond_chance_is_called_better():
    domain = make_domain("math", ("saliency", "base"))
    words = _sentence(domain)
    gain = domain["rows"]["expert"]["gain"]
    assert words.startswith("math: better than the base on 60 held-out documents: acc 41.5 → ")
    assert f"({gain['mean']:+.1f} [{gain['low']:+.1f}, {gain['high']:+.1f}] points)" in words
    assert "experts in 1 of 2 subdomains" in words
    assert "Routed from the prompt alone" in words
    assert "Caution" not in words


@pytest.mark.parametrize(
    ("chosen", "interval", "words"),
    [
        ("base", None, "no reliable gain was found"),
        ("saliency", (-1.0, 3.0), "not distinguishable from the base"),
        ("saliency", (-9.0, -2.0), "worse than the base"),
    ],
)
def test_what_does_not_help_is_not_praised(chosen, interval, words):
    domain = make_domain("math", (chosen,))
    if interval:
        low, high = interval
        domain["rows"]["expert"]["gain"] = {"mean": (low + high) / 2, "low": low, "high": high}
    assert words in _sentence(domain)


def test_text_is_told_in_perplexity_and_ratio():
    domain = make_domain("wiki", ("saliency",), text=True)
    assert f"(× {domain['rows']['expert']['ratio']['mean']:.3f} [" in _sentence(domain)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ((8.0, 2.0, 14.0), "+8.0 [+2.0, +14.0] points, which weights are off matters."),
        ((8.0, -2.0, 18.0), "+8.0 [-2.0, +18.0] points, not shown that it matters which weights are off."),
        ((8.0, None, None), "+8.0 points, one draw, so no interval."),
    ],
)
def test_the_expert_is_compared_with_its_control(over, words):
    domain = make_domain("math", ("saliency",))
    assert "minus control" not in _sentence(domain)
    domain["rows"]["expert"]["over_control"] = dict(zip(("mean", "low", "high"), over, strict=True))
    domain["rows"]["control"]["seeds"] = [1.0] if over[1] is None else [1.0, 2.0]
    assert f" Expert minus control (random weights of the same magnitudes): {words}" in _sentence(domain)


def test_a_row_without_an_interval_shows_none():
    row = typed_row(gain=(3.0, None, None))
    assert gain_words(row, text=False) == "+3.0"
    assert better(row, text=False) == 0


def test_an_unguarded_choice_is_pointed_out():
    assert "not guarded" in _sentence(make_domain("math", ("saliency",)), select="argmax")


def test_better_knows_that_less_perplexity_is_better():
    row = typed_row(ratio=(0.5, 0.4, 0.6), gain=(-1, -2, -0.5))
    assert better(row, text=True) == 1
    assert better(row, text=False) == -1


def test_numbers_for_people():
    assert format_number(1.005, 1, True) == "+1.0"
    assert format_number(None) == format_number(float("inf")) == "–"
    assert format_number(4.2e30) == "4.20e+30"
    assert format_percent(0.0) == "0"
    assert format_percent(0.00039724) == "0.04"
