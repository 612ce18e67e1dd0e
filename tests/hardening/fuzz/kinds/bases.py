"""Folders of base models that were edited: config, weights, tokenizer.

Accepted by itself is a model whose every number is the file's, and finite: nothing was made up. Accepted under an artefact is a
model that answers as the artefact's base does.
"""

import torch
from hypothesis import strategies as st

from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.route.subdomains import prompt_features
from freemoe.models.checkpoints import loading
from freemoe.text.chat import as_prompt, has_template
from tests.hardening.fuzz.case import Refused, require
from tests.hardening.fuzz.drawing import FLOATS, NUMBERS, TEMPLATES, byte_edits, json_edits, tensor_edits, wild_edits
from tests.hardening.fuzz.editing import edited_copy, read_plain
from tests.hardening.fuzz.material import PROBES, logits

_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"
_GENERATION = "generation_config.json"


def _wild():
    counts = ("num_beams", "num_return_sequences", "no_repeat_ngram_size", "top_k", "max_length", "min_new_tokens")
    shares = ("temperature", "top_p", "repetition_penalty", "eos_token_id")
    return {
        ("config.json", "num_hidden_layers"): NUMBERS,
        ("tokenizer_config.json", "chat_template"): TEMPLATES,
        ("tokenizer.json", "model", "continuing_subword_prefix"): ("report.html",),
        **{(_GENERATION, name): NUMBERS for name in counts},
        **{(_GENERATION, name): FLOATS for name in shares},
    }


def strategy(material):
    """Edits of a base's folder."""
    config, tokenizer, other = (json_edits(material.base, file) for file in _JSON)
    tensors = tensor_edits(material.base, WEIGHTS)
    anything = st.one_of(*(byte_edits(material.base, file) for file in (*_JSON, WEIGHTS)))
    edit = st.one_of(config, config, config, tensors, tensors, tokenizer, other, anything, wild_edits(_wild()))
    return st.builds(lambda edits: {"edits": edits}, st.lists(edit, min_size=1, max_size=2))


def warm(material):
    assert len(material.answers)


def attempt(what, material, folder):
    """Open an edited base by itself, and then as the base of an artefact."""
    own = edited_copy(material.base, folder / "base", what["edits"])
    model, tokenizer = loading.load_base(own, device="cpu")
    held = read_plain(own / WEIGHTS)
    for name, parameter in model.named_parameters():
        require(bool(parameter.isfinite().all()), f"{name!r} holds NaN or infinity")
        tied = name not in held and name == "lm_head.weight" and model.config.tie_word_embeddings
        require(tied or name in held, f"{name!r} stands in no file: it was made up")
        wanted = held["model.embed_tokens.weight" if tied else name]
        same = wanted.shape == parameter.shape and torch.equal(wanted.to(parameter.dtype), parameter.detach())
        require(same, f"{name!r} was read as other numbers than the file holds")
    features = prompt_features(model, material.probes.tolist())
    require(bool(features.isfinite().all()), "features that hold NaN or infinity")
    if tokenizer is not None and has_template(tokenizer):
        prompt = as_prompt(tokenizer, [{"role": "user", "content": PROBES[0]}], "row 1")
        require(len(prompt) < 1 << 20, "an endless prompt")
    try:
        moe = FreeMoE.from_pretrained(material.folder / "experts", base=model, tokenizer=tokenizer)
    except FreeMoEError as error:
        raise Refused(f"as a base: {error}") from None
    require(torch.equal(logits(moe.model, material.probes), material.answers), "another model was taken for the base")
    if tokenizer is not None:
        for probe in PROBES:
            ids, wanted = (list(t(probe)["input_ids"]) for t in (tokenizer, material.tokenizer))
            require(ids == wanted, f"another tokenizer was taken for the base's: {probe!r} is {ids[:8]}")
            said = tokenizer.decode(wanted, skip_special_tokens=True)
            require(said == material.tokenizer.decode(wanted, skip_special_tokens=True), f"another decoder: {said!r}")
