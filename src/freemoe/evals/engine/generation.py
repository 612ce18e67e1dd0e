"""Generation: prompts that begin alike share that beginning's keys and values, finished rows leave the batch.

Shapes: B rows that are still running, P prefix tokens, L longest prompt behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.evals.engine.likelihoods import fill_prefix
from freemoe.evals.engine.row_plan import Ids, shared_prefixes
from freemoe.evals.engine.sampling import SamplingConfig, tokens_to_list, widest_float
from freemoe.evals.engine.shared_cache import SharedCache
from freemoe.evals.engine.sharing import sliding_window

# A decoding step holds one token per row, so many more rows fit than when whole prompts are scored.
_DECODE_ROWS = 4


def cut_at_stop(text: str, until: Sequence[str]) -> str:
    """Cut a text before the first occurrence of every stop string."""
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text


class BatchDecoder:
    """Decoding with one model, greedy or sampled.

    ``scorer``: has the model, its tokenizer, and how many tokens a batch and one more forward pass are worth. ``share``:
    share prefixes and drop finished rows; without it the model keeps its own cache.
    """

    def __init__(self, scorer: Any, share: bool, sampling: SamplingConfig) -> None:
        self.model, self.tokenizer, self.batch_tokens = scorer.model, scorer.tokenizer, scorer.batch_tokens
        self.share, self.sampling, self.forward_cost = share, sampling, scorer.forward_cost
        # It counts places of the cache, padding included, so padding must not stand between a prefix and its prompts where the
        # window does not hold them all.
        self.window = sliding_window(scorer.model)
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.eos = eos
        self.pad = pad if pad is not None else (eos or 0)

    def generate_texts(self, prompts: Sequence[Ids], until: Sequence[str], new: int) -> list[list[str]]:
        """Continuations of at most ``new`` tokens, cut at the first stop string: for each prompt its samples, in order."""
        count = self.sampling.samples
        found: dict[int, list[str]] = {}
        for prefix, members in self._prefix_groups(prompts, new):
            order = sorted(members, key=lambda i: -len(prompts[i]))
            room = len(prompts[order[0]]) + new
            cache = None
            if prefix:
                cache = fill_prefix(self.model, torch.tensor([prefix], device=self.model.device), room)
            elif self.share:
                cache = SharedCache(room)
            while order:
                size = max(1, _DECODE_ROWS * self.batch_tokens // (count * (len(prompts[order[0]]) + new)))
                chunk, order = order[:size], order[size:]
                if cache is not None:
                    cache.reset_to_prefix()
                rows = [prompts[i][len(prefix) :] for i in chunk]
                chances = self._random_numbers([prompts[i] for i in chunk], new)
                texts = self._decode_batch(rows, len(prefix), cache, until, new, chances)
                found |= {i: texts[k * count : (k + 1) * count] for k, i in enumerate(chunk)}
        return [found[i] for i in range(len(prompts))]

    def _random_numbers(self, prompts: Sequence[Ids], new: int) -> Tensor:
        """The random numbers ``(B, new)`` of all samples, a prompt's one after the other; none where nothing is drawn."""
        count, device = self.sampling.samples, self.model.device
        if self.sampling.is_greedy:
            return torch.zeros(len(prompts) * count, new, device=device)
        drawn = [self.sampling.random_numbers(p, i, new) for p in prompts for i in range(count)]
        return torch.from_numpy(np.stack(drawn)).to(widest_float(device)).to(device)

    def _prefix_groups(self, prompts: Sequence[Ids], new: int) -> list[tuple[Ids, list[int]]]:
        if not self.share:
            return [((), list(range(len(prompts))))] if prompts else []
        groups = shared_prefixes(prompts, self.forward_cost)
        if self.window is None:
            return groups
        fit = [
            (prefix, members)
            for prefix, members in groups
            if prefix and max(len(prompts[i]) for i in members) + new <= self.window
        ]
        taken = {i for _, members in fit for i in members}
        left = [i for i in range(len(prompts)) if i not in taken]
        return [*fit, ((), left)] if left else fit

    def _decode_batch(
        self, rows: list[Ids], prefix: int, cache: SharedCache | None, until: Sequence[str], new: int, chances: Tensor
    ) -> list[str]:
        """Prompts padded on the left, behind the prefix; a row that stopped is fed padding until it is dropped.

        Samples of a prompt part ways at their first token: until then they are one row where the cache can be copied.
        """
        device, count = self.model.device, self.sampling.samples
        copies = torch.arange(len(rows), device=device).repeat_interleave(count)
        together = cache is not None and count > 1
        step, mask = self._left_pad(rows if together else [rows[i] for i in copies.tolist()], prefix)
        # A new stop string ends in the newest tokens; a few more guard against tokens that are parts of a character.
        tail = max((len(stop) for stop in until), default=0) + 8
        produced: list[list[int]] = [[] for _ in copies]
        running = list(range(len(copies)))  # the rows of the batch
        # What ended is sent to the device when that changes, and the tokens never are: they are there.
        done, stopped = [False] * len(copies), torch.zeros(len(copies), dtype=torch.bool, device=device)
        past: Any = cache
        for number in range(new):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            extra = {} if self.model.config.model_type == "opt" else {"position_ids": positions}
            out = self.model(
                input_ids=step, attention_mask=mask, past_key_values=past, use_cache=True, logits_to_keep=1, **extra
            )
            past = out.past_key_values
            logits = out.logits[:, -1].float()
            if cache is not None and together and number == 0:
                cache.select_rows(copies)
                logits, mask = logits[copies], mask[copies]
            picked = self.sampling.sample_tokens(logits, chances[:, number])
            ended = sum(done)
            for i, token in zip(running, tokens_to_list(picked), strict=True):
                if done[i] or token == self.eos:
                    done[i] = True
                    continue
                produced[i].append(token)
                recent = self._decode_text(produced[i][-tail:])
                done[i] = any(stop in recent for stop in until if stop)
            alive = [k for k, i in enumerate(running) if not done[i]]
            if not alive:
                break
            if sum(done) > ended:
                stopped = torch.tensor([done[i] for i in running], device=device)
            step = picked.masked_fill(stopped, self.pad)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=1)
            # Copying the cache pays when it halves it.
            if cache is not None and 2 * len(alive) <= len(running):
                kept = torch.tensor(alive, device=device)
                cache.select_rows(kept)
                step, mask, chances, stopped = step[kept], mask[kept], chances[kept], stopped[kept]
                running = [running[k] for k in alive]
        return [cut_at_stop(self._decode_text(p), until) for p in produced]

    def _left_pad(self, rows: list[Ids], prefix: int) -> tuple[Tensor, Tensor]:
        """Ids ``(B, L)`` padded on the left, and the mask ``(B, P + L)`` with a hole where the padding stands."""
        longest = max(1, max(map(len, rows)))
        ids = [[self.pad] * (longest - len(row)) + list(row) for row in rows]
        mask = [[1] * prefix + [0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(ids, device=self.model.device), torch.tensor(mask, device=self.model.device)

    def _decode_text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
