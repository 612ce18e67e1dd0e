"""The pages of the docs site that are made and not written: commands, recipes, costs; and files that stand elsewhere.

MkDocs calls `on_files` (`hooks` in mkdocs.yml). Everything here reads the code, or the JSON that the benchmarks left, so that a
page cannot promise what is not there.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"

COPIED = {
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
}
"""Page of the site -> the file that is shown there."""


MADE = ("reference/commands.md", "reference/recipes.md", "times.md", *COPIED)
"""Every page that is made."""


def pages() -> dict[str, str]:
    """Every page that is made: its place in the site -> its Markdown."""
    made = {
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "times.md": times_page(),
    }
    return made | {place: path.read_text(encoding="utf-8") for place, path in COPIED.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages to those that MkDocs found."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


# ---------------------------------------------------------------------------------------- commands


def commands_page() -> str:
    """Every command with its help and options, as the command line itself tells them."""
    import typer.main

    from freemoe.cli import app

    group: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Made from the commands themselves; `freemoe COMMAND --help` says the same. Most options are fields of a",
        "[recipe](recipes.md).",
        "",
        *(f"- [`freemoe {name}`](#freemoe-{name}): {_first(c.help)}" for name, c in group.commands.items()),
    ]
    for name, command in group.commands.items():
        lines += ["", f"## freemoe {name}", "", *_help(command.help or ""), "", *_options(command)]
    return "\n".join(lines) + "\n"


def _first(text: str) -> str:
    return (text or "").split("\n\n")[0].replace("\n", " ")


def _help(text: str) -> Iterator[str]:
    r"""Paragraphs as they are; what stands behind a `\b` is a block that keeps its lines."""
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("\b\n"):
            body = [line.removeprefix("  ") for line in paragraph.split("\n")[1:]]
            yield from ("", "```bash", *body, "```")
        else:
            yield from ("", paragraph.replace("<", "&lt;"))


def _options(command: Any) -> Iterator[str]:
    yield from ("| argument or option | default | |", "|---|---|---|")
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        named = parameter.param_type_name == "option"
        spelled = (
            ", ".join(f"`{o}`" for o in (*parameter.opts, *parameter.secondary_opts))
            if named
            else f"`{parameter.name.upper()}`"
        )
        default = parameter.default
        plain = (isinstance(default, str | int | float) and not isinstance(default, bool)) or isinstance(default, Path)
        told = getattr(parameter, "help", None) or ""
        yield f"| {spelled} | {f'`{default}`' if plain else ''} | {_cell(told)} |"


def _cell(text: str) -> str:
    """Text inside a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ----------------------------------------------------------------------------------------- recipes


def recipes_page() -> str:
    """Every field of every recipe: path, type, default, meaning, and the flag that sets it."""
    from freemoe.cli.run import COMMANDS

    lines = [
        "# Recipes",
        "",
        "Made from the recipes' own fields. A recipe, a YAML file and a command line are three spellings of one thing:",
        "`--print-recipe` prints the YAML of a command line, `freemoe run FILE.yaml` runs it, `--set PATH=VALUE` sets any field.",
        "An unknown field is an error that names the nearest one.",
    ]
    for name, command in COMMANDS.items():
        recipe = command.recipe
        flags = {f.path: n.replace("_", "-") for n, f in command.flags.items()}
        lines += ["", f"## {name}", "", _cell(recipe.__doc__ or ""), ""]
        lines += _fields(recipe, flags)
        for field, about in recipe.model_fields.items():
            if _section(about.annotation):
                lines += ["", f"### {name}: {field}", "", _cell(about.annotation.__doc__ or ""), ""]
                lines += _fields(about.annotation, flags, f"{field}.")
        for field in recipe.SETTINGS:
            lines += ["", f"### {name}: what {field} sets", "", *_settings(recipe, field)]
    return "\n".join(lines) + "\n"


def _settings(recipe: Any, field: str) -> Iterator[str]:
    """A row for every field that a value of ``preset`` or ``profile`` sets: the default, and what each value makes of it."""
    from freemoe.cli.flags import recipe_field

    named = {name: _flat(values) for name, values in recipe.SETTINGS[field].items() if values}
    yield f"| field | default | {' | '.join(f'`{name}`' for name in named)} |"
    yield "|---|---|" + "---|" * len(named)
    for path in dict.fromkeys(path for values in named.values() for path in values):
        default = recipe_field(recipe, path).get_default(call_default_factory=True)
        cells = [f"`{_default(values[path])}`" if path in values else "" for values in named.values()]
        yield f"| `{path}` | `{_default(default)}` | {' | '.join(cells)} |"


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by their path."""
    return {
        f"{section}.{name}" if isinstance(held, dict) else section: value
        for section, held in values.items()
        for name, value in (held.items() if isinstance(held, dict) else [("", held)])
    }


def _section(kind: Any) -> bool:
    return hasattr(kind, "model_fields")


def _fields(model: Any, flags: dict[str, str], prefix: str = "") -> Iterator[str]:
    yield from ("| field | type | default | flag | |", "|---|---|---|---|---|")
    for name, about in model.model_fields.items():
        if _section(about.annotation) or name == "command":
            continue
        path = prefix + name
        default = "required" if about.is_required() else f"`{_default(about.get_default(call_default_factory=True))}`"
        bounds = ", ".join(
            f"{sign} {getattr(m, key)}"
            for m in about.metadata
            for key, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
            if isinstance(getattr(m, key, None), int | float)
        )
        kind = _cell(f"{_kind(about.annotation)}{f', {bounds}' if bounds else ''}")
        flag = f"`--{flags[path]}`" if path in flags else ""
        yield f"| `{path}` | {kind} | {default} | {flag} | {_cell(about.description or '')} |"


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _kind(annotation: Any) -> str:
    """A type as a reader of YAML would say it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in inside)
    if origin in (tuple, list):
        parts = [part for part in inside if part is not Ellipsis]
        return f"list of {_kind(parts[0])}"
    if origin is dict:
        return f"{_kind(inside[0])} to {_kind(inside[1])}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        annotation.__name__, annotation.__name__
    )


# ---------------------------------------------------------------------------------------- times


def times_page() -> str:
    """What things took on the machines that the benchmarks ran on; every number is one of their JSON's."""
    lines = [
        "# Times",
        "",
        "Made from the JSON in `docs/benchmarks/`: nothing here is an estimate. Everything ran on two CPU cores, and other work took",
        "a share of them in all tables but the last one, and there in `gain`, `purify-step`, `streaming`, `tomoe-quality` and in part",
        "`tomoe-speed`. [Hardware](hardware.md) says what other models need; `--dry-run` says it of your own, with the time.",
    ]
    return "\n".join([*lines, *_subdomains(), *_mixtures(), *_demo(), *_streamed(), *_steps(), *_benches()]) + "\n"


def _subdomains() -> Iterator[str]:
    """One subdomain's training on the real LLM."""
    real, again = _result("real"), _result("real-bf16")
    protocol = real["details"]["protocol"]
    yield from ("", "## One subdomain of SmolLM2-135M", "")
    yield (
        f"{_machine(real)}; {protocol['train']} passes, {protocol['schedule']['steps']} steps; the training alone, without scoring. "
        f"A document of text is a block of 256 tokens, {protocol['reference']} of them where nothing else is said. `learned-1%`: "
        "single switches; `structured-20%`: whole neurons; `lora-r1`: the rival on the same documents."
    )
    yield from ("", "| material | method | tokens trained | seconds | peak memory, MB |", "|---|---|---|---|---|")
    for row in real["details"]["text"] + again["details"]["count"] + real["details"]["task"]:
        if row["method"] in ("learned-1%", "lora-r1", "structured-20%") and "seconds" in row:
            few = f", {row['reference_documents']} documents" if "reference_documents" in row else ""
            tokens = f"{row['tokens_trained']:,.0f}" if row.get("tokens_trained") else ""
            yield f"| {row['material']}{few} | {row['method']} | {tokens} | {row['seconds']:.0f} | {row['memory_mb']} |"


def _mixtures() -> Iterator[str]:
    """Conversion and trim of the real LLM."""
    found = _result("real-fp32")
    yield from (
        "",
        "## Converting and trimming SmolLM2-135M",
        "",
        f"{_machine(found)}, fp32; rivals and control included.",
    )
    yield from ("", "| run | steps | tokens per step | seconds | peak memory, MB |", "|---|---|---|---|---|")
    for name, run in found["details"]["mixtures"].items():
        steps = run.get("training") or run["routers"]
        tokens = steps.get("batch_tokens") or steps["rows"] * steps.get("block", 256)
        yield f"| `{name}` | {steps['steps']} | {tokens} | {run['wall_seconds']:.0f} | {run['memory_bytes'] / 1e6:.0f} |"


def _demo() -> Iterator[str]:
    """Whole builds of bases of the demo's kind."""
    gain = _result("gain")
    yield from ("", "## Whole builds of a tiny base", "")
    yield f"{_machine(gain)}: the demo's recipe on three bases of 1.2M parameters, every domain, controls and oracle included."
    yield from ("", "| base's seed | documents reported | seconds | peak memory, MB |", "|---|---|---|---|")
    for base in gain["details"]["demo"]:
        cost = base["cost"]
        documents = sum(d["rows"]["base"]["documents"] for d in base["domains"])
        peak = cost["peak_memory_bytes"] / 1e6
        yield f"| {base['seed']} | {documents} | {cost['wall_seconds']:.0f} | {peak:.0f} |"


def _streamed() -> Iterator[str]:
    """Bases that stay on disk."""
    found = _result("streaming")
    yield from ("", "## A base that stays on disk", "")
    yield f"{_machine(found)}: one batch of {found['details']['tokens']} tokens, one thread, `--device disk`."
    yield from ("", "| checkpoint | stage | seconds | whole process, MB |", "|---|---|---|---|")
    for one in found["details"]["measured"].values():
        for stage, seconds in one["seconds"].items():
            yield f"| {one['checkpoint'] / 1e9:.1f} GB | {stage} | {seconds:.0f} | {one['peaks'][stage] / 1e6:.0f} |"


def _steps() -> Iterator[str]:
    """One step of training switches beside LoRA's."""
    found = _result("purify-step")
    yield from ("", "## One step of learned switches, SmolLM2-135M's shape", "")
    yield f"{_machine(found)}: median of {len(found['details']['seconds']['switches'])} steps, one thread, beside LoRA of rank 1."
    yield from ("", "| step | seconds | peak memory, MB |", "|---|---|---|")
    for name, seconds in found["details"]["seconds"].items():
        median = sorted(seconds)[len(seconds) // 2]
        yield f"| {name} | {median:.1f} | {found['details']['bytes'][name] / 1e6:.0f} |"


def _benches() -> Iterator[str]:
    """What every benchmark took."""
    yield from (
        "",
        "## The benchmarks themselves",
        "",
        "| `python -m benchmarks`, or a test of `make hardening` | seconds | machine |",
        "|---|---|---|",
    )
    for path in sorted(RESULTS.glob("*.json")):
        if not path.stem.startswith("real"):
            found = _result(path.stem)
            yield f"| `{found['bench']}` | {found['seconds']:.0f} | {_machine(found)} |"


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _machine(found: dict[str, Any]) -> str:
    machine = found["environment"]
    return re.sub(r"\s+", " ", f"{machine['cpu']}, {machine['cores']} cores")
