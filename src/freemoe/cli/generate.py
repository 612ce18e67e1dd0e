from __future__ import annotations

from typing import Any

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import calm_libraries, print_json, print_line, print_status
from freemoe.cli.flags import with_signature
from freemoe.core.registry import unknown_name
from freemoe.hub.fetch import require_in_reach

HELP = """Continue a prompt: with the expert that the router picks, or one you name; with a converted, trimmed or plain model.

Example:

\b
  freemoe generate experts "Q: 3 + 4 =" --expert auto
  freemoe generate trimmed "Q: 3 + 4 =" --expert base
"""


@with_signature(
    {
        "artefact": options.ANY_ARTEFACT,
        "prompt": (str, typer.Argument(help="Text to continue.")),
        "expert": (
            str,
            typer.Option(
                "auto",
                help="auto, base, an expert's name (see freemoe inspect), or a union a+b.",
                autocompletion=completion.complete_experts,
            ),
        ),
        "base": (options.Base, None),
        "max_new_tokens": (int, typer.Option(64, min=1, help="Tokens to write at most.")),
        "chat": (
            str,
            typer.Option(
                "auto", help="The prompt as a message, by the chat template: on, off; auto: as the artefact's data was."
            ),
        ),
        "sample": (bool, typer.Option(False, "--sample", help="Sample instead of greedy decoding.")),
        "seed": (int, typer.Option(0, help="Of sampling.")),
        "dtype": (options.Dtype, "auto"),
        "device": (options.Device, "auto"),
        **options.look_options("Say which expert would answer; write nothing."),
    }
)
def run_command(artefact: str, prompt: str, chat: str, dry_run: bool, as_json: bool, **values: Any) -> None:
    """Run ``freemoe generate`` with these options."""
    require_in_reach(artefact)
    calm_libraries()
    import torch

    from freemoe.artefacts import load
    from freemoe.core.artifacts import read_manifest
    from freemoe.systems import system_of
    from freemoe.text.chat import MODES, as_prompt, uses_template

    opened = load(artefact, values["base"], dtype=values["dtype"], device=values["device"])
    if chat not in MODES:
        raise unknown_name("--chat", chat, list(MODES))
    built_so = system_of(artefact) is not None and bool(read_manifest(artefact, check=False).get("chat"))
    if uses_template(opened.tokenizer, chat, built_so):
        prompt = as_prompt(opened.tokenizer, [{"role": "user", "content": prompt}], "the prompt")
    torch.manual_seed(values["seed"])
    wanted = 1 if dry_run else values["max_new_tokens"]
    how = {"expert": values["expert"], "do_sample": values["sample"]}
    text, chosen = opened.generate_text(prompt, max_new_tokens=wanted, **how)
    rejected = chosen in getattr(opened, "rejected", ())
    if as_json:
        print_json("generate", {"expert": chosen, "rejected": rejected, "text": None if dry_run else text})
        return
    note = " (rejected: no reliable gain, so it is the base)" if rejected else ""
    print_status(f"expert: {chosen}{note}")
    if not dry_run:
        print_line(text)
