"""The door to the model: rows of tokens in, logits out; how sequences and experts are put together stays behind it.

Shapes: B rows, L tokens of the longest, K tokens that a row sees, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from freemoe.compat.caches import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from freemoe.recipes.expert_names import BASE
from freemoe.serve.engine.acting import ByExpert, InOnePass
from freemoe.serve.engine.cache import SlotCache
from freemoe.serve.settings import EngineLimits


@dataclass(frozen=True)
class BatchRow:
    """Tokens of one sequence, behind those that it has."""

    number: int  # Of the sequence, as `ModelRunner.add_sequence` was told
    tokens: tuple[int, ...]  # At least one
    expert: str  # Whose weights read them
    wanted: Literal["last", "every", "none"] = "last"  # Logits after its last token, after every token, or none


class ModelRunner:
    """Runs a step: one pass per row, each sequence with a cache of the model's own kind, as transformers' generate runs it.

    For whatever `SlotRunner` cannot do, and where no sequence's logits may depend on its neighbours.
    """

    def __init__(self, model: Any, acting: ByExpert) -> None:
        self._model, self._acting = model, acting
        self._cuts = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._caches: dict[int, Any] = {}

    def add_sequence(self, number: int) -> None:
        """Make room for a sequence."""
        self._caches[number] = DynamicCache(config=self._model.config)

    def remove_sequence(self, number: int) -> None:
        """Let go of a sequence."""
        del self._caches[number]

    def forward(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """Run rows of different sequences; per row ``(n, V)`` logits, n as `BatchRow.wanted` says."""
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for part in self._acting.group_rows([row.expert for row in rows], max(len(row.tokens) for row in rows)):
            for i in part:
                self._acting.activate_experts([rows[i].expert])
                found[i] = self._forward_row(rows[i])
        return found

    def _forward_row(self, row: BatchRow) -> Tensor:
        ids = torch.tensor([row.tokens], device=self._model.device)
        kept = {"logits_to_keep": 1} if self._cuts and row.wanted != "every" else {}
        logits = self._model(input_ids=ids, past_key_values=self._caches[row.number], use_cache=True, **kept).logits[0]
        return {"every": logits, "last": logits[-1:], "none": logits[:0]}[row.wanted]

    def release_model(self) -> None:
        """Leave the base as it was, until the next pass."""
        self._acting.release_model()


class SlotRunner(ModelRunner):
    """Many sequences in one pass, whatever their lengths; their keys and values lie in a `SlotCache`."""

    def __init__(self, model: Any, acting: ByExpert, limits: EngineLimits) -> None:
        super().__init__(model, acting)
        self.cache, self._context = SlotCache(limits.batch, limits.context), limits.context

    def add_sequence(self, number: int) -> None:
        """Take a slot of the cache for a new sequence."""
        self.cache.add_sequence(number)

    def remove_sequence(self, number: int) -> None:
        """Free the slot of a sequence that ended."""
        self.cache.remove_sequence(number)

    def forward(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """As `ModelRunner.forward`: in as few passes as the experts allow."""
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        # In the order of their places, so that slots that follow each other are used without a copy.
        order = sorted(range(len(rows)), key=lambda i: self.cache.places[rows[i].number])
        tokens = len(rows) * max(len(row.tokens) for row in rows)
        for part in self._acting.group_rows([rows[i].expert for i in order], tokens):
            members = [rows[order[i]] for i in part]
            self._acting.activate_experts([row.expert for row in members])
            for i, one in zip(part, self._forward_slots(members), strict=True):
                found[order[i]] = one
        return found

    def _forward_slots(self, rows: list[BatchRow]) -> list[Tensor]:
        self.cache.map_slots([row.number for row in rows])
        kept = self._logit_positions(rows)
        logits = self._model(**self._build_inputs(rows, kept), past_key_values=self.cache, use_cache=True).logits
        for row in rows:
            self.cache.lengths[row.number] += len(row.tokens)
        found = []
        for i, row in enumerate(rows):
            last = kept.index(len(row.tokens) - 1) if kept and row.wanted == "last" else len(row.tokens) - 1
            first, end = {"none": (0, 0), "every": (0, len(row.tokens)), "last": (last, last + 1)}[row.wanted]
            found.append(logits[i, first:end])
        return found

    def _build_inputs(self, rows: list[BatchRow], keep: list[int]) -> dict[str, Any]:
        """Ids ``(B, L)``, positions and the mask ``(B, 1, L, K)``; short rows end in copies of their last token."""
        device, aim, longest = self._model.device, self.cache.aim, max(len(row.tokens) for row in rows)
        ids = [token for row in rows for token in (*row.tokens, *[row.tokens[-1]] * (longest - len(row.tokens)))]
        # All together: each transfer is a wait.
        sent = torch.tensor([*ids, *aim.slots, *aim.starts, *keep]).to(device)
        tokens, places, cut = sent.split([len(ids), 2 * len(rows), len(keep)])
        aim.places = places.view(2, len(rows))
        at = aim.places[1][:, None] + torch.arange(longest, device=device)
        hidden = torch.arange(max(aim.starts) + longest, device=device) > at[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=device)
        # A mask of booleans would be added by some families' attention, not applied.
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return {
            "input_ids": tokens.view(len(rows), longest),
            "position_ids": at.clamp(max=self._context - 1),
            "attention_mask": mask[:, None],
            **({"logits_to_keep": cut} if keep else {}),
        }

    def _logit_positions(self, rows: list[BatchRow]) -> list[int]:
        """Places whose logits are made, for all rows; none for all of them."""
        longest = max(len(row.tokens) for row in rows)
        if not self._cuts or longest == 1 or any(row.wanted == "every" for row in rows):
            return []
        return sorted({len(row.tokens) - 1 for row in rows if row.wanted == "last"} or {0})


def runner_for(host: Any, limits: EngineLimits) -> ModelRunner:
    """The best runner for a host: `SlotRunner` where it is proven to say what the model says, else the plain `ModelRunner`."""
    batched = not limits.batch_invariant and plain_cache(host.model, limits.context)
    if batched and _matches_unbatched(host, limits):
        return SlotRunner(host.model, InOnePass(host) if hasattr(host, "mixed") else ByExpert(host), limits)
    return ModelRunner(host.model, ByExpert(host))


def plain_cache(model: Any, context: int) -> bool:
    """Whether a model keeps keys and values of all tokens it sees, in all layers: no recurrent state, no shorter window."""
    layers = DynamicCache(config=model.config).layers
    return all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= context)
        for layer in layers
    )


def _matches_unbatched(host: Any, limits: EngineLimits) -> bool:
    """Whether two rows of different lengths, the second behind tokens that it has, get the logits of the rows alone."""
    model = host.model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [tuple((7 * i + 3 * j + 5) % vocabulary for j in range(n)) for i, n in enumerate((5, 8))]
    if limits.context < max(map(len, ids)) or limits.batch < len(ids):
        # Too small to try; nothing is gained by batches either.
        return False
    runner = SlotRunner(model, ByExpert(host), EngineLimits(limits.context, batch=2))
    with torch.no_grad():
        try:
            alone = [model(input_ids=torch.tensor([row], device=model.device)).logits[0, -1].float() for row in ids]
            for number in (0, 1):
                runner.add_sequence(number)
            runner.forward([BatchRow(1, ids[1][:4], BASE)])
            found = runner.forward([BatchRow(0, ids[0], BASE), BatchRow(1, ids[1][4:], BASE)])
        except Exception:  # whatever a family's own code makes of a mask or a cache that it does not expect
            return False
        finally:
            runner.release_model()
    close = 1e-3 if model.dtype == torch.float32 else 5e-2
    return all(
        bool((one[-1].float() - true).abs().max() <= close * (true.max() - true.min()).clamp(min=1e-6))
        for one, true in zip(found, alone, strict=True)
    )
