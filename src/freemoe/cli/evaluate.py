"""`freemoe eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from rich.table import Table

from freemoe.cli.common import Bars, calm_libraries, out, print_json, read_domains, stopped
from freemoe.cli.flags import SHARED, Command
from freemoe.recipes import EvalRecipe

HELP = """Score an artefact's experts, or a plain model, on the reported split of tasks.

Example:

\b
  freemoe eval experts --domain math=gsm8k --data-root ./data --expert base --expert auto
  freemoe eval ./my-model --domain law=law.jsonl

A trimmed mixture (see trim) is measured against its base and its plan alone; without a domain, on its own text's test part:

\b
  freemoe eval trimmed --domain math=demo:math
"""


def print_plan(recipe: EvalRecipe, as_json: bool) -> None:
    """Print how many documents would be scored."""
    calm_libraries()
    from freemoe.evals.held_out import read_record, seeded, set_aside
    from freemoe.evals.tasks.domains import load_domains
    from freemoe.models.checkpoints.loading import load_tokenizer

    source = recipe.base or _base_name(recipe.artefact)
    record = read_record(recipe.artefact)
    loaded = load_domains(seeded(recipe, record), load_tokenizer(source))
    domains = {name: set_aside(data, record)[0] for name, data in loaded.items()}
    plan = {n: f"{len(d.reported)} documents x {len(recipe.experts)} experts" for n, d in domains.items()}
    if as_json:
        print_json(plan)
    for name, line in {} if as_json else plan.items():
        out.print(f"{name}: {line}", markup=False, highlight=False)


def run_recipe(recipe: EvalRecipe, *, overwrite: bool, resume: bool, as_json: bool, quiet: bool) -> None:
    """Score, print a table; there is nothing that could be resumed."""
    del resume
    calm_libraries()
    from freemoe.domain_experts.prove.card import gain_text
    from freemoe.systems import evaluate

    try:
        result = evaluate(recipe, progress=Bars(quiet or as_json), overwrite=overwrite)
    except KeyboardInterrupt:
        raise stopped("Stopped; nothing was written. Run the same command to start again.") from None
    if as_json:
        print_json(result)
        return
    table = Table("domain", "expert", "score", "difference to the base [95 %]", "documents", "set aside", box=None)
    for domain in result["domains"]:
        aside = str(domain["set_aside"]["documents"])
        for number, (expert, row) in enumerate(domain["rows"].items()):
            gain = gain_text(row, domain["unit"]) if number else ""
            table.add_row(domain["name"], expert, f"{row['score']:.2f}", gain, str(row["documents"]), aside)
    out.print(table)


def _base_name(artefact: str) -> str:
    from pathlib import Path

    from freemoe.core.artifacts import MANIFEST, read_manifest

    if (Path(artefact) / MANIFEST).is_file():
        return read_manifest(artefact)["base_model_name_or_path"]
    return artefact


def _begin(values: Mapping[str, Any]) -> dict[str, Any]:
    data = {"artefact": values["artefact"], "domains": read_domains(values["domain"])}
    return {**data, "experts": tuple(values["expert"])} if values["expert"] else data


def _own_text(values: Mapping[str, Any]) -> bool:
    """Measure an artefact on its own text, where it has one and no domain is named."""
    from freemoe.systems import system_of

    system = None if values["domain"] or values["dry_run"] or values["print_recipe_"] else system_of(values["artefact"])
    if system is None or system.own_text is None:
        return False
    calm_libraries()
    bars = Bars(values["quiet"] or values["as_json"])
    where = (
        values["artefact"],
        values["base"],
        values["dtype"] or "auto",
        values["device"] or "auto",
        values["threads"],
    )
    table, found = system.own_text(*where, bars)
    if values["as_json"]:
        print_json(found)
    else:
        out.print(table)
    return True


COMMAND = Command(
    name="eval",
    help=HELP,
    recipe=EvalRecipe,
    arguments={
        "artefact": (str, typer.Argument(help="Folder written by freemoe build, or a plain model.")),
        "domain": (list[str], typer.Option([], "--domain", "-d", help="NAME=TASK[,TASK]; repeat.")),
        "expert": (
            list[str],
            typer.Option([], "--expert", "-e", help="base, auto, or a name; repeat. [base, auto]"),
        ),
    },
    flags={"base": "base", **SHARED},
    begin=_begin,
    run=run_recipe,
    plan=print_plan,
    dry_run="units of work",
    example="data.fewshot=2",
    resumes=False,
    instead=_own_text,
)
