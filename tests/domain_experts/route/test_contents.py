"""What subdomains hold: of reference documents, cut short, and nothing that only one or two documents say."""

import torch

from freemoe.domain_experts.recipe import SubdomainSection
from freemoe.domain_experts.route.contents import LONGEST, describe_subdomains
from freemoe.domain_experts.route.subdomains import divide_domain
from freemoe.evals.tasks.documents import Document, ReferenceSplit


def divided(groups, feature):
    """The division of documents by their fields, and what each subdomain is said to hold."""
    documents = tuple(
        Document("t", f"{field}{i}", f"{field}{i}", "choice", text, field=field)
        for field, texts in groups.items()
        for i, text in enumerate(texts)
    )
    part = divide_domain("math", ReferenceSplit(documents), feature, SubdomainSection(by="field", min_size=2), 0)
    return part, describe_subdomains(documents, part)


def test_the_documents_nearest_to_the_centroid_come_first():
    groups = {"a": ["one far out", "two in the middle", "three near it", "four as well"]}
    feature = torch.tensor([[9.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])  # centroid at 3
    part, (held,) = divided(groups, feature)
    assert part.typical == ((1, 2, 3, 0),)
    assert held["prompts"] == ["two in the middle", "three near it", "four as well"]


def test_words_are_those_that_tell_a_subdomain_from_the_others():
    groups = {
        "add": ["please add apples"] * 4 + ["please add the secret"],
        "sub": ["please subtract apples"] * 4 + ["please subtract it"],
    }
    _, (add, sub) = divided(groups, torch.cat([torch.zeros(5, 2), torch.ones(5, 2)]))
    # "please" and "apples" are as frequent in both, "secret" stands in one document only.
    assert add["words"] == ["add"]
    assert sub["words"] == ["subtract"]


def test_what_is_shown_is_short_and_one_line_and_said_once():
    long = "word " * 80
    _, (held,) = divided({"a": [long, long, f"{long}x", "a\n\nb"]}, torch.zeros(4, 2))
    assert all(len(p) <= LONGEST for p in held["prompts"])
    assert len(set(held["prompts"])) == len(held["prompts"]) <= 3
    assert all("\n" not in p for p in held["prompts"])


def test_the_examples_that_all_prompts_begin_with_are_left_out():
    examples = "Question: what is one and one?\nAnswer: two\n\n" * 4
    _, (held,) = divided({"a": [f"{examples}Question: {n}?" for n in ("who", "where", "why")]}, torch.zeros(3, 2))
    assert held["prompts"] == ["who?", "where?", "why?"]


def test_a_text_without_prompts_shows_the_text():
    numbers = map(str, range(4))
    texts = [Document("t", n, n, "text", "", reference=f"Old stories number {n}", tokens=(1,)) for n in numbers]
    part = divide_domain("wiki", ReferenceSplit(tuple(texts)), torch.zeros(4, 2), SubdomainSection(), 0)
    (held,) = describe_subdomains(texts, part)
    assert held["prompts"][0] == "Old stories number 0"
    assert held["words"] == ["number", "stories"]
