from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from freemoe.cli import options
from freemoe.cli.common import calm_libraries, print_json, print_line, print_table
from freemoe.cli.flags import with_signature
from freemoe.hub.fetch import require_in_reach

HELP = """Time an artefact on this machine: each expert beside the base, switching, a batch of several experts at once, memory.

Example:

\b
  freemoe bench experts
  freemoe bench trimmed --prompt-tokens 512
  freemoe bench converted --against ./dense-model

Sides take turns, and ratios have an interval; a machine that does other things widens it. What freemoe itself promises is
measured from a clone of it: python -m benchmarks.
"""


@with_signature(
    {
        "artefact": options.ANY_ARTEFACT,
        "base": (options.Base, None),
        "against": (str, typer.Option(None, help="Another model or artefact to hold it against.")),
        "prompt_tokens": (int, typer.Option(128, min=1, help="Tokens of the prompt.")),
        "new_tokens": (int, typer.Option(32, min=3, help="Tokens of the answer.")),
        "batch": (int, typer.Option(4, min=2, help="Sequences of the batch of several experts.")),
        "rounds": (int, typer.Option(5, min=1, help="Times each side is timed.")),
        "experts": (int, typer.Option(3, min=1, help="Of so many experts each is timed.")),
        "dtype": (options.Dtype, "auto"),
        "device": (options.Device, "auto"),
        "threads": (options.Threads, None),
        **options.look_options("Say what would be timed; time nothing."),
    }
)
def run_command(
    artefact: str, base: str | None, against: str | None, dry_run: bool, as_json: bool, **values: Any
) -> None:
    """Run ``freemoe bench`` with these options."""
    require_in_reach(artefact)
    calm_libraries()
    from freemoe.artefacts import load
    from freemoe.core.environment import use_threads
    from freemoe.evals.bench import BenchSizes, benchmark_artifact

    sizes = BenchSizes(*(values[name] for name in ("prompt_tokens", "new_tokens", "batch", "rounds")))
    if dry_run and as_json:
        return print_json("bench-plan", {"artefact": artefact, "against": against, "sizes": vars(sizes)})
    if dry_run:
        return print_line(
            f"{artefact}{f' beside {against}' if against else ''}: prompts of {sizes.prompt} tokens, answers of {sizes.new}, "
            f"batches of {sizes.batch}, {sizes.rounds} rounds"
        )
    use_threads(values["threads"])
    how = {"dtype": values["dtype"], "device": values["device"]}
    other = None if against is None else load(against, **how)
    found = benchmark_artifact(load(artefact, base, **how), sizes, other, values["experts"])
    return print_json("bench", found) if as_json else _print_timings(found)


def _print_timings(timings: dict[str, Any]) -> None:
    sizes = timings["sizes"]
    title = f"One request: {sizes['prompt']} tokens of prompt, {sizes['new']} new ones, {sizes['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    first = next(iter(timings["requests"]))
    ratio = f"times as fast as {first}"
    for column in ("", "first token, ms", ratio, "tokens per second", ratio):
        table.add_column(column)
    for name, parts in timings["requests"].items():
        start, further = parts["first_token"], parts["further_tokens"]
        table.add_row(
            name,
            f"{1000 * start['seconds']:.1f}",
            _format_ratio(start["times_as_fast"]) if name != first else "",
            f"{1 / further['seconds']:.1f}",
            _format_ratio(further["times_as_fast"]) if name != first else "",
        )
    print_table(table)
    if "switch" in timings:
        rates = timings["batch"]["tokens_per_second"]
        print_line(f"switching to an expert that was used before: {1000 * timings['switch']['seconds']:.2f} ms")
        print_line(
            f"{sizes['batch']} sequences at once: {rates['base']:.1f} tokens per second under the base, {rates['mixed']:.1f} under "
            f"{len(set(timings['batch']['experts']))} experts ({_format_ratio(timings['batch']['times_as_fast'])} as fast)"
        )
    memory = timings["memory"]
    print_line(
        f"weights {memory['weights_bytes'] / 1e6:,.1f} MB; the process held {memory['peak_bytes'] / 1e6:,.1f} MB at the most"
    )


def _format_ratio(ratio: dict[str, float | None]) -> str:
    ends = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{ratio['mean']:.2f}x{ends}"
