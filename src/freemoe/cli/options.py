"""Options that several commands take, and help in groups: the usual options first, all of them with ``--help-all``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from freemoe.cli import completion
from freemoe.core.errors import RecipeError

CODE = "--allow-code-execution"
DATA, SEARCH, METHOD, COMPUTE, OUTPUT = "Data", "Search", "Method", "Compute", "Output"

ANY_ARTEFACT: tuple[type, Any] = (
    str,
    typer.Argument(
        help="Folder written by freemoe, a model, or owner/name of the hub.",
        autocompletion=completion.complete_artefacts_and_models,
    ),
)
Base = Annotated[str | None, typer.Option(help="Base model; the artefact's own if absent.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16.", autocompletion=completion.complete_names(completion.DTYPES)
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, split, disk or limits.",
        autocompletion=completion.complete_names(completion.DEVICES),
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", rich_help_panel=COMPUTE)]
Resume = Annotated[bool, typer.Option(help="Go on with an unfinished run of the same recipe.", rich_help_panel=OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a finished output that stands there.", rich_help_panel=OUTPUT)
]
PrintRecipe = Annotated[
    bool,
    typer.Option(
        "--print-recipe", help="Print the YAML for freemoe run, with all defaults; do nothing.", rich_help_panel=OUTPUT
    ),
]
Summary = Annotated[
    bool,
    typer.Option(
        "--summary", help="Print the verdict and the artefact's path only; no tables.", rich_help_panel=OUTPUT
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document (freemoe schema).", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.", rich_help_panel=OUTPUT)]


_GROUPS = ("Arguments", "Options", DATA, SEARCH, METHOD, COMPUTE, OUTPUT)
_WHOLE = "freemoe.help_all"


def _print_whole_help(context: typer.Context, wanted: bool) -> None:
    """Print the help with every option, and end."""
    if wanted:
        context.meta[_WHOLE] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_print_whole_help, help="Show every option and exit.")
]


def domain_option(text: str) -> tuple[Any, Any]:
    """The option ``--domain NAME=TASK``, with a command's help text."""
    return list[str], typer.Option([], "--domain", "-d", help=text, autocompletion=completion.complete_domains)


def dry_run_option(text: str, panel: str | None = None) -> Any:
    """``--dry-run``, and what it does for a command."""
    return typer.Option("--dry-run", help=text, rich_help_panel=panel)


def look_options(text: str) -> dict[str, tuple[Any, Any]]:
    """``--dry-run``, and what it does for a command, and ``--json``."""
    return {"dry_run": (Annotated[bool, dry_run_option(text)], False), "as_json": (Json, False)}


def allowed_code(written: str | None) -> bool | Literal["unsafe"]:
    """What ``--allow-code-execution`` says, where no recipe reads it."""
    if written not in (None, "true", "unsafe"):
        raise RecipeError(f"{CODE}={written}: it stands alone, or is {CODE}=unsafe.")
    return "unsafe" if written == "unsafe" else written == "true"


class GroupedCommand(TyperCommand):
    """A command whose help has its options in groups; its ``--allow-code-execution`` may stand alone, or be ``=unsafe``.

    ``common``: parameters that ``--help`` shows; the others stand in ``--help-all``. None: all.
    """

    def __init__(self, *args: Any, common: Collection[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.common = common

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write out what ``--allow-code-execution`` alone means."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [f"{CODE}=true" if a == CODE else a for a in args[:end]] + args[end:])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in their groups, and how many were left out."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS}
        left_out = 0
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            panel = getattr(parameter, "rich_help_panel", None)
            if shown is None:
                continue
            if self.common is not None and panel and not ctx.meta.get(_WHOLE) and parameter.name not in self.common:
                left_out += 1
                continue
            title = "Arguments" if parameter.param_type_name == "argument" else panel or "Options"
            groups[title].append(shown)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more options: {ctx.command_path} --help-all")
