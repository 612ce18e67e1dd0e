"""A build from files to artefact: what stands in it, and that the report is about what is on disk."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import FreeMoEError
from freemoe.core.run.progress import CollectingProgress
from freemoe.domain_experts.expert import DomainExpert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from freemoe.recipes import load_recipe
from tests.domain_experts.conftest import read_result, task_recipe, write_jsonl
from tests.tiny import model_and_weights, tiny_model


def experts_of(folder):
    tensors = load_file(folder / "experts.safetensors")
    return {e["name"]: DomainExpert.from_parts(e, tensors) for e in read_manifest(folder)["experts"]}


def reported(world, name, spec):
    data = load_domain(name, [str(spec)], tokenizer=world.tokenizer)
    return data, data.reported.open(FrozenChoice("test"))


def test_the_artefact_is_whole(world, artefact):
    manifest = read_manifest(artefact)
    assert set(manifest["files"]) == {
        "experts.safetensors", "router.safetensors", "seen.safetensors", "recipe.yaml", "result.json", "README.md"
    }  # fmt: skip
    assert manifest["base_fingerprint"] == fingerprint_model(world.model)
    assert [e["name"] for e in manifest["experts"]] == ["law/0", "law/1", "sums/all"]
    assert not artefact.with_name("out.partial").exists()
    assert not list(artefact.rglob("*.tmp"))
    assert not (artefact / "units").exists()
    assert load_recipe(artefact / "recipe.yaml") == task_recipe(world, artefact)


def test_no_weight_of_the_base_is_in_the_artefact(artefact, text_artefact):
    for folder in (artefact, text_artefact):
        size = (folder / "experts.safetensors").stat().st_size
        assert size < 0.25 * sum(p.numel() * p.element_size() for p in tiny_model("llama").parameters())
    assert all(t.dtype == torch.uint8 for t in load_file(text_artefact / "experts.safetensors").values())


def test_the_result_is_what_the_experts_do(world, artefact):
    """Every per-document score again, by hand: load, switch off, score one document at a time."""
    model, experts = tiny_model("llama"), experts_of(artefact)
    weights = find_weights(model)
    for domain, spec in zip(read_result(artefact)["domains"], (world.law, world.sums), strict=True):
        data, documents = reported(world, domain["name"], spec)
        evaluator = Evaluator(Scorer(model, world.tokenizer), data.graders)
        assert [d["key"] for d in domain["documents"]] == [d.key for d in documents]
        for row, document in zip(domain["documents"], documents, strict=True):
            for column, name in (("base", "base"), ("expert", row["subdomain"]), ("routed", row["routed_to"])):
                with switched_off(weights, Mask() if name == "base" else experts[name].mask(weights)):
                    assert row[column] == evaluator.score([document])[0].value


def test_rows_are_means_over_documents(artefact):
    for domain in read_result(artefact)["domains"]:
        documents = domain["documents"]
        for name, row in domain["rows"].items():
            values = np.array([d[name] for d in documents])
            base = np.array([d["base"] for d in documents])
            assert row["score"] == pytest.approx(100 * values.mean())
            assert row["gain"]["mean"] == pytest.approx(100 * (values - base).mean())
            # The oracle was picked on these very documents, and one draw of a control says nothing of the next.
            if name == "oracle" or (name == "control" and len(row["seeds"]) < 2):
                assert (row["gain"]["low"], row["gain"]["high"]) == (None, None)
            else:
                assert row["gain"]["low"] <= row["gain"]["mean"] <= row["gain"]["high"]
            assert row["documents"] == len(documents) == domain["reported_documents"]
            if "won" in row:
                assert row["won"] == ((values == 1) & (base == 0)).sum()
                assert row["lost"] == ((values == 0) & (base == 1)).sum()
        assert set(domain["rows"]) == {"base", "expert", "routed", "control", "oracle"}
        for sub in domain["subdomains"]:
            mine = [d for d in documents if d["subdomain"] == sub["name"]]
            if not mine:
                continue
            for name, row in sub["rows"].items():
                assert row["score"] == pytest.approx(100 * np.mean([d[name] for d in mine]))
            # The oracle is the best candidate on these very documents, the base included.
            best = max([*sub["candidates"].values(), sub["rows"]["base"]["score"]])
            assert sub["rows"]["oracle"]["score"] == pytest.approx(best)
            assert len(sub["candidates"]) == 9


def test_facts_of_subdomains(world, artefact):
    result = read_result(artefact)
    moe = FreeMoE.from_pretrained(world.model, artefact)
    total = sum(w.size for w in find_weights(world.model))
    assert result["base"]["weights"] == total
    assert result["base"]["fingerprint"] == fingerprint_model(world.model)
    for domain in result["domains"]:
        assert sum(s["reference_documents"] for s in domain["subdomains"]) == domain["reference_documents"]
        for sub in domain["subdomains"]:
            off = moe.expert_mask(sub["name"]).count
            assert sub["off"] == off > 0
            assert sub["off_share"] == pytest.approx(off / total)
            assert sum(c["off"] for c in sub["where_off"]) == off
            assert sum(c["of"] for c in sub["where_off"]) == total
            assert [v["metric"] for v in sub["verdicts"]] == ["saliency", "wanda", "random"]
            assert len(sub["bands"]) == 8
            assert sub["chosen"] in {"saliency", *sub["bands"]}


def test_text(world, text_artefact):
    (domain,) = read_result(text_artefact)["domains"]
    assert (domain["unit"], domain["metric"]) == ("perplexity", "perplexity")
    model, weights = model_and_weights("llama")
    (expert,) = experts_of(text_artefact).values()
    assert expert.kind == "switch"
    _, documents = reported(world, "wiki", f"text:{world.text}")
    scorer = Scorer(model, world.tokenizer)

    def perplexity():
        found = [scorer.score(scorer.document_pairs(d))[0] for d in documents]
        return np.exp(-sum(s.loglikelihood for s in found) / sum(s.tokens for s in found))

    before = perplexity()
    with switched_off(weights, expert.mask(weights)):
        after = perplexity()
    assert domain["rows"]["base"]["score"] == pytest.approx(before, rel=1e-4)
    assert domain["rows"]["expert"]["score"] == pytest.approx(after, rel=1e-4)
    assert domain["rows"]["expert"]["ratio"]["mean"] == pytest.approx(after / before, rel=1e-4)
    assert after < before
    (sub,) = domain["subdomains"]
    assert min(sub["purification_curve"]) < sub["purification_curve"][0]
    assert sub["off"] == expert.mask(weights).count


def test_guarded_noise_gets_the_base(world, tmp_path):
    search = {"metrics": ["random"], "select": "guarded", "method": "exhaustive"}
    law = {"law": [str(world.law)]}
    folder = build(task_recipe(world, tmp_path / "out", domains=law, search=search, subdomains={"count": 1}))
    (domain,) = read_result(folder)["domains"]
    (sub,) = domain["subdomains"]
    assert sub["chosen"] == "base"
    assert "no reliable gain" in sub["verdict"]
    assert sub["off"] == 0
    assert domain["rows"]["expert"] == domain["rows"]["base"]
    moe = FreeMoE.from_pretrained(world.model, folder)
    assert moe.expert_mask("law/all").count == 0
    assert (folder / "experts.safetensors").stat().st_size < 100
    assert "no reliable gain" in (folder / "README.md").read_text()


BAD = {
    "text beside tasks": (
        lambda w, rows: {"domains": {"d": [str(w.law), f"text:{w.text}"]}},
        "mixes plain text with tasks",
    ),
    "layers": (lambda w, rows: {"bands": {"layers": [0, 9]}}, r"\[0, 9\)"),
    "answers": (lambda w, rows: rows("p", "x" * 300), "300 tokens, more than the model's context of 256"),
    "prompts": (lambda w, rows: {**rows("p" * 300, "x"), "data": {"overflow": "error"}}, "--overflow truncate"),
    "no base": (lambda w, rows: {"model": str(w.root)}, "tokenizer|config.json"),
    "no file": (lambda w, rows: {"domains": {"d": ["./nowhere.jsonl"]}}, "nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_leaves_no_artefact(world, tmp_path, case):
    def rows(prompt, target):
        made = [{"prompt": f"{prompt}{i}", "target": target} for i in range(20)]
        return {"domains": {"d": [str(write_jsonl(tmp_path / "rows.jsonl", made))]}}

    changes, message = BAD[case]
    with pytest.raises(FreeMoEError, match=message):
        build(task_recipe(world, tmp_path / "out", **changes(world, rows)))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob(MANIFEST))


def test_a_prompt_that_is_cut_is_said(world, tmp_path):
    rows = [{"prompt": f"{i} " + "long " * 60, "target": "x"} for i in range(24)]
    told = CollectingProgress()
    folder = build(
        task_recipe(
            world,
            tmp_path / "out",
            domains={"d": [str(write_jsonl(tmp_path / "p.jsonl", rows))]},
            search={"metrics": ["magnitude"]},
            subdomains={"by": "none"},
            evidence={"controls": 0, "oracle": False},
        ),
        progress=told,
    )
    assert any("12 prompts of p are longer than the context of 256" in line for line in told.lines)
    assert any("power: d, magnitude" in line and "(12 documents test it" in line for line in told.lines)
    assert set(read_result(folder)["domains"][0]["rows"]) == {"base", "expert", "routed"}
