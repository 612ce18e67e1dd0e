"""What an expert is on disk: a rule and the few numbers that regenerate its switched-off weights bit by bit.

A *band* expert holds the input norms of its subdomain (fp32, one per column) and, per row, the columns at the two ends
of its band (`bands`). A *switch* expert holds sorted positions, as coded gaps: no values. A *unit* expert holds the rows
and columns of the units that are off, and perhaps single positions beside them. A *base* expert holds nothing: the guard
found no reliable gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import ArtifactError, DataError
from freemoe.domain_experts.rank.bands import Band, positions_between
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.models.weights import Weight

Ends = dict[str, tuple[Tensor | None, Tensor | None]]

Lines = dict[str, tuple[str, Tensor]]
"""Weight -> what of it is off as a whole (``rows``, ``columns`` or ``experts``), and which: (N,) int64, ascending."""


_HEAD = 9  # one byte k, eight bytes N


def encode_positions(positions: Tensor) -> Tensor:
    """Golomb-Rice code of sorted positions: each gap as its ``k`` low bits and, in unary, what is above them.

    ``k`` is the one that makes these gaps shortest, so that positions without a pattern take hardly more than their
    entropy: at 1 % of the weights off 8.1 bits each, where H(0.01) / 0.01 is 8.08.

    Args:
        positions: ``(N,)`` int64, strictly ascending, from 0.

    Returns:
        ``(bytes,)`` uint8: k, N in eight bytes, the low bits, the unary parts (zeros, then a one).
    """
    values = positions.cpu().numpy().astype(np.int64)
    if len(values) and (values[0] < 0 or (np.diff(values) <= 0).any()):
        raise DataError("Positions must be ascending, without repeats and not negative.")
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


def decode_positions(code: Tensor) -> Tensor:
    """Inverse of `encode_positions`: ``(N,)`` int64."""
    data = code.cpu().numpy()
    k, count = (int(data[0]), int.from_bytes(data[1:_HEAD].tobytes(), "little")) if len(data) >= _HEAD else (0, -1)
    split = _HEAD + -(-count * k // 8)
    ones = np.flatnonzero(np.unpackbits(data[split:])) if count >= 0 else np.empty(0, dtype=np.int64)
    used = int(ones[-1]) + 1 if len(ones) else 0
    if len(ones) != count or len(data) != split + -(-used // 8):
        raise ArtifactError("The positions of an expert are cut short or edited. Copy the artefact again.")
    low = np.unpackbits(data[_HEAD:split], count=count * k).reshape(count, k)
    gaps = (np.diff(ones, prepend=-1) - 1) << k
    for bit in range(k):
        gaps |= low[:, bit].astype(np.int64) << bit
    gaps[1:] += 1
    return torch.from_numpy(np.cumsum(gaps))


@dataclass(frozen=True, eq=False)
class Expert:
    """One subdomain's expert.

    Attributes:
        name: Name of the subdomain, ``DOMAIN/...``.
        kind: ``base``, ``band``, ``switch`` or ``unit``.
        band: The rule of a band expert.
        norms: Its input norms: tap -> ``(E, C)`` fp32.
        ends: Columns at the band's ends: weight -> two of ``(E, G)``.
        switches: Positions of a switch expert, and of the single switches of a unit expert: weight -> ``(N,)`` int64.
        unit: Which units a unit expert switches off: a name of ``structured.units.KINDS``.
        lines: Their rows and columns.
    """

    name: str
    kind: Literal["base", "band", "switch", "unit"] = "base"
    band: Band | None = None
    norms: dict[str, Tensor] = field(default_factory=dict)
    ends: Ends = field(default_factory=dict)
    switches: dict[str, Tensor] = field(default_factory=dict)
    unit: str | None = None
    lines: Lines = field(default_factory=dict)

    def positions(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """Regenerate the switched-off positions from the base's weights: name -> ``(N,)`` int64.

        Raises:
            ArtifactError: When a weight that the expert names is not in the model.
        """
        known = {w.name: w for w in weights}
        touched = {**self.switches, **self.lines, **self.ends}
        for name in touched:
            if name not in known:
                raise ArtifactError(
                    f"Expert {self.name!r} switches {name!r}, which the model does not have. It was made for another base."
                )
        if self.kind == "switch":
            return dict(self.switches)
        if self.kind == "unit":
            return _with_lines(self.switches, self.lines, known)
        if self.band is None:
            return {}
        found = {}
        for name, (lower, upper) in self.ends.items():
            weight = known[name]
            device = weight.parameter.device
            low, high = (None if end is None else end.to(device) for end in (lower, upper))
            found[name] = positions_between(
                self.band, weight, lambda tap, device=device: self.norms[tap].to(device), low, high
            )
        return found

    def describe(self) -> dict[str, Any]:
        """The part of the expert that stands in the manifest."""
        said = {"name": self.name, "kind": self.kind, "band": asdict(self.band) if self.band else None}
        return {**said, "unit": self.unit} if self.unit else said

    def to_tensors(self) -> dict[str, Tensor]:
        """The part that stands in ``experts.safetensors``, under names that begin with the expert's."""
        out: dict[str, Tensor] = {}
        for tap, norm in self.norms.items():
            out[f"{self.name}|norm|{tap}"] = norm.float().cpu()
        for name, (lower, upper) in self.ends.items():
            # A weight whose band spans its whole ranking has no ends; the empty marker says it is touched at all.
            for side, end in (("low", lower), ("high", upper)):
                if end is not None:
                    out[f"{self.name}|{side}|{name}"] = _narrow(end)
            if lower is None and upper is None:
                out[f"{self.name}|all|{name}"] = torch.zeros(1, dtype=torch.uint8)
        for name, positions in self.switches.items():
            out[f"{self.name}|switch|{name}"] = encode_positions(positions)
        for name, (axis, numbers) in self.lines.items():
            out[f"{self.name}|{axis}|{name}"] = encode_positions(numbers)
        return out

    @classmethod
    def from_parts(cls, described: dict[str, Any], tensors: dict[str, Tensor]) -> Expert:
        """Rebuild an expert from its manifest entry and the artefact's tensors."""
        name = described["name"]
        # Names of weights and inputs hold no bar; a subdomain's may, as it can be a field of the user's data.
        parts = {tuple(key.rsplit("|", 2)): value for key, value in tensors.items()}
        band = described.get("band")
        if band is not None:
            band = Band(**{**band, "layers": tuple(band["layers"]) if band["layers"] else None})
        norms, switches, lines = {}, {}, {}
        ends: Ends = {}
        for (owner, part, target), value in parts.items():
            if owner != name:
                continue
            if part == "norm":
                norms[target] = value
            elif part == "switch":
                switches[target] = decode_positions(value)
            elif part in AXES:
                lines[target] = part, decode_positions(value)
            else:
                lower, upper = ends.get(target, (None, None))
                ends[target] = (
                    _widen(value) if part == "low" else lower,
                    _widen(value) if part == "high" else upper,
                )
        return cls(name, described["kind"], band, norms, ends, switches, described.get("unit"), lines)


AXES = ("rows", "columns", "experts")


def _with_lines(switches: dict[str, Tensor], lines: Lines, weights: dict[str, Weight]) -> dict[str, Tensor]:
    """Single positions and all those of whole rows, columns and experts: name -> (N,) int64, ascending."""
    found = dict(switches)
    for name, (axis, numbers) in lines.items():
        experts, rows, columns = weights[name].shape
        size = {"rows": experts * rows, "columns": columns, "experts": experts}[axis]
        if len(numbers) and int(numbers[-1]) >= size:
            raise ArtifactError(
                f"{name!r} has {size} {axis}, and {int(numbers[-1])} is to be off. The expert was made for another base."
            )
        if axis == "columns":
            where = (torch.arange(experts * rows)[:, None] * columns + numbers).flatten()
        else:
            each = experts * rows * columns // size
            where = (numbers[:, None] * each + torch.arange(each)).flatten()
        found[name] = torch.cat([found[name], where]).unique() if name in found else where
    return found


def _narrow(columns: Tensor) -> Tensor:
    """Columns in the smallest type that safetensors has for them: two bytes up to 65,536 columns."""
    wide = columns.long().cpu()
    if not wide.numel() or int(wide.max()) < 2**16:
        return wide.to(torch.uint16)
    return wide.to(torch.int32) if int(wide.max()) < 2**31 else wide


def _widen(columns: Tensor) -> Tensor:
    return columns.to(torch.int64)


def band_expert(name: str, band: Band, ends: Ends, norms: dict[str, Tensor], weights: Sequence[Weight]) -> Expert:
    """An expert from a band: keeps the norms of the inputs it needs only."""
    taps = dict.fromkeys(w.tap for w in weights if w.name in ends)
    needed = norms if METRICS.get(band.metric).needs == "norms" else {}
    return Expert(name, "band", band, {t: needed[t] for t in taps if t in needed}, ends)


def switch_expert(name: str, positions: dict[str, Tensor]) -> Expert:
    """An expert from switched-off positions."""
    return Expert(name, "switch", switches={k: v.cpu().long() for k, v in positions.items() if len(v)})


def unit_expert(name: str, unit: str, lines: Lines, singles: dict[str, Tensor]) -> Expert:
    """An expert from units that are off, and single positions outside of them."""
    kept = {k: (axis, numbers.cpu().long()) for k, (axis, numbers) in lines.items() if len(numbers)}
    return Expert(
        name, "unit", switches={k: v.cpu().long() for k, v in singles.items() if len(v)}, unit=unit, lines=kept
    )


def require_zeros_say(name: str, unit: str | None) -> None:
    """Raise unless a plain checkpoint with zeros computes what an expert does.

    Args:
        name: Of the expert.
        unit: Which units it switches off.

    Raises:
        ArtifactError: Whole experts of a mixture are off: a router knows nothing of zeros.
    """
    if unit == "expert":
        raise ArtifactError(
            f"Expert {name!r} has whole experts of the mixture off, which its routers do not choose; in a plain "
            "checkpoint they would. Cut them out: merge with --shrink."
        )


def random_positions(positions: dict[str, Tensor], weights: Sequence[Weight], seed: int) -> dict[str, Tensor]:
    """The control: as many positions per weight as an expert has, drawn at random."""
    known = {w.name: w for w in weights}
    drawn = {}
    for i, (name, where) in enumerate(positions.items()):
        rng = np.random.default_rng([seed, i])
        picked = rng.choice(known[name].size, size=len(where), replace=False)
        drawn[name] = torch.from_numpy(np.sort(picked)).long()
    return drawn
