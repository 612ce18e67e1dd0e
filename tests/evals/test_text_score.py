"""The sums of a text's score, against every token alone."""

import pytest
import torch

from freemoe.evals.engine import output_head
from freemoe.evals.text_score import score_text
from freemoe.text.blocks import PackedBlocks
from tests.tiny import IDS, VOCABULARY, tiny_model


def test_sums_are_those_of_every_predicted_token_whatever_the_chunk(monkeypatch):
    monkeypatch.setattr(output_head, "CHUNK", 4 * VOCABULARY)
    model, positions = tiny_model("gemma2"), torch.tensor([0, 1, 2, 3, 0, 1, 2]).expand_as(IDS)
    found = score_text(model, PackedBlocks(IDS, positions), divergence=lambda rows: lambda at, logits: logits[:, 5])
    logits, places = model(IDS, position_ids=positions, use_cache=False).logits.detach(), [0, 1, 2, 4, 5]
    for row, said in enumerate(logits):
        nll = [-float(said[at].log_softmax(-1)[IDS[row, at + 1]]) for at in places]
        assert float(found.ce[row]) == pytest.approx(sum(nll), rel=1e-5)
        assert found.right[row] == sum(bool(said[at].argmax() == IDS[row, at + 1]) for at in places)
        assert float(found.kl[row]) == pytest.approx(float(said[places, 5].sum()), rel=1e-4)
    assert found.tokens.tolist() == [5.0] * 3
