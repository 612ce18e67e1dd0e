"""Hashes of what was seen: overlap is found however the text is cut, and what both parts say tells nothing."""

import random
from dataclasses import replace

import numpy as np
import pytest

from freemoe.core.errors import ArtifactError, DataError
from freemoe.evals.held_out import ProvenanceRecord, set_aside
from freemoe.evals.seen import RUN, SeenHashes, run_hashes, text_hashes
from freemoe.evals.tasks.documents import Document, FrozenChoice, ReferenceSplit, ReportedSplit
from freemoe.evals.tasks.task import DomainData
from freemoe.text.words import split_words


def prose(count, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randrange(3, 9))) for _ in range(count)]


def text_document(text, key="k", task="t"):
    return Document(task, f"id {key}", key, "text", "", (text,), reference=text)


def question(prompt, answer, key, task="q"):
    return Document(task, f"id {key}", key, "choice", prompt, (f" {answer}", " other"), gold=0, reference=f" {answer}")


def test_runs_equal_the_slow_obvious_ones():
    found = prose(40)
    alone = [run_hashes(found[i : i + RUN])[0] for i in range(40 - RUN + 1)]
    assert run_hashes(found).tolist() == alone
    assert len(set(alone)) == len(alone)
    assert run_hashes(found[: RUN - 1]).size == 0


def test_a_block_that_overlaps_is_found_whatever_its_offset_case_and_breaks():
    said = prose(300)
    seen = SeenHashes.from_documents([text_document(" ".join(said[:200]), "a")])
    for start in (0, 17, 150, 200 - RUN):
        block = "\n".join(w.upper() for w in said[start : start + 100])
        assert seen.seen_reason(text_document(f"{block}!", "b")), start
    assert not seen.seen_reason(text_document(" ".join(said[200 - RUN + 1 :]), "b"))
    assert not seen.seen_reason(text_document(" ".join(prose(400, 1)), "b"))


def test_short_lines_are_found_in_another_order_and_tiny_ones_are_not():
    lines = [" ".join(prose(8, n)) for n in range(5)]
    assert all(len(line) >= 40 for line in lines)
    seen = SeenHashes.from_texts(["\n".join(lines)])
    assert seen.has_text(f"{lines[3]}\nsomething else\n")
    assert not SeenHashes.from_texts(["return None\nx = 1"]).has_text("return None\n")


def test_text_without_spaces_has_words():
    text = "白日依山尽黄河入海流欲穷千里目更上一层楼"
    assert len(split_words(text)) == len(text)
    assert SeenHashes.from_texts([text]).has_text("序" + text[2:])


def test_what_the_own_reported_part_says_too_tells_nothing():
    licence = prose(30, 9)
    ours, theirs = [" ".join([*licence, *prose(60, n)]) for n in (1, 2)]
    first, other = text_document(ours, "a"), text_document(theirs, "b")
    assert SeenHashes.from_documents([first]).seen_reason(other)
    seen = SeenHashes.from_documents([first], [other])
    assert not seen.seen_reason(other)
    assert seen.seen_reason(text_document(ours, "c"))


def test_a_question_is_found_by_key_and_by_its_words_with_the_same_answer():
    asked = [question(f"Question: how many legs has a {name}? Answer:", name[0], f"k{name}") for name in ("cow", "fly")]
    seen = SeenHashes.from_documents(asked)
    assert seen.seen_reason(asked[0]) == "key"
    shots = "Question: who sings best? Answer: birds\n\n"
    moved = question(shots + asked[0].prompt, "c", "other key", "another")
    unlike = question(shots + asked[0].prompt, "four", "other key", "another")
    assert (seen.seen_reason(moved), seen.seen_reason(unlike)) == ("question", "")
    # A shown example is no held-out document.
    shown = [question(f"{asked[0].prompt} c\n\nQuestion: what is {n} times 7? Answer:", "1", f"n{n}") for n in (3, 4)]
    assert not any(map(seen.seen_reason, shown))


def test_a_question_out_of_seen_text_is_found_but_few_shot_examples_are_not():
    passage = " ".join(prose(40))
    seen = SeenHashes.from_texts([passage])
    inside = question(f"{passage} What is meant?", "x", "i")
    assert seen.seen_reason(inside) == "text"
    assert seen.seen_reason(question("Who goes there by night?", "y", "z")) == ""
    # What the row asks counts, not what stands before it.
    assert seen.seen_reason(replace(inside, about=("What is meant?", "x"))) == ""


def test_many_runs_are_sampled_evenly_and_a_union_is_a_sample_again():
    said = [" ".join(prose(400, n)) for n in range(12)]
    whole = np.unique(np.concatenate([text_hashes(text) for text in said]))
    full = SeenHashes.from_texts(said)
    assert full.share == 1.0
    assert full.runs.tolist() == whole.tolist()
    few = SeenHashes.from_texts(said, most=500)
    assert few.runs.tolist() == whole[:500].tolist()
    assert few.share == pytest.approx(500 / len(whole), rel=0.15)
    # 388 runs of which one in nine is kept: all found.
    assert all(few.has_text(text) for text in said)
    joined = SeenHashes.from_texts(said[:6], most=500).union_with(SeenHashes.from_texts(said[6:]), most=500)
    assert joined.runs.tolist() == few.runs.tolist()
    assert joined.share == few.share
    assert joined.documents == 12


def test_bytes_and_back():
    seen = SeenHashes.from_documents([question("Who goes there?", "me", "k"), text_document(" ".join(prose(50)), "t")])
    data = seen.to_bytes()
    back = SeenHashes.from_bytes(data)
    assert back.to_bytes() == data
    assert back.as_json() == seen.as_json()
    assert back.longest == seen.longest == 3
    assert SeenHashes.from_bytes(SeenHashes().to_bytes()).seen_reason(question("Who?", "me", "k")) == ""
    with pytest.raises(ArtifactError, match="cannot be read"):
        SeenHashes.from_bytes(data[:-4])
    with pytest.raises(ArtifactError, match="runs of 5 words"):
        SeenHashes.from_bytes(data.replace(b'"run": 13', b'"run": 5 '))


def test_setting_aside_counts_and_refuses_an_empty_rest():
    asked = [question(f"What is {n} plus {n + 3}?", str(2 * n + 3), f"k{n}") for n in range(6)]
    data = DomainData("sums", ReferenceSplit(tuple(asked[:1])), ReportedSplit(tuple(asked[1:])))
    record = ProvenanceRecord("out", 3, SeenHashes.from_documents(asked[:3]))
    left, found = set_aside(data, record)
    assert found == {"documents": 2, "of": 5, "by": {"key": 2}}
    assert left.reported.open(FrozenChoice("x")) == tuple(asked[3:])
    assert "2 of 5 reported documents set aside" in left.notes[-1]
    assert set_aside(data, None) == (data, {"documents": 0, "of": 5, "by": {}})
    with pytest.raises(DataError, match=r"5 of 5 .* nothing is left.*own seed is 3"):
        set_aside(data, ProvenanceRecord("out", 3, SeenHashes.from_documents(asked)))
