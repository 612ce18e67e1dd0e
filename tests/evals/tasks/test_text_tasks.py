import math
import re
from contextlib import nullcontext

import pytest
import torch

from freemoe.core.errors import DataError, RecipeError
from freemoe.domain_experts.select.choice import split_by_share, split_folds
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.evaluation import EvalTarget, evaluate_target, make_variant
from freemoe.evals.summary import summarise_scores
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domain, make_task
from freemoe.evals.tasks.text_tasks import (
    TextTask,
    cut_into_blocks,
    drop_shared_lines,
    split_tail,
    subsample_paragraphs,
)
from freemoe.recipes import DataSection, EvalRecipe
from freemoe.report.tables import evaluation_table
from freemoe.results import EvaluationResult
from freemoe.text.files import evenly_spaced, split_paragraphs
from freemoe.text.groups import TextPassage
from tests.rows import write_rows
from tests.text.test_groups import FORMS, WORDS
from tests.tiny import tiny_model, tiny_tokenizer


class Letters:
    """A tokenizer of characters, without offsets."""

    is_fast = False

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class FastLetters(Letters):
    is_fast = True

    def __call__(self, text, **_):
        return {"input_ids": self.encode(text), "offset_mapping": [(i, i + 1) for i in range(len(text))]}


def load(*files, tokenizer=None, **data):
    """Reference and reported documents of a text, and what is told of them."""
    spec = f"text:{'::'.join(map(str, files))}"
    domain = load_domain("d", [spec], DataSection(**data), tokenizer=tokenizer or FastLetters())
    return domain.reference.documents, domain.reported.open(FrozenChoice("a test")), domain.notes[0]


def story(i):
    return " ".join(f"word{i}of{j}" for j in range(12)) + ".\n\n"


def test_paragraphs_lose_nothing():
    for text in ("a\nb\n\nc\n\n\nd", "\n e \n\n f", "x\ny\nz"):
        assert "".join(split_paragraphs(text)) == text
    assert split_paragraphs("a\nb\n\nc") == ["a\nb\n\n", "c"]
    assert split_paragraphs("x\ny\n") == ["x\n", "y\n"]


@pytest.mark.parametrize("tokenizer", [Letters(), FastLetters()])
def test_blocks_are_exact_and_lie_in_one_group(tokenizer):
    pieces = [TextPassage(text, group=text[0]) for text in ("aaaaaaa\n", "b" * 30 + "\n", "cc", "d", "eeee", "a" * 9)]
    blocks = cut_into_blocks(tokenizer, pieces, 4)
    assert all(len(b.tokens) == 4 and tokenizer.decode(b.tokens) == b.text for b in blocks)
    # The rest of a group is left out; short neighbours are one group, as are parts of one.
    assert [b.text for b in blocks] == ["aaaa", "aaa\n", *["bbbb"] * 7, "ccde", "aaaa", "aaaa"]
    assert [b.group for b in blocks] == ["a"] * 2 + ["b"] * 7 + ["c"] + ["a"] * 2
    carried = cut_into_blocks(tokenizer, pieces, 4, carry=True)
    assert "".join(b.text for b in carried) == "".join(pieces)[: 4 * len(carried)]
    assert len(carried) == sum(map(len, pieces)) // 4


def test_spread_is_even_and_sorted():
    assert evenly_spaced(3, 5) == [0, 1, 2]
    assert evenly_spaced(10, 2) == [2, 7]
    assert len(set(evenly_spaced(1000, 600))) == 600


def passages(*texts):
    return [TextPassage(text, group=text) for text in texts]


def test_tail_is_reported_and_a_group_lies_between():
    articles = [TextPassage(story(i), group=str(i // 2)) for i in range(50)]
    head, tail = split_tail(articles, 0.3)
    assert head == articles[: len(head)]
    assert tail == articles[len(head) + 2 :]
    assert 0.2 < len(tail) / 50 < 0.33


@pytest.mark.parametrize(
    ("sizes", "head", "tail"),
    [
        ([10, 10, 70, 10, 10, 10], 3, 2),  # the large one is neither lost nor reported
        ([10, 10, 10, 10, 60], 3, 1),
        ([60, 10, 10, 10, 10], 1, 3),
        ([10, 10, 10], 1, 1),
        ([10, 10], 2, 0),
        ([10], 1, 0),
    ],
)
def test_a_group_that_is_larger_than_half_is_cut_around(sizes, head, tail):
    parts = split_tail([TextPassage("x" * size, group=str(i)) for i, size in enumerate(sizes)], 0.3)
    assert tuple(map(len, parts)) == (head, tail)


def test_lines_that_are_reported_too_leave_the_reference():
    line = "This very line stands in both parts, in 1999 as today.\n"
    other = line.replace("1999", "2001")
    reference = passages(line.upper().replace(",", " --"), other, "short\n")
    assert drop_shared_lines(reference, [line, "short\n"]) == ([other, "short\n"], 1)


def test_thin_keeps_evenly_spaced_runs():
    pieces = passages(*(f"{i:05d}" for i in range(10000)))
    kept = subsample_paragraphs(pieces, 10000, runs=10)
    assert sum(map(len, kept)) <= 11000
    assert kept[0] == "00000"
    assert int(kept[-1]) > 9000
    assert subsample_paragraphs(pieces, 10**9) == pieces


def test_text_task_from_one_file(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("".join(map(story, range(300))))
    reference, reported, note = load(path, limit=20)
    assert len(reference) == len(reported) == 20
    assert {d.kind for d in reference} == {"text"}
    assert all(len(d.tokens) == 256 and d.answers == (d.reference,) for d in reference)
    assert not {d.key for d in reference} & {d.key for d in reported}
    assert "tail (30%)" in note
    # No paragraph stands in both parts.
    seen = "".join(d.reference for d in reported)
    assert all(d.reference[100:160] not in seen for d in reference)
    given, _, note = load(path, limit=20, text_given=1)
    assert {d.given for d in given} == {1}
    assert [d.tokens for d in given] == [d.tokens for d in reference]
    assert "first 1 given" in note


def test_caps_of_its_own_bound_a_split_and_leave_the_other_as_it_is():
    documents, test = ["".join(map(story, range(60)))], ["".join(map(story, range(100, 160)))]

    def blocks(reference, reported):
        task = TextTask("t", documents, test, tokenizer=Letters(), caps={"reference": reference, "reported": reported})
        return task.reference(), task.reported()

    few, reported = blocks(5, 7)
    more, same = blocks(9, 7)
    assert (len(few), len(more), len(reported)) == (5, 9, 7)
    assert reported == same


def test_text_tasks_refuse(tmp_path):
    path = write_rows(tmp_path / "a.txt", ["too short"])
    with pytest.raises(DataError, match="given no tokenizer"):
        load_domain("d", [f"text:{path}"])
    with pytest.raises(DataError, match="gives no block of 256 tokens"):
        load(path)


@pytest.mark.realdata
def test_offsets_of_the_real_tokenizer(stories, data_root):
    tokenizer = stories[1]
    text = (data_root / "tinystories" / "TinyStories-valid_excerpt.txt").read_text()
    task = TextTask("t", [text], tokenizer=tokenizer)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(task.reference()[0].tokens) == whole[:256]
    assert all(document.reference.strip() in text for document in task.reference())


@pytest.fixture
def wikitext(tmp_path):
    """A data root with WikiText-2's two files, as they look, and the text of the second."""
    for part, words in (("valid", WORDS[:3]), ("test", WORDS[3:])):
        write_rows(tmp_path / f"wikitext-2-raw/wiki.{part}.raw", [" \n" + "".join(map(FORMS["wikitext"], words))])
    return tmp_path, (tmp_path / "wikitext-2-raw/wiki.test.raw").read_text()


def test_one_text_in_windows_has_the_perplexity_of_gptqs_code(wikitext):
    root, text = wikitext
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    # As a data set has it: a row a line, blank ones empty; joined by GPTQ's code.
    rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
    joined = "\n\n".join(rows)
    ids = torch.tensor([tokenizer.encode(joined, add_special_tokens=False)])
    windows = [ids[:, i : i + 100] for i in range(0, ids.shape[1] - 99, 100)]
    with torch.no_grad():
        losses = [model(w).logits[0, :-1].log_softmax(-1).gather(-1, w[0, 1:, None]).sum().item() for w in windows]
    words = len(tokenizer.decode(ids[0, : 100 * len(windows)]).split())
    recipe = EvalRecipe(artefact="m", domains={"w": ("wikitext2@100",)}, data=DataSection(root=str(root)))
    result = evaluate_target(recipe, lambda _: EvalTarget(model, tokenizer, {"base": make_variant(nullcontext)}))
    (domain,) = EvaluationResult.model_validate(result).domains
    row = domain.rows["base"]
    assert row.score == pytest.approx(math.exp(-sum(losses) / (99 * len(windows))), rel=1e-4)
    assert math.log(row.also["word_perplexity"].score) == pytest.approx(-sum(losses) / words, rel=1e-4)
    assert (row.documents, row.clusters, domain.unit) == (len(windows), len(windows), "perplexity")
    assert "wikitext2@100: reference validation, reported test, each as one text; windows of 100" in domain.notes[0]
    cells = list(evaluation_table(EvaluationResult.model_validate(result)).columns[1].cells)
    assert [str(cell) for cell in cells] == ["base", "base, word_perplexity"]


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("wikitext2@1", DataError, "windows of at least 2 tokens"),
        ("wikitext2@99999", DataError, "the reference text .* gives no window of 99999 tokens"),
        ("wikitext2:acc", RecipeError, "wikitext2 has no metric 'acc', but perplexity"),
        ("wikitext:acc", RecipeError, "wikitext has no metric 'acc', but raw_block_nll"),
    ],
)
def test_windows_that_cannot_be_cut(wikitext, spec, error, said):
    with pytest.raises(error, match=said):
        make_task(spec, DataSection(root=str(wikitext[0])), tokenizer=tiny_tokenizer())


def test_the_gain_per_word_is_the_gain_per_token_in_other_units(wikitext):
    documents = make_task("wikitext2@64", DataSection(root=str(wikitext[0])), tokenizer=tiny_tokenizer()).reported()

    def scores(loss):
        return [DocumentScore(-loss, -63 * loss, 63, (("word_perplexity", -63 * loss / d.words),)) for d in documents]

    row = summarise_scores(scores(2.5), scores(3.0), documents)
    per_word = row["also"]["word_perplexity"]
    tokens, words = 63 * len(documents), sum(d.words for d in documents)
    assert row["gain"]["mean"] == pytest.approx(0.5)
    assert per_word["gain"]["mean"] == pytest.approx(0.5 * tokens / words)
    assert math.log(per_word["score"]) == pytest.approx(2.5 * tokens / words)
    assert math.log(per_word["ratio"]["mean"]) == pytest.approx(-0.5 * tokens / words)


def words_of(documents):
    return {word for word in WORDS if any(word in d.reference for d in documents)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokenizer", [Letters(), FastLetters()])
def test_no_split_lets_the_word_of_an_article_pass(tmp_path, form, tokenizer):
    path = tmp_path / "six.txt"
    path.write_text("".join(map(FORMS[form], WORDS)))
    reference, reported, note = load(path, tokenizer=tokenizer)
    sides = [words_of(reference), words_of(reported)]
    # One article is the gap.
    assert [*map(len, sides)] == [4, 1] or [*map(len, sides)] == [3, 2]
    assert not sides[0] & sides[1]
    assert re.search(r"groups: reference [34] \(articles by .*\), reported [12] \(articles by", note)
    assert "fewer than 20 groups" in note
    for seed in range(10):
        keys = [d.key for d in reference]
        for split in (split_by_share(keys, [0.5, 0.25], seed), split_folds(keys, 5, seed), split_folds(keys, 2, seed)):
            found = [words_of([reference[i] for i in part]) for part in split]
            assert all(found)
            assert sum(map(len, found)) == len(sides[0])


def test_two_files_share_no_article(tmp_path):
    write = FORMS["markdown"]
    (tmp_path / "a.md").write_text("".join(map(write, WORDS)))
    # The same article with another end is the same group.
    (tmp_path / "b.md").write_text(write("osprey") + write(WORDS[2])[:-400] + "Then it ends otherwise. " * 30)
    assert words_of(load(tmp_path / "a.md", tmp_path / "b.md", tokenizer=Letters())[0]) == set(WORDS) - {WORDS[2]}
    (tmp_path / "c.md").write_text("".join(map(write, WORDS)) + "And more. " * 40)
    with pytest.raises(DataError, match="all groups or lines of the reference part"):
        load(tmp_path / "a.md", tmp_path / "c.md", tokenizer=Letters())


def test_one_article_is_cut_in_stretches_and_says_so(tmp_path):
    path = tmp_path / "one.md"
    path.write_text("# One\n\n" + "".join(map(story, range(400))))
    reference, reported, note = load(path)
    assert "figures may be too good" in note
    assert len({d.key for d in reference}) > 10
    assert len({d.key for d in reported}) > 3
    # A stretch is several neighbouring blocks, and none lies in two of them.
    assert len(reported) / len({d.key for d in reported}) > 4
    assert "".join(d.reference for d in reported) in path.read_text()


def test_rows_are_groups_and_the_same_row_is_dropped_from_the_reference(tmp_path):
    def row(n):
        return {"text": f"Is {n} even? {'yn'[n % 2]}"}

    a = write_rows(tmp_path / "a.jsonl", [{"text": f"Is {n} even? yes no " * 20} for n in range(30)])
    assert len({d.key for d in load(a, tokenizer=Letters())[0]}) == 20
    write_rows(a, map(row, range(40)))
    b = write_rows(tmp_path / "b.jsonl", [{"text": row(n)["text"].replace("even?", "EVEN !")} for n in range(20, 70)])
    reference, _, note = load(a, b, tokenizer=Letters())
    assert "20 reference groups dropped as also reported" in note
    said = "".join(d.reference for d in reference)
    assert "Is 17 even" in said
    assert not any(f"Is {n} " in said for n in range(20, 40))
