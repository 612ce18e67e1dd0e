"""What Triton's kernels are tried with: a launch, its arguments, and the reference's result. Run as a program, it tries all.

Sizes are ragged: no multiples of a block's; experts have lists of unequal lengths, and some have no token.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.kernels import experts
from freemoe.kernels.experts import MLPWeights
from freemoe.kernels.optional import TRITON_DTYPES
from freemoe.kernels.sparse import bands, rows
from freemoe.kernels.triton_experts import triton_experts
from tests.kernels.sparse import test_bands, test_rows
from tests.kernels.test_experts import layer, tokens

Case = tuple[Callable[..., Tensor], tuple[Any, ...], Tensor]
"""The function that launches, without its fallback; what it is given; what it should give, in float32."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRITON_DTYPES}

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}

LAYERS = {
    "silu": (2, False, "silu"),
    "gelu biased": (2, True, "gelu"),
    "fc1 gelu_new biased": (1, True, "gelu_new"),
    "gelu_pytorch_tanh": (2, False, "gelu_pytorch_tanh"),
    "fc1 relu": (1, False, "relu"),
}
"""Parts, biases and activation of a layer: every way to compile the experts' kernels."""


def moved(value, *to):
    """Tensors, a layer's weights and bands on another device or of another type; all else as it is."""
    if isinstance(value, MLPWeights):
        parts = (moved(part, *to) for part in (value.up, value.down, value.up_bias, value.down_bias))
        return MLPWeights(*parts, value.activation, value.name)
    if isinstance(value, bands.BandTiles):
        return bands.BandTiles.from_tiles(
            [bands.BandTile(*(t.to(*to) for t in (tile.scale, tile.low, tile.high))) for tile in value.tiles]
        )
    return value.to(*to) if isinstance(value, Tensor) else value


def of_experts(kind, count, dtype):
    weights, index = layer(*LAYERS[kind])
    x, expert = tokens(count)
    x, weights = x.to(dtype), moved(weights, dtype)
    expected = experts.reference_experts(x.float(), expert, moved(weights, torch.float32), index)
    return triton_experts.__wrapped__, (x, expert, weights, index), expected


def of_places(size, each, dtype):
    x, weight, *rest = test_rows.batch(each, size, dtype)
    return (
        rows.triton_products.__wrapped__,
        (x, weight, *rest),
        rows.reference_products(x.float(), weight.float(), *rest),
    )


def of_bands(size, each, dtype):
    x, weight, *rest = test_bands.batch(size, each, dtype)
    return (
        bands.tiled_products.__wrapped__,
        (x, weight, *rest),
        bands.reference_tiled_products(x.float(), weight.float(), *rest),
    )


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    **{f"experts, {kind}, {n} tokens": partial(of_experts, kind, n) for kind in LAYERS for n in (1, 37)},
    "places, an expert without tokens": partial(of_places, (20, 33), [3, 0, 18]),
    "places, more than 16 bits of them": partial(of_places, (3, 30000), [1]),
    "bands, an expert without tokens": partial(of_bands, (20, 33), [3, 18, 0, 2]),
    "bands, several tiles": partial(of_bands, (40, 130), [1, 2, 3]),
}

COMPILED = [
    *(f"experts, {kind}, 37 tokens" for kind in LAYERS),
    "places, an expert without tokens",
    "bands, an expert without tokens",
]
"""Cases that between them launch every kernel with every set of its constants."""


def tried(case):
    """What is wrong with a result; nothing where it is the reference's."""
    launch, arguments, expected = case
    try:
        found = launch(*arguments)
        assert found.dtype == arguments[0].dtype
        close = CLOSE[found.dtype]
        torch.testing.assert_close(found.float(), expected, rtol=close, atol=close)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps({f"{name}, {key}": tried(CASES[name](DTYPES[key])) for name in CASES for key in DTYPES}))
