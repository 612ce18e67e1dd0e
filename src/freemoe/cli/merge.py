from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import calm_libraries, print_fields, print_json, print_line
from freemoe.cli.flags import with_signature

HELP = """Write one expert as a plain model folder that needs no freemoe, and as a GGUF file where the base was one.

Several experts are combined with --op; FOLDER:NAME is an expert of another artefact of the same base. What a combination gains
is not known until it is scored (freemoe eval OUT -e 'a+b').

Example:

\b
  freemoe merge experts math/0 -o math-model

What either of two experts has off, off:

\b
  freemoe merge experts math/0 code/1 --op union -o both-model

From a GGUF file, and back to one:

\b
  freemoe build model.gguf --domain notes=text:notes.txt -o experts
  freemoe merge experts notes/all -o notes-model --gguf q8_0

An expert of whole units (build --unit), cut out: a smaller and faster model of the same class:

\b
  freemoe merge experts wiki/all -o wiki-small --shrink
"""


@with_signature(
    {
        "artefact": (
            str,
            typer.Argument(
                help="Folder written by freemoe build or demo, or owner/name of the hub.",
                autocompletion=completion.complete_artefacts,
            ),
        ),
        "expert": (
            list[str],
            typer.Argument(
                help="An expert's name (see freemoe inspect), or base; several with --op.",
                autocompletion=completion.complete_experts,
            ),
        ),
        "output": (Path, typer.Option(Path("freemoe-merged"), "--output", "-o", help="Folder to write.")),
        "op": (
            str,
            typer.Option(
                None,
                help="How several experts are combined: union or intersection.",
                autocompletion=completion.complete_names(("union", "intersection")),
            ),
        ),
        "gguf": (
            str,
            typer.Option(None, help="Also write model-TYPE.gguf into it: f32, f16 or q8_0; needs a GGUF base."),
        ),
        "shrink": (bool, typer.Option(False, "--shrink", help="Cut the expert's units out: a smaller model.")),
        "pad": (
            bool,
            typer.Option(False, "--pad", help="With --shrink: fill layers up to the largest (layout --free)."),
        ),
        "base": (options.Base, None),
        "dtype": (options.Dtype, "auto"),
        "device": (options.Device, "cpu"),
        "allow_rejected": (
            bool,
            typer.Option(
                False, "--allow-rejected", help="Write the base for an expert that the significance test rejected."
            ),
        ),
        "overwrite": (options.Overwrite, False),
        **options.look_options("Check the names and say what would be written."),
    }
)
def run_command(artefact: str, expert: list[str], output: Path, dry_run: bool, as_json: bool, **how: Any) -> None:
    """Run ``freemoe merge`` with these options."""
    calm_libraries()
    from freemoe.artefacts import merge

    merged = merge(artefact, expert, output, dry=dry_run, **how)
    if dry_run:
        return print_fields("merge-plan", merged, as_json)
    if as_json:
        return print_json("merge", merged)
    if merged["shrink"]:
        print_line(f"{merged['expert']}: its units are cut out; the logits are those of the expert on the whole base")
    else:
        print_line(f"{merged['expert']}: {merged['weights_off']:,} weights are zero, all others the base's")
    print_line(f"model: {merged['folder']}")
    if merged["gguf"]:
        print_line(f"gguf:  {merged['gguf']}  {merged['bytes'][Path(merged['gguf']).name]:,} bytes")
