"""Plans of rows: nothing lost, budgets kept, and of groups within groups those that save more."""

import random

import pytest

from freemoe.evals.engine.row_plan import SharedContext, TokenPair, plan, shared_prefixes


def requests_of(pairs):
    return list(map(TokenPair._make, pairs))


def rows_of(groups):
    """Every request as the plan would run it: number -> (context and answer, answer tokens)."""
    found = {}
    for group in groups:
        for batch in group.batches:
            for strand in batch:
                assert strand.trunk[: len(group.prefix)] == group.prefix
                assert len(strand.trunk) > len(group.prefix)
                for answer, targets in strand.branches.items():
                    for number, last in targets:
                        assert number not in found
                        found[number] = ((*strand.trunk, *answer, last), len(answer) + 1)
    return found


def random_requests(rng, count=40):
    prefixes = [tuple(rng.randrange(9) for _ in range(rng.randrange(30))) for _ in range(3)]
    pairs = []
    for _ in range(count):
        context = (*rng.choice(prefixes), *(rng.randrange(9) for _ in range(rng.randrange(1, 9))))
        for _ in range(rng.randrange(1, 5)):
            pairs.append((context, tuple(rng.randrange(9) for _ in range(rng.randrange(1, 9)))))
    return requests_of(pairs)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"share": False}, {"branch": False}, {"window": 20}, {"forward_cost": 40}])
def test_every_request_is_run_once_as_it_was(seed, options):
    requests = random_requests(random.Random(seed))
    expected = {i: (context + answer, len(answer)) for i, (context, answer) in enumerate(requests)}
    assert rows_of(plan(requests, 100, **options)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_batches_keep_their_budget_and_hold_one_kind(seed):
    requests = random_requests(random.Random(seed))
    for budget in (1, 60, 400):
        for group in plan(requests, budget):
            for batch in group.batches:
                longest = max(s.tokens_after_prefix(len(group.prefix)) for s in batch)
                assert len(batch) == 1 or len(batch) * (len(group.prefix) + longest) <= budget
                assert len({len(s.branches) > 1 for s in batch}) == 1


def common(rows):
    shortest = min(map(len, rows)) - 1
    return next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)


def most_that_can_be_saved(rows, cost):
    """Sorted rows as one group, or as the stretches inside that share more than all of them do."""
    if len(rows) < 2:
        return 0
    shared = common(rows)
    stretches, start = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or common(rows[i - 1 : i + 1]) == shared:
            stretches.append(rows[start:i])
            start = i
    return max(shared * (len(rows) - 1) - cost, sum(most_that_can_be_saved(part, cost) for part in stretches))


@pytest.mark.parametrize("cost", [0, 3, 12])
@pytest.mark.parametrize("seed", range(8))
def test_of_groups_within_groups_the_better_are_taken(seed, cost):
    rng = random.Random(seed)
    rows = [tuple(rng.choice("ab") for _ in range(rng.randrange(1, 12))) for _ in range(14)]
    groups = shared_prefixes(rows, cost)
    assert sorted(i for _, members in groups for i in members) == list(range(14))
    saved = 0
    for prefix, members in groups:
        if not prefix:
            continue
        assert len(members) > 1
        assert all(rows[i][: len(prefix)] == prefix and len(rows[i]) > len(prefix) for i in members)
        saved += (len(members) - 1) * len(prefix) - cost
        assert (len(members) - 1) * len(prefix) > cost
    assert saved == most_that_can_be_saved(sorted(rows), cost)


def test_rows_that_continue_each_other_are_grouped_quickly():
    rows = [(5,) * n for n in range(1, 3000)]
    groups = shared_prefixes(rows, 64)
    assert sorted(i for _, members in groups for i in members) == list(range(2999))


def test_choices_become_branches_where_that_saves_a_quarter():
    context = tuple(range(20))
    near = requests_of([(context, (30 + i, 40, 41)) for i in range(4)])
    ((_, [[strand]]),) = plan(near, 1000)
    assert strand == SharedContext(context, {(30 + i, 40): [(i, 41)] for i in range(4)})
    assert strand.tokens_after_prefix(0) == 28
    assert strand.max_depth() == 22
    # Letters share every position.
    ((_, [[strand]]),) = plan(requests_of([((5, 6, 7), (i,)) for i in range(4)]), 1000)
    assert strand == SharedContext((5, 6, 7), {(): [(0, 0), (1, 1), (2, 2), (3, 3)]})
    # A text is one answer after its first token: branches would save next to nothing.
    texts = requests_of([((1,), tuple(range(100 * i, 100 * i + 50))) for i in range(4)])
    ((prefix, [batch]),) = plan(texts, 1000)
    assert (prefix, len(batch)) == ((), 4)


def test_branches_stay_within_a_window_and_a_batch():
    near = requests_of([(tuple(range(20)), (30 + i, 40, 41)) for i in range(4)])

    def branches(group):
        return [len(s.branches) for batch in group.batches for s in batch]

    for options in ({"window": 21}, {"branch": False}):
        (group,) = plan(near, 1000, forward_cost=1000, **options)
        assert branches(group) == [1] * 4
        assert not group.has_sharing
    (group,) = plan(near, 1000, window=22)
    assert group.has_sharing
    assert branches(group) == [4]
    (group,) = plan(near, 27, forward_cost=1000)
    assert len(group.batches) == 4
    # Without branches the context is the prefix of its own answers.
    (group,) = plan(near, 1000, branch=False)
    assert group.prefix == tuple(range(19))
