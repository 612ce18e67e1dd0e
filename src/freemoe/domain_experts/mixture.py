"""`FreeMoE`: a base and its experts, acting like the Hugging Face model (MoDE Eq. 10-11).

The prompt picks the expert, which stays for the whole sequence, because the sequence's key-value cache depends on it.
One copy of the weights serves all experts: an expert's weights are switched off in place and restored bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from freemoe.compat.transformers import make_known_to_pipelines
from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.threads import Threads, require_threads
from freemoe.domain_experts.expert import DomainExpert, read_experts
from freemoe.domain_experts.hosting.batches import batch_size, drop_none, left_padded, with_positions
from freemoe.domain_experts.hosting.host import with_model_lock
from freemoe.domain_experts.hosting.protection import method_of_base
from freemoe.domain_experts.hosting.saving import ArtefactSnapshot, SavedExperts
from freemoe.domain_experts.hosting.several import Several, forward_several, generate_several, require_strategy
from freemoe.domain_experts.hosting.standing import use_base
from freemoe.domain_experts.hosting.streaming import TextStream, start_stream
from freemoe.domain_experts.hosting.summary import read_measurements
from freemoe.domain_experts.result import KIND
from freemoe.domain_experts.route.reading import read_router, require_features
from freemoe.domain_experts.route.router import DomainRouter, Route
from freemoe.domain_experts.route.subdomains import prompt_feature
from freemoe.evals.engine.answering import AUTO, BASE, padded_ids, require_tokenizer, text_ids
from freemoe.hub.fetch import HubAccess, fetch_artefact
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_own_base
from freemoe.models.checkpoints.placement import Placement


class FreeMoE(SavedExperts):
    """A base model with its domain experts and their router.

    Use ``FreeMoE.from_pretrained(artefact)``. ``forward`` and ``generate`` take what the base's take, and
    ``expert=``: the name of an expert, ``"base"``, ``"auto"`` (the router decides, per sequence), ``"a+b"`` (a union) or
    ``"a&b"`` (an intersection), a list with one name per sequence, or nothing for the expert that is set. What else a
    transformers model has (``generation_config``, ``dtype``, ``get_input_embeddings`` ...) is the base's; what would edit it
    (``load_adapter``, ``resize_token_embeddings`` ...) is refused, as every expert is bound to it. While an expert is switched in,
    ``moe.model`` cannot be saved, deep-copied or pickled; its ``state_dict`` shows the expert's zeros.

    **Threads.** The experts are switched in the one copy of the weights, so calls on one base run one after the other, also those
    of several `FreeMoE` on the same base: each call, from reading its prompt to its last token, has the base for itself and
    answers as if it were alone. A second thread waits for its turn, first come, first served, or with ``threads="raise"`` gets
    a `BusyError`. ``with moe.expert(...)`` has the base for the whole block, and ``stream_text`` until its last token or its
    ``close``. On one thread all of these nest. What is not kept apart: ``set_expert`` (for all threads, for calls that name no
    expert), ``moe.model`` used directly outside of ``moe.turn()``, a backward pass, and torch's random numbers, which all
    threads draw from (``do_sample=True``). Serve many at once by batches, not by threads.

    **asyncio and processes.** All coroutines of a loop share its thread: call by ``asyncio.to_thread``, and await nothing inside
    ``with moe.expert(...)``; another task that comes in then gets a `BusyError`, as waiting would never end. In the child of a
    fork that happened during another thread's call, the model is refused; processes that are spawned load their own.
    """

    def __init__(
        self,
        model: Any,
        experts: Sequence[DomainExpert],
        router: DomainRouter | None = None,
        tokenizer: Any = None,
        *,
        threads: Threads = "wait",
    ) -> None:
        super().__init__(model, experts, tokenizer, threads)
        self.router = router

    @classmethod
    def from_pretrained(
        cls,
        *places: Any,
        base: Any = None,
        artefact: str | Path | None = None,
        tokenizer: Any = None,
        dtype: Any = "auto",
        torch_dtype: Any = None,
        device: Placement = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        threads: Threads = "wait",
    ) -> FreeMoE:
        """Load an artefact and its base: ``from_pretrained(artefact)``, or PEFT's ``from_pretrained(base, artefact)``.

        Args:
            places: The artefact alone, or the base and the artefact.
            base: The loaded model, to share one, or its folder or hub id; what the artefact names if absent.
            artefact: Folder written by ``freemoe build``, or a repository ``owner/name`` of the hub.
            tokenizer: The base's tokenizer, when ``base`` is a loaded model and prompts will be text.
            dtype: Of the base when it is loaded here, as a name or torch's own; its values must survive it.
            torch_dtype: Its older name.
            device: Where to load it.
            revision: Branch, tag or commit of the artefact's repository.
            token: For what is private, artefact or base.
            cache_dir: Where what is fetched is kept.
            local_files_only: Look into that cache only.
            threads: What a thread does that finds the base in use by another: ``wait`` for its turn, or ``raise`` a `BusyError`.

        Raises:
            ArtifactError: When the artefact is damaged, of another kind, or was made for another base.
            HubError: When it cannot be read from the hub.
            RecipeError: When no artefact is named, or base or artefact twice; or ``threads`` is neither.
        """
        require_threads(threads)
        base, place = _parse_places(places, base, artefact)
        access = HubAccess(revision, token, cache_dir, local_files_only)
        root = fetch_artefact(place, access, required=True)
        manifest = read_manifest(root)
        if manifest.get("kind") != KIND:
            raise ArtifactError(f"{str(place)!r} holds {manifest.get('kind')!r}, not domain experts.")
        experts = read_experts(root, manifest)
        router = read_router(root, manifest, experts)
        if base is None or isinstance(base, str | Path):
            wanted = dtype if torch_dtype is None else torch_dtype
            base, tokenizer = load_own_base(manifest, base, wanted, device, access)
        with use_base(base):
            require_base(manifest, base, tokenizer)
            require_features(router, base)
        moe = cls(base, experts, router, tokenizer, threads=threads)
        moe.folder, moe.origin = root, ArtefactSnapshot(manifest, dict(moe._experts), router)
        moe._measurements = read_measurements(root)
        return moe

    def route(
        self, prompts: Tensor | str | Sequence[str], attention_mask: Tensor | None = None
    ) -> list[tuple[str, Route]]:
        """Expert for every prompt, and the router's reasons.

        Below the router's threshold the answer is ``"base"``, and so it is for a prompt without tokens of its own and for one that
        an expert would get that is not here (any more).

        Args:
            prompts: A text, several, or token ids ``(B, L)``.
            attention_mask: ``(B, L)``, 1 at real tokens, wherever the padding is; only beside token ids.

        Raises:
            DataError: There is no router, or there are texts and no tokenizer.
        """
        if self.router is None:
            raise DataError("This artefact has no router; name an expert instead of 'auto'.")
        special = set(getattr(self.tokenizer, "all_special_ids", None) or [])
        # Features are made of the untouched base, whatever expert is active.
        with self.expert(BASE):
            kept = [[t for t in ids if t not in special] for ids in self._token_ids(prompts, attention_mask)]
            if not kept:
                return []
            rows = [prompt_feature(self.model, ids, self.router.feature).cpu() for ids in kept]
        found = []
        for ids, route in zip(kept, self.router.route(torch.stack(rows)), strict=True):
            if not ids:
                route = replace(route, confidence=0.0, domain_confidence=0.0)
            known = ids and not self.router.abstains(route) and route.subdomain in self._experts
            found.append((route.subdomain if known else BASE, route))
        return found

    def _token_ids(self, prompts: Tensor | str | Sequence[str], mask: Tensor | None) -> list[list[int]]:
        """The tokens of every prompt, without padding."""
        if isinstance(prompts, Tensor):
            real = torch.ones_like(prompts) if mask is None else mask
            return [row[kept.bool()].tolist() for row, kept in zip(prompts, real, strict=True)]
        require_tokenizer(self.tokenizer)
        texts = [prompts] if isinstance(prompts, str) else prompts
        return [text_ids(self.tokenizer, text) for text in texts]

    def _resolve_experts(self, expert: Any, inputs: dict[str, Any]) -> list[str] | str:
        """The expert of every sequence, or one name for all."""
        if expert is None:
            return self.active
        if expert == AUTO:
            if inputs.get("input_ids") is None:
                raise DataError("expert='auto' reads the prompt's tokens: pass input_ids.")
            names = [name for name, _ in self.route(inputs["input_ids"], inputs.get("attention_mask"))]
        elif isinstance(expert, str):
            return expert
        else:
            names = list(expert)
            if len(names) != (size := batch_size(inputs)):
                raise DataError(f"{len(names)} experts are named for a batch of {size} sequences.")
        for name in set(names):
            self.require(name)
        return names[0] if len(set(names)) == 1 else names

    @with_model_lock
    def forward(
        self, input_ids: Tensor | None = None, *, expert: Any = None, strategy: Several = "auto", **inputs: Any
    ) -> Any:
        """The base's forward under an expert, or under one per sequence.

        Without position ids, tokens are counted from each sequence's first one, also after padding at the left.

        Args:
            input_ids: ``(B, L)``.
            expert: See `FreeMoE`.
            strategy: How several experts are run: ``fused`` and ``scratch`` in one forward pass without gradients (`mixed`),
                ``grouped`` in one per expert, ``swap`` in one per sequence; ``auto`` picks the quickest that is possible.
            inputs: What else the base's forward takes.

        Raises:
            RecipeError: Another strategy.
            DataError: Several experts, and an input that needs one, or a base or an expert that cannot be mixed.
        """
        require_strategy(strategy)
        inputs = with_positions(self.model, {"input_ids": input_ids, **inputs})
        names = self._resolve_experts(expert, inputs)
        if isinstance(names, str):
            with self.expert(names):
                return self.model(**inputs)
        return forward_several(self, inputs, names, strategy)

    @with_model_lock
    @torch.no_grad()
    def generate(
        self, input_ids: Tensor | None = None, *, expert: Any = None, strategy: Several = "auto", **inputs: Any
    ) -> Any:
        """The base's generate under an expert, or under one per sequence; it stays for the whole sequence.

        Padding at the right is moved to the left, so that new tokens follow their prompt: they begin at ``input_ids.shape[1]``.

        Args:
            input_ids: ``(B, L)``.
            expert: See `FreeMoE`.
            strategy: As in `forward`; ``fused`` and ``scratch`` are one call of the base's generate, with one cache.
            inputs: What else the base's generate takes.

        Raises:
            RecipeError: Another strategy.
            DataError: Several experts, and an input that needs one, or a base or an expert that cannot be mixed; or calls of
                their own end at different lengths without a padding token.
        """
        require_strategy(strategy)
        if input_ids is None:
            input_ids = inputs.pop("inputs", None)
        inputs = left_padded(self.model, {"input_ids": input_ids, **inputs})
        names = self._resolve_experts(expert, inputs)
        if isinstance(names, str):
            with self.expert(names):
                return self.model.generate(**drop_none(inputs))
        return generate_several(self, drop_none(inputs), names, strategy)

    @overload
    def generate_text(
        self, prompt: str, *, expert: str = ..., max_new_tokens: int = ..., **options: Any
    ) -> tuple[str, str]: ...

    @overload
    def generate_text(
        self, prompt: Sequence[str], *, expert: str | Sequence[str] = ..., max_new_tokens: int = ..., **options: Any
    ) -> list[tuple[str, str]]: ...

    @with_model_lock
    def generate_text(  # pyright: ignore[reportInconsistentOverload]
        self,
        prompt: str | Sequence[str],
        *,
        expert: str | Sequence[str] = AUTO,
        max_new_tokens: int = 64,
        **options: Any,
    ) -> tuple[str, str] | list[tuple[str, str]]:
        """Continue a prompt; returns the continuation and the expert that wrote it. Of several prompts a list of both.

        Args:
            prompt: A text, or several, which are run as one batch.
            expert: For all; or one per prompt.
            max_new_tokens: Per prompt.
            options: Of `generate`.

        Raises:
            DataError: When there is no tokenizer, or a prompt and new tokens do not fit the context.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts:
            return []
        ids, mask = padded_ids(self.model, self.tokenizer, texts, max_new_tokens)
        names = self._resolve_experts(expert, {"input_ids": ids, "attention_mask": mask})
        out = self.generate(ids, expert=names, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
        said = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        used = [names] * len(texts) if isinstance(names, str) else names
        found = list(zip(said, used, strict=True))
        return found[0] if isinstance(prompt, str) else found

    def stream_text(self, prompt: str, *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any) -> TextStream:
        """Continue a prompt and read it piece by piece: the pieces together are what `generate_text` says.

        It is written by a thread of its own, which has the base until the last token, also where the reader stalls; closing or
        letting go of the stream ends it earlier, and an error is raised where it is read.

        Args:
            prompt: A text.
            expert: As in `generate_text`.
            max_new_tokens: The most.
            options: Of `generate`.

        Returns:
            An iterator of texts, with ``close`` and, at the end, ``expert``.

        Raises:
            BusyError: This thread has the base itself (``with moe.expert(...)``), for which the writer would wait in vain.
            UnknownNameError: There is no such expert.
        """
        if expert != AUTO:
            self.require(expert)
        return start_stream(self, prompt, options | {"expert": expert, "max_new_tokens": max_new_tokens})

    def can_generate(self) -> bool:
        """Whether the base generates text; pipelines ask this before they ask what kind of model it is."""
        make_known_to_pipelines(type(self))
        return self.model.can_generate()

    def __getattr__(self, name: str) -> Any:
        """What is not here is the base's: ``dtype``, ``generation_config``, ``get_input_embeddings``; not what would edit it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # not there yet
                raise
            return method_of_base(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FreeMoE:
        """An independent copy with the same experts, the same one switched in; what is never changed is shared."""
        with self.expert(BASE):
            model = copy.deepcopy(self.model, memo)
            tokenizer = copy.deepcopy(self.tokenizer, memo)
        other = type(self)(model, list(self._experts.values()), self.router, tokenizer, threads=self.threads)
        other.folder, other.origin = self.folder, self.origin
        other._measurements = dict(self._measurements)
        other.set_expert(self.active)
        return other

    @property
    def config(self) -> Any:
        """The base's transformers configuration, unchanged."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Device of the base's first parameter."""
        return self.model.device


def _parse_places(places: tuple[Any, ...], base: Any, artefact: Any) -> tuple[Any, Any]:
    """Base and artefact as `FreeMoE.from_pretrained` was given them."""
    given = dict(zip(("artefact",) if len(places) == 1 else ("base", "artefact"), places, strict=False))
    twice = [name for name, also in (("base", base), ("artefact", artefact)) if name in given and also is not None]
    if len(places) == 1 and twice == ["artefact"] and base is None:
        given, twice = {"base": places[0]}, []
    if len(places) > 2 or twice:
        raise RecipeError(
            f"from_pretrained takes the artefact, or the base and the artefact; {len(places)} were given in order"
            + (f", and {' and '.join(twice)} again by name." if twice else ".")
        )
    base, artefact = given.get("base", base), given.get("artefact", artefact)
    if not isinstance(artefact, str | Path):
        raise RecipeError(
            f"from_pretrained needs an artefact, a folder or a repository of the hub; got {type(artefact).__name__}. Write "
            "FreeMoE.from_pretrained(artefact), or FreeMoE.from_pretrained(base, artefact)."
        )
    return base, artefact
