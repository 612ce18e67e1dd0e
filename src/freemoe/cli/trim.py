from __future__ import annotations

import typer

from freemoe.cli.common import CommandOutput
from freemoe.cli.flags import OUTPUT, SIDE_BY_SIDE, TIMING, RecipeCommand, RecipeFlag, flags_of, model_argument
from freemoe.core.errors import RecipeError
from freemoe.hookmoe.recipe import TrimRecipe

HELP = """Run fewer experts of a mixture model, and train small hooks that win back what that costs (HookMoE).

Example, with the bundled tiny mixture:

\b
  freemoe trim freemoe-demo-moe --text demo: --act 1.0 --block 128 --steps 300 -o trimmed

Example, with a model and a text of your own:

\b
  freemoe trim ./my-mixture --text notes.jsonl --act 1.5 -o trimmed

Plans and rules beside each other, and requests of several lengths timed:

\b
  freemoe trim ./my-mixture --text notes.jsonl --plan uniform:1 --hooks none --compare "sweep:4 top_p:0.6 naee" -o sweep
  freemoe trim ./my-mixture --text notes.jsonl --act 1.5 --speed 1024,2048,4096 --new-tokens 256 --rounds 10 -o trimmed

A plan by name (two layers at k = 2, the others at 1), or the paper's search:

\b
  freemoe trim ./my-mixture --text notes.jsonl --plan tlnle:2,2 -o trimmed
  freemoe trim ./my-mixture --text notes.jsonl --search two_stage --hooks one --position pre --loss lm -o trimmed
"""


def _parse_hook_layers(text: str) -> str | list[int]:
    """Read ``all``, ``one``, ``none`` or ``0,3``."""
    if text in ("all", "one", "none"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"--hooks is {text!r}; write all, one, none, or layer numbers: 0,3") from None


FLAGS = flags_of(
    TrimRecipe,
    "preset profile",
    OUTPUT,
    "act plan search score tolerance rescale",
    {
        "compare": RecipeFlag(
            help="Plans and rules per token to measure too, without hooks: 'uniform:1 sweep:4 top_p:0.6 rel_threshold:0.5,0.2 naee'.",
            read=str.split,
            kind=str,
        ),
        "hooks": RecipeFlag(
            help="all reduced layers, one, none, or layer numbers: 0,3. [all]", read=_parse_hook_layers
        ),
    },
    "units scope position start loss steps rate block limit control",
    *TIMING,
    "seed dtype device threads",
    *SIDE_BY_SIDE,
    "revision chat group_by",
)


def run_recipe(recipe: TrimRecipe, *, overwrite: bool, resume: bool, shown: CommandOutput) -> None:
    """Run a trim, draw its Pareto list, print what was found."""
    from freemoe.hookmoe.pipeline import trim
    from freemoe.hookmoe.plans.plan_figures import PLANS
    from freemoe.hookmoe.report import write_pages

    folder = trim(recipe, progress=shown.make_progress(), overwrite=overwrite, resume=resume, page=write_pages)
    picture = folder / PLANS
    shown.print_artefact("trim", folder, plans=picture if picture.exists() else None)


COMMAND = RecipeCommand(
    name="trim",
    help=HELP,
    recipe=TrimRecipe,
    arguments={
        "model": model_argument("the mixture, or freemoe-demo-moe"),
        "text": (str, typer.Option(..., "--text", "-t", help="Text file (.txt, .jsonl, .json), or demo: .")),
    },
    flags=FLAGS,
    common="preset output act plan search hooks units steps block limit seed dtype device workers",
    run=run_recipe,
    plan="freemoe.hookmoe.dry_run:plan_trim",
    dry_run="units of work and sizes",
    example="plan.best=4",
)
