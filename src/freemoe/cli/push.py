from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import print_json, print_line
from freemoe.cli.flags import with_signature

HELP = """Write an artefact of any kind to a repository of the Hugging Face Hub, in one commit.

The base is no part of it. A repository that holds something else is left alone unless --overwrite is given. HF_TOKEN, or what
`hf auth login` kept, must have the right to write.

Example:

\b
  freemoe push experts owner/experts --private
  freemoe generate owner/experts "Q: 3 + 4 ="
"""


@with_signature(
    {
        "folder": (
            Path,
            typer.Argument(
                help="Folder written by freemoe build, demo, convert or trim.",
                autocompletion=completion.complete_artefacts,
            ),
        ),
        "repository": (str, typer.Argument(help="owner/name; made if there is none.")),
        "private": (bool, typer.Option(False, "--private", help="Make a new repository private.")),
        "revision": (str, typer.Option(None, help="Branch to write to, made if there is none; main if absent.")),
        "message": (str, typer.Option(None, help="Of the commit.")),
        "overwrite": (
            bool,
            typer.Option(False, "--overwrite", help="Replace what stands there, also of another kind."),
        ),
        **options.look_options("List the files and their bytes; ask nobody."),
    }
)
def run_command(folder: Path, repository: str, private: bool, dry_run: bool, as_json: bool, **how: Any) -> None:
    """Run ``freemoe push`` with these options."""
    from freemoe.hub.push import push_artefact

    found = push_artefact(folder, repository, private=private or None, dry=dry_run, **how)
    if as_json:
        files = [{"name": name, "bytes": size} for name, size in found["files"].items()]
        return print_json("push-plan" if dry_run else "push", {**found, "files": files})
    for name, size in found["files"].items():
        print_line(f"  {name}  {size:,} bytes")
    print_line(f"{len(found['files'])} files, {found['bytes']:,} bytes, of kind {found['kind']}")
    print_line(
        f"would be written to {found['url']}" if dry_run else f"pushed: {found['url']} (commit {found['commit'][:12]})"
    )
    if found["note"]:
        print_line(f"note: {found['note']}")
