"""One rule for the names of experts, wherever one comes from, and one reading of combinations."""

import pytest

from freemoe import FreeMoE
from freemoe.core.errors import ArtifactError, DataError, RecipeError, UnknownNameError
from freemoe.domain_experts.expert import DomainExpert
from freemoe.recipes import expert_names, recipe_from
from freemoe.recipes.expert_names import MAX_NAME, ExpertRef, make_names, name_fault
from freemoe.serve.catalogue import ExpertCatalogue
from tests.artefacts import rewritten
from tests.serve.conftest import folders  # noqa: F401  (a fixture)
from tests.tiny import tiny_model

BAD = {
    "": "no text of 1 to 200",
    "x" * (MAX_NAME + 1): "no text of 1 to 200",
    "base": "means the base",
    "auto": "means the base",
    "base:math": "means the base",
    "a\nb": "cannot be seen",
    "a\u2028b": "cannot be seen",
    "a\u202eb": "cannot be seen",
    "a\x1b[2Jb": "cannot be seen",
    "a\x00": "cannot be seen",
    "\ud800": "cannot be seen",
    "a+b": "combines experts",
    "a+b&": "combines experts",
    "a&": "combines experts",
    " a": "begins or ends with a space",
    "a/": "an empty part",
    "a//b": "an empty part",
    "../a": "an empty part, '.' or",
    "a/./b": "an empty part, '.' or",
}
GOOD = ["a", "law/0", "x-law/all", "code/C#", "wiki/Süd ost?", "数学/1", "a|b", "x:law/0", "100%/a%2Fb"]
GOOD += ["base/all", "a.b"]


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_a_name(name):
    assert name_fault(name) is None
    assert ExpertRef.parse(name) == ExpertRef((name,))


@pytest.mark.parametrize(("name", "says"), BAD.items())
def test_what_cannot_be_a_name_is_refused_wherever_it_comes_from(folders, tmp_path, name, says):  # noqa: F811
    tiny = tiny_model("llama", num_hidden_layers=1)
    with pytest.raises(DataError, match=says):
        FreeMoE(tiny, [DomainExpert(name)])
    host = FreeMoE(tiny, [])
    # As what stands before another name it may do: then it is the whole that counts.
    before = name.removesuffix("a")
    if name_fault(before + "a"):
        for load in (
            lambda: host.load_expert(folders.own, prefix=before),
            lambda: ExpertCatalogue().with_artefact(folders.own, before),
        ):
            with pytest.raises(DataError, match="The name "):
                load()
    with pytest.raises(DataError, match=says):
        host.add_expert(name, union=["a", "b"])
    assert host.experts == []
    with pytest.raises(RecipeError, match="domain"):
        recipe_from({"model": "x", "domains": {name: ["task.jsonl"]}})
    if name.isprintable():  # JSON with half of a pair, or NUL, is refused before
        copy = rewritten(folders.own, tmp_path / "copy", manifest=lambda m: m["experts"][0].update(name=name))
        with pytest.raises(ArtifactError, match=says):
            FreeMoE.from_pretrained(tiny, copy)


def test_groups_of_documents_are_called_by_names_that_can_be():
    groups = ["physics", "C++", "C&&", "R&D", "", "../..", "a\nb", "x" * 999, " spaced / out ", "physics"]
    names = make_names(groups)
    assert names[:4] == ["physics", "C--", "C---2", "R-D"]
    assert names[-2:] == ["spaced/out", "physics-2"]
    assert len(set(names)) == len(groups)
    assert not any(name_fault(f"{'d' * 64}/{name}") for name in names)


def test_experts_are_loaded_up_to_one_limit(folders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(expert_names, "MAX_EXPERTS", 5)
    host = FreeMoE.from_pretrained(str(folders.base), folders.own)
    host.load_expert(folders.own, prefix="x-")
    catalogue = ExpertCatalogue().with_artefact(folders.own).with_artefact(folders.own, "x-")
    for more in (
        lambda: host.load_expert(folders.own, prefix="y-"),
        lambda: catalogue.with_artefact(folders.own, "y-"),
    ):
        with pytest.raises(DataError, match=r"4 experts are on this base, and 2 more exceed the limit of 5\. Delete"):
            more()
    host.add_expert("one-more", union=["a", "b"])
    with pytest.raises(DataError, match="exceed the limit"):
        host.add_expert("another", union=["a", "b"])


@pytest.mark.parametrize(
    ("text", "names", "operation"),
    [
        ("a", ("a",), None),
        ("a+b", ("a", "b"), "union"),
        ("a & b", ("a", "b"), "intersection"),
        ("a+b+a", ("a", "b", "a"), "union"),
        ("a+b&c", ("a", "b&c"), "union"),
    ],
)
def test_combinations_are_read_in_one_way(text, names, operation):
    ref = ExpertRef.parse(text)
    assert ref == ExpertRef(names, operation)
    assert ExpertRef.parse(str(ref)) == ref
    if set(names) <= {"a", "b"}:
        ref.require_known(["a", "b"])
    else:
        with pytest.raises(UnknownNameError, match=r"'b&c'.*stands in a\+b&c; a\+b is a union"):
            ref.require_known(["a", "b", "c"])
