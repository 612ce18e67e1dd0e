"""What a server puts behind its address: a base and folders of experts, named and checked before anything is loaded, and opened."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import DataError, FamilyError, RecipeError
from freemoe.core.files import MANIFEST
from freemoe.domain_experts.result import KIND
from freemoe.evals.engine.tokens import context_length
from freemoe.hub.fetch import fetch_artefact, require_in_reach
from freemoe.models.checkpoints.loading import load_config
from freemoe.models.checkpoints.placement import require_one_device
from freemoe.recipes.expert_names import PREFIX
from freemoe.serve.catalogue import ExpertCatalogue, model_names
from freemoe.serve.engine.cache import token_bytes
from freemoe.serve.settings import EngineLimits, ServeSettings, require_key

log = logging.getLogger(__name__)


class ExpertSource(NamedTuple):
    """A folder of experts, and what is put before their names."""

    folder: Path
    prefix: str = ""


@dataclass(frozen=True)
class ServeTarget:
    """What settings mean on this machine."""

    settings: ServeSettings
    base: str  # A folder, a file, or a repository of the hub
    sources: tuple[ExpertSource, ...]  # Folders of experts besides the base's own
    catalogue: ExpertCatalogue
    has_router: bool  # Whether ``auto`` can be asked for
    roots: tuple[Path, ...]  # Folders below which experts may be loaded

    @property
    def served_models(self) -> list[str]:
        """Names that a request's ``model`` can have."""
        return model_names(self.catalogue.expert_names, self.has_router)

    @property
    def rejected_models(self) -> list[str]:
        """Those of them that were rejected: they are the base."""
        return [PREFIX + name for name in self.catalogue.rejected_experts]

    def __str__(self) -> str:
        """What ``model`` can be, on one line."""
        return ", ".join(f"{name} (rejected)" if name in self.rejected_models else name for name in self.served_models)

    def base_config(self) -> tuple[str, Any]:
        """The base, and its config; None where a GGUF file tells it only once it is loaded."""
        named = self.base
        if (Path(self.base) / MANIFEST).is_file():
            named = str(read_manifest(self.base, check=False).get("base_model_name_or_path") or self.base)
        return named, load_config(self.base if (Path(self.base) / "config.json").is_file() else named)

    def dry_run_plan(self) -> dict[str, Any]:
        """What would be served, without loading weights."""
        named, config = self.base_config()
        if config is None:
            raise DataError(
                f"{named!r} is a GGUF file, whose settings are known once it is loaded. Leave --dry-run out."
            )
        limits = self.engine_limits(SimpleNamespace(config=config))
        stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        dtype = stored if self.settings.dtype == "auto" else self.settings.dtype
        slot = token_bytes(config, 4 if dtype == "float32" else 2) * limits.context
        return {
            "base": named,
            "models": self.served_models,
            "rejected": self.rejected_models,
            "dtype": dtype,
            "context_tokens": limits.context,
            "slots": limits.batch,
            "slot_bytes": slot,
            "cache_bytes": slot * limits.batch,
        }

    def load_host(self) -> tuple[Any, EngineLimits]:
        """The base with all experts on it, and what the engine takes on."""
        # Not for a dry run.
        from freemoe.artefacts import load
        from freemoe.domain_experts.mixture import FreeMoE
        from freemoe.serve.engine.hosts import VariantHost

        how: Any = {"dtype": self.settings.dtype, "device": self.settings.device}
        more = list(self.sources)
        if more and not (Path(self.base) / MANIFEST).is_file():
            first = more.pop(0)
            host: Any = FreeMoE.from_pretrained(self.base, first.folder, **how)
            if first.prefix:
                # The router knows the experts by the names that they were built with, so they keep them where there is one.
                raise RecipeError(
                    "The first folder's router knows its experts by their own names: put no prefix before them."
                )
        else:
            host = opened = load(self.base, **how)
            if not isinstance(opened, FreeMoE):
                host = VariantHost(opened)  # type: ignore[arg-type]
                if list(opened.ways) == ["base"]:  # type: ignore[attr-defined]
                    try:
                        host = FreeMoE(opened.model, [], None, opened.tokenizer)
                    except FamilyError:
                        log.warning("This family is unknown, so that no experts can be loaded.")
        for source in more:
            host.load_expert(source.folder, prefix=source.prefix)
        return host, self.engine_limits(host.model, host.tokenizer)

    def engine_limits(self, model: Any, tokenizer: Any = None) -> EngineLimits:
        """What the engine takes on; tokens of a sequence: what is asked for, else the model's own length, at most 4096.

        The model may be whatever has its ``config``; a tokenizer may read less than the model does.
        """
        settings, longest = self.settings, context_length(model, tokenizer)
        if settings.context is not None and settings.context > longest:
            raise RecipeError(
                f"--context is {settings.context:,}, and the model reads at most {longest:,} tokens. Ask for fewer."
            )
        return EngineLimits(
            settings.context or min(longest, 4096),
            settings.max_batch,
            settings.queue,
            settings.prefill_tokens,
            batch_invariant=settings.batch_invariant,
        )


def resolve_settings(settings: ServeSettings, key: str | None) -> ServeTarget:
    """Check settings, and find what they name, before anything is loaded."""
    require_key(settings.host, key)
    require_one_device(settings.device, "A served model")  # pyright: ignore[reportArgumentType]
    require_in_reach(settings.base)
    sources = tuple(map(_read_source, settings.experts))
    base = fetch_artefact(settings.base)
    is_artefact = (base / MANIFEST).is_file()
    folders = list(sources)
    if is_artefact:
        kind = read_manifest(base, check=False).get("kind")
        if kind == KIND:
            folders.insert(0, ExpertSource(base.absolute()))
        elif sources:
            raise RecipeError(f"{str(base)!r} holds {kind!r}, on which no experts are put. Leave --experts out.")
    catalogue = ExpertCatalogue()
    for folder, prefix in folders:
        catalogue = catalogue.with_artefact(folder, prefix)
    has_router = bool(folders) and bool(read_manifest(folders[0].folder, check=False).get("router"))
    for root in settings.expert_root:
        if not root.is_dir():
            raise RecipeError(f"--expert-root {str(root)!r} is no folder. Name one that is there.")
    given = [*([base] if is_artefact else []), *(source.folder for source in sources)]
    roots = tuple(root.absolute() for root in settings.expert_root or given)
    return ServeTarget(settings, str(base), sources, catalogue, has_router, roots)


def _read_source(text: str) -> ExpertSource:
    """Read ``--experts [PREFIX=]DIR``; a RecipeError unless domain experts lie there."""
    prefix, equals, folder = text.partition("=")
    if not equals or Path(text).exists():
        prefix, folder = "", text
    found = fetch_artefact(folder, required=True)
    kind = read_manifest(found, check=False).get("kind")
    if kind != KIND:
        raise RecipeError(
            f"--experts {str(found)!r} holds {kind!r}; only domain experts are put on a base. Serve it as it is: freemoe serve {found}"
        )
    return ExpertSource(found.absolute(), prefix)
