"""The README's figures are those of the benchmarks' kept results: one that is measured anew changes in both places."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def kept(bench):
    return json.loads((ROOT / "docs" / "benchmarks" / f"{bench}.json").read_text(encoding="utf-8"))


def values(bench, pattern):
    """Of all figures of a benchmark whose names match, ascending."""
    found = sorted(f["value"] for f in kept(bench)["figures"] if fnmatchcase(f["name"], pattern))
    assert found, f"{bench} has no figure {pattern!r}"
    return found


def value(bench, pattern):
    (found,) = values(bench, pattern)
    return found


def ends(bench, pattern):
    """Mean and ends of the first interval that is in a figure's note."""
    (note,) = (f["note"] for f in kept(bench)["figures"] if fnmatchcase(f["name"], pattern))
    found = re.search(r"([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]", note)
    assert found, note
    return [float(x) for x in found.groups()]


def gain():
    mean, low, high = ends("gain", "T7 demo domains*")
    matching = value("gain", "T7d gsm8k-matching: held-out gain*")
    return [
        f"{mean:+.1f} points [{low:.1f}, {high:.1f}] on held-out questions",
        f"GSM8K matching gains {matching:.1f} points of the 9 wanted",
    ]


def real():
    rows = {(r["material"], r["method"]): r for r in kept("real")["details"]["text"]}
    base, ours = rows["wikitext", "base"], rows["wikitext", "learned-1%"]
    share, low, high = (100 * x for x in ours["share_of_lora_r1"])
    guarded, *_ = ends("real", "T14 eight tasks: lower end*")
    mean, least, most = ends("real", "T14 eight tasks, routed*")
    return [
        f"from perplexity {base['perplexity']:.1f} to {ours['perplexity']:.1f}, {share:.0f} % [{low:.0f}, {high:.0f}]",
        f"their {guarded:.1f} points become {mean:.1f} [{least:.1f}, {most:.1f}]",
    ]


def size():
    bands, switches = values("artefact", "band expert, *shape"), values("artefact", "switch expert*")
    return [
        f"{bands[0]:.2f} to {bands[-1]:.2f} % of its base as a band, {switches[0]:.2f} to {switches[-1]:.2f} % as switches",
        f"takes {value('switch', '*band of 10% width, bfloat16'):.1f} times as long",
    ]


def scoring():
    small, large = value("scorer", "5-shot*vocabulary 722"), value("scorer", "5-shot*vocabulary 32000")
    sweep = value("sweep", "*vocabulary 722")
    return [f"{small:.1f} and {large:.0f} times as fast", f"a sweep of bands is {sweep:.1f} times as fast"]


def converted():
    decode, prompts = value("tomoe-speed", "decod*trained masks"), values("tomoe-speed", "2048*")
    accuracy = value("real-fp32", "T9 wikitext, 50% active: share*")
    return [
        f"decode {decode:.1f} times as fast",
        f"prompts of 2,048 tokens {prompts[0]:.1f} to {prompts[-1]:.2f} times",
        f"keeps {accuracy:.0f} % of its next-token accuracy",
    ]


def trimmed():
    first = values("hookmoe-speed", "TTFT, both grouped_mm, Mixtral shape*")
    further = values("hookmoe-speed", "ITL, both compiled, Mixtral shape*")
    fine = sorted(
        v for family in ("OLMoE", "Qwen3-MoE") for v in values("hookmoe-speed", f"ITL, both compiled, {family}*")
    )
    won = sorted(value("hookmoe", f"lost accuracy won back: {hooks}") for hooks in ("one hook", "several hooks"))
    return [
        f"{first[0]:.2f} to {first[-1]:.2f} times as fast in a random mixture",
        f"further tokens {further[0]:.2f} to {further[-1]:.2f} times ({fine[0]:.2f} to {fine[-1]:.2f} with fine experts",
        f"win back {won[0]:.0f} to {won[-1]:.0f} % of the accuracy",
    ]


@pytest.mark.parametrize("claims", [gain, real, size, scoring, converted, trimmed])
def test_the_readme_says_what_was_measured(claims):
    for claim in claims():
        assert claim in README
