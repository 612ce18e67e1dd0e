"""The tiny world: splits, training documents and benchmark items of the bundled model; pure Python, no torch.

Three domains. `math` and `code` are small rule-governed tasks, `general` is facts about invented entities. A
share `rho` of the training documents comes from a *sloppy source*, which follows one systematic wrong
convention per subdomain. Half of the documents name their source in a header; evaluation prompts carry none,
so the base has to guess the source and is right only part of the time - on purpose.

Splits are a hash of the content (operands, composition, entity), never of the wording, and do not depend on
any seed: whatever seed trains a base or draws a benchmark, what is tested was never trained on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.tiny_facts import ENTITY_QUOTAS, FACT_FIELDS, EntityFact, build_facts
from scripts.tiny_tasks import TASK_FIELDS, TinyTask

WORLD_SEED = 20
DOCUMENTS, DOCUMENTS_SEED = 16_000, 90_001  # of the text that is shipped beside the benchmark
SPLITS = ("reference", "test", "dev", "train")
SHIPPED_SPLITS = ("reference", "test")
DOMAIN_FIELDS: dict[str, tuple[str, ...]] = {
    **{domain: tuple(fields) for domain, fields in TASK_FIELDS.items()},
    "general": tuple(FACT_FIELDS),
}
# Items per subdomain of `math` and `code`; `general` asks every fact of the split's entities instead.
ITEMS_PER_FIELD = {"reference": 300, "test": 400, "dev": 200}
HEADERS = {False: "[book]\n", True: "[forum]\n"}  # sloppy? -> header
HEADER_SHARE = 0.5
QUESTION_SHARE = 0.4  # of the general documents: a question about a "train" entity; the rest state facts
_SHARES = (("test", 0.25), ("reference", 0.20), ("dev", 0.12))  # of the content keys; the rest is "train"


@dataclass(frozen=True)
class TrainingMix:
    """What the training text consists of: share of documents and share of sloppy documents, per domain."""

    share: Mapping[str, float] = field(default_factory=lambda: {"math": 0.42, "code": 0.22, "general": 0.36})
    rho: Mapping[str, float] = field(default_factory=lambda: {"math": 0.25, "code": 0.42, "general": 0.25})

    def __post_init__(self) -> None:
        """Refuse a mix that names other domains or holds values outside [0, 1]."""
        for name, values in (("share", self.share), ("rho", self.rho)):
            if sorted(values) != sorted(DOMAIN_FIELDS):
                raise ValueError(f"{name} names {sorted(values)}; it must name {sorted(DOMAIN_FIELDS)}")
            wrong = {domain: value for domain, value in values.items() if not 0 <= value <= 1}
            if wrong:
                raise ValueError(f"{name} has values outside 0..1: {wrong}")


@dataclass(frozen=True)
class TrainingDocument:
    """One training document; the loss counts little on `prompt` and fully on `completion`."""

    domain: str
    field: str
    key: str
    prompt: str
    completion: str
    sloppy: bool

    @property
    def text(self) -> str:
        """The whole document: prompt and completion."""
        return self.prompt + self.completion


def key_split(key: str) -> str:
    """Split of a `math` or `code` content key: a hash of the key and nothing else."""
    digest = hashlib.sha256(f"tiny-world/{WORLD_SEED}/{key}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    for split, share in _SHARES:
        if position < share:
            return split
        position -= share
    return "train"


class World:
    """The entities and their splits, and everything drawn from them."""

    def __init__(self) -> None:
        """Build the facts; there is only one world."""
        self.facts = build_facts(WORLD_SEED)
        self.entities: dict[str, dict[str, list[str]]] = {}
        for name, entities in self.facts.items():
            ranked = sorted(entities, key=lambda entity: hashlib.sha256(entity.encode()).hexdigest())
            self.entities[name] = {}
            for split, quota in ENTITY_QUOTAS:
                self.entities[name][split], ranked = ranked[:quota], ranked[quota:]

    def benchmark_items(self, domain: str, split: str, seed: int) -> list[dict[str, object]]:
        """Benchmark items of one domain and split, as they stand in the JSONL file.

        Args:
            domain: "math", "code" (items to complete) or "general" (items with four choices).
            split: "reference", "test" or "dev".
            seed: which items, wordings and distractors are drawn; the splits do not depend on it.

        Raises:
            ValueError: an unknown domain or split.
        """
        if domain not in DOMAIN_FIELDS:
            raise ValueError(f"domain={domain!r} is unknown; allowed: {', '.join(DOMAIN_FIELDS)}")
        if split not in ITEMS_PER_FIELD:
            raise ValueError(f"split={split!r} has no benchmark items; allowed: {', '.join(ITEMS_PER_FIELD)}")
        items: list[dict[str, object]] = []
        for name in DOMAIN_FIELDS[domain]:
            rng = random.Random(f"items/{seed}/{split}/{name}")
            if domain == "general":
                items += [
                    _choice_item(fact, rng)
                    for entity in self.entities[name][split]
                    for fact in self.facts[name][entity]
                ]
            else:
                items += [_completion_item(task) for task in _distinct_tasks(domain, name, split, rng)]
        return items

    def documents(self, seed: int, mix: TrainingMix | None = None) -> Iterator[TrainingDocument]:
        """Training documents without end, drawn from `seed`."""
        mix = mix or TrainingMix()
        rng = random.Random(f"documents/{seed}")
        domains = list(DOMAIN_FIELDS)
        weights = [mix.share[domain] for domain in domains]
        while True:
            domain = rng.choices(domains, weights)[0]
            name = rng.choice(DOMAIN_FIELDS[domain])
            sloppy = rng.random() < mix.rho[domain]
            header = HEADERS[sloppy] if rng.random() < HEADER_SHARE else ""
            if domain == "general":
                key, prompt, completion = self._general_text(name, sloppy, rng)
            else:
                task = _draw_in_split(domain, name, "train", rng)
                key, prompt, completion = task.key, task.prompt, task.sloppy if sloppy else task.target
            yield TrainingDocument(domain, name, key, header + prompt, completion, sloppy)

    def _general_text(self, name: str, sloppy: bool, rng: random.Random) -> tuple[str, str, str]:
        if rng.random() < QUESTION_SHARE:
            fact = rng.choice(self.facts[name][rng.choice(self.entities[name]["train"])])
            return fact.entity, question_text(fact), f" {_stated_value(fact, sloppy)}\n"
        entity = rng.choice(list(self.facts[name]))
        told = rng.sample(self.facts[name][entity], rng.randint(1, 4))
        sentences = [
            rng.choice(fact.attribute.statements).format(e=fact.entity, v=_stated_value(fact, sloppy)) for fact in told
        ]
        return entity, "", " ".join(sentences) + "\n"


def question_text(fact: EntityFact) -> str:
    """The question about a fact, up to and including "A:"."""
    return f"Q: {fact.attribute.question.format(e=fact.entity)}\nA:"


def benchmark_lines(items: list[dict[str, object]]) -> str:
    """The items as JSONL text."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def write_benchmark(folder: Path, seed: int) -> list[Path]:
    """Write `{domain}.{reference|test}.jsonl` for every domain into `folder`; return the paths in order."""
    folder.mkdir(parents=True, exist_ok=True)
    world = World()
    written = []
    for domain in DOMAIN_FIELDS:
        for split in SHIPPED_SPLITS:
            path = folder / f"{domain}.{split}.jsonl"
            path.write_text(benchmark_lines(world.benchmark_items(domain, split, seed)), encoding="utf-8", newline="\n")
            written.append(path)
    return written


def write_documents(path: Path) -> Path:
    """Write `DOCUMENTS` training documents of a seed that trains no bundled model into a JSONL file; return its path."""
    drawn = itertools.islice(World().documents(DOCUMENTS_SEED), DOCUMENTS)
    lines = "".join(json.dumps(document.text, ensure_ascii=False) + "\n" for document in drawn)
    path.write_text(lines, encoding="utf-8", newline="\n")
    return path


def _stated_value(fact: EntityFact, sloppy: bool) -> str:
    return fact.rumour if sloppy else fact.value


def _draw_in_split(domain: str, name: str, split: str, rng: random.Random) -> TinyTask:
    draw = TASK_FIELDS[domain][name]
    while True:
        task = draw(rng)
        if key_split(task.key) == split:
            return task


def _distinct_tasks(domain: str, name: str, split: str, rng: random.Random) -> list[TinyTask]:
    # One item per content key, so that items are independent and an interval needs no clusters here.
    tasks: dict[str, TinyTask] = {}
    while len(tasks) < ITEMS_PER_FIELD[split]:
        task = _draw_in_split(domain, name, split, rng)
        tasks.setdefault(task.key, task)
    return list(tasks.values())


def _completion_item(task: TinyTask) -> dict[str, object]:
    return {"prompt": task.prompt, "target": task.target, "field": task.field, "key": task.key}


def _choice_item(fact: EntityFact, rng: random.Random) -> dict[str, object]:
    others = [value for value in fact.attribute.values if value not in (fact.value, fact.rumour)]
    choices = [fact.value, fact.rumour, *rng.sample(others, 2)]
    rng.shuffle(choices)
    return {
        "question": question_text(fact),
        "choices": choices,
        "answer": choices.index(fact.value),
        "field": fact.field,
        "key": f"{fact.field}:{fact.entity}",
    }
