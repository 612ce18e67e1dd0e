"""What an expert is on disk: a rule and the few numbers that regenerate its switched-off weights bit by bit.

A *band* expert holds the input norms of its subdomain (fp32, one per column) and, per row, the columns at the two ends
of its band (`bands`). A *switch* expert holds a coded mask: no values. A *unit* expert holds the rows
and columns of the units that are off, and perhaps single weights beside them. A *base* expert holds nothing: the guard
found no reliable gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from freemoe.core.artifacts import read_tensors
from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.rank.bands import Band, band_tile, mask_between
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.structured.units import KINDS
from freemoe.kernels.sparse.bands import BandTile
from freemoe.models.mask import AXES, Mask, MaskError, TensorMask, len_of
from freemoe.models.sorted_code import decode_sorted, encode_sorted, encoded_count
from freemoe.models.weights import WeightMatrix
from freemoe.recipes.expert_names import BASE, name_fault

EXPERTS = "experts.safetensors"
"""The file of an artefact that holds them."""

_PARTS: dict[str, tuple[str, ...]] = {
    BASE: (),
    "band": ("norm", "low", "high", "all"),
    "switch": ("switch",),
    "unit": ("switch", *AXES),
}
"""Kind of an expert -> the parts that its tensors can be."""

_WHOLE = (torch.uint16, torch.int32, torch.int64)
_TYPES: dict[str, tuple[torch.dtype, ...]] = {
    "norm": (torch.float32,),
    "low": _WHOLE,
    "high": _WHOLE,
    **dict.fromkeys(("all", "switch", *AXES), (torch.uint8,)),
}
"""Part -> the types that it is written in."""

Ends = dict[str, tuple[Tensor | None, Tensor | None]]

Lines = dict[str, tuple[str, Tensor]]
"""Weight -> what of it is off as a whole (``rows``, ``columns`` or ``experts``), and which: (N,) int64, ascending."""


@dataclass(frozen=True, eq=False)
class DomainExpert:
    """One subdomain's expert, as it stands on disk."""

    name: str  # Name of the subdomain, ``DOMAIN/...``
    kind: Literal["base", "band", "switch", "unit"] = "base"  # ``base``, ``band``, ``switch`` or ``unit``
    band: Band | None = None  # The rule of a band expert
    norms: dict[str, Tensor] = field(default_factory=dict)  # Its input norms: tap -> ``(E, C)`` fp32
    ends: Ends = field(default_factory=dict)  # Columns at the band's ends: weight -> two of ``(E, G)``
    # Coded masks of a switch expert, and of the single switches of a unit expert (`Mask.encode`)
    switches: dict[str, Tensor] = field(default_factory=dict)
    unit: str | None = None  # Which units a unit expert switches off: a name of ``structured.units.KINDS``
    lines: Lines = field(default_factory=dict)  # Their rows and columns

    def mask(self, weights: Sequence[WeightMatrix]) -> Mask:
        """Regenerate what is off from the base's weights.

        Raises:
            ArtifactError: When a weight that the expert names is not in the model, or is smaller there.
        """
        known = {w.name: w for w in weights}
        touched = {**self.switches, **self.lines, **self.ends}
        for name in touched:
            if name not in known:
                raise ArtifactError(
                    f"Expert {self.name!r} switches {name!r}, which the model does not have. It was made for another base."
                )
        if self.kind in ("switch", "unit"):
            try:
                singles = Mask.decode(self.switches, weights)
            except MaskError as error:
                raise ArtifactError(f"Expert {self.name!r}: {error} It was made for another base.") from None
            return singles.union(_of_lines(self.lines, known))
        if self.band is None:
            return Mask()
        found = {}
        for name, (lower, upper) in self.ends.items():
            weight = known[name]
            _check_ends(self, self.band, weight)
            device = weight.device
            low, high = (None if end is None else end.to(device) for end in (lower, upper))
            found[name] = mask_between(self.band, weight, self.norms.__getitem__, low, high)
        return Mask(found)

    def band_tiles(self, weights: Sequence[WeightMatrix]) -> dict[str, BandTile] | None:
        """What is off as rules of bands, by weight; None where it is anything else, or bands that `band_tile` does not know."""
        if self.band is None:
            return None
        known, found = {w.name: w for w in weights}, {}
        for name, (lower, upper) in self.ends.items():
            if name not in known:
                return None
            _check_ends(self, self.band, known[name])
            tile = band_tile(self.band, known[name], self.norms.__getitem__, lower, upper)
            if tile is None:
                return None
            found[name] = tile
        return found

    def manifest_entry(self) -> dict[str, Any]:
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
                    # In the smallest type that safetensors has for them: two bytes up to 65,536 columns.
                    wide = end.long().cpu()
                    most = int(wide.max()) if wide.numel() else 0
                    small = torch.uint16 if most < 2**16 else torch.int32 if most < 2**31 else torch.int64
                    out[f"{self.name}|{side}|{name}"] = wide.to(small)
            if lower is None and upper is None:
                out[f"{self.name}|all|{name}"] = torch.zeros(1, dtype=torch.uint8)
        for name, code in self.switches.items():
            out[f"{self.name}|switch|{name}"] = code
        for name, (axis, numbers) in self.lines.items():
            out[f"{self.name}|{axis}|{name}"] = encode_sorted(numbers)
        return out

    @classmethod
    def from_parts(cls, described: dict[str, Any], tensors: dict[str, Tensor]) -> DomainExpert:
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
                switches[target] = value
            elif part in AXES:
                lines[target] = part, decode_sorted(value)
            else:
                lower, upper = ends.get(target, (None, None))
                columns = value.to(torch.int64)
                ends[target] = (columns if part == "low" else lower, columns if part == "high" else upper)
        return cls(name, described["kind"], band, norms, ends, switches, described.get("unit"), lines)


def read_experts(folder: str | Path, manifest: Mapping[str, Any]) -> list[DomainExpert]:
    """The experts of an artefact, each of which is what its manifest says.

    Raises:
        ArtifactError: One is of an unknown kind, has no tensors or another kind's, or a rule that is none; names are missing or
            there twice; tensors belong to nobody, or are NaN.
    """
    described = manifest.get("experts", [])
    tensors = read_tensors(folder, EXPERTS, manifest)
    names = [one["name"] for one in described]
    wrong = [f"{n!r:.120} {name_fault(n) or 'is there twice'}" for n in names if name_fault(n) or names.count(n) > 1]
    if wrong or not names:
        raise ArtifactError(
            f"The manifest of {str(folder)!r} names {len(names)} experts, and each needs a name of its own"
            f"{': ' + wrong[0] if wrong else ''}. Build it anew."
        )
    owners = {key.rsplit("|", 2)[0] for key in tensors}
    if strangers := sorted(owners - set(names)):
        raise ArtifactError(
            f"{EXPERTS!r} in {str(folder)!r} holds tensors of {strangers[0]!r}, which is no expert of its manifest. Build "
            "it anew."
        )
    try:
        return [_check_expert(DomainExpert.from_parts(one, tensors), tensors) for one in described]
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"An expert in {str(folder)!r} cannot be read ({type(error).__name__}: {error}). Build it anew."
        ) from None


def _check_expert(expert: DomainExpert, tensors: Mapping[str, Tensor]) -> DomainExpert:
    """Raise unless an expert has what its kind needs and nothing else."""
    name, kind = expert.name, expert.kind
    own = [(key.rsplit("|", 2)[1], tensor.dtype) for key, tensor in tensors.items() if key.rsplit("|", 2)[0] == name]
    odd = [f"{part} ({dtype})" for part, dtype in own if part not in _PARTS[kind] or dtype not in _TYPES[part]]
    off = sum(encoded_count(code) for code in expert.switches.values()) + sum(len(n) for _, n in expert.lines.values())
    if odd or (kind != BASE and not off and not expert.ends):
        held = f"tensors of {odd[0]}" if odd else "nothing that is off"
        raise ArtifactError(
            f"Expert {name!r} is of kind {kind!r} and holds {held}; it would be another than it is called. Build it anew."
        )
    whole = {axis for axis, _ in expert.lines.values()} == {"experts"}
    if expert.unit not in (KINDS if kind == "unit" else (None,)) or whole != (expert.unit == "expert"):
        raise ArtifactError(
            f"Expert {name!r} is of kind {kind!r} and has units of the kind {expert.unit!r}; known: {', '.join(KINDS)}, which say "
            "what of a weight is off. Build it anew."
        )
    if expert.band is not None and (
        expert.band.metric not in METRICS or (METRICS.get(expert.band.metric).needs == "norms" and not expert.norms)
    ):
        raise ArtifactError(
            f"Expert {name!r} ranks by {expert.band.metric!r}, which is none of {', '.join(METRICS.names())}, or needs norms that are not "
            "there. Install the package that wrote it, or build it anew."
        )
    return expert


def _check_ends(expert: DomainExpert, band: Band, weight: WeightMatrix) -> None:
    """Raise unless the ends and the norms of a band are of a weight's shape."""
    rows, columns = -(-weight.num_rows // band.patch), -(-weight.num_columns // band.patch)
    layer = band.scope == "layer"
    groups, size = (weight.num_experts, 1 if layer else rows), rows * columns if layer else columns
    faults = [
        end
        for end in expert.ends[weight.name]
        if end is not None and (tuple(end.shape) != groups or int(end.min()) < 0 or int(end.max()) >= size)
    ]
    norm = expert.norms.get(weight.tap)
    wanted = METRICS.get(band.metric).needs == "norms"
    if faults or (wanted and (norm is None or norm.shape[-1] != weight.num_columns or bool((norm < 0).any()))):
        raise ArtifactError(
            f"Expert {expert.name!r} has ends or norms for {weight.name!r} that do not fit its shape {weight.shape}. It was made "
            "for another base."
        )


def _of_lines(lines: Lines, weights: dict[str, WeightMatrix]) -> Mask:
    """All single weights of whole rows, columns and experts."""
    found = {}
    for name, (axis, numbers) in lines.items():
        size = len_of(weights[name].shape, axis)
        if len(numbers) and int(numbers[-1]) >= size:
            raise ArtifactError(
                f"{name!r} has {size} {axis}, and {int(numbers[-1])} is to be off. The expert was made for another base."
            )
        found[name] = TensorMask.of_lines(weights[name].shape, axis, numbers)
    return Mask(found)


def band_expert(
    name: str, band: Band, ends: Ends, norms: dict[str, Tensor], weights: Sequence[WeightMatrix]
) -> DomainExpert:
    """An expert from a band: keeps the norms of the inputs it needs only."""
    taps = dict.fromkeys(w.tap for w in weights if w.name in ends)
    needed = norms if METRICS.get(band.metric).needs == "norms" else {}
    return DomainExpert(name, "band", band, {t: needed[t] for t in taps if t in needed}, ends)


def switch_expert(name: str, mask: Mask) -> DomainExpert:
    """An expert from single weights that are off."""
    return DomainExpert(name, "switch", switches=mask.encode())


def unit_expert(name: str, unit: str, lines: Lines, singles: Mask) -> DomainExpert:
    """An expert from units that are off, and single weights outside of them."""
    kept = {k: (axis, numbers.cpu().long()) for k, (axis, numbers) in lines.items() if len(numbers)}
    return DomainExpert(name, "unit", switches=singles.encode(), unit=unit, lines=kept)


def require_accepted(kinds: Mapping[str, str]) -> None:
    """Raise where one of some experts was rejected, so that nothing of it could be written. ``kinds``: expert -> its kind.

    Raises:
        ArtifactError: Names the first.
    """
    for name, kind in kinds.items():
        if kind == BASE:
            raise ArtifactError(
                f"Expert {name!r} was rejected by the significance test: it switches nothing off, and what is written of it is the base. "
                "Name an accepted one (freemoe inspect lists them), or write the base all the same: --allow-rejected "
                "(allow_rejected=True)."
            )


def require_zeros_say(name: str, unit: str | None) -> None:
    """Raise unless a plain checkpoint with zeros computes what an expert does.

    Raises:
        ArtifactError: Whole experts of a mixture are off: a router knows nothing of zeros.
    """
    if unit == "expert":
        raise ArtifactError(
            f"Expert {name!r} has whole experts of the mixture off, which its routers do not choose; in a plain "
            "checkpoint they would. Cut them out: merge with --shrink."
        )
