"""Command lines that make recipes. A flag is a field of the recipe: type, help and default stand there and nowhere else."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from freemoe.cli import completion, options
from freemoe.cli.common import (
    CommandOutput,
    Stopped,
    apply_sets,
    calm_libraries,
    print_fields,
    read_domains,
)
from freemoe.cli.options import CODE, GroupedCommand
from freemoe.core.errors import RecipeError
from freemoe.domain_experts.recipe import METRICS, PURIFICATIONS, ROUTERS, SEARCHES
from freemoe.hub.fetch import require_in_reach
from freemoe.recipes import Recipe, dump, recipe_from, set_path
from freemoe.recipes.keywords import path_of
from freemoe.recipes.sections import is_section
from freemoe.systems import SYSTEMS, ArtefactSystem
from freemoe.tomoe.recipe import METHODS


@dataclass(frozen=True)
class RecipeFlag:
    """An option whose name or way of writing is not its field's own."""

    # The field, as ``--set`` has it, where that is not the one that a keyword of the flag's name says; several with blanks
    # between
    path: str = ""
    names: tuple[str, ...] = ()  # How it is written, where ``--name`` is not all
    help: str | None = None  # What it says, where it is written otherwise than the field
    # What the field holds when this was written, where pydantic cannot read it; a value for each of several fields
    read: Callable[[Any], Any] | None = None
    kind: type | None = None  # What is written, where that is not the field's type


Flags = Mapping[str, RecipeFlag]
"""By the name of a flag's parameter."""


def flags_of(recipe: type[Recipe], *groups: str | Flags) -> Flags:
    """Flags in their order: names with spaces between, or flags that are written otherwise than their field is called.

    A flag sets what the keyword of its name does (`recipes.keywords`), unless it says otherwise.
    """
    found: dict[str, RecipeFlag] = {}
    for group in groups:
        found |= {name: RecipeFlag() for name in group.split()} if isinstance(group, str) else group
    return {name: flag if flag.path else replace(flag, path=path_of(recipe, name)) for name, flag in found.items()}


OUTPUT: Flags = {"output": RecipeFlag(names=("--output", "-o"))}

SHARED: tuple[str | Flags, ...] = (
    OUTPUT,
    "data_root task_folder limit fewshot chat group_by overflow",
    {"allow_code_execution": RecipeFlag(names=(CODE,))},
    "samples temperature top_p pass_at seed dtype device threads batch_tokens",
)
"""The flags that build and eval share."""

SIDE_BY_SIDE: tuple[str | Flags, ...] = ({"place": RecipeFlag(names=("--on",))}, "workers unit_seconds")
"""Where the units of a run are done, of every command that has units."""


def _parse_prompts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"--speed is {text!r}; write tokens of prompts: 1024,2048,4096") from None


_SPEED = RecipeFlag(help="Tokens of the prompts to time: 1024,2048,4096. [one block]", read=_parse_prompts, kind=str)
TIMING: tuple[str | Flags, ...] = ({"speed": _SPEED}, "new_tokens rounds")
"""What is timed at the end, of every command that changes how fast a model is."""


@dataclass(frozen=True)
class RecipeCommand:
    """A command that makes a recipe and runs it."""

    name: str
    help: str  # With an example that works
    recipe: type[Recipe]
    # Parameters that are no flags: name -> (type, typer's argument or option). ``domain`` and ``expert`` make the fields
    # ``domains`` and ``experts``, any other one the field of its name.
    arguments: dict[str, tuple[Any, Any]]
    flags: Flags
    common: str  # Names of the flags that ``--help`` shows; ``--help-all`` shows the others too
    plan: str  # ``module:function`` that says what it would do, as plain data whose keys name the units
    dry_run: str  # What ``--dry-run`` prints
    example: str  # Of ``--set``
    # Runs a recipe: ``run(recipe, overwrite=, resume=, shown=)``; without it the system's own pipeline does
    run: Callable[..., Any] | None = None
    resumes: bool = True  # Whether an unfinished run goes on
    # Acts on the parameters' values where no recipe is made of them, and says so
    instead: Callable[[Mapping[str, Any]], bool] = field(default=lambda values: False)

    def read_recipe(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe that a command line says; flags that were not given keep the recipe's defaults."""
        data: dict[str, Any] = {"command": self.name}
        for name in self.arguments:
            if name == "domain":
                data["domains"] = read_domains(values[name])
            elif name != "expert":
                data[name] = values[name]
            elif values[name]:
                data["experts"] = values[name]
        for name, flag in self.flags.items():
            value, paths = values.get(name), flag.path.split()
            if value is None:
                continue
            read = flag.read(value) if flag.read else value
            for path, part in zip(paths, read if len(paths) > 1 else [read], strict=True):
                set_path(data, path, part)
        apply_sets(data, values.get("sets", []))
        return recipe_from(data, "The command line")

    def execute_command(self, values: Mapping[str, Any]) -> None:
        """Print the recipe, or what it would do, or run it."""
        if self.instead(values):
            return
        recipe = self.read_recipe(values)
        if not values["print_recipe_"]:
            # What a recipe's model is: an artefact, for eval.
            require_in_reach(getattr(recipe, "artefact", None) or getattr(recipe, "model", ""))
        self.execute_recipe(recipe, values)

    def execute_recipe(self, recipe: Any, values: Mapping[str, Any]) -> None:
        """Print a recipe, or what it would do, or run it, as the values of `run_options` say; ctrl-C is told with what was kept."""
        if values["print_recipe_"]:
            if values["as_json"]:
                raise RecipeError("--print-recipe prints YAML, and --json asks for a JSON document: give one of them.")
            sys.stdout.write(dump(recipe))
            return
        calm_libraries()
        if values["dry_run"]:
            return print_fields(f"{self.name}-plan", pkgutil.resolve_name(self.plan)(recipe), values["as_json"])
        resume, shown = values.get("resume", False), output_options(values)
        try:
            (self.run or self._run_pipeline)(recipe, overwrite=values["overwrite"], resume=resume, shown=shown)
        except KeyboardInterrupt:
            from freemoe.core.run.folder import interrupted_message

            again = "Stopped; nothing was written. Run the same command to start again."
            raise Stopped(interrupted_message(recipe.output) if self.resumes else again) from None

    def register_command(self, app: typer.Typer) -> None:
        """Add the command to ``app``, with an option for every flag."""
        parameters = {
            **self.arguments,
            **{n: self._make_option(n, f) for n, f in self.flags.items()},
            "sets": (
                list[str],
                typer.Option([], "--set", help=f"Any recipe field: PATH=VALUE, e.g. {self.example}; repeat."),
            ),
            **run_options(self.dry_run, self.resumes),
            "help_all": (options.HelpAll, False),
        }
        grouped: Any = functools.partial(GroupedCommand, common={*self.common.split(), *_ALWAYS_SHOWN})

        @app.command(self.name, help=self.help, cls=grouped)
        @with_signature(parameters)
        def recipe_command(**values: Any) -> None:
            self.execute_command(values)

    def _run_pipeline(self, recipe: Recipe, *, overwrite: bool, resume: bool, shown: CommandOutput) -> None:
        """Run a recipe as its system does, write the report, print what was found."""
        from freemoe.artefacts import write_page
        from freemoe.tomoe.devices import DistributedContext

        [system] = [one for one in map(SYSTEMS.get, SYSTEMS) if one.command == self.name]
        run = system.part(f"pipeline:{self.name}")
        folder = run(recipe, progress=shown.make_progress(), overwrite=overwrite, resume=resume, page=write_page)
        if not DistributedContext.from_environment().rank:  # the first of several processes prints
            shown.print_artefact(self.name, folder)

    def _make_option(self, name: str, flag: RecipeFlag) -> tuple[Any, Any]:
        about = None if flag.kind else recipe_field(self.recipe, flag.path)
        kind = flag.kind or _option_type(about.annotation if about else str)
        names = flag.names
        if kind is bool and not names:
            spelled = name.replace("_", "-")
            names = (f"--{spelled}/--no-{spelled}",) if about and about.default else (f"--{spelled}",)
        told = flag.help or (_help_text(about) if about else "")
        known = NAMED.get(flag.path) or (_literal_choices(about) if about else ())
        return kind, typer.Option(
            None,
            *names,
            help=told,
            autocompletion=completion.complete_names(known) if known else None,
            rich_help_panel=_PANELS.get(flag.path) or _PANELS.get(flag.path.split(".")[0]) or options.METHOD,
        )


def model_argument(what: str) -> tuple[type, Any]:
    """The model that a command begins with."""
    return str, typer.Argument(help=f"Folder or hub id of {what}.", autocompletion=completion.complete_models)


def system_command(system: ArtefactSystem) -> RecipeCommand:
    """The command of a system that has none of its own here: its model, and a flag for every field that is no section."""
    recipe = system.recipe_type
    plain = {name: RecipeFlag() for name, about in recipe.model_fields.items() if not is_section(about.annotation)}
    flags = flags_of(recipe, {n: f for n, f in plain.items() if n not in ("command", "model", "output")}, OUTPUT)

    return RecipeCommand(
        name=system.command,
        help=(recipe.__doc__ or "").partition("\n")[0],
        recipe=recipe,
        arguments={"model": model_argument("the base")},
        flags=flags,
        common=" ".join(flags),
        plan=f"{system.package}.pipeline:plan_{system.command}",
        dry_run="what would be done",
        example="seed=1",
    )


def run_options(dry_run: str, resumes: bool = True) -> dict[str, tuple[Any, Any]]:
    """The options of every command that runs a recipe."""
    return {
        **({"resume": (options.Resume, True)} if resumes else {}),
        "overwrite": (options.Overwrite, False),
        "dry_run": (Annotated[bool, options.dry_run_option(f"Print {dry_run}; do nothing.", options.OUTPUT)], False),
        "print_recipe_": (options.PrintRecipe, False),
        "summary": (options.Summary, False),
        "as_json": (options.Json, False),
        "quiet": (options.Quiet, False),
    }


def with_signature(parameters: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function of keywords the signature that typer reads.

    Parameters are name -> (type, typer's argument or option).
    """

    def sign(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)
                for name, (kind, info) in parameters.items()
            ]
        )
        command.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
        return command

    return sign


def output_options(values: Mapping[str, Any]) -> CommandOutput:
    """How the options of a command ask it to print."""
    return CommandOutput(values["as_json"], values["summary"], values["quiet"])


_PANELS = {
    **dict.fromkeys(("data", "data_root", "mix", "chat", "group_by", "base", "revision"), options.DATA),
    **dict.fromkeys(("search", "subdomains", "evidence"), options.SEARCH),
    **dict.fromkeys(
        ("device", "dtype", "threads", "place", "workers", "unit_seconds", "batch_tokens"), options.COMPUTE
    ),
    **dict.fromkeys(("train.batch_tokens", "train.checkpointing"), options.COMPUTE),
    **dict.fromkeys(("output", "timing"), options.OUTPUT),
}
"""Field or section -> the group of the help in which its flags stand; all others are of the method."""

_ALWAYS_SHOWN = ("overwrite", "dry_run", "print_recipe_", "as_json", "quiet")


def recipe_field(recipe: Any, path: str) -> FieldInfo:
    """The field at a path of a recipe."""
    *sections, last = path.split(".")
    for section in sections:
        recipe = recipe.model_fields[section].annotation
    return recipe.model_fields[last]


def non_none_types(annotation: Any) -> list[Any]:
    """The types that a field may have, None left out."""
    united = get_origin(annotation) in (Union, types.UnionType)
    return [a for a in (get_args(annotation) if united else (annotation,)) if a is not type(None)]


def _option_type(annotation: Any) -> type:
    """What a command line has for a field: a number, a switch, or text that the field reads."""
    kinds = non_none_types(annotation)
    if len(kinds) == 1:
        if get_origin(kinds[0]) is Literal:
            return type(get_args(kinds[0])[0])
        if kinds[0] in (int, float, bool):
            return kinds[0]
    return str


def _literal_choices(about: FieldInfo) -> list[str]:
    """What a field may be, where its type lists that."""
    return [str(c) for a in non_none_types(about.annotation) if get_origin(a) is Literal for c in get_args(a)]


NAMED: Mapping[str, Sequence[str]] = {
    "search.metrics": METRICS,
    "search.method": SEARCHES,
    "saliency.method": PURIFICATIONS,
    "router.level2": ROUTERS,
    "method": METHODS,
    "rivals": METHODS[1:],
    "device": completion.DEVICES,
}
"""Fields that hold names of a registry, and these."""


def _help_text(about: FieldInfo) -> str:
    """A field's help: what it is, what it may be, its default."""
    text = about.description or ""
    choices = _literal_choices(about)
    if choices and not all(choice in text for choice in choices):
        text = f"{text.removesuffix('.')}: {', '.join(choices[:-1])} or {choices[-1]}."
    default = about.get_default()
    if default in (None, (), "") or isinstance(default, bool):
        return text
    parts = default if isinstance(default, tuple) else (default,)
    return f"{text} [{','.join(f'{part:g}' if isinstance(part, float) else str(part) for part in parts)}]"
