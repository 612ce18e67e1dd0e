"""What an expert is on disk: a rule and the few numbers that regenerate its switched-off weights bit by bit.

A *band* expert holds the input norms of its subdomain (fp32, one per column) and, per row, the columns at the two ends
of its band (`bands`). A *switch* expert holds sorted positions, delta-coded: no values. A *base* expert holds nothing:
the guard found no reliable gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from freemoe.domain_experts.bands import Band, band_scores, inside, positions_from_mask
from freemoe.domain_experts.importance import METRICS
from freemoe.errors import ArtifactError, DataError
from freemoe.families.weights import Weight

Ends = dict[str, tuple[Tensor | None, Tensor | None]]


def encode_positions(positions: Tensor) -> Tensor:
    """Delta-code sorted positions into bytes: gaps of 7 bits per byte, the high bit says that more follow.

    Args:
        positions: ``(N,)`` int64, strictly ascending, from 0.

    Returns:
        ``(bytes,)`` uint8; at 1 % of the weights off, about 1.3 bytes per position.
    """
    values = positions.cpu().numpy().astype(np.int64)
    if len(values) and (values[0] < 0 or (np.diff(values) <= 0).any()):
        raise DataError("Positions must be ascending, without repeats and not negative.")
    gaps = np.diff(values, prepend=0)
    lengths = np.ones(len(gaps), dtype=np.int64)
    for byte in range(1, 9):
        lengths += gaps >= (1 << (7 * byte))
    starts = np.cumsum(lengths) - lengths
    out = np.zeros(int(lengths.sum()), dtype=np.uint8)
    for byte in range(9):
        here = lengths > byte
        part = (gaps[here] >> (7 * byte)) & 0x7F
        more = (lengths[here] > byte + 1).astype(np.int64) << 7
        out[starts[here] + byte] = (part | more).astype(np.uint8)
    return torch.from_numpy(out)


def decode_positions(code: Tensor) -> Tensor:
    """Inverse of `encode_positions`: ``(N,)`` int64."""
    data = code.cpu().numpy().astype(np.int64)
    if len(data) and data[-1] & 0x80:
        raise ArtifactError("The positions of an expert are cut short. Copy the artefact again.")
    ends = np.flatnonzero(data < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    gaps = np.zeros(len(ends), dtype=np.int64)
    for byte in range(9):
        here = starts + byte <= ends
        gaps[here] |= (data[starts[here] + byte] & 0x7F) << (7 * byte)
    return torch.from_numpy(np.cumsum(gaps))


@dataclass(frozen=True, eq=False)
class Expert:
    """One subdomain's expert.

    Attributes:
        name: Name of the subdomain, ``DOMAIN/...``.
        kind: ``base``, ``band`` or ``switch``.
        band: The rule of a band expert.
        norms: Its input norms: tap -> ``(E, C)`` fp32.
        ends: Columns at the band's ends: weight -> two of ``(E, G)``.
        switches: Positions of a switch expert: weight -> ``(N,)`` int64.
    """

    name: str
    kind: Literal["base", "band", "switch"] = "base"
    band: Band | None = None
    norms: dict[str, Tensor] = field(default_factory=dict)
    ends: Ends = field(default_factory=dict)
    switches: dict[str, Tensor] = field(default_factory=dict)

    def positions(self, weights: Sequence[Weight]) -> dict[str, Tensor]:
        """Regenerate the switched-off positions from the base's weights: name -> ``(N,)`` int64.

        Raises:
            ArtifactError: When a weight that the expert names is not in the model.
        """
        known = {w.name: w for w in weights}
        touched = self.switches if self.kind == "switch" else self.ends
        for name in touched:
            if name not in known:
                raise ArtifactError(
                    f"Expert {self.name!r} switches {name!r}, which the model does not have. It was made for another base."
                )
        if self.kind == "switch":
            return dict(self.switches)
        if self.band is None:
            return {}
        found = {}
        for name, (lower, upper) in self.ends.items():
            weight = known[name]
            device = weight.parameter.device
            scores = band_scores(self.band, weight, lambda tap, device=device: self.norms[tap].to(device))
            mask = inside(
                scores, None if lower is None else lower.to(device), None if upper is None else upper.to(device)
            )
            found[name] = positions_from_mask(mask, self.band, weight)
        return found

    def describe(self) -> dict[str, Any]:
        """The part of the expert that stands in the manifest."""
        return {"name": self.name, "kind": self.kind, "band": asdict(self.band) if self.band else None}

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
        norms, switches, ends = {}, {}, {}
        for (owner, part, target), value in parts.items():
            if owner != name:
                continue
            if part == "norm":
                norms[target] = value
            elif part == "switch":
                switches[target] = decode_positions(value)
            else:
                lower, upper = ends.get(target, (None, None))
                ends[target] = (
                    _widen(value) if part == "low" else lower,
                    _widen(value) if part == "high" else upper,
                )
        return cls(name, described["kind"], band, norms, ends, switches)


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


def random_positions(positions: dict[str, Tensor], weights: Sequence[Weight], seed: int) -> dict[str, Tensor]:
    """The control: as many positions per weight as an expert has, drawn at random."""
    known = {w.name: w for w in weights}
    drawn = {}
    for i, (name, where) in enumerate(positions.items()):
        rng = np.random.default_rng([seed, i])
        picked = rng.choice(known[name].size, size=len(where), replace=False)
        drawn[name] = torch.from_numpy(np.sort(picked)).long()
    return drawn
