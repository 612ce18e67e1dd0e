"""`FreeMoE`: a base and its experts, acting like the Hugging Face model (MoDE Eq. 10-11).

The prompt picks the expert, which stays for the whole sequence, because the sequence's key-value cache depends on it.
One copy of the weights serves all experts: an expert's weights are switched off in place and restored bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.domain_experts.expert import Expert, require_zeros_say
from freemoe.domain_experts.route.router import Route, Router
from freemoe.domain_experts.route.subdomains import prompt_feature
from freemoe.evals.engine.answering import AUTO, BASE, prompt_ids
from freemoe.hub.fetch import Access, fetch_artefact
from freemoe.hub.shipped import Shipped
from freemoe.models.checkpoints.fingerprint import require_base
from freemoe.models.checkpoints.loading import load_own_base
from freemoe.models.checkpoints.placement import Placement
from freemoe.models.checkpoints.saving import require_free, save_checkpoint, whole_or_nothing
from freemoe.models.mask import Mask
from freemoe.models.switchboard import Switchboard
from freemoe.models.weights import find_weights
from freemoe.results.build import KIND

"""Of the artefact, as its manifest has it."""


class FreeMoE(torch.nn.Module, Shipped):
    """A base model with its domain experts and their router.

    Use ``FreeMoE.from_pretrained(artefact)``. ``forward`` and ``generate`` take what the base's take, and
    ``expert=``: the name of an expert, ``"base"``, ``"auto"`` (the router decides, per sequence), a list with one name
    per sequence, or nothing for the expert that is set.
    """

    def __init__(
        self, model: Any, experts: Sequence[Expert], router: Router | None = None, tokenizer: Any = None
    ) -> None:
        super().__init__()
        self.model = model
        self.router = router
        self.tokenizer = tokenizer
        self._experts = {e.name: e for e in experts}
        self._weights = find_weights(model)
        self._board = Switchboard(self._weights)

    @classmethod
    def from_pretrained(
        cls,
        *places: Any,
        base: Any = None,
        artefact: str | Path | None = None,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: Placement = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> FreeMoE:
        """Load an artefact and its base: ``from_pretrained(artefact)``, or PEFT's ``from_pretrained(base, artefact)``.

        Args:
            places: The artefact alone, or the base and the artefact.
            base: The loaded model, to share one, or its folder or hub id; what the artefact names if absent.
            artefact: Folder written by ``freemoe build``, or a repository ``owner/name`` of the hub.
            tokenizer: The base's tokenizer, when ``base`` is a loaded model and prompts will be text.
            dtype: Of the base when it is loaded here; its values must survive it.
            device: Where to load it.
            revision: Branch, tag or commit of the artefact's repository.
            token: For what is private, artefact or base.
            cache_dir: Where what is fetched is kept.
            local_files_only: Look into that cache only.

        Raises:
            ArtifactError: When the artefact is damaged, of another kind, or was made for another base.
            HubError: When it cannot be read from the hub.
            RecipeError: When no artefact is named, or base or artefact twice.
        """
        base, place = _named(places, base, artefact)
        access = Access(revision, token, cache_dir, local_files_only)
        root = fetch_artefact(place, access, required=True)
        manifest = read_manifest(root)
        if manifest.get("kind") != KIND:
            raise ArtifactError(f"{str(place)!r} holds {manifest.get('kind')!r}, not domain experts.")
        if base is None or isinstance(base, str | Path):
            base, tokenizer = load_own_base(manifest, base, dtype, device, access)
        require_base(manifest, base)
        tensors = load_file(root / "experts.safetensors")
        experts = [Expert.from_parts(described, tensors) for described in manifest["experts"]]
        router = None
        if manifest.get("router"):
            router = Router.from_parts(manifest["router"], load_file(root / "router.safetensors"))
        moe = cls(base, experts, router, tokenizer)
        moe.folder = root
        return moe

    def _shipped(self) -> Path:
        """The artefact's folder, while it still says which experts there are."""
        folder = super()._shipped()
        written = [described["name"] for described in read_manifest(folder, check=False)["experts"]]
        if written != self.experts:
            raise ArtifactError(
                f"This mixture has the experts {', '.join(self.experts)}, and the artefact it was opened from has "
                f"{', '.join(written)}; only what an artefact holds is copied or pushed."
            )
        return folder

    # ----------------------------------------------------------------- experts

    @property
    def experts(self) -> list[str]:
        """Names of the experts; those that the guard turned down act like the base."""
        return list(self._experts)

    @property
    def active(self) -> str:
        """The expert that is switched in now, or ``"base"``."""
        return self._board.active or BASE

    def require(self, name: str) -> None:
        """Raise unless ``name`` can be switched in.

        Raises:
            DataError: It is ``"auto"``, or no expert of this artefact.
        """
        if name == AUTO:
            raise DataError("'auto' depends on the prompt and cannot be set; pass expert='auto' with the prompt.")
        if name != BASE and name not in self._experts:
            raise unknown_name("expert", name, [BASE, AUTO, *self._experts])

    def expert_mask(self, name: str) -> Mask:
        """Weights that an expert switches off, regenerated from the untouched base."""
        self.require(name)
        if name == BASE:
            return Mask()
        with self.expert(BASE):
            return self._experts[name].mask(self._weights)

    def set_expert(self, name: str | None) -> None:
        """Switch to an expert until told otherwise; None or ``"base"`` restores the base bit by bit."""
        wanted = name or BASE
        if wanted != BASE and wanted not in self._board:
            self._board.learn(wanted, self.expert_mask(wanted))
        self._board.switch(None if wanted == BASE else wanted)

    @contextlib.contextmanager
    def expert(self, name: str | None) -> Iterator[FreeMoE]:
        """Use an expert inside a ``with`` block, then go back to the one before."""
        before = self.active
        self.set_expert(name)
        try:
            yield self
        finally:
            self.set_expert(before)

    # ----------------------------------------------------------------- routing

    def route(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[tuple[str, Route]]:
        """Expert for every prompt, and the router's reasons; below its threshold the answer is ``"base"``.

        Args:
            input_ids: ``(B, L)``.
            attention_mask: ``(B, L)``, 1 at real tokens.
        """
        if self.router is None:
            raise DataError("This artefact has no router; name an expert instead of 'auto'.")
        special = set(getattr(self.tokenizer, "all_special_ids", None) or [])
        rows = []
        # Features are made of the untouched base, whatever expert is active.
        with self.expert(BASE):
            for i, row in enumerate(input_ids):
                kept = row if attention_mask is None else row[attention_mask[i].bool()]
                ids = [t for t in kept.tolist() if t not in special]
                rows.append(prompt_feature(self.model, ids, self.router.feature).cpu())
        routes = self.router.route(torch.stack(rows))
        return [(BASE if self.router.abstains(r) else r.subdomain, r) for r in routes]

    def _names(self, expert: Any, ids: Tensor | None, mask: Tensor | None) -> list[str] | str:
        """The expert of every sequence, or one name for all."""
        if expert is None:
            return self.active
        if expert == AUTO:
            if ids is None:
                raise DataError("expert='auto' reads the prompt's tokens: pass input_ids.")
            return [name for name, _ in self.route(ids, mask)]
        if isinstance(expert, str):
            return expert
        if ids is None or len(expert) != len(ids):
            raise DataError(
                f"{len(expert)} experts are named for a batch of {0 if ids is None else len(ids)} sequences."
            )
        return list(expert)

    # ------------------------------------------------------------- like the HF model

    def forward(self, input_ids: Tensor | None = None, *, expert: Any = None, **inputs: Any) -> Any:
        """The base's forward under an expert; sequences of different experts are run group by group."""
        names = self._names(expert, input_ids, inputs.get("attention_mask"))
        groups = _groups(names)
        if isinstance(names, str) or len(groups) == 1:
            with self.expert(names if isinstance(names, str) else names[0]):
                return self.model(input_ids=input_ids, **inputs)
        if inputs.get("past_key_values") is not None or inputs.get("labels") is not None:
            raise DataError(
                "A batch with several experts takes neither past_key_values nor labels; run it expert by expert."
            )
        parts: list[tuple[list[int], Tensor]] = []
        for name, rows in groups:
            with self.expert(name):
                out = self.model(input_ids=input_ids[rows], **_take(inputs, rows, len(names)), use_cache=False)  # type: ignore[index]
            parts.append((rows, out.logits))
        logits = torch.cat([part for _, part in parts])
        order = torch.tensor([row for rows, _ in parts for row in rows], device=logits.device)
        logits = logits[order.argsort()]
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(logits=logits)  # type: ignore[arg-type]

    @torch.no_grad()
    def generate(self, input_ids: Tensor | None = None, *, expert: Any = None, **inputs: Any) -> Any:
        """The base's generate under an expert; the prompt's expert stays for the whole sequence."""
        names = self._names(expert, input_ids, inputs.get("attention_mask"))
        groups = _groups(names)
        if isinstance(names, str) or len(groups) == 1:
            with self.expert(names if isinstance(names, str) else names[0]):
                return self.model.generate(input_ids, **inputs)
        pad = self.model.generation_config.pad_token_id
        outs: list[tuple[list[int], Tensor]] = []
        for name, rows in groups:
            with self.expert(name):
                outs.append((rows, self.model.generate(input_ids[rows], **_take(inputs, rows, len(names)))))  # type: ignore[index]
        longest = max(o.shape[1] for _, o in outs)
        result = outs[0][1].new_full((len(names), longest), pad if pad is not None else 0)
        for rows, out in outs:
            result[rows, : out.shape[1]] = out
        return result

    def generate_text(
        self, prompt: str, *, expert: str = AUTO, max_new_tokens: int = 64, **options: Any
    ) -> tuple[str, str]:
        """Continue a prompt; returns the continuation and the expert that wrote it.

        Raises:
            DataError: When there is no tokenizer, or prompt and new tokens do not fit the context.
        """
        ids = prompt_ids(self.model, self.tokenizer, prompt, max_new_tokens)
        mask = torch.ones_like(ids)
        name = self._names(expert, ids, mask)
        chosen = name if isinstance(name, str) else name[0]
        out = self.generate(ids, expert=chosen, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), chosen

    @property
    def config(self) -> Any:
        """The base's config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.model.device

    def merge_and_save(
        self,
        name: str,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        *,
        also: Callable[[Path], None] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write one expert as a plain Hugging Face checkpoint that needs no freemoe; the base is bit-equal afterwards.

        The expert is switched in while the shards are written one by one: the model is never copied.

        Args:
            name: Of the expert, or ``"base"``.
            folder: Where the checkpoint shall stand; nothing may stand there yet.
            max_shard_size: Of a weight file: bytes, or digits and a unit.
            also: Writes more into the folder that it is given, while the expert is still switched in.
            overwrite: Replace a model folder that stands there.

        Raises:
            ArtifactError: When the folder exists already, or cannot be written; when zeros do not say what the expert is.
        """
        target = Path(folder)
        require_free(target, overwrite)
        self.require(name)
        if name != BASE:
            require_zeros_say(name, self._experts[name].unit)
        with whole_or_nothing(target) as partial:
            with self.expert(name):
                save_checkpoint(self.model, partial, max_shard_size)
                if also is not None:
                    also(partial)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
        return target


def _named(places: tuple[Any, ...], base: Any, artefact: Any) -> tuple[Any, Any]:
    """Base and artefact as `FreeMoE.from_pretrained` was given them.

    Raises:
        RecipeError: One of them is named twice, or there is no artefact.
    """
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


def _groups(names: list[str] | str) -> list[tuple[str, list[int]]]:
    """Sequences by expert, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate([names] if isinstance(names, str) else names):
        groups.setdefault(name, []).append(i)
    return list(groups.items())


def _take(inputs: dict[str, Any], rows: list[int], size: int) -> dict[str, Any]:
    """The rows of every input that has one row per sequence."""
    return {
        # What has one dimension (logits_to_keep, cache_position) counts positions, not sequences.
        k: v[rows] if isinstance(v, Tensor) and v.ndim > 1 and v.shape[0] == size else v
        for k, v in inputs.items()
        if k != "use_cache"
    }
