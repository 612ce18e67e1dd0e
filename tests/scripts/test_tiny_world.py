"""The tiny world, its scripts and the files they left in the package: mechanics only, never a gain."""

import itertools
import json
import re
import sys
from functools import cache

import pytest

from freemoe.assets import benchmark_path, demo_documents, demo_model_path
from scripts import make_demo_benchmark, make_demo_model
from scripts.tiny_facts import FACT_FIELDS
from scripts.tiny_world import (
    DOCUMENTS,
    DOCUMENTS_SEED,
    DOMAIN_FIELDS,
    ITEMS_PER_FIELD,
    TrainingMix,
    World,
    key_split,
    write_benchmark,
)

TASK_DOMAINS = ("math", "code")
FILES = [(domain, split) for domain in DOMAIN_FIELDS for split in ("reference", "test")]


@cache
def world():
    return World()


@cache
def documents(seed, count=6000):
    return tuple(itertools.islice(world().documents(seed), count))


def shipped(domain, split):
    return [json.loads(line) for line in benchmark_path(domain, split).read_text(encoding="utf-8").splitlines()]


@cache
def provenance():
    return json.loads((demo_model_path() / "PROVENANCE.json").read_text(encoding="utf-8"))


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


# -- splits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", DOMAIN_FIELDS)
@pytest.mark.parametrize("seeds", [(1, 2), (5, 5)])
def test_splits_share_no_content_key(domain, seeds):
    keys = {
        split: {item["key"] for seed in seeds for item in world().benchmark_items(domain, split, seed)}
        for split in ITEMS_PER_FIELD
    }
    for one, other in itertools.combinations(keys, 2):
        assert not keys[one] & keys[other]


@pytest.mark.parametrize("domain", TASK_DOMAINS)
def test_training_draws_no_key_of_another_split(domain):
    drawn = [document for document in documents(3) if document.domain == domain]
    assert len(drawn) > 500
    assert {key_split(document.key) for document in drawn} == {"train"}
    evaluated = {item["key"] for split in ITEMS_PER_FIELD for item in world().benchmark_items(domain, split, 3)}
    assert not evaluated & {document.key for document in drawn}


def test_training_asks_only_about_train_entities_and_states_all_facts():
    general = [document for document in documents(3, 40_000) if document.domain == "general"]
    asked = {document.key for document in general if "Q:" in document.prompt}
    stated = {document.key for document in general if "Q:" not in document.prompt}
    train = {entity for splits in world().entities.values() for entity in splits["train"]}
    assert asked <= train
    assert stated == {entity for entities in world().facts.values() for entity in entities}


@pytest.mark.parametrize(("domain", "split"), FILES)
def test_shipped_items_are_distinct_and_counted(domain, split):
    items = shipped(domain, split)
    for name in DOMAIN_FIELDS[domain]:
        of_field = [item for item in items if item["field"] == name]
        if domain == "general":
            assert len(of_field) == 4 * len(world().entities[name][split])
            assert len({item["question"] for item in of_field}) == len(of_field)
        else:
            assert len(of_field) == ITEMS_PER_FIELD[split]
            assert len({item["key"] for item in of_field}) == len(of_field)
    assert {item["field"] for item in items} == set(DOMAIN_FIELDS[domain])


# -- reproducible ----------------------------------------------------------------------------------------


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    first, second, other = (write_benchmark(tmp_path / name, seed) for name, seed in (("a", 4), ("b", 4), ("c", 5)))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(first, other, strict=True))


def test_documents_are_a_function_of_the_seed():
    again = tuple(itertools.islice(World().documents(3), 300))
    assert again == documents(3)[:300]
    assert again != documents(4)[:300]


def test_shipped_benchmark_is_what_the_script_writes(tmp_path, monkeypatch):
    flags = ["--out", str(tmp_path), "--eval-seed", str(provenance()["eval_seed"])]
    monkeypatch.setattr(sys, "argv", ["make_demo_benchmark", *flags])
    make_demo_benchmark.main()
    shipped = benchmark_path("math", "test").parent
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in shipped.iterdir()
    }
    assert demo_documents() == [d.text for d in documents(DOCUMENTS_SEED, DOCUMENTS)]


def test_default_seeds_of_both_scripts_are_the_recorded_ones():
    model, benchmark = make_demo_model, make_demo_benchmark
    assert model.EVAL_SEED == benchmark.EVAL_SEED == provenance()["eval_seed"]
    assert (provenance()["seed"], provenance()["steps"]) == (model.SEED, model.STEPS)
    assert provenance()["mix"] == {"share": dict(TrainingMix().share), "rho": dict(TrainingMix().rho)}
    decided = model.recipe(model.SEED, model.EVAL_SEED, model.STEPS)
    assert decided.items() <= provenance().items()


# -- gold answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["reference", "test"])
def test_math_gold_is_right(split):
    for item in shipped("math", split):
        prompt, numbers = item["prompt"], [int(text) for text in re.findall(r"\d+", item["prompt"])]
        if item["field"] in ("add", "sub"):
            expected = numbers[0] + numbers[1] * (1 if "+" in prompt else -1)
        elif item["field"] == "compare":
            ordered = sorted(numbers)
            expected = ordered[-1] if prompt.startswith(("max", "larger")) else ordered[0]
        else:
            steps = {after - before for before, after in itertools.pairwise(numbers)}
            assert len(steps) == 1
            expected = numbers[-1] + steps.pop()
        assert item["target"] == f"{expected}\n", prompt


@pytest.mark.parametrize("split", ["reference", "test"])
def test_code_gold_does_what_the_prompt_says(split):
    inputs = {
        "arith": [0, 7, 45, 128],
        "lists": [
            [7, 31, 2, 19, 4, 4, 26, 15, 8, 30, 12, 3, 28, 5, 9, 18, 24, 1, 22, 10, 14, 6] * 2,
            [3, 9, 27],
        ],
        "strings": ["  aZ quick Brown fox jumps over the lazy dog", "Mississippi River  "],
    }
    variable = {"arith": "x", "lists": "xs", "strings": "s"}
    for item in shipped("code", split):
        words = item["prompt"].rsplit(":", 1)[0]
        for value in inputs[item["field"]]:
            program = eval(f"lambda {variable[item['field']]}: {item['target']}")
            assert _outcome(program, value) == _outcome(lambda v, i=item, w=words: _follow(i["field"], w, v), value), (
                item
            )


def _outcome(program, value):
    try:
        return program(value)
    except ValueError as error:  # the largest of an empty choice
        return type(error)


def _follow(field, words, value):
    """Do what the sentence says, step by step, without the grammar's program texts."""
    if field == "lists":
        taken = re.fullmatch(r"take (?P<chosen>.*), give the (?P<wanted>.*)", words)
        wanted, chosen = (taken["wanted"], taken["chosen"]) if taken else words.split(" of ", 1)
        n = int(re.search(r"\d+", chosen)[0])
        picks = {
            "the first": lambda i, v: i < n,
            "the last": lambda i, v: i >= len(value) - n,
            "all after": lambda i, v: i >= n,
            "all but": lambda i, v: i < len(value) - n,
            "every": lambda i, v: i % n == 0,
            "those above": lambda i, v: v > n,
            "those below": lambda i, v: v < n,
            "the multiples": lambda i, v: v % n == 0,
            "those not": lambda i, v: v != n,
        }
        pick = next(rule for start, rule in picks.items() if chosen.startswith(start))
        picked = [v for i, v in enumerate(value) if pick(i, v)]
        plain = {"sum": sum, "set": set, "tuple": tuple, "any": any, "all": all}
        return {**plain, "largest": max, "smallest": min, "count": len, "sorted list": sorted}[wanted](picked)
    steps = re.split(r", then | and after that ", words.removeprefix("first "))
    assert len(steps) == 2
    for step in steps:
        value = _step(step, value)
    return value


def _step(step, value):
    number = int(found[0]) if (found := re.search(r"\d+", step)) else 0
    verb = re.sub(r" ?\d+.*| [a-z]$", "", step)
    return {
        "add": lambda: value + number,
        "subtract": lambda: value - number,
        "multiply by": lambda: value * number,
        "divide by": lambda: value // number,
        "reduce modulo": lambda: value % number,
        "make upper case": lambda: value.upper(),
        "make lower case": lambda: value.lower(),
        "make title case": lambda: value.title(),
        "strip spaces": lambda: value.strip(),
        "reverse": lambda: "".join(reversed(value)),
        "keep the first": lambda: "".join(c for i, c in enumerate(value) if i < number),
        "keep the last": lambda: "".join(c for i, c in enumerate(value) if i >= len(value) - number),
        "skip the first": lambda: "".join(c for i, c in enumerate(value) if i >= number),
        "repeat": lambda: "".join([value] * number),
        "remove": lambda: "".join(c for c in value if c != step[-1]),
    }[verb]()


@pytest.mark.parametrize("split", ["reference", "test"])
def test_general_gold_is_what_the_books_state(split):
    for item in shipped("general", split):
        name, entity = item["key"].split(":")
        fact = next(
            fact for fact in world().facts[name][entity] if fact.attribute.question.format(e=entity) in item["question"]
        )
        assert item["choices"][item["answer"]] == fact.value
        assert fact.rumour in item["choices"]
        assert len(set(item["choices"])) == len(item["choices"]) == 4
        assert set(item["choices"]) <= set(fact.attribute.values)


def test_gold_has_no_favourite_place():
    answers = [item["answer"] for item in shipped("general", "test")]
    assert all(0.15 < answers.count(place) / len(answers) < 0.35 for place in range(4))


# -- documents -------------------------------------------------------------------------------------------


def test_sloppy_share_and_headers_follow_the_mix():
    drawn, mix = documents(3, 40_000), TrainingMix()
    for domain in DOMAIN_FIELDS:
        of_domain = [document for document in drawn if document.domain == domain]
        assert len(of_domain) / len(drawn) == pytest.approx(mix.share[domain], abs=0.02)
        assert sum(d.sloppy for d in of_domain) / len(of_domain) == pytest.approx(mix.rho[domain], abs=0.02)
    headed = [document for document in drawn if document.text.startswith("[")]
    assert len(headed) / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert all(document.text.startswith("[forum]\n") == document.sloppy for document in headed)


@pytest.mark.parametrize("domain", TASK_DOMAINS)
def test_sloppy_target_differs_except_where_nothing_is_carried(domain):
    sloppy = [document for document in documents(3) if document.domain == domain and document.sloppy]
    for document in sloppy:
        if document.field in ("compare", "sequence", "arith", "lists", "strings"):
            clean = {d.completion for d in documents(3) if d.key == document.key and not d.sloppy}
            assert document.completion not in clean


def test_facts_have_one_rumour_other_than_the_truth():
    for name, entities in world().facts.items():
        assert len(entities) == sum(map(len, world().entities[name].values()))
        for facts in entities.values():
            assert [fact.attribute for fact in facts] == list(FACT_FIELDS[name])
            assert all(fact.value != fact.rumour for fact in facts)


@pytest.mark.parametrize(
    ("share", "rho", "message"),
    [
        ({"math": 1.0}, {"math": 0.1, "code": 0.1, "general": 0.1}, "share names"),
        ({"math": 0.4, "code": 0.3, "general": 0.3}, {"math": 0.1, "code": 1.5, "general": 0.1}, "outside 0..1"),
    ],
)
def test_wrong_mix_is_refused(share, rho, message):
    with pytest.raises(ValueError, match=message):
        TrainingMix(share, rho)


@pytest.mark.parametrize(("domain", "split"), [("maths", "test"), ("math", "train")])
def test_unknown_names_are_refused(domain, split):
    with pytest.raises(ValueError, match="allowed"):
        world().benchmark_items(domain, split, 1)
    with pytest.raises(ValueError, match="allowed"):
        benchmark_path(domain, split)


# -- tokenizer and model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "split"), FILES)
def test_token_boundary_is_clean(domain, split):
    encode = tokenizer().encode
    for item in shipped(domain, split):
        context = item.get("prompt") or item["question"]
        assert context == context.rstrip()
        for continuation in [item["target"]] if "target" in item else [f" {choice}" for choice in item["choices"]]:
            assert encode(context) + encode(continuation) == encode(context + continuation)


def test_training_cuts_where_the_scorer_cuts():
    drawn = list(documents(3)[:400])
    module = make_demo_model
    for document, (ids, weights) in zip(drawn, module.encode(drawn, tokenizer()), strict=True):
        completion = tokenizer().encode(document.completion)
        assert ids == tokenizer().encode(document.prompt) + completion
        assert weights[len(weights) - len(completion) :] == [module.COMPLETION_WEIGHT[document.domain]] * len(
            completion
        )
        assert len(weights) == len(ids)


def test_tokenizer_is_small_plain_and_lossless():
    assert len(tokenizer()) == 512
    assert tokenizer().eos_token_id == tokenizer().bos_token_id != tokenizer().pad_token_id
    assert len(tokenizer().encode("1234")) == 4
    text = "Q: é 12?\nA: [forum] 'ok'  \tdone\n"
    assert tokenizer().decode(tokenizer().encode(text)) == text
    assert not set(tokenizer().encode(text)) & {tokenizer().eos_token_id, tokenizer().pad_token_id}


def test_stored_weights_are_bfloat16_and_small():
    from safetensors import safe_open

    with safe_open(demo_model_path() / "model.safetensors", framework="pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(path.stat().st_size for path in demo_model_path().iterdir()) < 2_600_000


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_demo_model", "--dry-run", "--threads", "1", "--out", str(tmp_path / "out")])
    make_demo_model.main()
    assert re.search(r"steps x 4096 tokens = .*M, about \d+ min", capsys.readouterr().out)
    assert not (tmp_path / "out").exists()


def test_another_seed_is_another_base_of_the_same_kind():
    module = make_demo_model
    first, again, other = (module.new_model(tokenizer(), seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert first[name].equal(again[name])
    assert not first[name].equal(other[name])
    assert {key: value.shape for key, value in first.items()} == {key: value.shape for key, value in other.items()}
