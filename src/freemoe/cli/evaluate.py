from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import CommandOutput, calm_libraries, print_fields
from freemoe.cli.flags import SHARED, SIDE_BY_SIDE, RecipeCommand, flags_of, output_options
from freemoe.core.ledger import openings_text
from freemoe.recipes import EvalRecipe

if TYPE_CHECKING:
    from freemoe.results import EvaluationResult

HELP = """Score an artefact's experts, or a plain model, on the reported split of tasks.

Example:

\b
  freemoe eval experts --domain math=gsm8k --data-root ./data --expert base --expert auto
  freemoe eval ./my-model --domain law=law.jsonl -o scores.json

With -o the result is written as JSON, and beside it a page to read in a browser (scores.html); freemoe report writes that again.

Two experts and their union on the held-out data of both (a&b is the intersection):

\b
  freemoe eval experts -d math=math.jsonl -d code=code.jsonl -e math/0 -e code/1 -e math/0+code/1

A trimmed mixture (see trim) is measured against its base and its plan alone; without a domain, on its own text's test part:

\b
  freemoe eval trimmed --domain math=demo:math
"""


def plan_evaluation(recipe: EvalRecipe) -> dict[str, Any]:
    """How many documents would be scored."""
    from freemoe.core.artifacts import read_manifest
    from freemoe.domain_experts.result import KIND
    from freemoe.evals.evaluation import require_plain
    from freemoe.evals.held_out import read_record, resolve_seed, set_aside
    from freemoe.evals.tasks.domains import load_domains
    from freemoe.hub.fetch import fetch_artefact
    from freemoe.models.checkpoints.loading import load_tokenizer
    from freemoe.recipes.expert_names import AUTO, BASE, ExpertRef
    from freemoe.systems import system_of

    place = fetch_artefact(recipe.artefact)
    record = read_record(place)
    # An expert that there is not is refused as the evaluation would; what can be run elsewhere depends on the base.
    if system_of(place) is None:
        require_plain(recipe)
    elif (manifest := read_manifest(place))["kind"] == KIND:
        known = [described["name"] for described in manifest["experts"]]
        for name in recipe.experts:
            if name not in (BASE, AUTO):
                ExpertRef.parse(name).require_known(known, (BASE, AUTO))
    source = recipe.base or (recipe.artefact if record is None else read_manifest(place)["base_model_name_or_path"])
    loaded = load_domains(resolve_seed(recipe, record), load_tokenizer(source))
    domains = {name: set_aside(data, record)[0] for name, data in loaded.items()}
    experts = list(recipe.experts) if record is not None else ["base"]
    return {
        "artefact": recipe.artefact,
        "base": source,
        "documents": {name: len(data.reported) for name, data in domains.items()},
        "experts": experts,
        "document_scores": len(experts) * sum(len(data.reported) for data in domains.values()),
        "output": recipe.output,
    }


def run_recipe(recipe: EvalRecipe, *, overwrite: bool, resume: bool, shown: CommandOutput) -> None:
    """Score, print a table; there is nothing that could be resumed."""
    del resume
    from freemoe.artefacts import evaluate
    from freemoe.evals.guessing import guessing_text
    from freemoe.report.tables import evaluation_table
    from freemoe.results import EvaluationResult

    result = evaluate(recipe, progress=shown.make_progress(), overwrite=overwrite)
    found = EvaluationResult.model_validate(result)
    notes = [guessing_text(d.name, d.guessing) for d in found.domains if d.guessing]
    notes += openings_text(found.cost.openings)
    where = [f"result: {recipe.output}"] if recipe.output else []
    if shown.summary:
        domains = [{name: value for name, value in d.items() if name != "documents"} for d in result["domains"]]
        result = {**result, "domains": domains}
    lines, verdict = [*cost_lines(found.costs), *notes], [*_verdict_lines(found), *notes, *where]
    shown.print_found("eval", result, lambda: [evaluation_table(found)], lines, verdict)


def cost_lines(costs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each way of running a mixture: experts per token, and parameters."""
    lines = []
    for way, cost in costs.items():
        layers = ", ".join(f"{value:.3g}" for value in cost["act_per_layer"].values())
        lines.append(
            f"{way}: Act {cost['act']:.3f} (per layer {layers}), {cost['active']:,} active of {cost['total']:,} parameters"
        )
    return lines


def _verdict_lines(result: EvaluationResult) -> list[str]:
    """A line per domain: the first row's score, and the others' with their differences to it."""
    from freemoe.report.reading import gain_text

    lines = []
    for domain in result.domains:
        (first, base), *others = domain.rows.items()
        said = [f"{name} {row.score:.2f} ({gain_text(row, domain.unit)})" for name, row in others]
        scores = ", ".join([f"{first} {base.score:.2f}", *said])
        unit = "perplexity" if domain.is_text else "score"
        lines.append(f"{domain.name}: {unit} {scores}, {base.documents} held-out documents")
    return lines


def _own_text(values: Mapping[str, Any]) -> bool:
    """Measure an artefact on its own text, where it has one and no domain is named."""
    from freemoe.hub.fetch import fetch_artefact
    from freemoe.systems import system_of

    if values["domain"] or values["print_recipe_"]:
        return False
    place = fetch_artefact(values["artefact"])
    system = system_of(place)
    if system is None or system.own_text is None:
        return False
    calm_libraries()
    if values["dry_run"]:
        assert system.own_text_plan is not None
        print_fields("eval-text-plan", system.part(system.own_text_plan)(str(place), values["base"]), values["as_json"])
        return True
    shown = output_options(values)
    where = (str(place), values["base"], values["dtype"] or "auto", values["device"] or "auto", values["threads"])
    table, found = system.part(system.own_text)(*where, shown.make_progress())
    losses = ", ".join(f"{name} {row['ce']:.4f}" for name, row in found["rows"].items())
    verdict = [f"own text, loss on {found['tokens']:,} tokens of its test part: {losses}"]
    lines = [*cost_lines(found.get("costs", {})), *openings_text(found.get("cost", {}).get("openings"))]
    shown.print_found("eval-text", found, lambda: [table], lines, verdict)
    return True


COMMAND = RecipeCommand(
    name="eval",
    help=HELP,
    recipe=EvalRecipe,
    arguments={
        "artefact": (
            str,
            typer.Argument(
                help="Folder written by freemoe, a plain model, or owner/name of the hub.",
                autocompletion=completion.complete_artefacts_and_models,
            ),
        ),
        "domain": options.domain_option("NAME=TASK[,TASK]; repeat."),
        "expert": (
            list[str],
            typer.Option(
                [],
                "--expert",
                "-e",
                help="base, auto, a name, or a union a+b; repeat. [base, auto]",
                autocompletion=completion.complete_experts,
            ),
        ),
    },
    flags=flags_of(EvalRecipe, "base", *SHARED, *SIDE_BY_SIDE),
    common="base output data_root limit fewshot chat seed dtype device threads batch_tokens",
    run=run_recipe,
    plan="freemoe.cli.evaluate:plan_evaluation",
    dry_run="units of work",
    example="data.fewshot=2",
    resumes=False,
    instead=_own_text,
)
