"""What page, card and terminal say of a converted model: verdict, table and lines; all read the result, nothing else."""

from __future__ import annotations

from freemoe.core import neutral
from freemoe.core.numbers import format_percent
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.evals.speed import speed_lines
from freemoe.evals.verdict import GainVerdict, interval_sign, judge_against_model, perplexity_against, ratio_text
from freemoe.hub.cards import HERE, CardMetric, base_shown, card_header, card_notes, loading_example, markdown_table
from freemoe.tomoe.result import ConvertResult

_FAR = 0.05
"""From the share that was asked for, of the last training step's masks: then the page says so."""

NAMES = {
    "dense": "dense model",
    "converted": "converted",
    "static-magnitude": "static pruning by magnitude",
    "static-activation": "static pruning by activation x weight",
    "activation-split": "activation-statistics split",
}


def score_rows(result: ConvertResult) -> list[tuple[str, float, float, float]]:
    """Name, active share, perplexity and next-token accuracy of everything that was scored on test text."""
    length = result.blocks.length
    found = []
    for name, score in result.scores.items():
        if name == "dense":
            active = 1.0
        elif name == "converted":
            active = result.parameters["active_share"]
        else:
            active = result.rivals[name]["active"]
        shown = NAMES.get(name, name)
        if name == "converted" and result.recipe["method"] != "tomoe":
            shown = f"converted, {NAMES.get(result.recipe['method'], result.recipe['method'])}"
        found.append((shown, active, score[f"perplexity@{length}"], score[f"next_token_accuracy@{length}"]))
    return found


def score_table(result: ConvertResult) -> tuple[list[str], list[list[str]]]:
    """The scores on test text for people: header and rows."""
    header = ["on test text", "active", f"perplexity@{result.blocks.length}", "next-token accuracy"]
    return header, [
        [name, format_percent(active), f"{p:.3f}", f"{right:.2%}"] for name, active, p, right in score_rows(result)
    ]


def verdict(result: ConvertResult) -> GainVerdict:
    """What the converted model costs and gives against the dense one, and whether any rival of its size is as good."""
    parameters, rivals = result.parameters, [n for n in result.scores if n not in ("dense", "converted")]
    ours, groups = result.scores["converted"], result.blocks.test_groups
    against = {
        name: perplexity_against(ours["nll"], result.scores[name]["nll"], ours["tokens"], groups)
        for name in ("dense", *rivals)
    }
    then = "No rival at this share was scored."
    if rivals:
        best = max(rivals, key=lambda name: against[name]["mean"])
        said = {-1: "it is the best", 0: "it is as good as the best", 1: "it is not the best"}[
            interval_sign(against[best])
        ]
        then = (
            f"Among {len(rivals)} rivals at this share {said}: {ratio_text(against[best], 3)} the perplexity of "
            f"{NAMES.get(best, best)}, the best rival."
        )
    missed = result.missed_budget
    asked = (
        f"{format_percent(missed.asked)} active weights were asked for, and a token uses {format_percent(missed.got)}."
        if missed
        else ""
    )
    share = f"{format_percent(parameters['active_share_at_run_time'])} of the decoder's weights"
    return judge_against_model(against["dense"], share, result.speed and result.speed.model_dump(), then, asked)


def headlines(result: ConvertResult) -> list[str]:
    """The verdict, what is active, how fast it is, and that the dense model only guesses, if it does."""
    parameters = result.parameters
    guess = guessing_text("the test text", result.guessing)
    return [
        verdict(result).words,
        f"active weights of the decoder's linears: {format_percent(parameters['active_share'])} nominal, "
        f"{format_percent(parameters['active_share_at_run_time'])} at run time with routers and gates; "
        f"{format_percent(parameters['active_share_with_embeddings'])} with embeddings",
        *missed_text(result),
        *speed_lines(result.speed and result.speed.model_dump()),
        *([guess] if guess else []),
    ]


def missed_text(result: ConvertResult) -> list[str]:
    """A loud line where a token uses another share of the weights than was asked for, or training was far from it."""
    missed, gates, asked = result.missed_budget, result.recipe["gates"], result.recipe["active"]
    ended = result.history["rows"][-1][result.history["columns"].index("active")] if result.history["rows"] else asked
    if missed is None and gates.get("export") == "share" and abs(ended - asked) > _FAR:
        return [
            f"BUDGET NOT REACHED IN TRAINING: masks of the last step keep {format_percent(ended)} of the weights, and the export moved "
            f"the threshold to {format_percent(asked)}. Give more steps, by --steps."
        ]
    if missed is None:
        return []
    if gates["budget"] == "loss":
        advice = (
            "Thresholds (gates.budget: loss) come down to a budget over thousands of steps: give more, by --steps, or let every "
            "step keep it: --profile default."
        )
    else:
        advice = "Every layer keeps one unit of each kind at least: ask for more, by --active."
    return [
        f"BUDGET MISSED: {format_percent(missed.asked)} active weights were asked for, and a token uses {format_percent(missed.got)}. "
        + advice
    ]


def model_card(result: ConvertResult) -> str:
    """README.md of the folder in the Hub's format."""
    base, recipe, parameters = result.base.name, result.recipe, result.parameters
    length = result.blocks.length
    title = f"{base_shown(base)} as a token-level mixture of experts"
    score = result.scores["converted"]
    measured = [
        CardMetric("held-out text", "perplexity", score[f"perplexity@{length}"], f"perplexity@{length}"),
        CardMetric("held-out text", "accuracy", 100 * score[f"next_token_accuracy@{length}"], "next-token accuracy, %"),
    ]
    about = (
        f"Made by `freemoe convert` (method {recipe['method']}, profile {recipe['profile']}): every token uses "
        f"{format_percent(parameters['active_share'])} of the weights of the decoder's linears, and no weight was changed "
        f"(base fingerprint `{result.base.fingerprint[:16]}`)."
    )
    tags = ["mixture-of-experts", "frozen-base", "custom_code"]
    lines = [
        *card_header(base, title, "finetune", tags, about, measured, [str(recipe.get("text"))]),
        *(line for said in headlines(result) for line in (neutral.escape_markdown(said), "")),
        *loading_example(None, "model", 'text, way = model.generate_text("...")'),
        f'Without freemoe: `AutoModelForCausalLM.from_pretrained("{HERE}", trust_remote_code=True)`, and of the tokenizer, which '
        f'needs no code, `AutoTokenizer.from_pretrained("{HERE}", trust_remote_code=False)`.',
        "",
        *card_notes(base, result),
        "## On held-out text",
        "",
        *markdown_table(*score_table(result)),
        "",
        f"The text was divided by content: {result.blocks.train:,} tokens trained, "
        f"{result.blocks.held_out:,} settled what training left open, {result.blocks.test:,} are reported. "
        "Rivals are not trained; they see the same text.",
        "",
        f"At run time {format_percent(parameters['active_share_at_run_time'])} of those weights are read for a token, routers and gates "
        "included: value dimensions that a token masks are still computed. Load with another engine only after "
        "comparing logits.",
        "",
        record_text(result.seen),
        "",
    ]
    return "\n".join(lines)
