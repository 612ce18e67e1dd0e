"""MoDE's tables: the paper's numbers, and the recipes that measure ours."""

from __future__ import annotations

from freemoe.papers.mode.work import BUILDS
from freemoe.papers.table import Needs, Row, Table

ORACLE = (
    "theirs: the best of ten bands per cluster, chosen on the test split; ours: chosen on the reference split, reported on "
    "test; theirs as a protocol: ours under oracle"
)
BUNDLED = {
    "tiny": "the bundled model and tasks of the same kind (general for MMLU, math for GSM8K and MathQA, code for MBPP and "
    "HumanEval), 120 documents, a quarter of the subdomains",
    "small": "a model of 135M parameters, 200 documents per task and split",
}
LLAMA = "meta-llama/Llama-2-7b-chat-hf"
SEVEN_B = 6.74e9
MMLU_TOKENS = 14_042 * 750 * 11 + 1_531 * 750 * 11
"""Test and validation questions at five shots, under the base and ten bands."""

RATIOS = {"01": 47.75, "03": 47.83, "05": 47.79, "10": 47.83, "20": 45.33}

TABLES: tuple[Table, ...] = (
    Table(
        name="mode/table03",
        title="width of a band: share of each row's weights that is switched off, on MMLU",
        columns={"mmlu": " %"},
        rows=(
            Row("base", {"mmlu": 45.81}, "mode/table03-ratio-10", pick="base"),
            *(
                Row(f"{int(name)} %", {"mmlu": score}, f"mode/table03-ratio-{name}", pick="expert")
                for name, score in RATIOS.items()
            ),
        ),
        way=BUILDS,
        protocol=ORACLE,
        approximated=BUNDLED,
        needs=Needs(LLAMA, SEVEN_B, MMLU_TOKENS),
    ),
)
