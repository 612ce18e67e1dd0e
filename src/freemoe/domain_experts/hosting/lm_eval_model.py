"""lm-eval's model ``freemoe``: any causal LM, or an artefact with the router's or a named expert.

    freemoe lm-eval --model_args pretrained=FOLDER,expert=auto --tasks gsm8k

Importing this module makes it known to lm-eval, which has no entry points for models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from freemoe.compat.lm_eval import generation_settings, list_models, rolling_windows, stop_strings
from freemoe.compat.templates import render_template
from freemoe.core.errors import DataError, RecipeError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.prove.seen_requests import SeenRequestCounter, is_model
from freemoe.evals.engine.answering import AUTO, BASE
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.held_out import read_record
from freemoe.hub.fetch import HubAccess, fetch_artefact
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mixed.rows import rows_by_key

# What a request may say about its generation: the rest would change greedy texts.
SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p")

Result = TypeVar("Result")

list_models()


@register_model("freemoe")
class FreeMoELM(TemplateLM):
    """Answers lm-eval's requests by the shared-prefix scorer.

    Raises:
        RecipeError: When an argument is unknown, or ``seen`` has another value.
        UnknownNameError: When no expert has that name.
        ArtifactError: When the artefact is damaged or was made for another base.
    """

    def __init__(
        self,
        pretrained: Any,  # Folder or hub id of a model or of an artefact, a loaded model, or a `FreeMoE`
        # ``base``, ``auto`` (the router reads each request's context; requests without one get the base) or an
        # expert's name. By default ``auto`` for an artefact that has a router, else ``base``
        expert: str | None = None,
        artefact: str | None = None,  # Folder or hub id of an artefact whose base is ``pretrained``
        tokenizer: Any = None,  # Of a loaded model
        revision: str | None = None,  # Of the hub repository: the artefact's where there is one
        dtype: str = "auto",  # auto, float32, bfloat16 or float16
        device: str | None = None,  # auto, cpu, cuda, cuda:N, split or disk; auto where there is no cuda
        batch_tokens: int = 4096,  # Padded tokens of a batch
        max_length: int | None = None,  # Longest input in tokens; the model's context by default
        max_gen_toks: int = 256,  # New tokens where a request does not say
        # Ignored, as is ``max_batch_size``: batches hold tokens, not rows. lm-eval always passes it
        batch_size: Any = None,
        max_batch_size: Any = None,  # Ignored
        # What to do with requests on documents that the artefact's making saw, which lm-eval scores with the
        # others: ``warn`` counts them (in the log and in the results' ``config``), ``refuse`` raises before
        # anything is scored
        seen: str = "warn",
        **unknown: Any,  # Anything else is an error
    ) -> None:
        super().__init__()
        if unknown:
            raise RecipeError(
                f"The model 'freemoe' has no argument {', '.join(map(repr, unknown))}; it has pretrained, expert, artefact, "
                "tokenizer, revision, dtype, device, batch_tokens, max_length, max_gen_toks and seen."
            )
        # lm-eval's command asks for cuda:0 wherever it runs, and its own models take what there is.
        device = "auto" if device is None or (device.startswith("cuda") and not torch.cuda.is_available()) else device
        self.moe: FreeMoE | None = None
        folder = pretrained if artefact is None else artefact
        if isinstance(folder, str | Path):
            folder = fetch_artefact(folder, HubAccess(revision), required=artefact is not None)
        # A mixture that was loaded elsewhere does not say from where.
        record = read_record(folder) if isinstance(folder, str | Path) else None
        self.witness = SeenRequestCounter(record, seen)
        plain = artefact is None and is_model(folder)
        if isinstance(pretrained, FreeMoE):
            self.moe = pretrained
        elif artefact is not None or (record is not None and not plain):
            base = pretrained if artefact is not None else None
            self.moe = FreeMoE.from_pretrained(base, folder, tokenizer=tokenizer, dtype=dtype, device=device)
        if self.moe is not None:
            model, tokenizer = self.moe.model, self.moe.tokenizer or tokenizer
        elif isinstance(pretrained, str | Path):
            model, found = load_base(pretrained, revision, dtype, device)
            tokenizer = tokenizer or found
        else:
            model = pretrained
        self.expert = self._resolve_expert(expert)
        self.scorer = Scorer(model, tokenizer, max_length=max_length, batch_tokens=batch_tokens)
        self.tokenizer = tokenizer
        self.max_gen_toks = max_gen_toks
        self._device = model.device
        self._routes: dict[str, str] = {}

    def _resolve_expert(self, expert: str | None) -> str:
        """Check the expert's name before anything is scored."""
        if self.moe is None:
            if expert not in (None, BASE):
                raise RecipeError(
                    f"expert is {expert!r}, but a plain model was given, which has none. Name an artefact's folder as "
                    "pretrained, or artefact=FOLDER beside its base."
                )
            return BASE
        expert = expert or (AUTO if self.moe.router is not None else BASE)
        if expert == AUTO and self.moe.router is None:
            raise RecipeError(
                f"expert is 'auto', but this artefact has no router; allowed: {', '.join([BASE, *self.moe.experts])}."
            )
        if expert != AUTO:
            self.moe.require(expert)
        return expert

    def _route_context(self, text: str) -> str:
        """The expert of a request's context."""
        if self.expert != AUTO or self.moe is None:
            return self.expert
        if not text:
            return BASE
        if text not in self._routes:
            ids = self.tokenizer.encode(text, add_special_tokens=False)[-self.scorer.max_length :]
            self._routes[text] = self.moe.route(torch.tensor([ids], dtype=torch.long))[0][0]
        return self._routes[text]

    def _by_expert(
        self, contexts: Sequence[str], work: Callable[[list[int]], Sequence[Result]]
    ) -> Iterator[tuple[int, Result]]:
        """Do work on the numbers of the requests that one expert answers, switching once per expert."""
        names = [self._route_context(context) for context in contexts]
        for name, mine in rows_by_key(names).items():
            if self.moe is None:
                yield from zip(mine, work(mine), strict=True)
                continue
            with self.moe.expert(name):
                found = work(mine)
            yield from zip(mine, found, strict=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        for (context, continuation), _, ids in requests:
            if not ids:
                raise DataError(
                    f"The continuation {continuation!r} has no tokens of its own after the context that ends in "
                    f"{context[-40:]!r}. Give the answer at least one visible character."
                )
        pairs = [TokenPair(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        contexts = [texts[0] for texts, _, _ in requests]
        found = dict(self._by_expert(contexts, lambda mine: self.scorer.score([pairs[i] for i in mine])))
        answers = [(found[i].loglikelihood, found[i].is_greedy) for i in range(len(requests))]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of continuations in nats, and whether greedy decoding gives them."""
        self.witness.check_requests(requests, "continuation")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in nats, in windows of the context's length, each token predicted once."""
        self.witness.check_requests(requests, "text")
        texts = [request.args[0] for request in requests]
        windows = [self._rolling_windows(text) for text in texts]

        def score_windows(mine: list[int]) -> list[float]:
            scored = iter(self.scorer.score([pair for i in mine for pair in windows[i]]))
            return [sum(next(scored).loglikelihood for _ in windows[i]) for i in mine]

        found = dict(self._by_expert(texts, score_windows))
        for i, text in enumerate(texts):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[i])
        return [found[i] for i in range(len(texts))]

    def _rolling_windows(self, text: str) -> list[TokenPair]:
        if self.prefix_token_id is None:
            raise DataError(
                "Whole texts need a token before them, and the tokenizer has neither a bos nor an eos token."
            )
        windows = rolling_windows(self.tok_encode(text), self.prefix_token_id, self.scorer.max_length)
        return [TokenPair(tuple(context), tuple(continuation)) for context, continuation in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations.

        Raises:
            RecipeError: When a request asks for sampling, beams or anything else that is not greedy.
        """
        self.witness.check_requests(requests, "generation")
        contexts = [request.args[0] for request in requests]
        wanted = [self._generation_settings(request.args[1]) for request in requests]

        def generate_group(mine: list[int]) -> list[str]:
            texts: dict[int, str] = {}
            for setting in dict.fromkeys(wanted[i] for i in mine):
                alike = [i for i in mine if wanted[i] == setting]
                texts.update(zip(alike, self.scorer.generate([contexts[i] for i in alike], *setting), strict=True))
            return [texts[i] for i in mine]

        found = dict(self._by_expert(contexts, generate_group))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[i])
        return [found[i] for i in range(len(requests))]

    def _generation_settings(self, gen_kwargs: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        """Stop strings and most new tokens of a request."""
        settings = generation_settings(gen_kwargs, self.max_gen_toks)
        odd = [name for name in settings if name not in SETTINGS]
        if settings["do_sample"] or odd:
            what = "do_sample" if settings["do_sample"] else odd[0]
            raise RecipeError(
                f"The model 'freemoe' decodes greedily, and a request has {what}={settings[what]!r} (all of it: {gen_kwargs}). "
                "Use --gen_kwargs do_sample=False, or a task that asks for greedy decoding."
            )
        eos = self.tokenizer.decode(self.eot_token_id) if self.eot_token_id is not None else None
        return tuple(stop_strings(settings["until"], eos)), settings["max_gen_toks"]

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The tokenizer's end-of-sequence id; None where it has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text with no context."""
        return self.scorer.prefix_id

    @property
    def max_length(self) -> int:
        """Longest input in tokens: the model's context."""
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        if add_special_tokens is None:
            return self.scorer.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the tokenizer's template writes it."""
        return render_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        model = self.scorer.model
        return {
            "model_num_parameters": model.num_parameters(),
            "model_dtype": str(model.dtype),
            "expert": self.expert,
            **self.witness.describe(),
        }
