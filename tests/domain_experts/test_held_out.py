"""What a build saw is never reported as held out: not under another seed, another cut of a text, or by lm-eval."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from freemoe.artefacts import evaluate
from freemoe.core.artifacts import MANIFEST, read_manifest, write_manifest
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.run.progress import CollectingProgress
from freemoe.domain_experts.pipeline import build
from freemoe.evals.held_out import SEEN_FILE, read_record
from freemoe.evals.tasks.domains import load_domain
from freemoe.recipes import recipe_from
from freemoe.text.words import split_words
from tests.domain_experts.conftest import read_result, task_recipe, write_jsonl
from tests.tiny import tiny_tokenizer

SEED = 3


@pytest.fixture(scope="module")
def small(world, tmp_path_factory):
    """Questions that are long enough to be known again, a text, and an artefact that was built on both with seed 3."""
    root, draw = tmp_path_factory.mktemp("held-out"), random.Random(7)
    vocabulary = ["court", "judge", "claim", "treaty", "clause", "party", "appeal", "statute", "oath", "fee"]
    rows = [
        {"question": " ".join(draw.choices(vocabulary, k=5)) + f" {n}?", "choices": ["yes", "not"], "answer": n % 2}
        for n in range(64)
    ]
    law = write_jsonl(root / "law.jsonl", rows)
    recipe = task_recipe(
        world,
        root / "out",
        seed=SEED,
        domains={"law": [str(law)], "wiki": [f"text:{world.text}"]},
        bands={"step": 0.5, "ratio": 0.5},
        search={"metrics": ["random"], "method": "exhaustive", "select": "argmax"},
        evidence={"controls": 0, "oracle": False},
    )
    return SimpleNamespace(base=world.base, text=world.text, rows=rows, law=law, artefact=build(recipe))


def score(small, artefact=None, told=None, **changes):
    data = {
        "command": "eval",
        "artefact": str(artefact or small.artefact),
        "domains": {"law": [str(small.law)]},
        "experts": ["base"],
        "device": "cpu",
        **changes,
    }
    return evaluate(recipe_from(data), progress=told)


def carved(name, spec, **seed):
    return load_domain(name, [str(spec)], tokenizer=tiny_tokenizer(), **seed)


def searched(small):
    """The questions and the blocks of text that the build saw."""
    return [carved(*of, seed=SEED).reference.documents for of in (("law", small.law), ("wiki", f"text:{small.text}"))]


def test_no_key_is_on_both_sides_whatever_the_seed(small):
    known = {d.key for d in searched(small)[0]}
    assert len(known) == 32
    own = score(small)["domains"][0]
    assert own["set_aside"] == {"documents": 0, "of": 32, "by": {}}
    assert not known & {d["key"] for d in own["documents"]}
    dropped = []
    for seed in (0, 1, 2):
        told = CollectingProgress()
        result = score(small, told=told, seed=seed)
        (domain,) = result["domains"]
        assert result["recipe"]["seed"] == seed
        assert not known & {d["key"] for d in domain["documents"]}
        count = domain["set_aside"]["documents"]
        assert domain["rows"]["base"]["documents"] == len(domain["documents"]) == 32 - count
        assert domain["set_aside"] == {"documents": count, "of": 32, "by": {"key": count}}
        assert any(f"{count} of 32 reported documents set aside" in line for line in told.lines)
        assert domain["notes"][-1].startswith(f"{count} of 32")
        dropped.append(count)
    assert min(dropped) > 5


def test_without_a_seed_the_artefacts_own_is_used(small):
    found = score(small)
    assert found["recipe"]["seed"] == SEED
    assert found["seen"]["known"]
    assert found["seen"]["seed"] == SEED
    assert found["domains"] == score(small, seed=SEED)["domains"]


def test_a_text_cut_otherwise_shares_no_run_of_words_with_what_was_searched(small, tmp_path):
    def runs(text):
        found = split_words(text)
        return {tuple(found[i : i + 13]) for i in range(len(found) - 12)}

    known = set().union(*(runs(d.reference) for d in searched(small)[1]))
    own = score(small, domains={"wiki": [f"text:{small.text}"]})["domains"][0]
    assert own["set_aside"]["documents"] == 0
    # The same text a few bytes on, so that every block is another one, and another half of it reported.
    text = small.text.read_text()
    (tmp_path / "second.txt").write_text("new words " + text[len(text) // 2 :])
    (tmp_path / "first.txt").write_text("some other words that are no part of it at all. " * 20)
    shifted = f"text:{tmp_path / 'first.txt'}::{tmp_path / 'second.txt'}"
    (domain,) = score(small, domains={"wiki": [shifted]})["domains"]
    reported = carved("wiki", shifted).reported
    assert domain["set_aside"]["of"] == len(reported)
    assert 0 < domain["set_aside"]["by"]["text"] <= domain["set_aside"]["documents"] < len(reported)
    inside = carved("wiki", shifted).reported.filter_documents(lambda ds: [bool(known & runs(d.reference)) for d in ds])
    assert len(inside) == domain["set_aside"]["documents"]
    assert len({d["id"] for d in domain["documents"]}) == len(reported) - len(inside)


def test_when_nothing_is_left_it_says_so(small, tmp_path):
    known = {d.prompt for d in searched(small)[0]}
    again = [row for row in small.rows if row["question"] in known]
    # Under other keys they are still the same questions.
    keyed = [row | {"key": f"mine {n}"} for n, row in enumerate(again)]
    for rows, message in (
        (again, r"nothing is left to report on.*own seed is 3"),
        (keyed, "as the same question with the same answer"),
    ):
        with pytest.raises(DataError, match=message):
            score(small, domains={"law": [str(write_jsonl(tmp_path / "seen.jsonl", rows))]})


def legacy(small, folder):
    """The artefact as an older freemoe wrote it."""
    shutil.copytree(small.artefact, folder)
    (folder / SEEN_FILE).unlink()
    body = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, {k: v for k, v in body.items() if k not in ("seen", "files", "checksum")})
    return folder


def test_an_older_artefact_is_carved_with_its_seed_and_warned_about(small, tmp_path):
    told = CollectingProgress()
    found = score(small, legacy(small, tmp_path / "old"), told)
    assert found["seen"] == {"known": False, "seed": SEED}
    assert found["domains"] == score(small)["domains"]
    assert any("warning" in line and "no record" in line for line in told.lines)
    assert score(small, small.base)["seen"] is None


def test_the_manifest_names_the_file_and_vouches_for_it(small, tmp_path):
    manifest = read_manifest(small.artefact)
    said = manifest["seen"]
    assert said["file"] == SEEN_FILE
    assert SEEN_FILE in manifest["files"]
    assert said["bytes"] == (small.artefact / SEEN_FILE).stat().st_size < 20_000
    assert said == read_result(small.artefact)["seen"]
    seen = read_record(small.artefact).seen
    assert said["documents"] == seen.documents == 32 + len(searched(small)[1])
    for name, change in (
        (SEEN_FILE, lambda d: d[:-8] + bytes(8)),
        (MANIFEST, lambda d: d.replace(b'"seen"', b'"gone"')),
    ):
        folder = shutil.copytree(small.artefact, tmp_path / name)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        with pytest.raises(ArtifactError, match="edited"):
            score(small, folder)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_is_told_which_documents_were_seen(small, tmp_path, caplog):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from freemoe.domain_experts.hosting.lm_eval_model import FreeMoELM

    known = {d.prompt for d in searched(small)[0]}
    # Shown examples were seen; that is not what is asked.
    shown = (f"{r['question']} {r['choices'][r['answer']]}\n\n" for r in small.rows if r["question"] in known)
    shots = "".join(shown)[:200]
    asked = [
        Instance("loglikelihood", {"q": row["question"]}, (shots + row["question"], f" {choice}"), i, ("law", n, 1))
        for n, row in enumerate(small.rows[:20])
        for i, choice in enumerate(row["choices"])
    ]
    expected = sum(row["question"] in known for row in small.rows[:20])
    assert 0 < expected < 20
    lm = FreeMoELM(str(small.artefact), expert="base", device="cpu")
    lm.loglikelihood(asked, disable_tqdm=True)
    assert lm.get_model_info()["seen_documents"] == {"law": {"seen": expected, "of": 20}}
    assert f"saw {expected} of 20 documents of 'law'" in caplog.text
    text = [Instance("loglikelihood_rolling", {}, (small.text.read_text()[:300],), 0, ("wiki", 0, 1))]
    strict = FreeMoELM(str(small.artefact), expert="base", device="cpu", seen="refuse")
    with pytest.raises(DataError, match="1 of 1 documents of 'wiki'"):
        strict.loglikelihood_rolling(text, disable_tqdm=True)
    assert strict.loglikelihood([a for a in asked if a.doc["q"] not in known], disable_tqdm=True)
    with pytest.raises(RecipeError, match="allowed: warn, refuse"):
        FreeMoELM(str(small.artefact), seen="no")
    old = FreeMoELM(str(legacy(small, tmp_path / "old")), expert="base", device="cpu")
    assert "unknown" in old.get_model_info()["seen_documents"]
    assert "no record" in caplog.text
    plain = FreeMoELM(str(small.base), device="cpu")
    assert "seen_documents" not in plain.get_model_info()


def test_the_hashes_say_nothing_of_documents_that_were_not_searched(small):
    seen = read_record(small.artefact).seen
    assert len(seen.keys) == len(np.unique(seen.keys))
    law = carved("law", small.law, seed=SEED)
    assert len(law.reported.filter_documents(lambda ds: [not seen.seen_reason(d) for d in ds])) == 32
