"""A tiny world that is built once: a base in a folder, tasks and text in files, and their artefacts."""

import json
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from freemoe.core.run.progress import CollectingProgress
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.recipes import recipe_from
from tests.rows import write_rows as write_jsonl
from tests.tiny import tiny_model, tiny_tokenizer


def choice_rows(count=64, seed=0):
    rng = random.Random(seed)
    words = ["court", "judge", "claim", "treaty", "clause", "party", "appeal", "statute"]
    rows = []
    for i in range(count):
        question = " ".join(rng.sample(words, 3)) + f" {i}?"
        rows.append({"question": question, "choices": ["yes", "not", "may"], "answer": rng.randrange(3)})
    return rows


def target_rows(model, tokenizer, count=40, seed=1):
    """Sums; every other target is what the base says anyway, so that it is neither all right nor all wrong."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        prompt = f"{rng.randrange(1000)}+{rng.randrange(1000)}*{i}="
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            own = tokenizer.decode([int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())])
        usable = own.isascii() and own.isprintable() and bool(own.strip())
        rows.append({"prompt": prompt, "target": own if usable and i % 2 else "7"})
    return rows


def paragraphs(count=40, seed=2):
    rng = random.Random(seed)

    def word():
        return "".join(rng.choice("etaoinshrdlu") for _ in range(rng.randrange(2, 8)))

    return [" ".join(word() for _ in range(20)) + "." for _ in range(count)]


def task_recipe(world, output, **changes):
    """Two domains of tasks, all metrics, the papers' argmax so that an expert is surely there."""
    data = {
        "model": str(world.base),
        "domains": {"law": [str(world.law)], "sums": [str(world.sums)]},
        "output": str(output),
        "device": "cpu",
        "batch_tokens": 4096,
        "subdomains": {"count": {"law": 2, "sums": 1}, "min_size": 4},
        "bands": {"step": 0.25, "ratio": 0.25},
        "saliency": {"step": 0.002, "budget": 0.006, "patience": 2},
        "search": {"metrics": ["saliency", "wanda", "random"], "method": "exhaustive", "select": "argmax"},
        "evidence": {"controls": 1},
    }
    if "domains" in changes:
        data["subdomains"] = {"by": "none"}
    return recipe_from({**data, **changes})


def text_recipe(world, output, **changes):
    data = {
        "model": str(world.base),
        "domains": {"wiki": [f"text:{world.text}"]},
        "output": str(output),
        "device": "cpu",
        "subdomains": {"by": "none"},
        "bands": {"start": 0.0, "end": 0.1, "step": 0.1, "ratio": 0.1},
        "saliency": {"steps": 30, "every": 10, "step_tokens": 512, "budget": 0.01},
        "search": {"metrics": ["saliency", "wanda"], "select": "argmax"},
        "evidence": {"controls": 1},
    }
    return recipe_from({**data, **changes})


def read_result(folder):
    return json.loads((folder / "result.json").read_text())


class Told(CollectingProgress):
    """Progress that remembers what was said, and of how many steps every stage took how many."""

    def __init__(self):
        super().__init__()
        self.stages = {}

    @contextmanager
    def stage(self, name, total):
        self.stages[name] = [0, total]

        def advance(steps):
            self.stages[name][0] += steps

        yield advance


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Paths of a base, of its files of tasks and text, and the base's model and tokenizer."""
    root = tmp_path_factory.mktemp("world")
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    model.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    (root / "plain.txt").write_text("\n\n".join(paragraphs()))
    return SimpleNamespace(
        root=root,
        base=root / "base",
        model=model,
        tokenizer=tokenizer,
        law=write_jsonl(root / "law.jsonl", choice_rows()),
        sums=write_jsonl(root / "sums.jsonl", target_rows(model, tokenizer)),
        text=root / "plain.txt",
    )


@pytest.fixture(scope="session")
def artefact(world, tmp_path_factory):
    """A finished build of two domains of tasks."""
    return build(task_recipe(world, tmp_path_factory.mktemp("tasks") / "out"))


@pytest.fixture
def moe(world, artefact):
    """That build's experts, on a base of their own."""
    return FreeMoE.from_pretrained(str(world.base), artefact, device="cpu")


@pytest.fixture(scope="session")
def text_artefact(world, tmp_path_factory):
    """A finished build of a domain of text."""
    return build(text_recipe(world, tmp_path_factory.mktemp("text") / "out"))
