from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import calm_libraries, print_fields
from freemoe.core.errors import RecipeError

HELP = """Show what an artefact holds, and check that it is whole; with --base, that it fits that base.

Of a model, show its family, and with --super-weights the single weights that must not be switched off.

Example:

\b
  freemoe inspect experts
  freemoe inspect experts --base ./my-model
  freemoe inspect ./my-model --super-weights
  freemoe inspect owner/experts
"""


def run_command(
    artefact: str = typer.Argument(
        help="Folder written by freemoe, a model folder, a GGUF, or owner/name of the hub.",
        autocompletion=completion.complete_artefacts_and_models,
    ),
    base: str = typer.Option(None, help="Base model to check the fingerprint against."),
    super_weights: bool = typer.Option(
        False, "--super-weights", help="Also measure which single weights of a model disturb its loss most."
    ),
    text: Path = typer.Option(None, help="Text file to measure them on instead of a short built-in passage."),
    dry_run: Annotated[bool, options.dry_run_option("Accepted everywhere; inspect only ever reads.")] = False,
    as_json: options.Json = False,
) -> None:
    """Run ``freemoe inspect`` with these options."""
    calm_libraries()
    from freemoe.assets import BUNDLED, BUNDLED_MOE
    from freemoe.domain_experts.artefact import inspect_model
    from freemoe.hub.fetch import fetch_artefact, is_repository
    from freemoe.models.checkpoints.gguf_header import is_gguf
    from freemoe.systems import SYSTEMS, system_of

    if text is not None and not super_weights:
        raise RecipeError("--text is what super weights are measured on; it needs --super-weights.")
    place = fetch_artefact(artefact)
    system = system_of(place)
    model = system is None and (
        is_gguf(artefact)
        or (place / "config.json").is_file()
        or artefact in (BUNDLED, BUNDLED_MOE)
        or is_repository(artefact)
    )
    if super_weights and not model:
        raise RecipeError(
            f"--super-weights measures the weights of a model, and {artefact!r} is none. Give a model folder, a GGUF "
            f"file or {BUNDLED}; of an artefact, the base that it was made from."
        )
    if model:
        found = inspect_model(artefact, super_weights=super_weights, text=text)
    else:
        # What is neither is told by the first row: it says what it missed.
        found = (system or SYSTEMS.get(SYSTEMS.names()[0])).part("artefact:inspect_artefact")(place, base)
    print_fields("inspect", found, as_json)
