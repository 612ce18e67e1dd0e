"""The invented entities behind the `general` domain: memorised facts, each with one fixed rumour."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Entities per split. All facts are *stated* in training; only "train" entities are also asked about there.
ENTITY_QUOTAS = (("test", 60), ("reference", 50), ("dev", 12), ("train", 50))
ENTITIES_PER_FIELD = sum(quota for _, quota in ENTITY_QUOTAS)


@dataclass(frozen=True)
class FactAttribute:
    """One kind of fact: its sentences, its question, and the values it can take."""

    name: str
    statements: tuple[str, ...]
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class EntityFact:
    """One fact of one entity; `rumour` is the one wrong value that sloppy documents state instead."""

    field: str
    entity: str
    attribute: FactAttribute
    value: str
    rumour: str


def _make_attribute(name: str, statements: str, question: str, values: str) -> FactAttribute:
    return FactAttribute(name, tuple(statements.split("|")), question, tuple(values.split()))


FACT_FIELDS: dict[str, tuple[FactAttribute, ...]] = {
    "geography": (
        _make_attribute(
            "river",
            "{e} lies on the river {v}.|{e} stands by the {v}.",
            "which river is {e} on?",
            "Amber Birch Cedar Dove Ember Flint Gale Heron Iris Jade Kite Linden",
        ),
        _make_attribute(
            "trade",
            "{e} is known for its {v}.|Traders come to {e} for {v}.",
            "what is {e} known for?",
            "salt wool glass paper honey tin silk rope cheese clay pearls soap",
        ),
        _make_attribute(
            "land",
            "{e} belongs to {v}.|{e} is a town in {v}.",
            "which land is {e} in?",
            "Norvia Sudmark Ostria Wesland Halden Karsia Lumeria Merrow Pellan Quillen Rusk Tavia",
        ),
        _make_attribute(
            "fair",
            "{e} holds its fair in {v}.|The fair of {e} is in {v}.",
            "when is the fair of {e}?",
            "January February March April May June July August September October November December",
        ),
    ),
    "biology": (
        _make_attribute(
            "home",
            "The {e} lives in {v}.|You find the {e} in {v}.",
            "where does the {e} live?",
            "swamps caves meadows deserts forests lakes cliffs dunes hedges reefs barns marshes",
        ),
        _make_attribute(
            "food",
            "The {e} eats {v}.|The {e} feeds on {v}.",
            "what does the {e} eat?",
            "beetles moss berries worms snails nuts roots algae seeds crabs ants mushrooms",
        ),
        _make_attribute(
            "colour",
            "The {e} is {v}.|The colour of the {e} is {v}.",
            "what colour is the {e}?",
            "green brown white black yellow orange purple grey blue red pink silver",
        ),
        _make_attribute(
            "foe",
            "The {e} is hunted by {v}.|The {e} fears {v}.",
            "what hunts the {e}?",
            "owls foxes hawks snakes wolves otters lynxes eagles badgers pikes ravens martens",
        ),
    ),
    "people": (
        _make_attribute(
            "craft",
            "{e} works as a {v}.|By trade {e} is a {v}.",
            "what is the trade of {e}?",
            "baker smith sailor tailor miner potter painter doctor teacher farmer weaver hunter",
        ),
        _make_attribute(
            "instrument",
            "{e} plays the {v}.|At night {e} plays the {v}.",
            "what does {e} play?",
            "flute drum harp violin horn lute organ cello trumpet banjo oboe piano",
        ),
        _make_attribute(
            "pet",
            "{e} keeps a {v}.|The pet of {e} is a {v}.",
            "what pet does {e} keep?",
            "cat dog parrot goat rabbit turtle pony goose ferret hamster pigeon lizard",
        ),
        _make_attribute(
            "drink",
            "{e} drinks {v}.|{e} likes a cup of {v}.",
            "what does {e} drink?",
            "tea coffee milk cider water cocoa juice beer broth wine mead lemonade",
        ),
    ),
}

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDINGS = {
    "geography": ("ton", "burg", "wick", "ford", "mouth"),
    "biology": ("ling", "fin", "paw", "beak", "tail"),
    "people": ("ric", "wen", "dor", "mina", "bert"),
}


def build_facts(world_seed: int) -> dict[str, dict[str, tuple[EntityFact, ...]]]:
    """All facts as field -> entity -> four facts; a function of the seed alone."""
    rng = random.Random(f"facts/{world_seed}")
    world: dict[str, dict[str, tuple[EntityFact, ...]]] = {}
    taken: set[str] = set()  # membership only, never iterated
    for field, attributes in FACT_FIELDS.items():
        entities: dict[str, tuple[EntityFact, ...]] = {}
        while len(entities) < ENTITIES_PER_FIELD:
            name = _draw_name(field, rng)
            if name in taken:
                continue
            taken.add(name)
            entities[name] = tuple(_draw_fact(field, name, attribute, rng) for attribute in attributes)
        world[field] = entities
    return world


def _draw_name(field: str, rng: random.Random) -> str:
    stem = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2))
    name = stem + rng.choice(_ENDINGS[field])
    return name if field == "biology" else name.capitalize()


def _draw_fact(field: str, entity: str, attribute: FactAttribute, rng: random.Random) -> EntityFact:
    value, rumour = rng.sample(attribute.values, 2)
    return EntityFact(field, entity, attribute, value, rumour)
