from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from freemoe.cli import options
from freemoe.cli.common import print_json, print_line

HELP = """Run lm-eval's own command with the model `freemoe` known to it: any model, or an artefact under an expert.

Whatever is not listed below goes to lm-eval (see lm_eval --help). Where no --model is named it is ours; its --model_args are
pretrained, expert, artefact, dtype, device (auto, cpu, cuda, cuda:N, split, disk), batch_tokens, max_length and seen.

Example:

\b
  freemoe lm-eval --model_args pretrained=experts,expert=auto --tasks gsm8k
"""
MODEL = "freemoe"
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

WITHOUT_MODEL = ("ls", "validate")
"""lm-eval's commands that score nothing."""


def command_line(arguments: list[str]) -> list[str]:
    """What lm-eval is given: its arguments, with our model where it scores and none is named."""
    if arguments and arguments[0] in WITHOUT_MODEL:
        return arguments
    named = any(a == "--model" or a.startswith("--model=") for a in arguments)
    verb = ["run"] if arguments[:1] == ["run"] else []
    return [*verb, *([] if named else ["--model", MODEL]), *arguments[len(verb) :]]


def run_command(
    context: typer.Context,
    dry_run: Annotated[bool, options.dry_run_option("Print lm-eval's command line; run nothing.")] = False,
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print it as JSON."),
) -> None:
    """Run ``freemoe lm-eval`` with these options."""
    line = command_line(context.args)
    if dry_run:
        print_json("lm-eval-plan", {"arguments": line}) if as_json else print_line(shlex.join(["lm_eval", *line]))
        return
    from freemoe.lm_eval import lm_eval_main as lm_evals_command

    sys.argv = ["lm_eval", *line]
    lm_evals_command()()
