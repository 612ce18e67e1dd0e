"""Likelihoods and greedy generations of a causal LM, tokenised and cut as lm-eval's HF backend does it.

The same answers as `lm_eval.models.huggingface.HFLM`, with less work: documents are tokenised once per scorer,
continuations that share all but their last token share one forward pass, batches hold a number of tokens rather
than of rows, the head runs on the answer's positions only, and log-softmax and sums are fp32 for every dtype
(bf16 sums tie and flip answers).

Shapes: B rows of a batch, L longest row, A answer positions kept, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from freemoe.errors import DataError, NumericError, RecipeError
from freemoe.evals.documents import Document

log = logging.getLogger(__name__)

OVERFLOW = ("truncate", "error")

# A decoding step holds one token per row, so many more rows fit than when whole prompts are scored.
_DECODE_ROWS = 4


class Pair(NamedTuple):
    """Token ids of a context and of the continuation to be scored after it."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, whether greedy decoding gives it, and its length in tokens."""

    loglikelihood: float
    is_greedy: bool
    tokens: int


class _Row(NamedTuple):
    """One forward pass: input ids, where the answer starts, and the last tokens that share this row."""

    ids: tuple[int, ...]
    start: int
    stem: tuple[int, ...]
    last: list[tuple[int, int]]  # (position in the result, last token)


def context_length(model: Any, tokenizer: Any = None) -> int:
    """Longest input of the model in tokens: its config's word for it, else the tokenizer's, else 2,048."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    longest = getattr(tokenizer, "model_max_length", None)
    return int(longest) if isinstance(longest, int) and longest < 10**9 else 2048


class Scorer:
    """Scores documents on one model; keeps the tokenised requests, never the weights' state.

    Args:
        model: A causal LM of transformers, in eval mode; its weights may change between calls.
        tokenizer: Its tokenizer.
        max_length: Longest input in tokens; the model's context by default.
        batch_tokens: Padded tokens of a batch (rows times longest row).
        overflow: ``truncate`` cuts contexts from the left, as lm-eval does, and counts them in ``truncated``;
            ``error`` refuses them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        overflow: str = "truncate",
    ) -> None:
        if tokenizer is None:
            raise DataError(
                "The base model has no tokenizer, and prompts are text. Save one beside the model "
                "(tokenizer.save_pretrained(folder)) or pass tokenizer=."
            )
        if overflow not in OVERFLOW:
            raise RecipeError(f"overflow is {overflow!r}; allowed: {', '.join(OVERFLOW)}.")
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length or context_length(model, tokenizer)
        self.batch_tokens = batch_tokens
        self.overflow = overflow
        self.truncated: dict[str, int] = {}
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._embedding_ids: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ tokens

    @property
    def prefix_id(self) -> int | None:
        """Token that stands before a text with no context: the beginning-of-text or end-of-text token."""
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids as lm-eval makes them: the tokenizer's own special tokens, unless the text starts with one."""
        bos = self.tokenizer.decode(self.prefix_id) if self.prefix_id is not None else ""
        if bos and text.startswith(bos):
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.encode(text)

    def pair(self, context: str, continuation: str) -> Pair:
        """Tokenise a context and its continuation together, then part them where the context's own tokens end.

        Spaces at the context's end go to the continuation, as in lm-eval, so that words keep their usual tokens.
        """
        known = self._pairs.get((context, continuation))
        if known is not None:
            return known
        if context:
            spaces = len(context) - len(context.rstrip())
            left = context[: len(context) - spaces]
            right = context[len(context) - spaces :] + continuation
            head = self.encode(left)
            whole = self.encode(left + right)
            pair = Pair(tuple(head), tuple(whole[len(head) :]))
        else:
            pair = self.text_pair(self.tokenizer.encode(continuation, add_special_tokens=False))
        if not pair.continuation:
            raise DataError(
                f"The continuation {continuation!r} has no tokens of its own after the context that ends in "
                f"{context[-40:]!r}. Give the answer at least one visible character."
            )
        self._pairs[context, continuation] = pair
        return pair

    def text_pair(self, ids: Sequence[int]) -> Pair:
        """A text with nothing before it: after the prefix token, or given its own first token where there is none."""
        if self.prefix_id is None or (ids and ids[0] == self.prefix_id):
            return Pair(tuple(ids[:1]), tuple(ids[1:]))
        return Pair((self.prefix_id,), tuple(ids))

    def document_pairs(self, document: Document) -> list[Pair]:
        """The scored continuations of a document, in the order of its answers."""
        if document.kind == "text":
            ids = tuple(document.tokens or self.encode(document.answers[0]))
            return [Pair(ids[: document.given], ids[document.given :]) if document.given else self.text_pair(ids)]
        return [self.pair(document.prompt, answer) for answer in document.answers]

    def gold_pair(self, document: Document) -> Pair:
        """Prompt and gold answer: what calibration reads and what the loss of signed purification is taken on."""
        if document.kind == "text":
            return self.document_pairs(document)[0]
        if document.kind in ("choice", "target") and document.gold is not None:
            return self.pair(document.prompt, document.answers[document.gold])
        if not document.reference:
            raise DataError(
                f"Task {document.task!r}, document {document.id!r} has no gold answer, which calibration and signed "
                "purification need. Use a task with gold answers, or --metric random."
            )
        return self.pair(document.prompt, document.reference)

    def prompt_ids(self, document: Document) -> tuple[int, ...]:
        """Token ids of the prompt without special tokens, cut to the context: what features are made of."""
        if document.kind == "text":
            return tuple(document.tokens or self.encode(document.answers[0]))[-self.max_length :]
        if document.prompt not in self._embedding_ids:
            ids = self.tokenizer.encode(document.prompt, add_special_tokens=False)[-self.max_length :]
            self._embedding_ids[document.prompt] = tuple(ids)
        return self._embedding_ids[document.prompt]

    def fit(self, pair: Pair, task: str = "") -> tuple[tuple[int, ...], int]:
        """Input ids that fit the context, and how many of the last positions predict the continuation.

        Returns:
            Ids without the continuation's last token (it is only predicted), and the continuation's length.

        Raises:
            DataError: When the continuation alone is longer than the context, or ``overflow="error"`` and the
                prompt is.
        """
        whole = pair.context + pair.continuation
        if len(pair.continuation) > self.max_length:
            raise DataError(
                f"An answer of task {task or '?'!r} has {len(pair.continuation)} tokens, more than the model's context of "
                f"{self.max_length}. Leave the document out or use a model with a longer context."
            )
        if len(whole) > self.max_length + 1:
            if self.overflow == "error":
                raise DataError(
                    f"A prompt of task {task or '?'!r} has {len(whole)} tokens with its answer, the model's context is "
                    f"{self.max_length}. Use fewer few-shot examples (task@N), or --overflow truncate to cut prompts "
                    "from the left as lm-eval does."
                )
            self.truncated[task] = self.truncated.get(task, 0) + 1
        return whole[-(self.max_length + 1) :][:-1], len(pair.continuation)

    # ------------------------------------------------------------- likelihoods

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihood of every (context, continuation), and whether greedy decoding would give it."""
        scored = self.score([self.pair(context, continuation) for context, continuation in pairs])
        return [(s.loglikelihood, s.is_greedy) for s in scored]

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair], tasks: Sequence[str] | None = None) -> list[Likelihood]:
        """Score token pairs; the result is in the order of ``pairs``.

        Raises:
            NumericError: When a log-likelihood is NaN: the weights or the model's dtype are broken.
        """
        results: list[Likelihood | None] = [None] * len(pairs)
        device = self.model.device
        for batch in self._batches(self._rows(pairs, tasks)):
            longest = max(len(row.ids) for row in batch)
            first = min(row.start for row in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            for i, row in enumerate(batch):
                ids[i, : len(row.ids)] = torch.tensor(row.ids)
            keep = torch.arange(first, longest, device=device)
            # Rows are padded on the right and attention is causal, so padding needs no mask.
            logits = self.model(input_ids=ids.to(device), use_cache=False, logits_to_keep=keep).logits  # (B, A, V)
            for i, row in enumerate(batch):
                part = logits[i, row.start - first : len(row.ids) - first].float()
                logp = torch.log_softmax(part, dim=-1)  # (answer, V)
                best = part.argmax(dim=-1).tolist()
                stem_ll, stem_greedy = 0.0, True
                if row.stem:
                    stem = torch.tensor(row.stem, device=device)
                    stem_ll = float(logp[:-1].gather(1, stem[:, None]).sum())
                    stem_greedy = best[:-1] == list(row.stem)
                for position, token in row.last:
                    value = stem_ll + float(logp[-1, token])
                    if value != value:
                        raise NumericError(
                            "A log-likelihood is NaN. The base model or its dtype is broken for this text; try "
                            "--dtype float32, and check the checkpoint."
                        )
                    results[position] = Likelihood(value, stem_greedy and best[-1] == token, len(row.stem) + 1)
        return [r for r in results if r is not None]

    def _rows(self, pairs: Sequence[Pair], tasks: Sequence[str] | None) -> list[_Row]:
        """Continuations alike but for their last token share a row (the letters of a choice, for one)."""
        rows: dict[tuple[tuple[int, ...], int], _Row] = {}
        for position, pair in enumerate(pairs):
            ids, answer = self.fit(pair, tasks[position] if tasks else "")
            row = rows.setdefault((ids, answer), _Row(ids, len(ids) - answer, pair.continuation[:-1], []))
            row.last.append((position, pair.continuation[-1]))
        return list(rows.values())

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows of like length together, the longest first so that a lack of memory shows at once."""
        batch: list[_Row] = []
        longest = 0
        for row in sorted(rows, key=lambda r: (-len(r.ids), r.start)):
            longest = max(longest, len(row.ids))
            if batch and longest * (len(batch) + 1) > self.batch_tokens:
                yield batch
                batch, longest = [], len(row.ids)
            batch.append(row)
        if batch:
            yield batch

    # -------------------------------------------------------------- generation

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], until: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy continuations, cut at the first stop string; the same text as lm-eval's ``generate_until``.

        Raises:
            RecipeError: When ``max_new_tokens`` leaves no room for a prompt.
        """
        room = self.max_length - max_new_tokens
        if room <= 0:
            raise RecipeError(
                f"max_new_tokens is {max_new_tokens}, the model's context is {self.max_length}: no room is left for a "
                f"prompt. Ask for fewer than {self.max_length} new tokens."
            )
        encoded = []
        for text in prompts:
            ids = self.encode(text)
            if len(ids) > room:
                if self.overflow == "error":
                    raise DataError(
                        f"A prompt has {len(ids)} tokens; with {max_new_tokens} new ones the context of {self.max_length} "
                        f"leaves room for {room}. Shorten it, or use --overflow truncate."
                    )
                self.truncated["generate"] = self.truncated.get("generate", 0) + 1
            encoded.append(tuple(ids[-room:]))
        order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
        texts: dict[int, str] = {}
        while order:
            longest = len(encoded[order[0]]) + max_new_tokens
            size = max(1, _DECODE_ROWS * self.batch_tokens // longest)
            chunk, order = order[:size], order[size:]
            for i, text in zip(
                chunk, self._generate_batch([encoded[i] for i in chunk], until, max_new_tokens), strict=True
            ):
                texts[i] = text
        return [texts[i] for i in range(len(encoded))]

    def _generate_batch(self, rows: list[tuple[int, ...]], until: Sequence[str], new: int) -> list[str]:
        """Left-padded greedy decoding with a key-value cache; a row that stopped is fed padding."""
        device = self.model.device
        longest = max(1, max(len(r) for r in rows))
        eos = self.tokenizer.eos_token_id
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (eos or 0)
        ids = torch.full((len(rows), longest), pad, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            if row:
                ids[i, longest - len(row) :] = torch.tensor(row, device=device)
                mask[i, longest - len(row) :] = 1
        # A new stop string ends in the newest tokens; a few more guard against tokens that are parts of a character.
        tail = max((len(stop) for stop in until), default=0) + 8
        produced: list[list[int]] = [[] for _ in rows]
        done = [False] * len(rows)
        cache = None
        step = ids
        for _ in range(new):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            extra = {} if self.model.config.model_type == "opt" else {"position_ids": positions}
            out = self.model(
                input_ids=step, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, **extra
            )
            cache = out.past_key_values
            tokens = out.logits[:, -1].float().argmax(-1).tolist()
            for i, token in enumerate(tokens):
                if done[i]:
                    continue
                if token == eos:
                    done[i] = True
                    continue
                produced[i].append(token)
                recent = self._decode(produced[i][-tail:])
                done[i] = any(stop in recent for stop in until if stop)
            if all(done):
                break
            step = torch.tensor([[pad if done[i] else t] for i, t in enumerate(tokens)], device=device)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        return [cut_at_stop(self._decode(p), until) for p in produced]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def cut_at_stop(text: str, until: Sequence[str]) -> str:
    """Cut a text before the first occurrence of every stop string."""
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text
