"""Private and moving names of other libraries that the benchmarks ask for, in one place, as `freemoe.compat` is the package's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from freemoe.compat.names import attribute_of, name_of, quiet_loggers


def with_lora_beside(model: Any, names: list[str], rank: int, *, lengths: bool = False) -> Any:
    """The model itself with PEFT's LoRA (``lengths``: DoRA) beside the named linears; scaling is 1, all else frozen."""
    purpose = "train its rival, LoRA"
    make, wrap = name_of("peft", "peft:LoraConfig", purpose), name_of("peft", "peft:get_peft_model", purpose)
    config = make(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=names,
        task_type="CAUSAL_LM",
        use_dora=lengths,
    )
    with warnings.catch_warnings():
        # PEFT asks transformers for a property under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(model, config)


def with_lora_adapters(model: Any, names: list[str], rank: int, adapters: list[str]) -> Any:
    """The model itself with random LoRA adapters beside the named linears; its forward takes ``adapter_names``."""
    purpose = "measure batches of several adapters"
    make, wrap = name_of("peft", "peft:LoraConfig", purpose), name_of("peft", "peft:get_peft_model", purpose)
    config = make(
        r=rank, lora_alpha=rank, bias="none", target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = wrap(model, config, adapter_name=adapters[0], autocast_adapter_dtype=False)
        for adapter in adapters[1:]:
            wrapped.add_adapter(adapter, config, autocast_adapter_dtype=False)
    return wrapped


def own_backend(model: Any, tokenizer: Any, **options: Any) -> Any:
    """lm-eval's own scorer over a loaded model: the rival of ours."""
    backend = name_of("lm-eval", "lm_eval.models.huggingface:HFLM", "be measured beside lm-eval's own scorer")
    with quiet_loggers("lm_eval.models.huggingface"):
        return backend(pretrained=model, tokenizer=tokenizer, **options)


def answers_of(backend: Any, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """What lm-eval's own scorer answers to requests that are tokens already: log-likelihood in nats, and whether greedy."""
    score = attribute_of(backend, "_loglikelihood_tokens", "lm-eval", "measure both scorers on the same tokens")
    return score(requests, disable_tqdm=True)
