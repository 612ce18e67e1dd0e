"""Features by hand, clusters that repeat, small groups that merge, and documents that come later."""

import numpy as np
import pytest
import torch

from freemoe.core.errors import DataError, SplitError
from freemoe.domain_experts.recipe import SubdomainSection
from freemoe.domain_experts.route.subdomains import divide_domain, merge_small, prompt_feature, prompt_features
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit
from tests.tiny import tiny_model


def split_of(fields, tasks=("t",)):
    """A document of every field, or so many without one; their tasks take turns."""
    rows = enumerate([""] * fields if isinstance(fields, int) else fields)
    documents = [Document(tasks[i % len(tasks)], str(i), str(i), "target", "x", field=field) for i, field in rows]
    return ReferenceSplit(tuple(documents))


def divided(fields, feature, tasks=("t",), seed=0, **options):
    return divide_domain("d", split_of(fields, tasks), feature, SubdomainSection(**options), seed)


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
    assert torch.equal(prompt_feature(model, []), torch.zeros(32))
    assert prompt_feature(model.to(torch.bfloat16), ids).dtype == torch.float32


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
    a, b, reseeded = (divided(45, feature, count=3, min_size=2, seed=seed) for seed in (0, 0, 7))
    assert same_partition(a.labels, labels.tolist())
    assert a.labels == b.labels
    assert torch.equal(a.centroids, b.centroids)
    assert a.names == ("d/0", "d/1", "d/2")
    assert a.notes == ()
    # Numbered by first appearance, so that another seed does not rename what is the same.
    firsts = [a.labels.index(k) for k in range(3)]
    assert firsts == sorted(firsts)
    assert reseeded.labels == a.labels
    for k in range(3):
        mine = feature[torch.tensor(a.labels) == k]
        torch.testing.assert_close(a.centroids[k], mine.mean(0))


def test_number_of_clusters():
    def names(size=30, **options):
        return divided(2 * size, blobs([size, size])[0], **options).names

    assert names(count=1) == names(by="none") == ("d/all",)
    assert len(names(count={"d": 2, "other": 9}, min_size=2)) == 2
    # One for 40 documents where nothing is said.
    assert len(names(count={"other": 9})) == 1
    assert len(names(80)) <= 4


def test_fewer_documents_than_clusters():
    feature, _ = blobs([3, 2])
    with pytest.raises(DataError, match=r"'d' has 5 reference documents, fewer than the 6 clusters.*at most 2"):
        divided(5, feature, count=6, min_size=2)
    assert len(divided(5, feature, count=2, min_size=2).names) == 2


def test_equal_prompts_make_fewer_clusters():
    feature = torch.ones(20, 4)
    feature[10:] = 2
    found = divided(20, feature, count=5, min_size=2)
    assert len(found.names) == 2
    assert set(found.labels) == {0, 1}


def test_small_clusters_are_merged_into_the_nearest():
    feature = torch.tensor([[0.0, 0.0]] * 10 + [[10.0, 0.0]] * 9 + [[8.0, 0.0]] * 2 + [[1.0, 0.0]] * 1)
    labels = np.array([0] * 10 + [1] * 9 + [2] * 2 + [3] * 1)
    new, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 3)
    assert (new.tolist(), names) == ([0] * 10 + [1] * 11 + [0], ["a", "b"])
    assert "'e' has 1 documents, fewer than 3: merged into 'a'" in notes[0]
    assert "'c' has 2 documents, fewer than 3: merged into 'b'" in notes[1]
    assert len(notes) == 2
    assert labels.tolist() == [0] * 10 + [1] * 9 + [2] * 2 + [3]
    kept, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 1)
    assert (kept.tolist(), names, notes) == (labels.tolist(), ["a", "b", "c", "e"], [])
    one, names, notes = merge_small(feature.numpy(), labels, ["a", "b", "c", "e"], 1000)
    assert (set(one.tolist()), len(names), len(notes)) == ({0}, 1, 3)


@pytest.mark.parametrize("by", ["task", "field"])
def test_groups_by_name(by):
    tasks, fields = ["t2", "t1", "t1"] * 20, ["f0", "f1"] * 20
    feature = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    found = divided(fields, feature, tasks, by=by, count=5)
    expected = {"task": tasks, "field": fields}[by][:40]
    assert [found.names[k] for k in found.labels] == [f"d/{e}" for e in expected]
    # Others go with their own group, wherever their feature lies; an unknown group goes to the nearest.
    other = [Document("t1", "a", "a", "target", "x", field="f1"), Document("t9", "b", "b", "target", "x", field="f9")]
    far = torch.stack([found.centroids[0], found.centroids[1]])
    mine = found.names.index("d/t1" if by == "task" else "d/f1")
    assert found.assign_documents(other, far) == [mine, 1]
    assert found.assign_documents(other, far.flip(0)) == [mine, 0]


def test_a_document_without_a_field_is_grouped_by_its_task():
    assert divided(["", "f"] * 10, torch.zeros(20, 2), by="field").names == ("d/t", "d/f")


def test_a_merged_group_keeps_its_documents_together():
    fields = ["big"] * 12 + ["other"] * 12 + ["few"] * 2
    feature = torch.tensor([[0.0]] * 12 + [[5.0]] * 12 + [[4.9]] * 2)
    found = divided(fields, feature, by="field", min_size=5)
    assert found.names == ("d/big", "d/other")
    assert found.labels[-2:] == (1, 1)
    late = Document("t", "z", "z", "target", "x", field="few")
    assert found.assign_documents([late], torch.tensor([[0.0]])) == [1]


def test_assign_is_the_nearest_centroid():
    feature, _ = blobs([20, 20, 20], spread=2.0)
    found = divided(60, feature, count=3, min_size=2)
    other = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)) * 8
    expected = [int(((found.centroids - row) ** 2).sum(1).argmin()) for row in other]
    assert found.assign_documents(split_of(50).documents, other) == expected


def test_the_reported_split_is_refused():
    reported = ReportedSplit(split_of(5).documents)
    with pytest.raises(SplitError, match="ReportedSplit"):
        divide_domain("d", reported, torch.zeros(5, 2), SubdomainSection(), 0)
