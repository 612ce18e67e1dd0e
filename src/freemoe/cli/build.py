from __future__ import annotations

from freemoe.cli import options
from freemoe.cli.common import CommandOutput, parse_numbers
from freemoe.cli.flags import SHARED, SIDE_BY_SIDE, RecipeCommand, RecipeFlag, flags_of, model_argument
from freemoe.core.errors import RecipeError
from freemoe.domain_experts.recipe import BuildRecipe

HELP = """Find, prove and write the domain experts of a base model.

Example, with data of your own (questions, prompts, instructions, conversations or text; docs/data.md):

\b
  freemoe build ./my-model --domain law=law.jsonl --domain help=chats.parquet --domain notes=notes.txt -o experts

Example, with benchmarks from local files:

\b
  freemoe build ./my-model --domain math=gsm8k,mathqa --domain general=mmlu --data-root ./data --limit 200 -o experts

A smaller model: a fifth of the MLP's neurons off, and the curve on the way there:

\b
  freemoe build ./my-model --domain wiki=text:wiki.txt --unit neuron --off 0.1,0.2 -o experts

The papers' protocol (MoDE Table 3, 5 % bands over their range):

\b
  freemoe build ./my-model --domain math=gsm8k --metric wanda --ratio 0.05 --theta 0:0.5:0.05 \\
    --search exhaustive --select argmax
"""


def _parse_counts(text: str) -> int | dict[str, int]:
    try:
        if "=" not in text:
            return int(text)
        return {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise RecipeError(f"--subdomains is {text!r}; write a number, or one per domain: math=8,code=3") from None


def run_recipe(recipe: BuildRecipe, *, overwrite: bool, resume: bool, shown: CommandOutput) -> None:
    """Run a build, write its report, print what was found."""
    from freemoe.artefacts import write_page
    from freemoe.domain_experts.pipeline import build
    from freemoe.domain_experts.prove.card import headlines
    from freemoe.domain_experts.report import summary_table

    folder = build(recipe, progress=shown.make_progress(), overwrite=overwrite, resume=resume, page=write_page)
    from freemoe.domain_experts.result import BuildResult
    from freemoe.results import read_result

    result = read_result(folder, BuildResult)
    shown.print_result("build", folder, result.notes + headlines(result), lambda: [summary_table(result)])


FLAGS = flags_of(
    BuildRecipe,
    "preset profile",
    *SHARED,
    "by",
    {"subdomains": RecipeFlag(help="Clusters: a number, or math=8,code=3. [1 per 40 documents]", read=_parse_counts)},
    "min_size metric p ratio",
    {
        "theta": RecipeFlag(
            "bands.start bands.end bands.step",
            help="Bands from START:END:STEP, ascending importance. [0:1:0.1]",
            read=lambda text: parse_numbers(text, "--theta", 3),
            kind=str,
        )
    },
    "scope sublayers",
    {
        "layers": RecipeFlag(
            help="Decoder layers FIRST:LAST (last not included). [all]",
            read=lambda text: parse_numbers(text, "--layers", 2, int),
        )
    },
    "patch search objective select alpha purify step budget patience unit off",
    {
        "even": RecipeFlag(
            "units.layout",
            ("--even/--free",),
            "As many units off in every layer, or freely. [even]",
            lambda even: "even" if even else "free",
            bool,
        )
    },
    "level2 controls oracle",
    *SIDE_BY_SIDE,
    "revision",
)

COMMAND = RecipeCommand(
    name="build",
    help=HELP,
    recipe=BuildRecipe,
    arguments={
        "model": model_argument("the base model, or freemoe-demo"),
        "domain": options.domain_option("NAME=TASK[,TASK]; repeat. See freemoe ls tasks."),
    },
    flags=FLAGS,
    common="preset output data_root limit seed dtype device metric ratio purify unit off controls workers",
    run=run_recipe,
    plan="freemoe.domain_experts.cost.dry_run:plan_build",
    dry_run="units of work, memory and time",
    example="search.alpha=0.1",
)
