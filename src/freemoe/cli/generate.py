"""`freemoe generate`."""

from __future__ import annotations

from pathlib import Path

import typer

from freemoe.cli.common import calm_libraries, console, print_json, say

HELP = """Continue a prompt with the expert that the router picks, or one you name.

Example:

\b
  freemoe generate experts "Q: 3 + 4 =" --expert auto
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("generate", help=HELP)
    def command(
        artefact: Path = typer.Argument(help="Folder written by freemoe build or demo."),
        prompt: str = typer.Argument(help="Text to continue."),
        expert: str = typer.Option("auto", help="auto, base, or an expert's name (see freemoe inspect)."),
        base: str = typer.Option(None, help="Base model; the artefact's own if absent."),
        max_new_tokens: int = typer.Option(64, min=1, help="Tokens to write at most."),
        sample: bool = typer.Option(False, "--sample", help="Sample instead of greedy decoding."),
        seed: int = typer.Option(0, help="Of sampling."),
        dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
        device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Say which expert would answer; write nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
    ) -> None:
        calm_libraries()
        import torch

        from freemoe.domain_experts.mixture import FreeMoE

        moe = FreeMoE.from_pretrained(base, artefact, dtype=dtype, device=device)
        torch.manual_seed(seed)
        wanted = 1 if dry_run else max_new_tokens
        text, chosen = moe.generate_text(prompt, expert=expert, max_new_tokens=wanted, do_sample=sample)
        if as_json:
            print_json({"expert": chosen, "text": None if dry_run else text})
            return
        console.print(f"expert: {chosen}", markup=False, highlight=False)
        if not dry_run:
            say(text)
