"""Mixes: equal parts, taken in turns; a missing source is named."""

import json

import pytest

from freemoe.core.errors import DataError
from freemoe.text import mixes
from freemoe.text.mixes import instruction_text, read_mix
from tests.rows import write_rows


def write(root):
    for path, mark, count in (("alpaca/alpaca_data.json", "A", 60), ("code_alpaca/code_alpaca_20k.json", "C", 20)):
        records = [{"instruction": f"{mark}{i} do it", "input": "", "output": "done " * 20} for i in range(count)]
        write_rows(root / path, [json.dumps(records)])
    write_rows(root / "wikitext-2-raw" / "wiki.train.raw", [" = W = \n\n" + "wiki words " * 40] * 200)


def test_sources_have_equal_parts_in_turns(tmp_path):
    write(tmp_path)
    texts = read_mix("paper", tmp_path)
    kinds = ["A" if "Task: A" in t else "C" if "Task: C" in t else "W" for t in texts]
    sizes = {k: sum(len(t) for t, kind in zip(texts, kinds, strict=True) if kind == k) for k in "ACW"}
    assert sizes["C"] > 0
    assert 0.8 < sizes["A"] / sizes["C"] < 1.2
    half = kinds[: len(kinds) // 2]
    assert abs(half.count("A") - kinds.count("A") / 2) <= 1


def test_an_instruction_is_one_text():
    assert instruction_text({"instruction": "Add.", "input": "1 2", "output": "3"}) == "Task: Add.\n\n1 2\n\nAnswer: 3"
    assert instruction_text({"instruction": "Sing.", "input": "", "output": "La"}) == "Task: Sing.\n\nAnswer: La"
    assert (
        instruction_text({"instruction": "Sing.", "input": "", "output": "La", "text": "as Alpaca has it"})
        == "as Alpaca has it"
    )


def test_of_several_files_the_whole_set_is_read_and_a_part_is_named(tmp_path, caplog):
    write(tmp_path)
    part = [{"instruction": f"P{i}", "input": "", "output": "part " * 20} for i in range(60)]
    write_rows(tmp_path / "alpaca" / "alpaca_2k_gumbelsoft.json", [json.dumps(part)])
    assert not any("Task: P" in text for text in read_mix("paper", tmp_path))
    assert "is a part of" not in caplog.text
    (tmp_path / "alpaca" / "alpaca_data.json").unlink()
    assert any("Task: P" in text for text in read_mix("paper", tmp_path))
    assert "alpaca_2k_gumbelsoft.json is a part of the data set 'alpaca'" in caplog.text


def test_wikitext_of_the_hub_is_one_text_not_lines(monkeypatch, tmp_path):
    lines = [line for n in range(30) for line in ("", f" = Article {n} = \n", "", " Some words of it . \n" * 300)]
    monkeypatch.setattr(mixes, "load_hub_data", lambda *_: [{"text": line} for line in lines])
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.train.raw").write_text("".join(lines), encoding="utf-8")
    texts = read_mix("wikitext", None)
    assert "".join(texts).count("= Article") == 30
    assert texts == read_mix("wikitext", tmp_path)
    assert min(map(len, texts)) > 1000, "a heading is no passage of its own"


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"'alpaca' is not under .*alpaca/alpaca_2k"):
        read_mix("paper", tmp_path)


def test_the_authors_fourth_source_is_conversations(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match="'wizard_lm' is not under"):
        read_mix("authors", tmp_path)
    turns = [{"from": "human", "value": "Why? " * 20}, {"from": "gpt", "value": "Because. " * 20}]
    rows = [{"idx": str(i), "conversations": turns} for i in range(40)]
    write_rows(tmp_path / "wizard_lm" / "WizardLM_evol_instruct_V2_143k.json", [json.dumps(rows)])
    texts = read_mix("authors", tmp_path)
    asked = [text for text in texts if text.startswith("Why?")]
    assert asked[0].endswith("Because.")
    code = [text for text in texts if text.startswith("Task: C")]
    assert 0.8 < sum(map(len, asked)) / sum(map(len, code)) < 1.2
