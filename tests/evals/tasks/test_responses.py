"""Responses are scored token by token after what comes before them, and by nothing else."""

import math

import pytest
import torch

from freemoe.core.errors import DataError, RecipeError
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.user_tasks import response_parts
from freemoe.recipes import DataSection
from freemoe.text.shapes import ChatTurn, ConversationItem
from tests.rows import write_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def talk(i):
    said = (f"number {i}?", f"it is {i}", "and then", f"{i + 1}")
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


def load(folder, chat="auto"):
    """A domain of conversations."""
    path = write_rows(folder / "talk.jsonl", map(talk, range(20)))
    return load_domain("d", [str(path)], DataSection(chat=chat), tokenizer=chat_tokenizer())


@pytest.mark.parametrize("template", [False, True])
def test_a_response_s_likelihood_is_the_sum_over_its_own_tokens(tmp_path, template):
    model, tokenizer = tiny_model("llama"), chat_tokenizer()
    data = load(tmp_path, "auto" if template else "off")
    assert data.chat is template
    documents = data.reference.documents
    scores = Evaluator(Scorer(model, tokenizer), data.graders).score(documents)
    for document, score in zip(documents, scores, strict=True):
        end = "[/]" if template else ""
        assert document.prompt.endswith("[assistant]" if template else "Assistant:")
        assert document.reference.endswith(end)
        ids = torch.tensor([tokenizer.encode(document.prompt + document.reference)])
        with torch.no_grad():
            logs = model(ids).logits.log_softmax(-1)[0]
        own = len(tokenizer.encode(document.reference))
        expected = sum(logs[at - 1, ids[0, at]].item() for at in range(ids.shape[1] - own, ids.shape[1]))
        assert score.tokens == own
        assert math.isclose(score.loglikelihood, expected, rel_tol=1e-4)
        assert math.isclose(score.value, expected / own, rel_tol=1e-4)


def test_all_turns_of_a_conversation_are_on_one_side(tmp_path):
    data = load(tmp_path)
    sides = [data.reference.documents, data.reported.open(FrozenChoice("x"))]
    rows = [{d.id.split(":")[-1].split(".")[0] for d in side} for side in sides]
    assert [len(side) for side in sides] == [20, 20]
    assert not rows[0] & rows[1]
    assert "read as chat {messages}, by the model's chat template" in data.notes[0]


def test_features_are_of_the_prompt_alone(tmp_path):
    scorer = Scorer(tiny_model("llama"), chat_tokenizer())
    for document in load(tmp_path).reference.documents:
        assert scorer.tokenizer.decode(scorer.prompt_ids(document)) == document.prompt


def parts_of(*turn, tokenizer):
    """What a conversation of one turn is cut into."""
    item = ConversationItem((ChatTurn(({"role": "user", "content": "x"},), *turn),))
    return list(response_parts("row 1", item, tokenizer, False))


def test_long_ones_are_cut_to_what_the_model_holds():
    (parts,) = parts_of("r" * 400, "p" * 400, tokenizer=tiny_tokenizer())
    assert len(parts["tokens"]) == 256
    assert parts["given"] == 128
    assert list(parts["tokens"][128:]) == tiny_tokenizer().encode(" " + "r" * 127)


def test_on_makes_every_prompt_a_message(tmp_path):
    rows = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(20)]
    path = write_rows(tmp_path / "q.jsonl", rows)
    data = load_domain("d", [str(path)], DataSection(chat="on"), tokenizer=chat_tokenizer())
    document = data.reference.documents[0]
    assert document.prompt == f"[user]Is {document.index} even?[/][assistant]"
    assert document.answers == ("yes", "no")
    # Graded as without the template: by the lengths of the choices themselves.
    found = data.graders["q"].grade(document, [(-3.0, False), (-2.5, False)])
    assert found["acc_norm"] == float(document.gold == 0)
    assert found["acc"] == float(document.gold == 1)
    assert data.chat
    with pytest.raises(RecipeError, match="has no chat template"):
        load_domain("d", [str(path)], DataSection(chat="on"), tokenizer=tiny_tokenizer())


def test_refused():
    with pytest.raises(DataError, match=r"row 1: .*no tokenizer"):
        parts_of("r", "p", tokenizer=None)
    with pytest.raises(DataError, match="has no token of its own"):
        parts_of("", "p", "", tokenizer=tiny_tokenizer())
