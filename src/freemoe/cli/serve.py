"""`freemoe serve`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import typer

from freemoe.cli import completion, serve_vllm
from freemoe.cli.common import calm_libraries, console, print_found
from freemoe.cli.ray_serve import require_ways_to_serve, serve_on_ray
from freemoe.cli.served import KEY, Served, Settings, address_of, config_of, longest, open_served, resolve
from freemoe.core.environment import use_threads
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.run.places import Place, read_place

HELP = """Serve a base and its experts over HTTP, as OpenAI's API has it (pip install 'freemoe[serve]').

The model's name in a request picks the expert: base, base:NAME, base:NAME+OTHER, or auto, where the router picks. Experts can be
loaded and dropped while it runs. Without a key it listens on this machine alone.

Examples:

\b
  freemoe serve experts
  freemoe serve ./my-model --experts law-experts --experts notes-=more-experts --port 8080
  freemoe serve experts --max-batch 32 --context 2048 --threads 8
  freemoe serve experts --host 0.0.0.0 --api-key "$FREEMOE_API_KEY"
  freemoe serve experts --on ray --replicas 2
  freemoe serve experts --engine vllm --vllm-python .venv-vllm/bin/python
  freemoe serve experts --dry-run
"""

ENGINES = ("freemoe", "vllm")


def _plan(settings: Settings, served: Served) -> dict[str, Any]:
    """What would be served, without loading weights."""
    from freemoe.serve.engine.cache import token_bytes

    named, config = config_of(served)
    if config is None:
        raise DataError(f"{named!r} is a GGUF file, whose settings are known once it is loaded. Leave --dry-run out.")
    length = longest(settings, config)
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = stored if settings.dtype == "auto" else settings.dtype
    slot = token_bytes(config, 4 if dtype == "float32" else 2) * length
    return {
        "base": named,
        "models": list(served.names),
        "rejected": list(served.rejected),
        "dtype": dtype,
        "context_tokens": length,
        "slots": settings.max_batch,
        "slot_bytes": slot,
        "cache_bytes": slot * settings.max_batch,
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
_ON = typer.Option(
    "local", help="local, this process; ray, or ray://HOST:PORT: replicas by Ray Serve (docs/serve-ray.md)."
)
_REPLICAS = typer.Option(1, min=1, max=4096, help="With --on ray: each has a copy of the base.")
_API_KEY = typer.Option(None, help=f"Key that requests have to show. [{KEY}]", show_default=False)
_BATCH = typer.Option(16, min=1, max=1024, help="Sequences that are written side by side.")
_CONTEXT = typer.Option(None, min=2, help="Tokens of prompt and answer together. [the model's, at most 4096]")
_QUEUE = typer.Option(256, min=1, max=100_000, help="Sequences that may wait; the next gets 429.")
_PREFILL = typer.Option(256, "--prefill-tokens", min=1, help="Tokens of prompts that are read per step.")
_INVARIANT = typer.Option(
    False,
    "--batch-invariant",
    help="Compute every sequence by itself: the same bits whoever else asks, fewer tokens/s.",
)
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
_ENGINE = typer.Option(
    "freemoe",
    help="freemoe, or vllm, which lives in an environment of its own.",
    autocompletion=completion.names(ENGINES),
)
_VLLM_PYTHON = typer.Option(
    None, "--vllm-python", help=f"Python of that environment. [{serve_vllm.PYTHON}]", show_default=False
)
_QUIET = typer.Option(False, "--quiet", "-q", help="No line per request on standard error.")
_DRY = typer.Option(False, "--dry-run", help="Print model names and memory per slot; serve nothing.")
_JSON = typer.Option(False, "--json", help="Print the dry run as JSON.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help=HELP)(_command)


def _command(
    line: typer.Context,
    base: str = _BASE,
    experts: list[str] = _EXPERTS,
    expert_root: list[Path] = _ROOTS,
    host: str = _HOST,
    port: int = _PORT,
    on: str = _ON,
    replicas: int = _REPLICAS,
    api_key: str = _API_KEY,
    max_batch: int = _BATCH,
    context: int = _CONTEXT,
    queue: int = _QUEUE,
    prefill: int = _PREFILL,
    batch_invariant: bool = _INVARIANT,
    max_body: int = _BODY,
    patience: float = _PATIENCE,
    drain: float = _DRAIN,
    threads: int = _THREADS,
    device: str = _DEVICE,
    dtype: str = _DTYPE,
    engine: str = _ENGINE,
    vllm_python: str = _VLLM_PYTHON,
    quiet: bool = _QUIET,
    dry_run: bool = _DRY,
    as_json: bool = _JSON,
) -> None:
    python = _python_of(line, engine, vllm_python)
    settings = Settings(
        base=base,
        experts=experts,
        expert_root=expert_root,
        host=host,
        replicas=replicas,
        max_batch=max_batch,
        context=context,
        queue=queue,
        prefill_tokens=prefill,
        batch_invariant=batch_invariant,
        max_body_bytes=max_body,
        patience_seconds=patience,
        drain_seconds=drain,
        threads=threads,
        device=device,
        dtype=dtype,
    )
    key = api_key or os.environ.get(KEY) or None
    place = read_place(on)
    require_ways_to_serve(place, settings, key)
    served = resolve(settings, key)
    calm_libraries()
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING if quiet else logging.INFO)
    if python is not None:
        _become_vllm(python, settings, served, key, port, as_json if dry_run else None)
    elif dry_run:
        print_found("serve-plan", _plan(settings, served), as_json)
    else:
        _listen(settings, served, place, key, port)


def _python_of(line: typer.Context, engine: str, python: str | None) -> str | None:
    """The python that runs vLLM; None where freemoe's own engine serves.

    Raises:
        RecipeError: Another engine, one that is not installed, or an option that it would not heed.
    """
    if engine not in ENGINES:
        raise RecipeError(f"--engine is {engine!r}; allowed: {', '.join(ENGINES)}.")
    if engine == "vllm":
        serve_vllm.require_heeded(line)
        return serve_vllm.python_of_vllm(python)
    if python is not None:
        raise RecipeError("--vllm-python is of --engine vllm. Add that, or leave it out.")
    require_serve()
    return None


def _become_vllm(python: str, settings: Settings, served: Served, key: str | None, port: int, dry: bool | None) -> None:
    """Become vLLM's server; or, where ``dry`` says whether as JSON, print what that would be."""
    import shlex

    from freemoe.serve.listening import require_free
    from freemoe.serve.vllm.settings import served_names

    folder = serve_vllm.read_folder(served.base, served.sources)
    plan = _plan(settings, served) | {"models": served_names(folder[0])}
    ready = serve_vllm.launch(folder, python, plan, settings.host, port, key, settings.threads)
    if dry is not None:
        print_found("serve-plan", plan | {"command": shlex.join(ready.command)}, dry)
        return
    require_free(settings.host, port)
    console.print(f"models: {', '.join(plan['models'])}", markup=False, highlight=False, soft_wrap=True)
    ready.run()


def _listen(settings: Settings, served: Served, place: Place, key: str | None, port: int) -> None:
    """Serve with freemoe's own engine, here or on a Ray."""
    from freemoe.serve.listening import require_free

    if place.address is None:
        require_free(settings.host, port)
    console.print(f"models: {served}", markup=False, highlight=False, soft_wrap=True)
    if place.ray:
        serve_on_ray(settings, served, place, key, port)
    else:
        _serve(settings, served, key, port)


def require_serve() -> None:
    """Raise where the server's packages are not installed.

    Raises:
        RecipeError: Says how to install them.
    """
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise RecipeError(f"The server needs {', '.join(missing)}: pip install 'freemoe[serve]'")


def _serve(settings: Settings, served: Served, key: str | None, port: int) -> None:
    """Listen until a signal."""
    use_threads(settings.threads)
    from freemoe.serve.engine.engine import Engine
    from freemoe.serve.http.app import make_app
    from freemoe.serve.http.metrics import Metrics
    from freemoe.serve.http.reading import Bounds
    from freemoe.serve.http.server import Server

    opened, limits = open_served(settings, served)
    bounds = Bounds(bytes=settings.max_body_bytes, seconds=settings.patience_seconds)
    metrics = Metrics()
    engine = Engine(opened, limits, metrics).start()
    app = make_app(engine, metrics, bounds=bounds, roots=served.roots, key=key, host=settings.host)
    console.print(f"serving on {address_of(settings.host, port)}", markup=False, highlight=False)
    try:
        Server(app, engine, settings.host, port, settings.drain_seconds).run()
    finally:
        engine.stop()
    if engine.failure is not None:
        raise engine.failure
