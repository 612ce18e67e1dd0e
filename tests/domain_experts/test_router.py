"""The two-level router against scikit-learn, figures by hand, and what it does when it is not sure."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression

from freemoe.domain_experts.choice import folds
from freemoe.domain_experts.router import (
    Router,
    abstention_threshold,
    expected_calibration_error,
    fit_level,
    latency,
    train_router,
)


def world(per_group=20, spread=0.3, seed=0):
    """Two domains with two and three subdomains, in five places: features, domains, subdomains, keys."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 5, (5, 8))
    names = ["law/a", "law/b", "math/0", "math/1", "math/2"]
    order = rng.permutation(np.repeat(np.arange(5), per_group))
    feature = torch.tensor(centres[order] + rng.normal(0, spread, (len(order), 8))).float()
    subdomains = [names[k] for k in order]
    return feature, [s.split("/")[0] for s in subdomains], subdomains, [str(i) for i in range(len(order))]


@pytest.mark.parametrize("level2", ["linear", "centroid"])
def test_separable_groups_are_routed(level2):
    feature, domains, subdomains, keys = world()
    router, figures = train_router(feature, domains, subdomains, keys, level2=level2)
    routes = router.route(feature)
    assert [r.domain for r in routes] == domains
    assert [r.subdomain for r in routes] == subdomains
    assert all(0 < r.confidence <= 1 for r in routes)
    fresh, _, s, _ = world(per_group=5, seed=0)
    assert [r.subdomain for r in router.route(fresh)] == s
    assert (figures["domain_accuracy"], figures["subdomain_accuracy"]) == (1.0, 1.0)
    assert figures["abstained"] <= 0.05
    assert figures["documents"] == 100


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_equal_scikit_learns(classes):
    rng = np.random.default_rng(classes)
    x = rng.normal(size=(60, 5))
    y = rng.integers(0, classes, 60)
    names = [f"n{k}" for k in range(classes)]
    level = fit_level(x, [names[k] for k in y], names, "linear", 0)
    expected = LogisticRegression(max_iter=300, random_state=0).fit(x, y).predict_proba(x)
    np.testing.assert_allclose(level.probabilities(torch.from_numpy(x).float()).numpy(), expected, atol=1e-5)
    assert level.classes == tuple(names)
    assert level.weight.shape == (classes, 5)


def test_centroids_are_means_and_the_nearest_wins():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    labels = [f"n{i % 3}" for i in range(60)]
    level = fit_level(x, labels, ["n0", "n1", "n2"], "centroid", 0)
    for k in range(3):
        np.testing.assert_allclose(level.weight[k].numpy(), x[k::3].mean(0), atol=1e-6)
    probabilities = level.probabilities(torch.from_numpy(x).float())
    distances = ((x[:, None] - level.weight.numpy()) ** 2).sum(-1)
    assert probabilities.argmax(1).tolist() == distances.argmin(1).tolist()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(60))


@pytest.mark.parametrize("kind", ["linear", "centroid"])
def test_a_single_class_is_certain(kind):
    x = np.random.default_rng(0).normal(size=(9, 3))
    level = fit_level(x, ["only"] * 9, ["only", "absent"], kind, 0)
    assert level.classes == ("only",)
    assert level.probabilities(torch.from_numpy(x).float()).tolist() == [[1.0]] * 9


@pytest.mark.parametrize("level2", ["linear", "centroid"])
def test_one_domain_with_one_subdomain_never_abstains(level2):
    feature = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    router, figures = train_router(feature, ["d"] * 30, ["d/all"] * 30, [str(i) for i in range(30)], level2=level2)
    routes = router.route(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)) * 50)
    assert {(r.domain, r.subdomain) for r in routes} == {("d", "d/all")}
    assert all(r.confidence >= router.threshold for r in routes)
    assert figures["abstained"] == 0
    assert figures["subdomain_accuracy"] == 1


def test_one_domain_with_two_subdomains():
    feature, _, subdomains, keys = world()
    router, _ = train_router(feature, ["all"] * 100, subdomains, keys)
    assert [r.subdomain for r in router.route(feature)] == subdomains


@pytest.mark.parametrize("level2", ["linear", "centroid"])
def test_routes_survive_the_disk(level2, tmp_path):
    feature, domains, subdomains, keys = world(spread=6.0)
    router, _ = train_router(feature, domains, subdomains, keys, level2=level2, kind="hidden", precision=0.6)
    save_file(router.to_tensors(), tmp_path / "r.safetensors")
    described = json.loads(json.dumps(router.describe()))
    back = Router.from_parts(described, load_file(tmp_path / "r.safetensors"))
    assert back.route(feature) == router.route(feature)
    assert (back.threshold, back.feature) == (router.threshold, "hidden")
    assert back.describe() == router.describe()


def test_training_is_deterministic():
    feature, domains, subdomains, keys = world(spread=6.0)
    a, first = train_router(feature, domains, subdomains, keys)
    b, second = train_router(feature, domains, subdomains, keys)
    assert all(torch.equal(x, y) for x, y in zip(a.to_tensors().values(), b.to_tensors().values(), strict=True))
    for key in first.keys() - {"p50_ms", "p95_ms"}:
        assert first[key] == second[key]


def test_features_are_standardised():
    feature, domains, subdomains, keys = world(spread=3.0)
    a, _ = train_router(feature, domains, subdomains, keys)
    b, _ = train_router(feature * 1000 + 7, domains, subdomains, keys)
    for x, y in zip(a.route(feature), b.route(feature * 1000 + 7), strict=True):
        assert x.subdomain == y.subdomain
        assert x.confidence == pytest.approx(y.confidence, abs=1e-3)
    constant = torch.cat([feature, torch.ones(100, 1)], 1)
    c, _ = train_router(constant, domains, subdomains, keys)
    assert all(torch.isfinite(t).all() for t in c.to_tensors().values())
    assert [r.subdomain for r in c.route(constant)] == [r.subdomain for r in a.route(feature)]


def test_figures_come_from_documents_that_were_not_seen():
    # Labels at random: what was seen can be learned by heart, what was not cannot.
    rng = np.random.default_rng(0)
    feature = torch.randn(60, 80, generator=torch.Generator().manual_seed(0))
    domains = [("a", "b")[k] for k in rng.integers(0, 2, 60)]
    router, figures = train_router(feature, domains, [f"{d}/all" for d in domains], [str(i) for i in range(60)])
    assert np.mean([r.domain == d for r, d in zip(router.route(feature), domains, strict=True)]) > 0.95
    assert figures["domain_accuracy"] < 0.75
    assert figures["abstained"] > 0.5
    # With copies of every document in the training, their keys must keep them apart all the same.
    keys = [str(i % 60) for i in range(120)]
    twice = torch.cat([feature, feature])
    _, copied = train_router(twice, domains * 2, [f"{d}/all" for d in domains] * 2, keys)
    assert copied["domain_accuracy"] < 0.75


def test_figures_by_hand():
    feature, domains, subdomains, keys = world(spread=5.0)
    router, figures = train_router(feature, domains, subdomains, keys, precision=0.8, seed=3)
    confidence, right, right_domain = [0.0] * 100, [False] * 100, [False] * 100
    for part in folds(keys, 5, 3):
        inside = [i for i in range(100) if i not in part]
        x = feature[inside].double().numpy()
        mean, scale = x.mean(0), x.std(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = LogisticRegression(max_iter=300).fit((x - mean) / scale, [domains[i] for i in inside])
            second = {}
            for d in ("law", "math"):
                mine = [n for n, i in enumerate(inside) if domains[i] == d]
                labels = [subdomains[inside[n]] for n in mine]
                second[d] = LogisticRegression(max_iter=300).fit(((x - mean) / scale)[mine], labels)
        for i in part:
            row = (feature[i].double().numpy()[None] - mean) / scale
            d = first.predict(row)[0]
            confidence[i] = first.predict_proba(row).max() * second[d].predict_proba(row).max()
            right_domain[i] = d == domains[i]
            right[i] = second[d].predict(row)[0] == subdomains[i]
    assert figures["domain_accuracy"] == np.mean(right_domain)
    assert figures["subdomain_accuracy"] == np.mean(right)
    threshold = abstention_threshold(confidence, right, 0.8)
    assert router.threshold == figures["threshold"] == pytest.approx(threshold, abs=1e-3)
    assert figures["subdomain_ece"] == pytest.approx(expected_calibration_error(confidence, right), abs=0.02)


def test_too_few_documents_to_know_means_abstaining():
    feature, domains, subdomains, _ = world()
    router, figures = train_router(feature, domains, subdomains, ["one key"] * 100)
    assert router.threshold > 1
    assert figures["abstained"] == 1


def test_calibration_error_by_hand():
    # Bins [0.2, 0.3): confidence 0.25, accuracy 0.5; [0.9, 1]: confidence 0.97, accuracy 2/3.
    confidence, right = [0.2, 0.3 - 1e-9, 0.95, 1.0, 0.96], [True, False, True, False, True]
    expected = (2 * abs(0.25 - 0.5) + 3 * abs(0.97 - 2 / 3)) / 5
    assert expected_calibration_error(confidence, right) == pytest.approx(expected)
    assert expected_calibration_error([1.0, 1.0], [True, True]) == 0
    assert expected_calibration_error([], []) == 0
    assert expected_calibration_error([0.5] * 4, [True, True, False, False]) == 0


def test_abstention_threshold():
    confidence = [0.9, 0.5, 0.7, 0.6, 0.8]
    right = [True, False, True, False, True]
    # From the top: 0.9 0.8 0.7 right, 0.6 0.5 wrong.
    assert abstention_threshold(confidence, right, 1.0) == 0.7
    assert abstention_threshold(confidence, right, 0.75) == 0.6
    assert abstention_threshold(confidence, right, 0.6) == 0.5
    assert abstention_threshold(confidence, [False] * 5, 0.5) > 1
    assert abstention_threshold([], [], 0.9) > 1
    # A wrong one at the top does not hide that many below it are right.
    assert abstention_threshold([0.99, 0.9, 0.8, 0.7], [False, True, True, True], 0.75) == 0.7


@pytest.mark.parametrize("seed", range(20))
def test_what_passes_the_threshold_has_the_precision(seed):
    rng = np.random.default_rng(seed)
    # Few distinct confidences: those that are equal pass together.
    confidence = rng.choice([0.4, 0.6, 0.9, 1.0], 30)
    right = rng.random(30) < confidence * 0.9
    threshold = abstention_threshold(confidence.tolist(), right.tolist(), 0.8)
    passing = right[confidence >= threshold]
    assert not len(passing) or passing.mean() >= 0.8
    for lower in confidence[confidence < threshold]:
        assert right[confidence >= lower].mean() < 0.8


def test_latency_is_measured():
    feature, domains, subdomains, keys = world()
    router, figures = train_router(feature, domains, subdomains, keys)
    assert 0 < figures["p50_ms"] <= figures["p95_ms"]
    assert latency(router, feature[:1], repeats=3)["p50_ms"] > 0
