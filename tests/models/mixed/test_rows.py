"""Equal contiguous parts: which rows are whose."""

import torch

from freemoe.models.mixed.rows import ExpertAssignment

HOST = torch.device("cpu")


def test_rows_of_sequences_tokens_and_beams():
    given = ExpertAssignment(["a", "base", "a"])
    assert given.rows_of_experts(3, ("a",), HOST).tolist() == [0, 2]
    assert given.rows_of_experts(6, ("a",), HOST).tolist() == [0, 1, 4, 5]
    assert given.rows_of_experts(12, ("base",), HOST).tolist() == [4, 5, 6, 7]
    assert given.rows_of_experts(3, ("base", "a"), HOST).tolist() == [1, 0, 2]
    rows, starts = given.rows_and_starts(6, ("base", "a"))
    assert rows.tolist() == [2, 3, 0, 1, 4, 5]
    assert starts.tolist() == [0, 2, 6]


def test_what_is_kept_does_not_grow_for_ever():
    given = ExpertAssignment(["a", "b"])
    for each in range(1, 600):
        given.rows_and_starts(2 * each, ("a", "b"))
    assert len(given._rows) <= 64
    assert len(given._lists) <= 64
