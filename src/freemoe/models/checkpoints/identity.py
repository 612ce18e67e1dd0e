"""What decides a base's answers beside its weights: the settings in its config, its stored buffers, its tokenizer.

The same weights under another ``rope_theta``, with another norm's epsilon or behind another tokenizer are another model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.core.files import json_digest
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.offload import read_parameter

log = logging.getLogger(__name__)

IDENTITY = "base_identity"
"""Its place in a manifest."""

SETTINGS = "config or tokenizer of the base"
"""What a resumed run is told to put back where its digest has changed."""

_IGNORED = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "name_or_path", "problem_type"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "tokenizer_class"),
        *("pad_token_id", "pretraining_tp", "quantization_config", "gradient_checkpointing", "layerdrop"),
        *("attn_implementation", "experts_implementation", "about", "torchscript", "chunk_size_feed_forward"),
        *("initializer_range", "initializer_factor", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
        *("router_jitter_noise", "z_loss_coef", "bos_token_id"),
    }
)
"""Fields of a config that do not decide what is answered: names, versions, caches, what training alone reads."""

_TRAINING = ("dropout", "_pdrop", "_dropout_prob", "dropout_rate")

# Letters of several scripts, digits, spaces, code, and what normalisers change.
PASSAGE = (
    "The 23 judges' appeal of 1984-05-07 wasn't heard; they've said it COST $1,234.56 (12 %)!\n\n"
    "  def f(x):\n\treturn x**2 + 3.14 # two  spaces\r\n"
    "Straße, naïve, façade, ﬁn, Ångström, русский текст, 日本語の文章, العربية, हिन्दी, 한국어, 🙂👩‍🔬 e\u0301 <s> [INST] </s>"
)


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a config that decide the answers, by their path: ``rope_parameters.rope_theta``."""
    said = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return dict(_deciding_settings(json.loads(json.dumps(said, default=str))))


def _deciding_settings(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in sorted(value.items()):
        if name in _IGNORED or name.startswith("_") or name.endswith(_TRAINING):
            continue
        if isinstance(inner, dict):
            yield from _deciding_settings(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", inner


def tokenizer_parts(tokenizer: Any, rows: int) -> dict[str, str]:
    """Digests of what a tokenizer does, by part; its files' spelling and version do not matter.

    Tokens beyond the ``rows`` of the base's embedding cannot be used, and do not count.
    """
    ends = tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token
    # The padding token is often set anew, and is never seen by the model.
    special = {*ends, *(set(tokenizer.all_special_tokens) - {tokenizer.pad_token})}
    ids = list(tokenizer(PASSAGE, verbose=False)["input_ids"])
    return {
        "vocabulary": json_digest(sorted((token, n) for token, n in tokenizer.get_vocab().items() if n < rows)),
        "merges": json_digest(_tokenizer_merges(tokenizer)),
        "special tokens": json_digest([*map(str, ends), sorted(map(str, special - {None}))]),
        "way of splitting text": json_digest(ids),
        "way of putting text together": json_digest(tokenizer.decode(ids)),
        "chat template": json_digest(getattr(tokenizer, "chat_template", None)),
    }


def _tokenizer_merges(tokenizer: Any) -> Any:
    """Merges in their order, or pieces with their scores; None of a tokenizer that does not tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    if (merges := model.get("merges")) is not None:
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    pieces = model.get("vocab")
    return [[piece, f"{score:.6g}"] for piece, score in pieces] if isinstance(pieces, list) else None


def identify_base(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What a manifest says of its base beside the weights' fingerprint, as plain data."""
    import transformers

    return {
        "transformers": transformers.__version__,
        "config": settings_of(model.config),
        "buffers": buffers_digest(model),
        "tokenizer": None
        if tokenizer is None
        else tokenizer_parts(tokenizer, model.get_input_embeddings().weight.shape[0]),
    }


def buffers_digest(model: Any) -> str:
    """SHA-256 over the buffers that a checkpoint holds, such as the biases by which some routers choose."""
    total = hashlib.sha256()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in sorted(model.state_dict().keys() - parameters):
        path, _, own = name.rpartition(".")
        buffer = read_parameter(model.get_submodule(path), own).detach()
        total.update(f"{name}:{tuple(buffer.shape)};".encode())
        # Widened on the host: not every accelerator has float64.
        total.update(buffer.cpu().double().numpy().tobytes())
    return total.hexdigest()


def require_base(manifest: Mapping[str, Any], model: Any, tokenizer: Any = None) -> None:
    """Raise unless the model, and its tokenizer where one is given, is the base that the artefact was made for.

    Of an artefact that an older freemoe wrote only the weights can be compared, which the log says.

    Raises:
        ArtifactError: Weights, stored buffers, a deciding setting or the tokenizer differ; names what.
    """
    name, wanted, seen = manifest["base_model_name_or_path"], manifest["base_fingerprint"], fingerprint_model(model)
    if seen != wanted:
        raise ArtifactError(
            f"This artefact was made for the base {name!r} (fingerprint {wanted[:12]}), but "
            f"the model given has fingerprint {seen[:12]}. Load that very base, at a precision that keeps its values "
            "(its own dtype or float32)."
        )
    told = manifest.get(IDENTITY)
    if told is None:
        log.warning(
            "this artefact was written by an older freemoe: its base's weights are the right ones, but that its config (rope, "
            "norms, ...) and its tokenizer are could not be checked. Build it anew to bind it to them."
        )
        return
    different = identity_differences(told, identify_base(model, tokenizer), chat=bool(manifest.get("chat")))
    if different:
        raise ArtifactError(
            f"This artefact was made for the base {name!r}; the model given has its weights, but other settings: "
            f"{'; '.join(different)}. With these it answers differently. Load that very base, with its own config.json and "
            "tokenizer."
        )


def identity_differences(recorded: Mapping[str, Any], seen: Mapping[str, Any], chat: bool = True) -> list[str]:
    """What two identities differ in, in words; empty where they are of one base.

    ``chat``: whether the tokenizer's chat template counts.
    """
    then, now = recorded["config"], seen["config"]
    # Another release of transformers may know more fields, or fewer.
    names = then | now if recorded["transformers"] == seen["transformers"] else {n: 0 for n in then if n in now}
    different = [n for n in sorted(names) if not _values_equal(then.get(n), now.get(n))]
    found = [f"{n} is {now.get(n)!r} and was {then.get(n)!r}" for n in different[:3]]
    if len(different) > 3:
        found.append(f"{len(different) - 3} more settings")
    if recorded["buffers"] != seen["buffers"]:
        found.append("stored buffers differ")
    then, now = recorded["tokenizer"], seen["tokenizer"]
    if then is None and now is not None:
        found.append("it was made without a tokenizer")
    if then is not None and now is not None:
        names = [part for part in dict.fromkeys([*now, *then]) if chat or part != "chat template"]
        # One that either does not say is no match, whatever the other says: None is said of what a tokenizer does not have.
        parts = [part for part in names if not (part in now and part in then and now[part] == then[part])]
        if parts:
            found.append(f"another tokenizer (its {', '.join(parts)})")
    return found


def _values_equal(a: Any, b: Any) -> bool:
    if {type(a), type(b)} <= {int, float}:
        # A GGUF file has the same number in 32 bits.
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_values_equal, a, b))
    return a == b
