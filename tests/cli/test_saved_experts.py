"""The commands take experts that `FreeMoE.save_pretrained` wrote, of which no build says anything."""

import json
from pathlib import Path

import torch

from freemoe.domain_experts.mixture import FreeMoE
from tests.domain_experts.structured.artefacts import unit_artefact


def test_experts_made_by_hand_are_inspected_scored_and_merged(freemoe, tmp_path):
    saved = str(unit_artefact(tmp_path))
    rows = [{"question": f"Who rules {n}?", "choices": ["the judge", "nobody"], "answer": n % 2} for n in range(8)]
    (tmp_path / "law.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "law/free" in freemoe("inspect", saved, "--base", str(tmp_path / "base")).out
    scores = freemoe("eval", saved, "-d", f"law={tmp_path / 'law.jsonl'}", "-e", "base", "-e", "law/all", "--json")
    assert {"base", "law/all"} <= json.loads(scores.out)["domains"][0]["rows"].keys()
    freemoe("merge", saved, "law/all", "-o", str(tmp_path / "plain"))
    files = [path for folder in (saved, tmp_path / "plain") for path in Path(folder).iterdir()]
    assert len({path.stat().st_mode for path in files}) == 1, files
    moe = FreeMoE.from_pretrained(saved, device="cpu")
    merged = type(moe.model).from_pretrained(tmp_path / "plain")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), moe.expert("law/all"):
        torch.testing.assert_close(merged(input_ids=ids).logits, moe.model(input_ids=ids).logits, rtol=0, atol=0)
