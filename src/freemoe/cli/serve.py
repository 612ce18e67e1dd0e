"""`freemoe serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from freemoe.cli import completion
from freemoe.cli.common import calm_libraries, console, print_found
from freemoe.core.artifacts import read_manifest
from freemoe.core.environment import use_threads
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.files import MANIFEST
from freemoe.hub.fetch import fetch_artefact, require_in_reach
from freemoe.results.build import KIND

HELP = """Serve a base and its experts over HTTP, as OpenAI's API has it (pip install 'freemoe[serve]').

The model's name in a request picks the expert: base, base:NAME, base:NAME+OTHER, or auto, where the router picks. Experts can be
loaded and dropped while it runs. Without a key it listens on this machine alone.

Examples:

\b
  freemoe serve experts
  freemoe serve ./my-model --experts law-experts --experts notes-=more-experts --port 8080
  freemoe serve experts --max-batch 32 --context 2048 --threads 8
  freemoe serve experts --host 0.0.0.0 --api-key "$FREEMOE_API_KEY"
  freemoe serve experts --dry-run
"""

KEY = "FREEMOE_API_KEY"


@dataclass(frozen=True)
class Source:
    """A folder of experts, and what is put before their names."""

    folder: Path
    prefix: str = ""

    def names(self) -> list[str]:
        """Names of its experts here."""
        manifest = read_manifest(self.folder, check=False)
        if manifest.get("kind") != KIND:
            raise RecipeError(
                f"--experts {str(self.folder)!r} holds {manifest.get('kind')!r}; only domain experts are put on a base. Serve it as "
                f"it is: freemoe serve {self.folder}"
            )
        return [self.prefix + str(expert["name"]) for expert in manifest["experts"]]


def read_sources(texts: Sequence[str]) -> list[Source]:
    """Read ``--experts [PREFIX=]DIR``.

    Raises:
        RecipeError: It is no artefact of domain experts, or two experts have one name.
    """
    found: list[Source] = []
    for text in texts:
        prefix, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            prefix, folder = "", text
        found.append(Source(fetch_artefact(folder, required=True), prefix))
    require_different([name for source in found for name in source.names()])
    return found


def require_different(names: Sequence[str]) -> None:
    """Raise where two experts have one name.

    Raises:
        RecipeError: Says how to give another.
    """
    twice = sorted({name for name in names if names.count(name) > 1 or name in ("base", "auto")})
    if twice:
        raise RecipeError(
            f"The name {twice[0]!r} stands for two experts. Put something before the names of one folder: --experts other-=DIR"
        )


def _own(base: str, sources: Sequence[Source]) -> list[str]:
    """Names of all experts, and that of the router, before anything is loaded."""
    names: list[str] = []
    auto = False
    if (Path(base) / MANIFEST).is_file():
        manifest = read_manifest(base, check=False)
        if manifest.get("kind") == KIND:
            names, auto = [str(expert["name"]) for expert in manifest["experts"]], bool(manifest.get("router"))
        elif sources:
            raise RecipeError(
                f"{base!r} holds {manifest.get('kind')!r}, on which no experts are put. Leave --experts out."
            )
    elif sources:
        auto = bool(read_manifest(sources[0].folder, check=False).get("router"))
    names += [name for source in sources for name in source.names()]
    require_different(names)
    return ["base", *(["auto"] if auto else []), *(f"base:{name}" for name in names)]


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


def _context(asked: int | None, longest: int) -> int:
    """Tokens of a sequence at most."""
    if asked is not None and asked > longest:
        raise RecipeError(f"--context is {asked:,}, and the model reads at most {longest:,} tokens. Ask for fewer.")
    return asked or min(longest, 4096)


def _plan(base: str, sources: Sequence[Source], context: int | None, batch: int, dtype: str) -> dict[str, Any]:
    """What would be served, without loading weights."""
    from types import SimpleNamespace

    from freemoe.evals.engine.tokens import context_length
    from freemoe.models.checkpoints.loading import load_config
    from freemoe.serve.engine.cache import token_bytes

    manifest = read_manifest(base, check=False) if (Path(base) / MANIFEST).is_file() else None
    named = base if manifest is None else str(manifest.get("base_model_name_or_path") or base)
    config = load_config(base if (Path(base) / "config.json").is_file() else named)
    if config is None:
        raise DataError(f"{named!r} is a GGUF file, whose settings are known once it is loaded. Leave --dry-run out.")
    length = _context(context, context_length(SimpleNamespace(config=config)))
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    element = 4 if (stored if dtype == "auto" else dtype) == "float32" else 2
    slot = token_bytes(config, element) * length
    return {
        "base": named,
        "models": _own(base, sources),
        "context_tokens": length,
        "slots": batch,
        "slot_bytes": slot,
        "cache_bytes": slot * batch,
    }


_BASE = typer.Argument(
    help="Model or artefact: a folder, a GGUF file, or owner/name of the hub.",
    autocompletion=completion.artefacts_and_models,
)
_EXPERTS = typer.Option(
    [], "--experts", help="Folder of experts, may be repeated; PREFIX=DIR puts PREFIX before their names."
)
_ROOTS = typer.Option(
    [], help="Folder below which experts may be loaded while it runs, may be repeated. [those given at start]"
)
_HOST = typer.Option("127.0.0.1", help="Where to listen; another than this machine needs a key.")
_PORT = typer.Option(8000, min=1, max=65535, help="The same.")
_API_KEY = typer.Option(None, help=f"Key that requests have to show. [{KEY}]", show_default=False)
_BATCH = typer.Option(16, min=1, max=1024, help="Sequences that are written side by side.")
_CONTEXT = typer.Option(None, min=2, help="Tokens of prompt and answer together. [the model's, at most 4096]")
_QUEUE = typer.Option(256, min=1, max=100_000, help="Sequences that may wait; the next gets 429.")
_PREFILL = typer.Option(256, "--prefill-tokens", min=1, help="Tokens of prompts that are read per step.")
_BODY = typer.Option(4 << 20, "--max-body-bytes", min=1024, help="Bytes of a request.")
_PATIENCE = typer.Option(30, "--patience-seconds", min=0.1, help="For a slow body, and a slow reader.")
_DRAIN = typer.Option(30, "--drain-seconds", min=0, help="For running requests, after SIGTERM or ctrl-C.")
_THREADS = typer.Option(None, min=1, help="CPU threads.")
_DEVICE = typer.Option(
    "auto", help="auto, cpu, cuda or cuda:N.", autocompletion=completion.names(completion.DEVICES[:3])
)
_DTYPE = typer.Option(
    "auto", help="auto, float32, bfloat16 or float16.", autocompletion=completion.names(completion.DTYPES)
)
_DRY = typer.Option(False, "--dry-run", help="Print model names and memory per slot; serve nothing.")
_JSON = typer.Option(False, "--json", help="Print the dry run as JSON.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help=HELP)(_command)


def _command(
    base: str = _BASE,
    experts: list[str] = _EXPERTS,
    expert_root: list[Path] = _ROOTS,
    host: str = _HOST,
    port: int = _PORT,
    api_key: str = _API_KEY,
    max_batch: int = _BATCH,
    context: int = _CONTEXT,
    queue: int = _QUEUE,
    prefill: int = _PREFILL,
    max_body: int = _BODY,
    patience: float = _PATIENCE,
    drain: float = _DRAIN,
    threads: int = _THREADS,
    device: str = _DEVICE,
    dtype: str = _DTYPE,
    dry_run: bool = _DRY,
    as_json: bool = _JSON,
) -> None:
    require_serve()
    from freemoe.models.checkpoints.placement import require_one_device
    from freemoe.serve.engine.requests import Limits
    from freemoe.serve.http.gate import require_key
    from freemoe.serve.http.reading import Bounds
    from freemoe.serve.http.server import require_free

    key = api_key or os.environ.get(KEY) or None
    require_key(host, key)
    require_one_device(device, "A served model")
    require_in_reach(base)
    sources = read_sources(experts)
    base = str(fetch_artefact(base))
    names = _own(base, sources)
    roots = _roots(expert_root, base, sources)
    calm_libraries()
    if dry_run:
        print_found("serve-plan", _plan(base, sources, context, max_batch, dtype), as_json)
        return
    require_free(host, port)
    use_threads(threads)
    from freemoe.evals.engine.tokens import context_length

    opened = open_host(base, sources, dtype, device)
    length = _context(context, context_length(opened.model, opened.tokenizer))
    console.print(f"models: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
    _serve(
        opened,
        Limits(length, max_batch, queue, prefill),
        Bounds(bytes=max_body, seconds=patience),
        roots,
        key,
        host,
        port,
        drain,
    )


def _roots(asked: Sequence[Path], base: str, sources: Sequence[Source]) -> list[Path]:
    """Folders below which experts may be loaded.

    Raises:
        RecipeError: One of them is no folder.
    """
    for root in asked:
        if not root.is_dir():
            raise RecipeError(f"--expert-root {str(root)!r} is no folder. Name one that is there.")
    given = [source.folder for source in sources]
    return list(asked) or [*([Path(base)] if (Path(base) / MANIFEST).is_file() else []), *given]


def require_serve() -> None:
    """Raise where the server's packages are not installed.

    Raises:
        RecipeError: Says how to install them.
    """
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise RecipeError(f"The server needs {', '.join(missing)}: pip install 'freemoe[serve]'")


def _serve(
    opened: Any, limits: Any, bounds: Any, roots: list[Path], key: str | None, host: str, port: int, drain: float
) -> None:
    """Listen until a signal."""
    from freemoe.serve.engine.engine import Engine
    from freemoe.serve.http.app import make_app
    from freemoe.serve.http.metrics import Metrics
    from freemoe.serve.http.server import Server

    metrics = Metrics()
    engine = Engine(opened, limits, metrics).start()
    app = make_app(engine, metrics, bounds=bounds, roots=roots, key=key, host=host)
    shown = f"[{host}]" if ":" in host else host
    console.print(f"serving on http://{shown}:{port}", markup=False, highlight=False)
    try:
        Server(app, engine, host, port, drain).run()
    finally:
        engine.stop()
