"""Attention of narrow queries and keys equals fused attention of the same, filled up with zeros."""

import pytest
import torch
from torch.nn import functional as F

from freemoe.kernels.attention import BLOCK, LEAST, narrow_applies, narrow_causal


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_equals_fused_attention(tokens, kv_heads, threads, monkeypatch):
    # So many heads are computed at once.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    # Transposed, as a model hands them over.
    queries, keys, values = (
        torch.randn(2, tokens, heads, width, generator=generator).transpose(1, 2)
        for heads, width in ((4, 6), (kv_heads, 6), (kv_heads, 16))
    )
    before = queries.clone(), keys.clone(), values.clone()
    wide = [F.pad(t, (0, 10)) for t in (queries, keys)]
    want = F.scaled_dot_product_attention(*wide, values, is_causal=True, scale=0.3, enable_gqa=True)
    got = narrow_causal(queries, keys, values, 0.3)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (queries, keys, values), strict=True))


def test_when_it_applies():
    narrow, wide = torch.zeros(1, 2, LEAST, 4), torch.zeros(1, 2, LEAST, 8)
    assert narrow_applies(narrow, narrow, wide)
    assert not narrow_applies(wide, wide, wide)
    assert not narrow_applies(wide, wide, narrow)
    assert not narrow_applies(narrow[:, :, 1:], narrow[:, :, 1:], wide[:, :, 1:])
    # Tokens in a cache: the queries are the last ones.
    assert not narrow_applies(narrow, torch.zeros(1, 2, LEAST + 1, 4), torch.zeros(1, 2, LEAST + 1, 8))
    assert not narrow_applies(narrow.bfloat16(), narrow.bfloat16(), wide.bfloat16())
