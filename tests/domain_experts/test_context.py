"""The workbench: documents become batches, scores become journalled units, and the model stays the base."""

import json

import pytest

from freemoe.core.errors import DataError
from freemoe.domain_experts.context import _as_row, _score_from_row, prepare_context
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.domain_experts.select.scores import ReportedScores
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.models.mask import Mask
from tests.domain_experts.conftest import choice_rows, task_recipe, text_recipe, write_jsonl


@pytest.fixture(scope="module")
def context(world, tmp_path_factory):
    return prepare_context(task_recipe(world, tmp_path_factory.mktemp("context") / "out"))


def test_batches_hold_prompt_and_gold_answer(world, context):
    documents = context.domains["law"].reference.documents
    scorer = context.scorer
    expected = [scorer.loglikelihoods([(d.prompt, d.answers[d.gold])])[0][0] for d in documents]
    tokens = sum(len(d.answers[d.gold]) for d in documents)
    assert mean_loss(context.model, context.make_batches(documents)) == pytest.approx(-sum(expected) / tokens, rel=1e-4)
    labels = list(range(len(documents)))
    batches = context.make_batches(documents, labels)
    assert sorted(int(x) for b in batches for x in b.labels) == labels
    for ids, answer in context.answer_rows(documents):
        assert world.tokenizer.decode([*ids, answer[-1]]).endswith(world.tokenizer.decode(answer))


def test_batches_of_text(world, tmp_path):
    context = prepare_context(text_recipe(world, tmp_path / "out"))
    documents = context.domains["wiki"].reference.documents
    batches = context.make_batches(documents)
    assert sum(b.answer_tokens for b in batches) == sum(len(d.tokens) for d in documents)
    found = context.scorer.score([context.scorer.gold_pair(d) for d in documents])
    assert mean_loss(context.model, batches) == pytest.approx(
        -sum(s.loglikelihood for s in found) / sum(s.tokens for s in found), rel=1e-4
    )


def test_other_figures_of_an_answer_come_back_from_the_journal():
    for score in (DocumentScore(0.5, -3.0, 4, (("pass@10", 1.0), ("pass@100", 0.25))), DocumentScore(1.0, -2.0, 3)):
        assert _score_from_row(json.loads(json.dumps(_as_row(score)))) == score
    assert _score_from_row([1.0, -2.0, 3]) == DocumentScore(1.0, -2.0, 3), "a journal from before there were any"


def test_reported_scores_have_a_type_of_their_own(context):
    documents = context.domains["law"].reported.open(FrozenChoice("x"))[:2]
    assert isinstance(context.reported_scores("law", "u", Mask, documents), ReportedScores)
    assert not isinstance(context.score_documents("law", "u", Mask, documents), ReportedScores)


def test_tasks_of_one_name_in_two_domains_keep_their_own_grader(world, tmp_path):
    one = write_jsonl(tmp_path / "a" / "task.jsonl", choice_rows(20, seed=3))
    targets = [{"prompt": f"{i}?", "target": "x", "key": f"z{i}"} for i in range(20)]
    two = write_jsonl(tmp_path / "b" / "task.jsonl", targets)
    context = prepare_context(task_recipe(world, tmp_path / "out", domains={"a": [str(one)], "b": [str(two)]}))
    for name, data in context.domains.items():
        found = context.score_documents(name, "base", Mask, data.reference.documents)
        assert {s.value for s in found} <= {0.0, 1.0}


def test_a_base_without_tokenizer_is_refused_before_its_weights_are_read(world, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    world.model.save_pretrained(bare)
    monkeypatch.setattr("freemoe.domain_experts.context.load_base", lambda *a: pytest.fail("the weights were read"))
    with pytest.raises(DataError, match="no tokenizer that can be loaded"):
        build(task_recipe(world, tmp_path / "out", model=str(bare)))
    assert not list(tmp_path.glob("out*"))


def test_what_another_domain_reports_on_is_no_reference(world, tmp_path):
    rows, other = choice_rows(48, seed=5), choice_rows(32, seed=6)
    parts = {"a": rows[:32], "b": rows[32:], "c": [*other[:16], *rows[:4]], "d": other[16:]}
    a, b, c, d = (write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in parts.items())

    def prepared(one, two):
        domains = {"one": ["::".join(map(str, one))], "two": ["::".join(map(str, two))]}
        return prepare_context(task_recipe(world, tmp_path / "out", domains=domains)).domains

    with pytest.raises(DataError, match=r"'two'.*other domains report on all of its 16"):
        prepared((c, b), (b, a))
    found = prepared((c, b), (d, a))
    assert len(found["one"].reference) == 16
    assert "4 reference documents dropped: another domain reports on them" in found["one"].notes
    keys = {doc.key for data in found.values() for doc in data.reference.documents}
    assert not keys & {key for data in found.values() for key in data.reported.content_keys()}
