from __future__ import annotations

import typer

from freemoe.cli.flags import OUTPUT, SIDE_BY_SIDE, TIMING, RecipeCommand, flags_of, model_argument
from freemoe.tomoe.recipe import ConvertRecipe

HELP = """Make a dense model a token-level mixture of experts: the base's own weights, frozen, a part of them per token.

Example, half of the weights per token, on a text of your own:

\b
  freemoe convert ./my-model --text corpus.txt --active 0.5 -o half
  freemoe eval half --domain notes=text:notes.txt

The papers' mix of instructions, code and encyclopedia, from local files:

\b
  freemoe convert ./my-model --mix paper --data-root ./data --active 0.6 --experts 8 --profile paper -o sixty

A rival without training, written as the same kind of model:

\b
  freemoe convert ./my-model --text corpus.txt --method static-activation -o static
"""

FLAGS = flags_of(
    ConvertRecipe,
    "preset revision chat group_by mix data_root",
    OUTPUT,
    "active experts method profile mode rivals steps block batch_tokens rate checkpointing",
    *TIMING,
    "seed dtype device threads",
    *SIDE_BY_SIDE,
)


COMMAND = RecipeCommand(
    name="convert",
    help=HELP,
    recipe=ConvertRecipe,
    arguments={
        "model": model_argument("a dense model, or freemoe-demo"),
        "text": (list[str], typer.Option([], "--text", help="What to learn from: text, or rows of any shape; repeat.")),
    },
    flags=FLAGS,
    common="preset output mix data_root active experts method profile steps seed dtype device workers",
    plan="freemoe.tomoe.cost.dry_run:plan_conversion",
    dry_run="tokens, steps and parameters",
    example="gates.noise=true",
)
