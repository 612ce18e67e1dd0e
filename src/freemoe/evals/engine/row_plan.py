"""Which tokens are run, once each: prefixes that many rows share, and the answers of a question as branches.

Everything here is a function of token ids, never of weights, so a plan stays good while the weights change.

A request is a context and a continuation of it. Requests with one context are a strand: its trunk is run once, and the
continuations branch off behind it. Strands that begin alike are a group; what they share is its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Ids = tuple[int, ...]

LEAST_SAVING = 0.25
"""Share of a strand's tokens that branches must save, because they need a dense attention mask and rows do not."""


class TokenPair(NamedTuple):
    """Token ids of a context and of the continuation to be scored after it."""

    context: Ids
    continuation: Ids

    @property
    def inputs(self) -> Ids:
        """What is run: all but the last token, which is only predicted."""
        return self.context + self.continuation[:-1]


class SharedContext(NamedTuple):
    """A context that is run once, with what follows it."""

    trunk: Ids  # The context; its last position predicts the first token of every answer
    # All tokens of an answer but its last -> the requests that end there, as (number, last token)
    branches: dict[Ids, list[tuple[int, int]]]

    def tokens_after_prefix(self, prefix: int) -> int:
        """Tokens to run behind a prefix of so many."""
        return len(self.trunk) - prefix + sum(map(len, self.branches))

    def max_depth(self) -> int:
        """Tokens from the very first to the end of the longest branch."""
        return len(self.trunk) + max(map(len, self.branches))

    def saves_enough(self, prefix: int) -> bool:
        """Whether branches save enough against a row per answer."""
        rows = len(self.branches) * (len(self.trunk) - prefix) + sum(map(len, self.branches))
        return rows - self.tokens_after_prefix(prefix) >= LEAST_SAVING * rows

    def split_branches(self) -> list[SharedContext]:
        """The same requests as strands of one branch each."""
        return [SharedContext(self.trunk, {ids: targets}) for ids, targets in self.branches.items()]


class PrefixGroup(NamedTuple):
    """A prefix, empty where nothing is shared, and its strands in batches."""

    prefix: Ids
    batches: list[list[SharedContext]]

    @property
    def has_sharing(self) -> bool:
        """Whether any token of it stands for several rows."""
        return bool(self.prefix) or any(len(s.branches) > 1 for batch in self.batches for s in batch)


def group_by_context(requests: Sequence[TokenPair]) -> list[SharedContext]:
    """Put requests with one context together; those that differ in their last token only share every position."""
    found: dict[Ids, SharedContext] = {}
    for number, (context, continuation) in enumerate(requests):
        strand = found.setdefault(context, SharedContext(context, {}))
        strand.branches.setdefault(continuation[:-1], []).append((number, continuation[-1]))
    return list(found.values())


def plan(
    requests: Sequence[TokenPair],
    batch_tokens: int,
    *,
    forward_cost: int = 0,
    share: bool = True,
    branch: bool = True,
    window: int | None = None,
) -> list[PrefixGroup]:
    """Arrange requests in groups and batches so that few tokens are run.

    ``requests``: cut to the context already. ``batch_tokens``: padded tokens of a batch: rows times prefix and longest row.
    ``forward_cost``: tokens that one more forward pass is worth: what a group must save. ``window``: tokens that a layer
    with sliding attention sees; deeper strands have no branches, because the mask that keeps branches apart knows no
    window.
    """
    strands = group_by_context(requests)
    strands = [
        part
        for s in strands
        for part in ([s] if branch and (window is None or s.max_depth() <= window) else s.split_branches())
    ]
    whole = [(Ids(), list(range(len(strands))))]
    groups = shared_prefixes([s.trunk for s in strands], forward_cost) if share else whole
    found = []
    for prefix, members in groups:
        inside: list[SharedContext] = []
        for i in members:
            keep = strands[i].saves_enough(len(prefix)) and strands[i].tokens_after_prefix(0) <= batch_tokens
            inside += [strands[i]] if keep or len(strands[i].branches) == 1 else strands[i].split_branches()
        found.append(PrefixGroup(prefix, _make_batches(inside, len(prefix), batch_tokens)))
    return found


def shared_prefixes(rows: Sequence[Ids], forward_cost: int) -> list[tuple[Ids, list[int]]]:
    """Part rows into groups with one prefix each, so that many tokens are saved.

    A group of n rows that share p tokens saves (n - 1) p tokens and costs one more forward pass. Sorted rows with a
    common beginning stand side by side, and the stretches that share at least p tokens lie within each other like
    brackets; each bracket is closed as one group or as the groups inside it, whichever saves more.

    ``rows``: at least one token of each stays outside of its prefix. ``forward_cost``: tokens that a group must save to be
    made. Gives prefix and row numbers of every group, in sorted order; then, with an empty prefix, the rows that are left,
    in their own order.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    # The bracket that is open: shared tokens, first row, tokens saved by the groups inside it, these groups.
    stack: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
    saved, groups = 0, []
    for i in range(len(order)):
        shared = _common_length(rows[order[i]], rows[order[i + 1]]) if i + 1 < len(order) else -1
        first, saved, groups = i, 0, []
        while stack and stack[-1][0] >= shared:
            length, first, more, earlier = stack.pop()
            earlier += groups
            saved, groups = saved + more, earlier
            whole = length * (i - first) - forward_cost
            if length > shared and whole > saved:
                saved, groups = whole, [(length, first, i + 1)]
        stack.append((shared, first, saved, groups))
    found = [(rows[order[a]][:length], order[a:b]) for length, a, b in groups]
    taken = {i for _, members in found for i in members}
    left = [i for i in range(len(rows)) if i not in taken]
    return [*found, ((), left)] if left else found


def _common_length(a: Ids, b: Ids) -> int:
    """How many tokens two rows share at their beginning, at least one of each left over."""
    most = max(0, min(len(a), len(b)) - 1)
    return next((i for i in range(most) if a[i] != b[i]), most)


def _make_batches(strands: list[SharedContext], prefix: int, batch_tokens: int) -> list[list[SharedContext]]:
    """Strands of like length together, the longest first so that a lack of memory shows at once."""
    found: list[list[SharedContext]] = []
    branching = [s for s in strands if len(s.branches) > 1]
    for kind in (branching, [s for s in strands if len(s.branches) == 1]):
        order = sorted(kind, key=lambda s: -s.tokens_after_prefix(prefix))
        filled: list[list[SharedContext]] = []
        for strand in order:
            if (
                not filled
                or (prefix + filled[-1][0].tokens_after_prefix(prefix)) * (len(filled[-1]) + 1) > batch_tokens
            ):
                filled.append([])
            filled[-1].append(strand)
        # As many batches of even size, where they fit: no small one is left over, and the cache never has to grow.
        rows = -(-len(order) // max(1, len(filled)))
        if order and (rows == 1 or rows * (prefix + order[0].tokens_after_prefix(prefix)) <= batch_tokens):
            filled = [order[i : i + rows] for i in range(0, len(order), rows)]
        found += filled
    return found
