"""A tiny Llama as a GGUF file, written tensor by tensor by the package gguf: what freemoe reads is compared with it."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from tests.tiny import VOCABULARY, tiny_model

MERGES = ["t h", "th e", "o n", "i n", "Ġ t"]
NORMAL, CONTROL, UNUSED = 1, 3, 5

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_llama(tied=False):
    """A tiny Llama whose rows are blocks of 32 and more, so that Q8_0 and Q4_1 can hold them."""
    return tiny_model("llama", intermediate_size=64, tie_word_embeddings=tied)


def interleaved(weight, heads):
    """The rows of every head in llama.cpp's order: the rotary pair (i, i + half) side by side."""
    size = len(weight) // heads
    order = [head * size + part * size // 2 + i for head in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[order]


def gguf_tensors(model):
    """Every tensor under llama.cpp's name."""
    config, found = model.config, {}
    for name, value in model.state_dict().items():
        stem, weight = name.removesuffix(".weight"), value.float().numpy()
        if stem in OUTSIDE:
            if not (stem == "lm_head" and config.tie_word_embeddings):
                found[f"{OUTSIDE[stem]}.weight"] = weight
            continue
        _, _, layer, inside = stem.split(".", 3)
        if inside in ("self_attn.q_proj", "self_attn.k_proj"):
            query = inside == "self_attn.q_proj"
            weight = interleaved(weight, config.num_attention_heads if query else config.num_key_value_heads)
        found[f"blk.{layer}.{NAMES[inside]}.weight"] = weight
    return found


def write_gguf(model, path, kind="F32", architecture="llama", drop=None, add=None, **extra):
    """Write a Llama, its matrices in one type and its norms in F32.

    One tensor is dropped and ones of the shapes in ``add`` are added; ``extra`` are 32-bit numbers for the metadata.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    added = {name: np.ones(shape, dtype=np.float32) for name, shape in (add or {}).items()}
    for name, values in (gguf_tensors(model) | added).items():
        if name == drop:
            continue
        stored = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer):
    """The bytes, five merges, three control tokens, and unused tokens up to the size of the embedding."""
    special = ["<pad>", "<s>", "</s>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    kinds = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [UNUSED] * (VOCABULARY - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), VOCABULARY))])
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
