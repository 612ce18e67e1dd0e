"""A base that vLLM's CPU kernels can run, and an artefact with experts of every kind on it."""

from typing import Any

import torch

from freemoe.domain_experts.expert import DomainExpert, switch_expert, unit_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model, tiny_tokenizer

# vLLM's attention on a CPU knows no heads of fewer than 32 numbers.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
differences: list[float] = []
"""From Hugging Face's log-probabilities, of every batch that was compared; `make vllm-test` prints the largest."""

FEW, MANY, UNITS, NONE = "law/few", "law/many", "law/units", "law/none"


def random_switches(weights, share, seed):
    """A mask of a share of every weight, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return Mask({w.name: TensorMask.of_bools(torch.rand(w.size, generator=generator) < share) for w in weights})


def write_world(root, family="llama"):
    """Write a base into ``root/base`` and its artefact into the folder that is returned."""
    model = tiny_model(family, **SHAPE, head_dim=32)
    weights, units = find_weights(model), find_units(model, "neuron")
    lines = units.line_indices({number: torch.arange(number, 140 + number) for number in range(4)})
    experts = [
        switch_expert(FEW, random_switches(weights, 0.02, 1)),
        switch_expert(MANY, random_switches(weights, 0.3, 2)),
        unit_expert(UNITS, "neuron", lines, Mask()),
        DomainExpert(NONE),
    ]
    model.save_pretrained(root / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(root / "base")
    moe = FreeMoE(model, experts, tokenizer=tokenizer)
    return moe.save_pretrained(root / "artefact", base=str(root / "base"))


def prompts(count=6, seed=0):
    """Token ids of prompts of 9 to 120 tokens: shorter and longer than a block of 32, and than a step of 64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 40, 120, 65, 33, 90, 64, 12][:count]
    return [torch.randint(3, 259, (n,), generator=generator).tolist() for n in lengths]


def token_logprobs(model, ids):
    """(tokens - 1,) log-probability of every token but the first, from transformers."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def max_difference(steps, answers, logprobs):
    """Largest difference of log-probabilities, of what was written and of scored prompts; ``logprobs(ids, expert)`` has them."""
    found = []
    for step, answered in zip(steps, answers, strict=True):
        for asked, answer in zip(step["batch"], answered, strict=True):
            assert len(answer["tokens"]) == asked["new"]
            wanted = logprobs(asked["ids"] + answer["tokens"], asked.get("expert"))
            found.append((wanted[-asked["new"] :] - torch.tensor(answer["logprobs"])).abs().max())
            if asked.get("score"):
                scored = torch.tensor(answer["prompt_logprobs"])
                assert len(scored) == len(asked["ids"]) - 1
                found.append((wanted[: len(scored)] - scored).abs().max())
    return float(max(found))
