"""Passages, parts and blocks: nothing is lost, nothing stands on two sides, and passages do not see each other."""

import unicodedata

import pytest
import torch

from freemoe.core.errors import DataError
from freemoe.text.blocks import PackedBlocks, cut_passages, join_passages, pack_blocks, split_passages
from freemoe.text.groups import TextPassage, passage_clusters
from tests.tiny import tiny_model, tiny_tokenizer


def texts(count, length=40):
    return [f"text number {i} ".ljust(length, chr(97 + i % 26)) for i in range(count)]


def test_passages_give_the_text_back():
    long = "\n\n".join(f"Paragraph {i}. " + "word " * 60 for i in range(40))
    found = cut_passages([long, "short"], characters=1000)
    assert "".join(found) == long + "short"
    assert len(found) > 5
    assert all(len(p) < 1700 for p in found)


def test_parts_are_disjoint_and_divided_by_content():
    many = texts(400)
    parts = split_passages(many, held_out=0.2, test=0.2, seed=3)
    assert sorted(parts.train + parts.held_out + parts.test) == sorted(many)
    assert 40 < len(parts.test) < 120
    again = split_passages(many[::-1], held_out=0.2, test=0.2, seed=3)
    assert set(again.test) == set(parts.test)
    assert set(split_passages(many, held_out=0.2, test=0.2, seed=4).test) != set(parts.test)


def test_too_few_passages_are_refused():
    with pytest.raises(DataError, match=r"1 passages are too few .* nothing is left for"):
        split_passages(["only one"])


def test_blocks_hold_the_tokens_in_order():
    tokenizer = tiny_tokenizer()
    many = texts(9)
    blocks = pack_blocks(tokenizer, many, 32)
    stream = [i for t in many for i in (tokenizer.bos_token_id, *tokenizer.encode(t, add_special_tokens=False))]
    assert blocks.ids.flatten().tolist() == stream[: blocks.ids.numel()]
    assert len(stream) - blocks.ids.numel() < 32


def test_positions_count_every_passage_from_zero():
    blocks = pack_blocks(tiny_tokenizer(), ["abc", "defgh", "i" * 20], 8)
    assert blocks.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert blocks.positions[1].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert blocks.positions[2].tolist() == list(range(8))
    assert blocks.prediction_mask()[0].tolist() == [True, True, True, False, True, True, True]


def test_a_passage_does_not_see_the_one_before_it():
    tokenizer, model = tiny_tokenizer(), tiny_model("llama")
    blocks = pack_blocks(tokenizer, ["first passage", "and the second one"], 32)
    start = int((blocks.positions[0] == 0).nonzero()[1])
    with torch.no_grad():
        together = model(blocks.ids, position_ids=blocks.positions, use_cache=False).logits[0, start:]
        alone = model(blocks.ids[:, start:], use_cache=False).logits[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_contiguous_blocks_lie_within_one_article():
    tokenizer = tiny_tokenizer()
    cut = [
        TextPassage("abcdefghij", (), "first"),
        TextPassage("klmnopqrst", (), "first"),
        TextPassage("xyz", (), "second"),
    ]
    (article, short) = join_passages(cut)
    assert (article, short) == ("abcdefghijklmnopqrst", "xyz")
    blocks = pack_blocks(tokenizer, [article, short], 8, contiguous=True)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    own = start + tokenizer.encode(article, add_special_tokens=False)
    # What fills no block of its own is left out: the end of the first, all of the second.
    assert blocks.ids.flatten().tolist() == own[: len(own) // 8 * 8]
    assert blocks.positions.tolist() == [list(range(8))] * (len(own) // 8)
    assert set(blocks.groups) == {"first"}


def test_text_shorter_than_a_block_is_refused():
    with pytest.raises(DataError, match=r"test part .* 4 tokens, which is less than one block of 16"):
        pack_blocks(tiny_tokenizer(), ["abc"], 16, "test part of the text")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: f"{text}\n",
        lambda text: text.upper().replace(" ", ",  "),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: f"{text}!",
        lambda text: TextPassage(f"Otherwise: {text[::-1]}", ("what", text.split()[3])),
        lambda text: TextPassage(f"Otherwise: {text[::-1]}", group=text),
    ],
)
def test_copies_of_a_passage_its_question_and_its_group_stay_on_one_side(change):
    many = [TextPassage(f"café {t}", ("What?!", t.split()[2]), f"café {t}") for t in texts(100)]
    parts = split_passages(many + [change(t) for t in many], seed=0)
    known = {str(change(t)): str(t) for t in many}
    sides = [{known.get(str(t), str(t)) for t in part} for part in (parts.train, parts.held_out, parts.test)]
    assert sum(map(len, sides)) == 100


def test_signs_between_numbers_are_no_punctuation():
    several = ["3+4=7", "3-4=7", "((x-4)*4)", "((x*4)-4)", "3 \u2212 4 = 7.", "Well, known", "well-known"]
    labels = passage_clusters(several)
    assert labels[1] == labels[4]
    assert labels[5] == labels[6]
    assert len(set(labels)) == 5


def test_rows_know_the_group_that_most_of_their_tokens_come_from():
    pieces = [TextPassage("word " * n, group=g) for n, g in ((100, "a"), (60, "b"), (20, "c"), (90, "a"))]
    blocks = pack_blocks(tokenizer := tiny_tokenizer(), pieces, 48)
    lengths = [len(tokenizer.encode(p, add_special_tokens=False)) + 1 for p in pieces]
    sources = "".join(p.group * n for p, n in zip(pieces, lengths, strict=True))
    for row, group in enumerate(blocks.groups):
        of = sources[48 * row : 48 * row + 48]
        assert of.count(group) == max(map(of.count, "abc"))
    assert blocks.group_numbers()[0] == blocks.group_numbers()[-1] == 0
    assert blocks.select_rows([0, 1]).groups == blocks.groups[:2]
    assert len(set(pack_blocks(tokenizer, texts(30), 16).group_numbers())) > 20
    assert PackedBlocks(blocks.ids, blocks.positions).group_numbers() == list(range(len(blocks)))
