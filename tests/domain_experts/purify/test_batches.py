"""Batches of prompts and answers, and a loss that must not see padding."""

import math

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import answer_batches, mean_loss
from freemoe.domain_experts.purify.gradients import backward
from tests.tiny import tiny_model


def rows_of(count, seed=0):
    """(input ids without the last answer token, answer ids), of many lengths."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for i in range(count):
        prompt, answer = 1 + (7 * i) % 19, 1 + (3 * i) % 5
        ids = torch.randint(3, 250, (prompt + answer,), generator=generator).tolist()
        rows.append((tuple(ids[:-1]), tuple(ids[prompt:])))
    return rows


def test_every_document_is_in_one_batch():
    rows = rows_of(20)
    batches = answer_batches(rows, range(20), 60, "cpu")
    seen = {}
    for batch in batches:
        size, longest = batch.ids.shape
        assert size == 1 or size * longest <= 60
        for b in range(size):
            length = int(batch.mask[b].sum())
            assert batch.mask[b, :length].all()
            ids, answer = tuple(batch.ids[b, :length].tolist()), batch.targets[b][batch.targets[b] != -100]
            seen[int(batch.labels[b])] = (ids, tuple(answer.tolist()))
            # Targets stand where they are predicted: at the last tokens of the row.
            where = (batch.targets[b] != -100).nonzero().flatten().tolist()
            assert where == list(range(length - len(where), length))
    assert [seen[i] for i in range(20)] == rows
    assert sum(b.answer_tokens for b in batches) == sum(len(a) for _, a in rows)
    lengths = [b.ids.shape[1] for b in batches]
    assert lengths == sorted(lengths, reverse=True)


def test_a_row_longer_than_the_budget_stands_alone():
    batches = answer_batches([((5,) * 30, (6,)), ((5,) * 3, (6,)), ((5,) * 3, (7,))], [0, 1, 2], 10, "cpu")
    assert [tuple(b.ids.shape) for b in batches] == [(1, 30), (2, 3)]
    assert answer_batches([], [], 10, "cpu") == []


@pytest.mark.parametrize("case", ["llama", "gpt2", "opt", "gemma2", "mixtral"])
def test_loss_equals_one_document_at_a_time(case):
    model = tiny_model(case)
    rows = rows_of(9)
    slow = 0.0
    for ids, answer in rows:
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        for k, token in enumerate(answer):
            slow -= float(logp[len(ids) - len(answer) + k, token])
    tokens = sum(len(a) for _, a in rows)
    for budget in (20, 10000):
        batches = answer_batches(rows, [0] * 9, budget, "cpu")
        assert mean_loss(model, batches) == pytest.approx(slow / tokens, rel=1e-5)


def test_broken_loss():
    model = tiny_model("llama")
    model.model.embed_tokens.weight.data[5] = math.nan
    batches = answer_batches([((5, 6), (7,))], [0], 100, "cpu")
    with pytest.raises(NumericError, match="loss"):
        mean_loss(model, batches)
    with pytest.raises(NumericError, match="loss"):
        backward(model, batches)
