"""Features by hand, clusters that repeat, small groups that merge, and documents that come later."""

import numpy as np
import pytest
import torch

from freemoe.core.errors import DataError, SplitError
from freemoe.domain_experts.recipe import SubdomainSection
from freemoe.domain_experts.route.subdomains import divide_domain, merge_small, prompt_feature, prompt_features
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit
from tests.tiny import tiny_model


def split_of(count, task="t", fields=("",)):
    return ReferenceSplit(
        tuple(Document(task, str(i), str(i), "target", f"{i}", field=fields[i % len(fields)]) for i in range(count))
    )


def blobs(sizes, spread=0.1, seed=0):
    """Well separated groups, shuffled: features (D, 4) and the group of each."""
    rng = np.random.default_rng(seed)
    centres = 10 * np.eye(4)[: len(sizes)]
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return torch.tensor(centres[labels] + rng.normal(0, spread, (len(labels), 4))).float(), labels


def same_partition(a, b):
    pairs = set(zip(a, b, strict=True))
    return len(pairs) == len(set(a)) == len(set(b))


def test_feature_is_the_mean_embedding():
    model = tiny_model("llama")
    ids = [5, 9, 9, 200]
    table = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(prompt_feature(model, ids), (table[5] + 2 * table[9] + table[200]) / 4)
    assert prompt_feature(model, torch.tensor(ids)).dtype == torch.float32
    half = prompt_feature(tiny_model("llama").to(torch.bfloat16), ids)
    assert half.dtype == torch.float32
    assert not prompt_feature(model, []).any()
    assert prompt_feature(model, []).shape == (32,)


def test_hidden_feature_is_the_middle_state():
    model = tiny_model("llama")
    states = model(input_ids=torch.tensor([[5, 9, 200]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(prompt_feature(model, [5, 9, 200], "hidden"), states[1][0].mean(0))


def test_features_of_many_prompts():
    model = tiny_model("llama")
    prompts = [(5, 6), (7,), (5, 6), ()]
    found = prompt_features(model, prompts)
    assert found.shape == (4, 32)
    for row, ids in zip(found, prompts, strict=True):
        assert torch.equal(row, prompt_feature(model, ids))


def test_kmeans_finds_the_groups_and_repeats():
    feature, labels = blobs([20, 15, 10])
    section = SubdomainSection(count=3, min_size=2)
    a, b = (divide_domain("d", split_of(45), feature, section, 0) for _ in range(2))
    assert same_partition(a.labels, labels.tolist())
    assert a.labels == b.labels
    assert torch.equal(a.centroids, b.centroids)
    assert a.names == ("d/0", "d/1", "d/2")
    assert a.notes == ()
    # Numbered by first appearance, so that another seed does not rename what is the same.
    firsts = [a.labels.index(k) for k in range(3)]
    assert firsts == sorted(firsts)
    assert divide_domain("d", split_of(45), feature, section, 7).labels == a.labels
    for k in range(3):
        mine = feature[torch.tensor(a.labels) == k]
        torch.testing.assert_close(a.centroids[k], mine.mean(0))


def test_number_of_clusters():
    feature, _ = blobs([30, 30])
    split = split_of(60)

    def names(**options):
        return divide_domain("d", split, feature, SubdomainSection(**options), 0).names

    assert names(count=1) == names(by="none") == ("d/all",)
    assert len(names(count={"d": 2, "other": 9}, min_size=2)) == 2
    # One for 40 documents where nothing is said.
    assert len(names(count={"other": 9})) == 1
    feature, _ = blobs([80, 80])
    assert len(divide_domain("d", split_of(160), feature, SubdomainSection(), 0).names) <= 4


def test_fewer_documents_than_clusters():
    feature, _ = blobs([3, 2])
    with pytest.raises(DataError, match=r"'d' has 5 reference documents, fewer than the 6 clusters.*at most 2"):
        divide_domain("d", split_of(5), feature, SubdomainSection(count=6, min_size=2), 0)
    assert len(divide_domain("d", split_of(5), feature, SubdomainSection(count=2, min_size=2), 0).names) == 2


def test_equal_prompts_make_fewer_clusters():
    feature = torch.ones(20, 4)
    feature[10:] = 2
    found = divide_domain("d", split_of(20), feature, SubdomainSection(count=5, min_size=2), 0)
    assert len(found.names) == 2
    assert set(found.labels) == {0, 1}


def test_small_clusters_are_merged_into_the_nearest():
    feature = torch.tensor([[0.0, 0.0]] * 10 + [[10.0, 0.0]] * 9 + [[8.0, 0.0]] * 2 + [[1.0, 0.0]] * 1)
    labels = np.array([0] * 10 + [1] * 9 + [2] * 2 + [3] * 1)
    new, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 3)
    assert new.tolist() == [0] * 10 + [1] * 11 + [0]
    assert names == ["a", "b"]
    assert len(notes) == 2
    assert "'e' has 1 documents, fewer than 3: merged into 'a'" in notes[0]
    assert "'c' has 2 documents" in notes[1]
    assert "'b'" in notes[1]
    assert labels.tolist() == [0] * 10 + [1] * 9 + [2] * 2 + [3]
    kept, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 1)
    assert (kept.tolist(), names, notes) == (labels.tolist(), ["a", "b", "c", "e"], [])
    one, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 1000)
    assert set(one.tolist()) == {0}
    assert len(names) == 1
    assert len(notes) == 3


@pytest.mark.parametrize("by", ["task", "field"])
def test_groups_by_name(by):
    documents = [Document("t1" if i % 3 else "t2", str(i), str(i), "target", "x", field=f"f{i % 2}") for i in range(40)]
    feature = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    found = divide_domain("d", ReferenceSplit(tuple(documents)), feature, SubdomainSection(by=by, count=5), 0)
    expected = [d.task if by == "task" else d.field for d in documents]
    assert [found.names[k] for k in found.labels] == [f"d/{e}" for e in expected]
    # Others go with their own group, wherever their feature lies; an unknown group goes to the nearest.
    other = [Document("t1", "a", "a", "target", "x", field="f1"), Document("t9", "b", "b", "target", "x", field="f9")]
    far = torch.stack([found.centroids[0], found.centroids[1]])
    mine = found.names.index("d/t1" if by == "task" else "d/f1")
    assert found.assign_documents(other, far) == [mine, 1]
    assert found.assign_documents(other, far.flip(0)) == [mine, 0]


def test_a_document_without_a_field_is_grouped_by_its_task():
    documents = [Document("t", str(i), str(i), "target", "x", field="f" if i % 2 else "") for i in range(20)]
    found = divide_domain("d", ReferenceSplit(tuple(documents)), torch.zeros(20, 2), SubdomainSection(by="field"), 0)
    assert found.names == ("d/t", "d/f")


def test_a_merged_group_keeps_its_documents_together():
    fields = ["big"] * 12 + ["other"] * 12 + ["few"] * 2
    documents = [Document("t", str(i), str(i), "target", "x", field=f) for i, f in enumerate(fields)]
    feature = torch.tensor([[0.0]] * 12 + [[5.0]] * 12 + [[4.9]] * 2)
    found = divide_domain("d", ReferenceSplit(tuple(documents)), feature, SubdomainSection(by="field", min_size=5), 0)
    assert found.names == ("d/big", "d/other")
    assert found.labels[-2:] == (1, 1)
    late = Document("t", "z", "z", "target", "x", field="few")
    assert found.assign_documents([late], torch.tensor([[0.0]])) == [1]


def test_assign_is_the_nearest_centroid():
    feature, _ = blobs([20, 20, 20], spread=2.0)
    found = divide_domain("d", split_of(60), feature, SubdomainSection(count=3, min_size=2), 0)
    other = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)) * 8
    expected = [int(((found.centroids - row) ** 2).sum(1).argmin()) for row in other]
    assert found.assign_documents(split_of(50).documents, other) == expected


def test_the_reported_split_is_refused():
    reported = ReportedSplit(split_of(5).documents)
    with pytest.raises(SplitError, match="ReportedSplit"):
        divide_domain("d", reported, torch.zeros(5, 2), SubdomainSection(), 0)
