"""Build an expert for one domain of the bundled model, look at the evidence, and use it.

python examples/build_expert.py
"""

from __future__ import annotations

import torch

import freemoe
from freemoe.domain_experts.result import BuildResult
from freemoe.results import read_result


def main() -> None:
    """Build, read, switch, merge."""
    recipe = freemoe.BuildRecipe(
        model="freemoe-demo",
        domains={"code": ["demo:code"]},
        subdomains={"by": "none"},
        data={"limit": 400},
        output="experts",
    )
    folder = freemoe.build(recipe)  # an earlier run that was stopped goes on

    # What it found, on documents that the search never saw.
    for row, found in read_result(folder, BuildResult).domains[0].rows.items():
        gain = found.gain
        # The oracle was chosen by these documents, so that an interval would say nothing of it.
        ends = "" if gain.low is None else f" [{gain.low:+.1f}, {gain.high:+.1f}]"
        print(f"{row:8} {found.score:6.2f} %   {gain.mean:+.1f}{ends}")

    moe = freemoe.load(folder)
    prompt = "first add 12 and after that divide by 4: f(x)="
    before = moe.model(moe.tokenizer(prompt, return_tensors="pt").input_ids).logits
    for name in ("base", *moe.experts, "auto"):  # "auto": the router picks, or abstains
        text, chosen = moe.generate_text(prompt, expert=name, max_new_tokens=12)
        print(f"{name} -> {chosen}: {text!r}")

    with moe.expert(moe.experts[0]):
        print("switched in:", moe.active)
    after = moe.model(moe.tokenizer(prompt, return_tensors="pt").input_ids).logits
    print("the base is bit-equal afterwards:", torch.equal(before, after))

    print("plain checkpoint:", moe.merge_and_save(moe.experts[0], "code-model", overwrite=True))


if __name__ == "__main__":
    main()
