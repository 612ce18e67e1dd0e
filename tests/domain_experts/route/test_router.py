"""The two-level router against scikit-learn, figures by hand, and what it does when it is not sure."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save
from sklearn.linear_model import LogisticRegression

from freemoe.core.artifacts import read_manifest
from freemoe.domain_experts.recipe import RouterSection
from freemoe.domain_experts.route.confidence import abstention_threshold, expected_calibration_error, fit_temperature
from freemoe.domain_experts.route.levels import fit_level
from freemoe.domain_experts.route.router import DomainRouter, train_router
from freemoe.domain_experts.select.choice import split_folds


def world(per_group=20, spread=0.3, seed=0):
    """Two domains with two and three subdomains, in five places: features, domains, subdomains, keys."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 5, (5, 8))
    order = rng.permutation(np.repeat(np.arange(5), per_group))
    feature = torch.tensor(centres[order] + rng.normal(0, spread, (len(order), 8))).float()
    subdomains = [["law/a", "law/b", "math/0", "math/1", "math/2"][k] for k in order]
    return feature, [s.split("/")[0] for s in subdomains], subdomains, [str(i) for i in range(len(order))]


both_levels = pytest.mark.parametrize("level2", ["linear", "centroid"])


@both_levels
def test_separable_groups_are_routed(level2):
    feature, domains, subdomains, keys = world()
    router, figures = train_router(feature, domains, subdomains, keys, RouterSection(level2=level2))
    routes = router.route(feature)
    assert [r.domain for r in routes] == domains
    assert [r.subdomain for r in routes] == subdomains
    assert all(0 < r.confidence <= 1 for r in routes)
    fresh, _, expected, _ = world(per_group=5, seed=0)
    assert [r.subdomain for r in router.route(fresh)] == expected
    assert (figures["domain_accuracy"], figures["subdomain_accuracy"]) == (1.0, 1.0)
    assert figures["abstained"] <= 0.05
    assert figures["documents"] == 100


def said_of(level, x):
    """Probabilities (rows, classes)."""
    return level.probabilities(torch.from_numpy(x).float()).numpy()


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_equal_scikit_learns(classes):
    rng = np.random.default_rng(classes)
    x, y = rng.normal(size=(60, 5)), rng.integers(0, classes, 60)
    names = [f"n{k}" for k in range(classes)]
    level = fit_level(x, [names[k] for k in y], names, "linear", 0)
    expected = LogisticRegression(max_iter=300, random_state=0).fit(x, y).predict_proba(x)
    np.testing.assert_allclose(said_of(level, x), expected, atol=1e-5)
    assert level.classes == tuple(names)
    assert level.weight.shape == (classes, 5)


def test_the_papers_router_is_cross_entropy_alone():
    """Eq. 9 by Newton's method, on classes that overlap."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(80, 3)), rng.integers(0, 2, 80)
    inputs, weights = np.concatenate([x, np.ones((80, 1))], axis=1), np.zeros(4)
    for _ in range(50):
        p = 1 / (1 + np.exp(-inputs @ weights))
        weights -= np.linalg.solve((inputs * (p * (1 - p))[:, None]).T @ inputs, inputs.T @ (p - y))
    expected = 1 / (1 + np.exp(-inputs @ weights))
    unregularised, regularised = (
        said_of(fit_level(x, [f"n{k}" for k in y], ["n0", "n1"], kind, 0), x)[:, 1]
        for kind in ("unregularised", "linear")
    )
    np.testing.assert_allclose(unregularised, expected, atol=1e-5)
    assert np.abs(regularised - expected).max() > 1e-3


def test_centroids_are_means_and_the_nearest_wins():
    x = np.random.default_rng(0).normal(size=(60, 4))
    level = fit_level(x, ["n0", "n1", "n2"] * 20, ["n0", "n1", "n2"], "centroid", 0)
    for k in range(3):
        np.testing.assert_allclose(level.weight[k].numpy(), x[k::3].mean(0), atol=1e-6)
    distances = ((x[:, None] - level.weight.numpy()) ** 2).sum(-1)
    assert said_of(level, x).argmax(1).tolist() == distances.argmin(1).tolist()
    np.testing.assert_allclose(said_of(level, x).sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "unregularised", "centroid"])
def test_a_single_class_is_certain(kind):
    x = np.random.default_rng(0).normal(size=(9, 3))
    level = fit_level(x, ["only"] * 9, ["only", "absent"], kind, 0)
    assert level.classes == ("only",)
    assert said_of(level, x).tolist() == [[1.0]] * 9


@both_levels
def test_one_domain_with_one_subdomain_never_abstains(level2):
    feature = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    section = RouterSection(level2=level2)
    router, figures = train_router(feature[:30], ["d"] * 30, ["d/all"] * 30, list(map(str, range(30))), section)
    routes = router.route(feature[30:] * 50)
    assert {(r.domain, r.subdomain) for r in routes} == {("d", "d/all")}
    assert all(r.confidence >= router.threshold for r in routes)
    assert figures["abstained"] == 0
    assert figures["subdomain_accuracy"] == 1


def test_without_a_precision_no_route_is_too_unsure():
    router, figures = train_router(*world(spread=6.0), RouterSection(level2="unregularised", precision=None))
    assert router.threshold == 0.0
    assert figures["abstained"] == 0.0
    assert not any(router.abstains(r) for r in router.route(torch.zeros(100, 8)))


@both_levels
def test_routes_survive_the_disk(level2):
    made = world(spread=6.0)
    router, _ = train_router(*made, RouterSection(level2=level2, precision=0.6), kind="hidden")
    back = DomainRouter.from_parts(json.loads(json.dumps(router.describe())), load(save(router.to_tensors())))
    for ours, theirs in zip(back.route(made[0]), router.route(made[0]), strict=True):
        assert (ours.domain, ours.subdomain) == (theirs.domain, theirs.subdomain)
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-6)
        assert ours.domain_confidence == pytest.approx(theirs.domain_confidence, abs=1e-6)
    assert (back.threshold, back.feature) == (router.threshold, "hidden")
    assert back.describe() == router.describe()
    temperatures = [back.domain.temperature, *(level.temperature for level in back.subdomain.values())]
    assert len({1.0, *temperatures}) > 2
    assert all(torch.equal(t, router.to_tensors()[k]) for k, t in back.to_tensors().items())


def test_a_feature_that_is_always_the_same_is_no_obstacle():
    feature, domains, subdomains, keys = world()
    constant = torch.cat([feature, torch.ones(100, 1)], 1)
    router, _ = train_router(constant, domains, subdomains, keys)
    assert all(torch.isfinite(t).all() for t in router.to_tensors().values())
    assert [r.subdomain for r in router.route(constant)] == subdomains


def _fold_by_hand(feature, domains, subdomains, inside, part):
    """Logits of a fold's documents: level 1, and level 2 of each domain, with the classes of the columns."""
    x = feature.double().numpy()
    mean, scale = x[inside].mean(0), x[inside].std(0)
    x = (x - mean) / scale

    def fit(rows, labels):
        model = LogisticRegression(max_iter=300).fit(x[rows], labels)
        score = model.decision_function(x[part])
        return model.classes_.tolist(), np.stack([-score / 2, score / 2], 1) if score.ndim == 1 else score

    first = fit(inside, [domains[i] for i in inside])
    second = {}
    for d in ("law", "math"):
        mine = [i for i in inside if domains[i] == d]
        second[d] = fit(mine, [subdomains[i] for i in mine])
    return first, second


def _softmax(logits, temperature):
    e = np.exp((logits - logits.max()) / temperature)
    return e / e.sum()


@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
def test_figures_by_hand():
    feature, domains, subdomains, keys = world(spread=6.0)
    router, figures = train_router(feature, domains, subdomains, keys, RouterSection(precision=0.6), seed=3)
    parts = split_folds(keys, 5, 3)
    others = [[i for i in range(100) if i not in part] for part in parts]
    logits = [_fold_by_hand(feature, domains, subdomains, *fold) for fold in zip(others, parts, strict=True)]

    def temperature(numbers, domain):
        rows, right = [], []
        for n in numbers:
            classes, found = logits[n][0] if domain is None else logits[n][1][domain]
            for row, i in zip(found, parts[n], strict=True):
                if domain in (None, domains[i]):
                    rows.append(row)
                    right.append(classes[row.argmax()] == (domains if domain is None else subdomains)[i])
        return fit_temperature(torch.tensor(np.array(rows)), right)

    first, whole, plain, right_domain, right = [np.zeros(100) for _ in range(5)]
    for n, part in enumerate(parts):
        heat = {d: temperature({*range(5)} - {n}, d) for d in (None, "law", "math")}
        (classes, level1), level2 = logits[n]
        for row, i in enumerate(part):
            d = classes[level1[row].argmax()]
            names, scores = level2[d]
            first[i] = _softmax(level1[row], heat[None]).max()
            whole[i] = first[i] * _softmax(scores[row], heat[d]).max()
            plain[i] = _softmax(level1[row], 1).max() * _softmax(scores[row], 1).max()
            right_domain[i] = d == domains[i]
            right[i] = names[scores[row].argmax()] == subdomains[i]
    assert figures["domain_accuracy"] == right_domain.mean()
    assert figures["subdomain_accuracy"] == right.mean()
    assert 0.5 < right.mean() < 1
    threshold = abstention_threshold(whole, right, 0.6)
    assert router.threshold == figures["threshold"] == pytest.approx(threshold, abs=1e-4)
    assert figures["abstained"] == np.mean(whole < threshold - 1e-6)
    found = [figures["domain_ece"], figures["subdomain_ece"], figures["without_temperature"]["subdomain_ece"]]
    told = ((first, right_domain), (whole, right), (plain, right))
    assert found == pytest.approx([expected_calibration_error(*confidence) for confidence in told], abs=0.01)
    assert router.domain.temperature == figures["temperature"] == temperature(range(5), None)
    for d in ("law", "math"):
        assert router.subdomain[d].temperature == figures["subdomain_temperatures"][d] == temperature(range(5), d)


def test_a_class_that_a_fold_lacks_is_no_obstacle():
    feature, domains, subdomains, keys = world()
    # One content key for all of a domain's subdomain, and for another whole domain: their folds cannot know them.
    keys = ["one" if s == "math/2" else k for s, k in zip(subdomains, keys, strict=True)]
    feature = torch.cat([feature, feature[:4] + 40])
    added = [known + [new] * 4 for known, new in ((domains, "odd"), (subdomains, "odd/all"), (keys, "other"))]
    router, figures = train_router(feature, *added)
    assert router.domain.classes.count("odd") == 1
    assert all(np.isfinite([r.confidence for r in router.route(feature)]))
    assert figures["domain_accuracy"] <= 0.97
    assert all(np.isfinite(list(router.describe()["subdomain_temperatures"].values())))
    assert router.subdomain["odd"].temperature == 1.0


def test_too_few_documents_to_know_means_abstaining():
    feature, domains, subdomains, _ = world()
    router, figures = train_router(feature, domains, subdomains, ["one key"] * 100)
    assert router.threshold > 1
    assert figures["abstained"] == 1
    assert router.domain.temperature == 1.0


def test_a_build_keeps_the_temperatures_and_reports_the_calibration(artefact):
    result = json.loads((artefact / "result.json").read_text())
    described = read_manifest(artefact)["router"]
    router = DomainRouter.from_parts(described, load_file(artefact / "router.safetensors"))
    assert router.domain.temperature == result["router"]["temperature"] == described["temperature"]
    assert described["subdomain_temperatures"].keys() == result["router"]["subdomain_temperatures"].keys()
    assert result["router"]["without_temperature"].keys() == {"domain_ece", "subdomain_ece"}
    for domain in result["domains"]:
        documents = domain["documents"]
        right = [d["router_saw"] == d["subdomain"] for d in documents]
        error = expected_calibration_error([d["confidence"] for d in documents], right)
        assert domain["router"]["subdomain_ece"] == pytest.approx(error)
        assert 0 <= domain["router"]["domain_ece"] <= 1
