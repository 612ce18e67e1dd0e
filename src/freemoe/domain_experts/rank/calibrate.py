"""One-pass calibration: the norms of every input of every weight, for every subdomain and every p at once.

MoDE Eq. 5 (Free-MoE Eq. 4) ranks a weight by |W_ij| * ||X_j||_p, X_j being the j-th input feature over all
real tokens of a subdomain's reference documents. What this needs of the documents is sum |x|^p, which adds up
over batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freemoe.core.errors import DataError, FamilyError, NumericError
from freemoe.models.taps import tap_inputs
from freemoe.models.weights import WeightMatrix

POWERS = (1.0, 2.0, 4.0, math.inf)
"""The orders p that are accumulated; infinity by the maximum."""

Batch = tuple[Tensor, Tensor, Tensor]
"""``input_ids`` (B, L), ``attention_mask`` (B, L), and the subdomain's index of each document (B,)."""


def power_sums(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """Sum |x|^p over tokens for every p of ``POWERS``: the inner part of ||X_j||_p in MoDE Eq. 5.

    Of x (tokens, columns), over the tokens ``rows`` (n,) int64 or all: (4, columns) fp32, in the last row max |x|; zeros
    where there are no tokens.
    """
    rows = torch.arange(len(x), device=x.device) if rows is None else rows.to(x.device, non_blocking=True)
    # A part that stays in the CPU's cache is up to 5x faster than the whole; on a GPU they only bound the
    # memory.
    part = max(1, (1 << 17 if x.device.type == "cpu" else 1 << 26) // x.shape[1])
    parts = rows.split(part) if len(rows) else ()
    sums = torch.zeros(max(1, len(parts)), len(POWERS), x.shape[1], dtype=torch.float32, device=x.device)
    for found, some in zip(sums, parts, strict=False):
        # Plain sums, not scatter-adds: the same numbers on every run of the same device.
        value = x.detach().index_select(0, some).to(torch.float32).abs_()
        torch.amax(value, 0, out=found[3])
        torch.sum(value, 0, out=found[0])
        torch.sum(value.square_(), 0, out=found[1])
        torch.sum(value.square_(), 0, out=found[2])
    return sums[0] if len(sums) == 1 else torch.cat([sums[:, :3].sum(0), sums[:, 3:].amax(0)])


def rows_of_groups(labels: Tensor) -> list[tuple[int, Tensor]]:
    """Split tokens by their group.

    ``labels``: (tokens,) int64; negative ones (padding) belong nowhere. Gives, ascending, the number of each group that is
    present and the indices of its tokens, (n,) int64 ascending.
    """
    order = torch.argsort(labels, stable=True)
    present, sizes = torch.unique_consecutive(labels[order], return_counts=True)
    blocks = order.split(sizes.tolist())
    return [(group, rows) for group, rows in zip(present.tolist(), blocks, strict=True) if group >= 0]


def sums_to_norm(sums: Tensor, p: float) -> Tensor:
    """Turn sums of |x|^p into norms ||X_j||_p (MoDE Eq. 5). From (4, ...) fp64, in the order of ``POWERS``, to (...) fp32."""
    if float(p) not in POWERS:
        raise NumericError(f"Norm order p = {p!r} was not accumulated. Allowed: 1, 2, 4, inf.")
    chosen = sums[POWERS.index(float(p))]
    # Square roots are rounded correctly everywhere; pow(x, 1/4) is not.
    for _ in range({2.0: 1, 4.0: 2}.get(float(p), 0)):
        chosen = chosen.sqrt()
    return chosen.to(torch.float32)


@dataclass(frozen=True, eq=False)
class InputNorms:
    """What one calibration pass saw."""

    # Per tap (groups, 4, experts, columns) fp64 on the CPU: sum |x|^p in the order of ``POWERS``
    sums: dict[str, Tensor]
    counts: dict[str, Tensor]  # Per tap (groups, experts) int64: the tokens seen

    def input_norm(self, tap: str, group: int, p: float) -> Tensor:
        """||X_j||_p of one subdomain (MoDE Eq. 5): (experts, columns) fp32; 0 for an expert that no token was routed to."""
        sums = self.sums[tap]
        if not 0 <= group < len(sums):
            raise DataError(f"Subdomain {group} of a calibration with {len(sums)}: 0 to {len(sums) - 1} allowed.")
        return sums_to_norm(sums[group], p)

    def copy(self) -> InputNorms:
        """The same numbers in memory of their own."""
        return InputNorms({t: s.clone() for t, s in self.sums.items()}, {t: c.clone() for t, c in self.counts.items()})

    def to_tensors(self) -> dict[str, Tensor]:
        """Flatten into tensors by name, ready for safetensors."""
        out = {f"{tap}|sums": sums for tap, sums in self.sums.items()}
        return out | {f"{tap}|tokens": counts for tap, counts in self.counts.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> InputNorms:
        """Rebuild, bit by bit, from ``to_tensors``."""
        split = {kind: {} for kind in ("sums", "tokens")}
        for key, tensor in tensors.items():
            tap, _, kind = key.rpartition("|")
            if kind not in split:
                raise DataError(f"{key!r} is not a tensor of saved norms: it must end in |sums or |tokens.")
            split[kind][tap] = tensor
        return cls(split["sums"], split["tokens"])


def parts_of(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut documents into parts that are measured and written down one by one.

    ``lengths`` are the documents' tokens, of which a part has at most ``tokens``; a longer document is a part of its own.

    Returns:
        The documents' numbers, the longest first: neighbours pad each other least, and a lack of memory shows at
        once.
    """
    parts: list[list[int]] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if not parts or lengths[number] > room:
            parts.append([])
            room = tokens
        parts[-1].append(number)
        room -= lengths[number]
    return parts


def calibrate(
    model: nn.Module,  # The model that ``weights`` were found in; its training flags are restored
    weights: Sequence[WeightMatrix],  # From ``find_weights``
    batches: Iterable[Batch],  # ``(input_ids (B, L), attention_mask (B, L), subdomain (B,))``; may be a generator
    groups: int,  # Number of subdomains
    on_batch: Callable[[int], None] | None = None,  # Called after each batch with its number of documents
    before: InputNorms | None = None,  # What earlier batches gave; these are added to a copy of it
) -> InputNorms:
    """Run the reference documents once and keep ||X_j||_p (MoDE Eq. 5) of every subdomain.

    Padding never counts, on either side. Sums are fp32 on the device within a batch and fp64 across batches, in
    the order of the batches: a pass that is cut between two of them and goes on with ``before`` ends in the same
    bits as an unbroken one.

    Raises:
        DataError: No batch, or shapes or subdomains that do not fit.
        NumericError: NaN or infinity in an input; names the tap and the subdomain.
        FamilyError: The model computes a linear without calling its module, so nothing could be measured.
    """
    if before is None:
        taps = {w.tap: w for w in weights}
        shapes = {t: (groups, len(POWERS), w.num_experts, w.num_columns) for t, w in taps.items()}
        norms = InputNorms(
            {t: torch.zeros(shape, dtype=torch.float64) for t, shape in shapes.items()},
            {t: torch.zeros(groups, w.num_experts, dtype=torch.int64) for t, w in taps.items()},
        )
    else:
        norms = before.copy()
    fused = {w.tap for w in weights if w.is_fused}
    documents = 0
    with torch.no_grad(), _eval_mode(model):
        for ids, mask, labels in batches:
            # The host says which tokens count; where it has to ask a device it does so before the pass.
            mask, labels = mask.cpu(), labels.cpu()
            _check_batch(ids, mask, labels, groups)
            _add_sums(norms, _collect_sums(model, weights, fused, (ids, mask, labels)))
            documents += len(ids)
            if on_batch is not None:
                on_batch(len(ids))
    if documents == 0:
        raise DataError("Calibration was given no documents.")
    silent = [tap for tap, counts in norms.counts.items() if tap not in fused and not counts.any()]
    if silent:
        raise FamilyError(
            f"{len(silent)} inputs were never seen, the first is {silent[0]}: {type(model).__name__} "
            "computes these linears without calling their modules. Load it without fused kernels."
        )
    return norms


class TapSums(NamedTuple):
    """What one input of a batch was: tap, expert, n groups with their number of tokens, sums (n, 4, columns)."""

    tap: str
    expert: int
    groups: list[int]
    tokens: list[int]
    sums: Tensor


def _collect_sums(model: nn.Module, weights: Sequence[WeightMatrix], fused: set[str], batch: Batch) -> list[TapSums]:
    ids, mask, labels = batch
    token_labels = torch.where(mask.bool(), labels[:, None], -1).reshape(-1).to(torch.int64)
    # Every dense tap sees the same tokens, so they are split once per batch, and copied once per device.
    dense = rows_of_groups(token_labels)
    dense_on: dict[torch.device, list[tuple[int, Tensor]]] = {}
    seen: list[TapSums] = []

    def on_input(tap: str, expert: int, x: Tensor, token: Tensor) -> None:
        if tap in fused:
            parts = rows_of_groups(token_labels[token])
        elif len(x) == len(token_labels):
            if x.device not in dense_on:
                dense_on[x.device] = [(group, rows.to(x.device, non_blocking=True)) for group, rows in dense]
            parts = dense_on[x.device]
        else:
            raise FamilyError(f"{tap} saw {len(x)} tokens of a batch of {len(token_labels)}: the order is unknown.")
        if parts:
            sums = torch.stack([power_sums(x, rows) for _, rows in parts])
            seen.append(TapSums(tap, expert, [group for group, _ in parts], [len(rows) for _, rows in parts], sums))

    # The head is not needed: it would cost (B, L, vocabulary) numbers.
    body = getattr(model, "base_model", model)
    device = next(model.parameters()).device
    ids, mask = (t.to(device, non_blocking=True) for t in (ids, mask))
    extra = {}
    if "position_ids" in inspect.signature(body.forward).parameters:
        # A document counts its tokens from 0 whichever side its padding is on.
        extra["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with tap_inputs(model, weights, on_input):
        body(input_ids=ids, attention_mask=mask, use_cache=False, **extra)
    return seen


def _add_sums(norms: InputNorms, batch: list[TapSums]) -> None:
    """Add one batch to the totals; the sums of all inputs cross to the CPU together."""
    there = batch[0].sums.device if batch else None
    flat = torch.cat([seen.sums.reshape(-1).to(there) for seen in batch]).to("cpu", torch.float64) if batch else None
    arrived = [] if flat is None else flat.split([seen.sums.numel() for seen in batch])
    # In the order of computation, so that the first bad input is the one named.
    for seen, own in zip(batch, arrived, strict=True):
        sums = own.view(seen.sums.shape)
        if not bool(torch.isfinite(sums).all()):
            bad = torch.isfinite(sums).flatten(1).all(1).tolist().index(False)
            raise NumericError(
                f"NaN or infinity in the input {seen.tap} (expert {seen.expert}) for subdomain {seen.groups[bad]}, or "
                "fourth powers beyond fp32. Check the base model and its precision: bfloat16 or float32 instead of "
                "float16 often helps."
            )
        totals = norms.sums[seen.tap][:, :, seen.expert]
        new = totals[seen.groups]
        new[:, :3] += sums[:, :3]
        torch.maximum(new[:, 3], sums[:, 3], out=new[:, 3])
        totals[seen.groups] = new
        norms.counts[seen.tap][seen.groups, seen.expert] += torch.tensor(seen.tokens)


def _check_batch(ids: Tensor, mask: Tensor, labels: Tensor, groups: int) -> None:
    if ids.ndim != 2 or mask.shape != ids.shape or labels.shape != ids.shape[:1]:
        raise DataError(
            f"A calibration batch needs input_ids (B, L), attention_mask (B, L) and labels (B,); got "
            f"{tuple(ids.shape)}, {tuple(mask.shape)}, {tuple(labels.shape)}."
        )
    if ids.numel() and (int(labels.min()) < 0 or int(labels.max()) >= groups):
        raise DataError(
            f"Subdomain labels reach from {int(labels.min())} to {int(labels.max())}; 0 to {groups - 1} allowed."
        )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
