"""Sorted numbers in about as many bits as their entropy: the code in which masks lie on disk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import ArtifactError, DataError

_HEAD = 9  # one byte k, eight bytes N


def encode_sorted(numbers: Tensor) -> Tensor:
    """Golomb-Rice code of ascending numbers: each gap as its ``k`` low bits and, in unary, what is above them.

    ``k`` is the one that makes these gaps shortest, so that numbers without a pattern take hardly more than their entropy:
    at 1 % of the weights off 8.1 bits each, where H(0.01) / 0.01 is 8.08. ``numbers``: ``(N,)`` int64, strictly ascending,
    from 0.

    Returns:
        ``(bytes,)`` uint8: k, N in eight bytes, the low bits, the unary parts (zeros, then a one).
    """
    values = numbers.cpu().numpy().astype(np.int64)
    if len(values) and (values[0] < 0 or (np.diff(values) <= 0).any()):
        raise DataError("What is coded must ascend, without repeats and not negative.")
    gaps = np.diff(values, prepend=0)
    gaps[1:] -= 1
    longest = int(gaps.max()).bit_length() if len(gaps) else 0
    # In floats, as a bad k may need more bits than an int64 can count.
    k = min(range(max(1, longest)), key=lambda k: float((gaps >> k).sum(dtype=np.float64)) + k * len(gaps))
    low = np.empty((len(gaps), k), dtype=np.uint8)
    for bit in range(k):
        low[:, bit] = (gaps >> bit) & 1
    ones = np.cumsum((gaps >> k) + 1) - 1
    high = np.zeros(int(ones[-1]) + 1 if len(ones) else 0, dtype=np.uint8)
    high[ones] = 1
    head = np.frombuffer(bytes([k]) + len(gaps).to_bytes(_HEAD - 1, "little"), dtype=np.uint8)
    return torch.from_numpy(np.concatenate([head, np.packbits(low), np.packbits(high)]))


def encoded_count(code: Tensor) -> int:
    """How many numbers a code says that it holds; 0 of one that is cut short."""
    return int.from_bytes(code[1:_HEAD].cpu().numpy().tobytes(), "little") if code.numel() >= _HEAD else 0


def decode_sorted(code: Tensor) -> Tensor:
    """Inverse of `encode_sorted`: ``(N,)`` int64."""
    data = code.cpu().numpy()
    k, count = (int(data[0]), int.from_bytes(data[1:_HEAD].tobytes(), "little")) if len(data) >= _HEAD else (0, -1)
    split = _HEAD + -(-count * k // 8)
    ones = np.flatnonzero(np.unpackbits(data[split:])) if count >= 0 else np.empty(0, dtype=np.int64)
    used = int(ones[-1]) + 1 if len(ones) else 0
    # Behind the low bits their last byte is filled with zeros.
    filled = np.unpackbits(data[_HEAD:split])[max(0, count) * k :]
    if len(ones) != count or len(data) != split + -(-used // 8) or bool(filled.any()):
        raise ArtifactError("A mask's code is cut short or edited. Copy the artefact again.")
    low = np.unpackbits(data[_HEAD:split], count=count * k).reshape(count, k)
    gaps = (np.diff(ones, prepend=-1) - 1) << k
    for bit in range(k):
        gaps |= low[:, bit].astype(np.int64) << bit
    gaps[1:] += 1
    return torch.from_numpy(np.cumsum(gaps))
