"""Plain text as a task: blocks of tokens, and as figure the mean negative log-likelihood in nats per token.

Every block belongs to a group, which is its key: an article of a file, a row, or a stretch of neighbouring paragraphs
(`freemoe.text.groups`); no block reaches into the next group. One file is cut in two: its last groups are reported, the
group before them belongs to neither part, the rest is reference. Groups that both parts have, and lines of the reference
that also stand in the reported part (once case and punctuation are ignored), are dropped from the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from freemoe.core.errors import DataError
from freemoe.evals.tasks.benchmark import TaskName
from freemoe.evals.tasks.documents import Document, content_key
from freemoe.evals.tasks.splits import large_group_text
from freemoe.evals.tasks.task import EvalTask
from freemoe.text.files import encode_with_places, evenly_spaced, split_paragraphs
from freemoe.text.groups import (
    FEW,
    LOOSE,
    STRETCHES,
    TextPassage,
    cluster_labels,
    divide_by_source,
    end_with_blank_line,
    passage_clusters,
)
from freemoe.text.words import split_words

BLOCK, WINDOW = 256, 2048
SHARE = 0.3  # of one text's characters, at its end, that is reported
CAPS = {"reference": 600, "reported": 300}
# No tokenizer in use makes a token of more characters than this on average, so that much text is always
# enough.
CHARACTERS_PER_TOKEN = 16
SHORTEST_LINE = 40


def drop_shared_lines(reference: Sequence[TextPassage], reported: Sequence[str]) -> tuple[list[TextPassage], int]:
    """Drop from the reference every line of some length that the reported part has too.

    Gives the paragraphs that remain, and how many lines were dropped.
    """
    known = {
        " ".join(split_words(line)) for piece in reported for line in piece.splitlines() if len(line) >= SHORTEST_LINE
    }
    kept, dropped = [], 0
    for piece in reference:
        lines = piece.splitlines(keepends=True)
        left = [line for line in lines if len(line) < SHORTEST_LINE or " ".join(split_words(line)) not in known]
        dropped += len(lines) - len(left)
        if "".join(left).strip():
            kept.append(TextPassage("".join(left), piece.about, piece.group))
    return kept, dropped


def split_tail(articles: Sequence[TextPassage], share: float) -> tuple[list[TextPassage], list[TextPassage]]:
    """Cut groups, in the order in which they begin, into a head and a tail of about ``share`` of the characters.

    One group between them belongs to neither: the one with which the tail's size and what is lost come out best.
    """
    sizes: dict[str, int] = {}
    for article in articles:
        sizes[article.group] = sizes.get(article.group, 0) + len(article)
    names, total = list(sizes), sum(sizes.values())

    def split_cost(gap: int) -> float:
        return abs(sum(sizes[name] for name in names[gap + 1 :]) - share * total) + sizes[names[gap]]

    gap = min(range(1, len(names) - 1), key=split_cost, default=len(names))
    place = {name: number for number, name in enumerate(names)}
    return [a for a in articles if place[a.group] < gap], [a for a in articles if place[a.group] > gap]


class TextBlock(NamedTuple):
    """One run of tokens: their ids, the text that they stand for, and the name of the group that they lie in."""

    tokens: tuple[int, ...]
    text: str
    group: str


def cut_into_blocks(tokenizer: Any, pieces: Sequence[TextPassage], length: int, carry: bool = False) -> list[TextBlock]:
    """Cut groups into consecutive blocks of ``length`` tokens; the rest at a group's end is left out.

    Neighbouring groups that are shorter than a block are one group, and so are all that share a name with them.

    ``pieces``: paragraphs, white space included. ``carry``: let the next group begin with that rest: for groups whose
    borders mean nothing.
    """
    fast = getattr(tokenizer, "is_fast", False)
    ids: list[int] = []
    texts: list[str] = []  # of every token; empty for those that share a character with the one before
    names: set[str] = set()
    blocks: list[tuple[tuple[int, ...], str]] = []
    bundles: list[tuple[set[str], int]] = []
    for name, group in groupby(pieces, key=lambda piece: piece.group):
        own, starts, text = encode_with_places(tokenizer, list(group))
        ids += own
        bounds = [0, *starts[1:], len(text)] if own else []
        texts += [text[a:b] for a, b in pairwise(bounds)]
        names.add(name)
        if len(ids) < length:
            continue
        for at in range(0, len(ids) - length + 1, length):
            tokens = tuple(ids[at : at + length])
            # A token of several bytes may share its character with the next block: then the decoder knows better.
            blocks.append((tokens, "".join(texts[at : at + length]) if fast else tokenizer.decode(list(tokens))))
        bundles.append((names, len(ids) // length))
        rest = len(ids) - len(ids) % length if carry else len(ids)
        ids, texts, names = ids[rest:], texts[rest:], set()
    label = cluster_labels([names for names, _ in bundles])
    name_of = {
        cluster: min(min(names) for (names, _), other in zip(bundles, label, strict=True) if other == cluster)
        for cluster in set(label)
    }
    groups = [name_of[cluster] for (_, count), cluster in zip(bundles, label, strict=True) for _ in range(count)]
    return [TextBlock(*block, group) for block, group in zip(blocks, groups, strict=True)]


def subsample_paragraphs(pieces: Sequence[TextPassage], characters: int, runs: int = 100) -> list[TextPassage]:
    """Evenly spaced runs of paragraphs, ``characters`` in all, so that a huge file need not be tokenised."""
    total = sum(map(len, pieces))
    if total <= characters:
        return list(pieces)
    kept, at = [], 0
    for piece in pieces:
        # Position within the current run's stride of the whole text.
        if (at * runs / total) % 1.0 < characters / total:
            kept.append(piece)
        at += len(piece)
    return kept


@dataclass
class TextTask(EvalTask):
    """Blocks of plain text.

    ``documents``: the text, or the reference text when ``test_documents`` is given. ``test_documents``: the reported text.
    ``source``: where it comes from, for notes and errors. ``tokenizer``: tokenizer of the model to be scored: blocks are
    blocks of its tokens. ``length``: tokens of a block. ``limit``: blocks of each split at most (600 and 300 at most in any
    case). ``given``: tokens at a block's start that are context only; with 0 the beginning-of-text token stands before it.
    ``caps``: most blocks of each split, whatever ``limit`` says. ``metric``: name of the figure: nats per scored token.
    """

    name: str
    documents: Sequence[str]
    test_documents: Sequence[str] | None = None
    source: str = "text"
    tokenizer: Any = None
    length: int = BLOCK
    limit: int | None = None
    given: int = 0
    caps: Mapping[str, int] = field(default_factory=lambda: CAPS)
    metric: str = "nll"

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise DataError(
                f"Task {self.name!r} cuts text into blocks of tokens and was given no tokenizer; pass the "
                "model's: load_domain(..., tokenizer=tokenizer)."
            )
        first, unit = divide_by_source(self.documents)
        other = unit
        how = self.source
        if self.test_documents is None:
            reference, reported = split_tail(first, SHARE)
            how += f": reported its tail ({SHARE:.0%}), reference the rest, one group between"
        else:
            reported, other = divide_by_source(self.test_documents)
            reference = first
        reference, dropped = self._drop_reported(reference, reported)
        if dropped:
            how += f"; {dropped} dropped as also reported"
        (self._reference, whole), (self._reported, whole_reported) = (
            self._make_documents(reference, "reference", unit),
            self._make_documents(_article_paragraphs(reported), "reported", other),
        )
        sizes = [len({d.key for d in side}) for side in (self._reference, self._reported)]
        self.note = (
            f"{self.name}: {how}; blocks of {self.length} tokens, reference {len(self._reference)} of "
            f"{whole}, reported {len(self._reported)} of {whole_reported}, evenly spaced"
            + (f", the first {self.given} given and not scored" if self.given else "")
            + f"; groups: reference {sizes[0]} ({unit}), reported {sizes[1]} ({other})"
            + _group_warning((unit, other), self._reference, self._reported)
        )

    def _drop_reported(
        self, reference: list[TextPassage], reported: list[TextPassage]
    ) -> tuple[list[TextPassage], str]:
        """Paragraphs of the reference without what is reported too, and what was dropped, in words.

        A group that loses more than half of itself to lines that are reported is a copy too, and goes as a whole.
        """
        label = passage_clusters([*reference, *reported])
        known = set(label[len(reference) :])
        left = [a for a, cluster in zip(reference, label, strict=False) if cluster not in known]
        whole = _article_paragraphs(left)
        pieces, lines = drop_shared_lines(whole, _article_paragraphs(reported))
        sizes = [Counter[str](), Counter[str]()]
        for size, side in zip(sizes, (whole, pieces), strict=True):
            for piece in side:
                size[piece.group] += len(piece)
        pieces = [piece for piece in pieces if 2 * sizes[1][piece.group] >= sizes[0][piece.group]]
        copies = len({a.group for a in reference} - {piece.group for piece in pieces})
        if not pieces and (copies or lines):
            raise DataError(
                f"Task {self.name!r}: all groups or lines of the reference part of {self.source} also stand in the reported "
                "part. What is searched on cannot be reported on; give it other text."
            )
        counts = ((copies, "reference groups"), (lines, "reference lines"))
        return pieces, " and ".join(f"{count} {what}" for count, what in counts if count)

    def _make_documents(self, pieces: list[TextPassage], side: str, unit: str) -> tuple[list[Document], int]:
        cap = min(self.caps[side], self.limit or self.caps[side])
        pieces = subsample_paragraphs(pieces, self.caps[side] * self.length * CHARACTERS_PER_TOKEN)
        blocks = cut_into_blocks(self.tokenizer, pieces, self.length, carry=STRETCHES in unit)
        if not blocks:
            raise DataError(
                f"Task {self.name!r}: the {side} part of {self.source} ({sum(map(len, pieces))} "
                f"characters) gives no block of {self.length} tokens. Give more text (one file is cut between "
                f"groups, {unit}, and one of them lies between the parts), group it otherwise (--group-by), or name two files: "
                "text:FILE::TESTFILE."
            )
        chosen = evenly_spaced(len(blocks), cap)
        documents = [_block_document(self.name, side, i, blocks[i], blocks[i].group, self.given) for i in chosen]
        return documents, len(blocks)


class WindowTask(EvalTask):
    """One whole text in windows that follow each other, whatever article they lie in: the perplexity of GPTQ and its followers.

    Each window is scored after its own first token; what fills no window at the text's end is left out. The perplexity per word
    stands beside it: as lm-eval counts them, runs of characters that are no white space.

    ``task``: how it was named, with the tokens of a window in the place of few-shot examples (2,048 if absent). ``texts``:
    the reference and the reported text. ``limit``: windows of each split at most, evenly spaced.
    """

    def __init__(self, task: TaskName, texts: Sequence[str], source: str, tokenizer: Any, limit: int | None) -> None:
        window = WINDOW if task.shots is None else task.shots
        self.name, self.metric = f"{task.name}@{window}", task.require_metric(["perplexity"])
        if tokenizer is None or window < 2:
            needs = (
                "windows of at least 2 tokens" if window < 2 else "the model's tokenizer: load_domain(..., tokenizer=)"
            )
            raise DataError(f"Task {task.spec!r} cuts text into windows of tokens and needs {needs}.")
        sides, sizes = [], []
        for side, text in zip(("reference", "reported"), texts, strict=True):
            blocks = cut_into_blocks(tokenizer, [TextPassage(text)], window)
            if not blocks:
                raise DataError(
                    f"Task {task.spec!r}: the {side} text ({len(text):,} characters) gives no window of {window} tokens."
                )
            sides.append([self._document(side, blocks, i) for i in evenly_spaced(len(blocks), limit or len(blocks))])
            sizes.append(f"{side} {len(sides[-1])} of {len(blocks)}")
        self._reference, self._reported = sides
        self.note = f"{self.name}: {source}, each as one text; windows of {window} tokens, {', '.join(sizes)}"

    def _document(self, side: str, blocks: Sequence[TextBlock], index: int) -> Document:
        text = blocks[index].text
        # A word that lies in two windows counts where it begins.
        goes_on = index > 0 and not (text[:1].isspace() or blocks[index - 1].text[-1:].isspace())
        words = max(1, len(text.split()) - goes_on)
        return replace(_block_document(self.name, side, index, blocks[index], content_key(text), 1), words=words)


def _block_document(task: str, side: str, index: int, block: TextBlock, key: str, given: int) -> Document:
    said: dict[str, Any] = {"answers": (block.text,), "reference": block.text, "tokens": block.tokens}
    return Document(task, f"{side}:{index}", key, "text", "", index=index, given=given, **said)


def _article_paragraphs(articles: Sequence[TextPassage]) -> list[TextPassage]:
    return [
        TextPassage(piece, article.about, article.group)
        for article in articles
        for piece in split_paragraphs(article if article.endswith("\n") else end_with_blank_line(article))
    ]


def _group_warning(units: Sequence[str], *parts: Sequence[Document]) -> str:
    """What to say of figures from few groups, or from groups that share articles."""
    said = ""
    if any(unit.startswith(LOOSE) for unit in units):
        said += "; neighbours of one article may stand in several parts, so the figures may be too good"
    if any(len({d.key for d in part}) < FEW for part in parts):
        said += f"; with fewer than {FEW} groups in a part the figures hang on single ones"
    return said + large_group_text([d.key for part in parts for d in part])
