"""Tiny random models, one per family, and a tokenizer that goes with them. Nothing is downloaded.

Use as ``from tests.tiny import tiny_model, tiny_tokenizer``.
"""

import json
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from freemoe.models.weights import find_weights

VOCABULARY = 288
"""Entries of the models' embeddings; the tokenizer has no more."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {**_COMMON, "head_dim": 8}
_SLIDING = {"sliding_window": 64, "query_pre_attn_scalar": 8}
_MOE = {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_IDS = {key: _COMMON[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}

# Name of a case -> (model_type, configuration). A family may have several, where its layers differ.
CASES = {
    "llama": ("llama", _COMMON),
    "mistral": ("mistral", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 8}),
    "gemma": ("gemma", _GEMMA),
    "gemma2": ("gemma2", {**_GEMMA, **_SLIDING}),
    "gemma3": ("gemma3_text", {**_GEMMA, **_SLIDING}),
    "gemma3_images": (
        "gemma3",
        {
            "text_config": {**_GEMMA, **_SLIDING, "model_type": "gemma3_text"},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
            "boi_token_index": VOCABULARY - 2,
            "eoi_token_index": VOCABULARY - 3,
            "pad_token_id": 0,
        },
    ),
    "phi": ("phi", {**_COMMON, "num_key_value_heads": 4}),
    "phi3": ("phi3", _COMMON),
    "gpt2": ("gpt2", {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 256}),
    "opt": (
        "opt",
        {
            **_IDS,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt_neox": ("gpt_neox", {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}),
    "mixtral": ("mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 8, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**_MOE, "intermediate_size": 24}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_COMMON,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "head_dim": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_COMMON,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
CASES["deepseek_v3"] = (
    "deepseek_v3",
    {**CASES["deepseek_v2"][1], "q_lora_rank": 12, "n_shared_experts": 1, "num_nextn_predict_layers": 0},
)
CASES["deepseek_v2_low_rank_queries"] = ("deepseek_v2", {**CASES["deepseek_v2"][1], "q_lora_rank": 12})

DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_images"]
DENSE += ["phi", "phi3", "gpt2", "opt", "gpt_neox"]
MIXTURES = [c for c in CASES if c not in DENSE]


def tiny_model(family_name, seed=0, **overrides):
    """Build a random model: hidden size 32, 2 or 3 layers, fp32, evaluation mode.

    Args:
        family_name: A key of ``CASES``: every family, and a few variants of them.
        seed: Of the random weights; torch's own state of random numbers is left as it was.
        overrides: Configuration values to change, e.g. ``num_hidden_layers=4`` or
            ``tie_word_embeddings=True``.
    """
    model_type, values = CASES[family_name]
    config = AutoConfig.for_model(model_type, **{**values, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        for name, parameter in model.named_parameters():
            # Fresh models have biases and gates at zero and all logits nearly equal: give them something to
            # do.
            if parameter.ndim == 1 and "norm" not in name and "ln_" not in name:
                torch.nn.init.normal_(parameter, std=0.05)
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.to(torch.float32).eval()


def model_and_weights(family_name, **overrides):
    """A tiny model, and its matrices that can be switched."""
    model = tiny_model(family_name, **overrides)
    return model, find_weights(model)


def bits(model):
    """Every parameter's and buffer's bits, whatever its dtype."""
    state = model.state_dict().items()
    return {k: v.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8) for k, v in state}


def unchanged(model, before):
    """Whether a model has the bits that it had."""
    now = bits(model)
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


IDS = torch.randint(3, 250, (3, 7), generator=torch.Generator().manual_seed(1))
"""A batch of three sequences for any of them."""


@torch.no_grad()
def logits(model):
    """What a model says of `IDS`."""
    return model(input_ids=IDS).logits


@cache
def _bytes():
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_tokenizer():
    """One token per byte, and <pad> 0, <s> 1, </s> 2: 259 entries; every text comes back as it was."""
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*special, *_bytes()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Of a tokenizer that has one: what each role says stands in brackets."""


def save_base(model, folder):
    """Write a model and `tiny_tokenizer` into a folder; returns it."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_base_and_text(folder):
    """Write a tiny Llama with its tokenizer into ``model``, and ninety short passages into ``text.jsonl``."""
    save_base(tiny_model("llama"), folder / "model")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = [json.dumps(" ".join(words[(i * j) % 10] for j in range(1, 14)) + f" {i}") for i in range(90)]
    (folder / "text.jsonl").write_text("\n".join(lines))
