"""What `freemoe serve` puts behind its address: a base and folders of experts, named, checked and opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from freemoe.cli.common import console
from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import RecipeError
from freemoe.core.files import MANIFEST
from freemoe.hub.fetch import fetch_artefact, require_in_reach
from freemoe.recipes.expert_names import AUTO, BASE, PREFIX, require_new_names
from freemoe.results.build import KIND

KEY = "FREEMOE_API_KEY"
"""The variable of the environment that holds the key."""


class Settings(BaseModel):
    """What is served and within which limits: flags of `freemoe serve`, and ``args`` of an application of Ray Serve."""

    model_config = ConfigDict(extra="forbid")

    base: str
    experts: list[str] = []
    expert_root: list[Path] = []
    host: str = "127.0.0.1"
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 16
    context: Annotated[int, Field(ge=2)] | None = None
    queue: Annotated[int, Field(ge=1, le=100_000)] = 256
    prefill_tokens: Annotated[int, Field(ge=1)] = 256
    batch_invariant: bool = False
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    patience_seconds: Annotated[float, Field(ge=0.1)] = 30
    drain_seconds: Annotated[float, Field(ge=0)] = 30
    threads: Annotated[int, Field(ge=1)] | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True)
class Served:
    """What settings mean on this machine.

    Attributes:
        base: A folder, a file, or a repository of the hub.
        sources: Folders of experts besides the base's own.
        names: What ``model`` can be.
        rejected: Those of them that were rejected: they are the base.
        roots: Folders below which experts may be loaded.
    """

    base: str
    sources: tuple[Source, ...]
    names: tuple[str, ...]
    rejected: tuple[str, ...]
    roots: tuple[Path, ...]

    def __str__(self) -> str:
        """What ``model`` can be, on one line."""
        return ", ".join(f"{name} (rejected)" if name in self.rejected else name for name in self.names)


def resolve(settings: Settings, key: str | None) -> Served:
    """Check settings, and find what they name, before anything is loaded.

    Args:
        settings: What is served.
        key: That requests have to show.

    Raises:
        RecipeError: Something of it cannot be served, or could be reached by others without a key.
        FreeMoEError: Something of it is not there.
    """
    from freemoe.models.checkpoints.placement import require_one_device
    from freemoe.serve.listening import require_key

    require_key(settings.host, key)
    require_one_device(settings.device, "A served model")  # pyright: ignore[reportArgumentType]
    require_in_reach(settings.base)
    sources = read_sources(settings.experts)
    base = str(fetch_artefact(settings.base))
    names, rejected = model_names(base, sources)
    return Served(base, tuple(sources), names, rejected, tuple(roots_of(settings.expert_root, base, sources)))


def config_of(served: Served) -> tuple[str, Any]:
    """The base, and its config; None where a GGUF file tells it only once it is loaded.

    Raises:
        FreeMoEError: There is no such base.
    """
    from freemoe.models.checkpoints.loading import load_config

    base = served.base
    manifest = read_manifest(base, check=False) if (Path(base) / MANIFEST).is_file() else None
    named = base if manifest is None else str(manifest.get("base_model_name_or_path") or base)
    return named, load_config(base if (Path(base) / "config.json").is_file() else named)


def longest(settings: Settings, config: Any) -> int:
    """Tokens of a sequence at most.

    Raises:
        RecipeError: More is asked for than the model reads.
    """
    from freemoe.evals.engine.tokens import context_length

    return context_length_of(settings.context, context_length(SimpleNamespace(config=config)))


def open_served(settings: Settings, served: Served) -> tuple[Any, Any]:
    """The base with all experts on it, and what the engine takes on (`Limits`)."""
    from freemoe.evals.engine.tokens import context_length
    from freemoe.serve.engine.requests import Limits

    opened = open_host(served.base, served.sources, settings.dtype, settings.device)
    length = context_length_of(settings.context, context_length(opened.model, opened.tokenizer))
    return opened, Limits(
        length,
        settings.max_batch,
        settings.queue,
        settings.prefill_tokens,
        batch_invariant=settings.batch_invariant,
    )


@dataclass(frozen=True)
class Source:
    """A folder of experts, and what is put before their names."""

    folder: Path
    prefix: str = ""

    def kinds(self) -> dict[str, str]:
        """The kinds of its experts, by their names here."""
        manifest = read_manifest(self.folder, check=False)
        if manifest.get("kind") != KIND:
            raise RecipeError(
                f"--experts {str(self.folder)!r} holds {manifest.get('kind')!r}; only domain experts are put on a base. Serve it as "
                f"it is: freemoe serve {self.folder}"
            )
        return _kinds(manifest, self.prefix)


def _kinds(manifest: dict[str, Any], prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{expert['name']}": str(expert.get("kind")) for expert in manifest["experts"]}


def read_sources(texts: Sequence[str]) -> list[Source]:
    """Read ``--experts [PREFIX=]DIR``.

    Raises:
        RecipeError: It is no artefact of domain experts.
        DataError: Two experts have one name, or a name cannot be one.
    """
    found: list[Source] = []
    for text in texts:
        prefix, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            prefix, folder = "", text
        found.append(Source(fetch_artefact(folder, required=True), prefix))
    require_new_names([name for source in found for name in source.kinds()], ())
    return found


def model_names(base: str, sources: Sequence[Source]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of all experts, and that of the router, before anything is loaded; and of those that were rejected."""
    kinds: list[tuple[str, str]] = []
    auto = False
    if (Path(base) / MANIFEST).is_file():
        manifest = read_manifest(base, check=False)
        if manifest.get("kind") == KIND:
            kinds, auto = list(_kinds(manifest).items()), bool(manifest.get("router"))
        elif sources:
            raise RecipeError(
                f"{base!r} holds {manifest.get('kind')!r}, on which no experts are put. Leave --experts out."
            )
    elif sources:
        auto = bool(read_manifest(sources[0].folder, check=False).get("router"))
    kinds += [expert for source in sources for expert in source.kinds().items()]
    require_new_names([name for name, _ in kinds], ())
    names = (BASE, *([AUTO] if auto else []), *(PREFIX + name for name, _ in kinds))
    return names, tuple(PREFIX + name for name, kind in kinds if kind == BASE)


def open_host(base: str, sources: Sequence[Source], dtype: str, device: str) -> Any:
    """The base with all experts on it, as the engine takes it."""
    from freemoe.core.errors import FamilyError
    from freemoe.domain_experts.mixture import FreeMoE
    from freemoe.serve.engine.hosts import Ways
    from freemoe.systems import load

    more = list(sources)
    if more and not (Path(base) / MANIFEST).is_file():
        first = more.pop(0)
        host: Any = FreeMoE.from_pretrained(base, first.folder, dtype=dtype, device=device)
        if first.prefix:
            # The router knows the experts by the names that they were built with, so they keep them where there is one.
            raise RecipeError(
                "The first folder's router knows its experts by their own names: put no prefix before them."
            )
    else:
        opened = load(base, dtype=dtype, device=device)  # type: ignore[arg-type]
        host = opened
        if not isinstance(opened, FreeMoE):
            host = Ways(opened)  # type: ignore[arg-type]
            if list(opened.ways) == ["base"]:  # type: ignore[attr-defined]
                try:
                    host = FreeMoE(opened.model, [], None, opened.tokenizer)
                except FamilyError:
                    console.print("note: this family is unknown, so that no experts can be loaded.", markup=False)
    for source in more:
        host.load_expert(source.folder, prefix=source.prefix)
    return host


def context_length_of(asked: int | None, longest: int) -> int:
    """Tokens of a sequence at most: what is asked for, else the model's own length, at most 4096.

    Raises:
        RecipeError: More is asked for than the model reads.
    """
    if asked is not None and asked > longest:
        raise RecipeError(f"--context is {asked:,}, and the model reads at most {longest:,} tokens. Ask for fewer.")
    return asked or min(longest, 4096)


def roots_of(asked: Sequence[Path], base: str, sources: Sequence[Source]) -> list[Path]:
    """Folders below which experts may be loaded.

    Raises:
        RecipeError: One of them is no folder.
    """
    for root in asked:
        if not root.is_dir():
            raise RecipeError(f"--expert-root {str(root)!r} is no folder. Name one that is there.")
    given = [source.folder for source in sources]
    return list(asked) or [*([Path(base)] if (Path(base) / MANIFEST).is_file() else []), *given]


def address_of(host: str, port: int) -> str:
    """Where a browser finds the server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
