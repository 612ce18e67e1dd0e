"""What an expert's tensors say is off, read slowly and by other code than the library's: from the descriptions of the formats."""

import torch


def places_of(code):
    """The numbers of a Golomb-Rice code (`models/sorted_code.py`), bit by bit."""
    data = bytes(code.tolist())
    low_bits, count = data[0], int.from_bytes(data[1:9], "little")
    bits = "".join(f"{byte:08b}" for byte in data[9:])
    lows = [bits[i * low_bits : (i + 1) * low_bits] for i in range(count)]
    highs = bits[-(-count * low_bits // 8) * 8 :].split("1")[:count]
    found, at = [], -1
    for low, high in zip(lows, highs, strict=True):
        # From the least significant bit on.
        at += 1 + (len(high) << low_bits) + sum(int(bit) << place for place, bit in enumerate(low))
        found.append(at)
    return found


def off_of(described, tensors, weights, taps):
    """Weight -> booleans of what is off, of an expert by its row in the manifest; None for a rule that is not read here."""
    own = {}
    for key, tensor in tensors.items():
        owner, part, target = key.rsplit("|", 2)
        if owner == described["name"]:
            own.setdefault(target, {})[part] = tensor
    band = described.get("band")
    if band and (band["metric"], band["scope"], band["patch"]) != ("wanda", "row", 1):
        return None
    found = {}
    for target, parts in own.items():
        if target not in weights:
            continue
        weight = weights[target]
        off = torch.zeros(weight.numel(), dtype=torch.bool)
        if "switch" in parts:
            off[places_of(parts["switch"])] = True
        off = off.view(weight.shape)
        if "rows" in parts:
            off[places_of(parts["rows"])] = True
        if "columns" in parts:
            off[:, places_of(parts["columns"])] = True
        if {"low", "high", "all"} & parts.keys():
            off |= _between(weight, own[taps[target]]["norm"], parts)
        found[target] = off
    return found


def _between(weight, norm, parts):
    """Row by row, what ranks from the column at the band's low end up to, and without, the one at its high end."""
    scores = (weight.abs().float() * norm.view(-1)).tolist()
    off = torch.zeros(weight.shape, dtype=torch.bool)
    for row, values in enumerate(scores):
        ranked = list(zip(values, range(len(values)), strict=True))
        low = ranked[int(parts["low"].view(-1)[row])] if "low" in parts else min(ranked)
        high = ranked[int(parts["high"].view(-1)[row])] if "high" in parts else (float("inf"), 0)
        off[row] = torch.tensor([low <= one < high for one in ranked])
    return off
