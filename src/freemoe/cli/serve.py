from __future__ import annotations

import inspect
import logging
import os
import shlex
from collections.abc import Mapping
from typing import Any

import typer
from pydantic.fields import FieldInfo

from freemoe.cli import completion, options
from freemoe.cli.common import calm_libraries, print_fields, print_status
from freemoe.cli.flags import non_none_types, with_signature
from freemoe.core.errors import RecipeError
from freemoe.core.run.places import parse_executor_spec
from freemoe.serve.settings import KEY, ServeSettings
from freemoe.serve.vllm import PYTHON

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

_COMPLETIONS: Mapping[str, completion.Complete] = {
    "base": completion.complete_artefacts_and_models,
    "device": completion.complete_names(completion.DEVICES[:3]),
    "dtype": completion.complete_names(completion.DTYPES),
}

_MORE: Mapping[str, tuple[Any, Any]] = {
    "port": (int, typer.Option(8000, min=1, max=65535, help="Port to bind.")),
    "on": (
        str,
        typer.Option(
            "local", help="local, this process; ray, or ray://HOST:PORT: replicas by Ray Serve (docs/serve-ray.md)."
        ),
    ),
    "api_key": (str, typer.Option(None, help=f"Key that requests have to show. [{KEY}]")),
    "engine": (
        str,
        typer.Option(
            "freemoe",
            help="freemoe, or vllm, which lives in an environment of its own.",
            autocompletion=completion.complete_names(ENGINES),
        ),
    ),
    "vllm_python": (str, typer.Option(None, help=f"Python of that environment. [{PYTHON}]")),
    "quiet": (bool, typer.Option(False, "--quiet", "-q", help="No line per request on standard error.")),
    **options.look_options("Print model names and memory per slot; serve nothing."),
}
"""What is said on a command line alone."""


def _settings_option(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """A field as typer's argument, where it has to be given, or option."""
    [kind] = non_none_types(field.annotation)
    about = {"help": field.description, "autocompletion": _COMPLETIONS.get(name)}
    if field.is_required():
        return kind, typer.Argument(**about)
    bounds = {"min": _field_bound(field, "ge"), "max": _field_bound(field, "le")}
    return kind, typer.Option(field.default, "--" + name.replace("_", "-"), **about, **bounds)


def _field_bound(field: FieldInfo, which: str) -> Any:
    return next((getattr(rule, which) for rule in field.metadata if hasattr(rule, which)), None)


@with_signature(
    {
        "line": (typer.Context, inspect.Parameter.empty),
        **{name: _settings_option(name, field) for name, field in ServeSettings.model_fields.items()},
        **_MORE,
    }
)
def run_command(line: typer.Context, **values: Any) -> None:
    """Run ``freemoe serve`` with these options."""
    settings = ServeSettings(**{name: values[name] for name in ServeSettings.model_fields})
    key = values["api_key"] or os.environ.get(KEY) or None
    if values["engine"] not in ENGINES:
        raise RecipeError(f"--engine is {values['engine']!r}; allowed: {', '.join(ENGINES)}.")
    if values["engine"] == "vllm":
        sources = {name: line.get_parameter_source(name) for name in values}
        given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        _with_vllm(settings, key, values, given)
    else:
        _with_own_engine(settings, key, values)


def _with_vllm(settings: ServeSettings, key: str | None, values: Mapping[str, Any], given: list[str]) -> None:
    from freemoe.serve.served import resolve_settings
    from freemoe.serve.settings import require_free
    from freemoe.serve.vllm.launch import build_launch_command, python_of_vllm, require_heeded

    require_heeded(given)
    python = python_of_vllm(values["vllm_python"])
    served = resolve_settings(settings, key)
    calm_libraries()
    plan, command, environment = build_launch_command(served, python, key, values["port"])
    if values["dry_run"]:
        return print_fields("serve-plan", plan | {"command": shlex.join(command)}, values["as_json"])
    require_free(settings.host, values["port"])
    print_status(f"models: {', '.join(plan['models'])}")
    os.execve(command[0], command, {**os.environ, **environment})


def _with_own_engine(settings: ServeSettings, key: str | None, values: Mapping[str, Any]) -> None:
    """Serve as this process, or as replicas on a Ray."""
    if values["vllm_python"] is not None:
        raise RecipeError("--vllm-python is of --engine vllm. Add that, or leave it out.")
    require_serve()
    from freemoe.serve.served import resolve_settings
    from freemoe.serve.settings import require_free

    place, port = parse_executor_spec(values["on"]), values["port"]
    if place.ray:
        from freemoe.serve.ray.launch import require_ray

        require_ray(place, settings, key)
    elif settings.replicas > 1:
        raise RecipeError(f"--replicas {settings.replicas} needs a Ray: --on ray, or --on ray://HOST:PORT.")
    elif place.is_parallel:
        raise RecipeError("A server is one process or replicas on a Ray: --on local, ray or ray://HOST:PORT.")
    served = resolve_settings(settings, key)
    calm_libraries()
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING if values["quiet"] else logging.INFO)
    if values["dry_run"]:
        return print_fields("serve-plan", served.dry_run_plan(), values["as_json"])
    if place.address is None:
        require_free(settings.host, port)
    print_status(f"models: {served}")
    if place.ray:
        from freemoe.serve.ray.launch import serve_on_ray

        serve_on_ray(served, key, port, print_status, place.address)
    else:
        from freemoe.serve.http.server import serve_here

        serve_here(served, key, port, print_status)


def require_serve() -> None:
    """Raise where the server's packages are not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise RecipeError(f"The server needs {', '.join(missing)}: pip install 'freemoe[serve]'")
