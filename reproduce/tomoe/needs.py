"""What ToMoE's own models take, and what stands in for them at the smaller scales."""

from __future__ import annotations

from reproduce.table import Needs

# 10,000 steps of 2,048 tokens, each by the dense model, too, and a trained token counts as three; 20 million for five tasks.
TOKENS = 10_000 * 2048 * 4 + 2e7
DATA = "WikiText-103, Alpaca and CodeAlpaca, and the tasks, from the hub or --data-root"

LLAMA_2_7B = Needs("meta-llama/Llama-2-7b-hf", 6.74e9, TOKENS, DATA)
LLAMA_2_13B = Needs("meta-llama/Llama-2-7b-hf and 13b, the larger", 13.0e9, TOKENS, DATA)
LLAMA_3_8B = Needs("meta-llama/Meta-Llama-3-8B, and others of 7B", 8.03e9, TOKENS, DATA)
QWEN_7B = Needs("Qwen/Qwen2.5-7B", 7.62e9, TOKENS, DATA)
PHI_2 = Needs("microsoft/phi-2", 2.78e9, TOKENS, DATA)

STANDS_IN = {
    "tiny": "the bundled model for every model, its three domains for all tasks (60 documents each, mean), 40 steps of the default "
    "profile for the paper's 10,000",
    "small": "your model for every model; ARC, HellaSwag and MMLU, as the files of PIQA, WinoGrande, BoolQ, SciQ and TruthfulQA are "
    "not in the data folder; 60 steps of the default profile",
}
SAME_DOCUMENTS = (
    "theirs: scores of a trained conversion; ours: the same documents for the dense and the converted model, with the interval of the "
    "difference; perplexity and active weights of ours stand beside"
)
SHOWN = (
    "theirs: a drawing without numbers in the text; ours: the same quantity of our conversion at shares of the depth"
)
