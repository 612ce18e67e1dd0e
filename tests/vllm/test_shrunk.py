"""A checkpoint from which an expert's units were cut out is a plain one: vLLM serves it as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freemoe.domain_experts.structured.merging import merge_shrunk
from tests.vllm.test_experts import CLOSE
from tests.vllm.world import UNITS, prompts, write_world


def test_a_shrunk_checkpoint_needs_nothing(tmp_path: Path, ask: Callable[..., list[Any]]) -> None:
    from transformers import AutoModelForCausalLM

    folder = merge_shrunk(write_world(tmp_path), UNITS, tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert small.config.intermediate_size == 20
    batch = [{"ids": ids, "new": 6} for ids in prompts(4)]
    (answers,) = ask("v1", folder, [{"batch": batch}], ours=False)
    for asked, answer in zip(batch, answers, strict=True):
        ids = torch.tensor([asked["ids"] + answer["tokens"]])
        with torch.no_grad():
            likely = small(input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[-6:, 0]
        assert float((likely - torch.tensor(answer["logprobs"])).abs().max()) <= CLOSE
