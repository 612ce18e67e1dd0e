"""A hub on loopback that this process asks, with an empty cache and no token; artefacts of all three kinds."""

from types import SimpleNamespace

import pytest

from freemoe.hookmoe.adapter import Trimmed, save_adapter
from freemoe.hookmoe.artefact_files import KIND as TRIMMED
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.hub import reach
from freemoe.hub.push import copy_artefact
from freemoe.tomoe.export import export_converted_model
from tests.artefacts import finish_artefact, rewritten
from tests.cli.conftest import freemoe  # noqa: F401  a fixture
from tests.domain_experts.conftest import artefact, world  # noqa: F401  fixtures
from tests.fake_hub import serving
from tests.tiny import save_base, tiny_model, tiny_tokenizer
from tests.tomoe.random_structures import random_structure

CARD = '---\nlibrary_name: freemoe\n---\n# A card\n\nfreemoe.load("path/to/this/folder")\n'


def point_to(monkeypatch, url, cache):
    """Let the hub's client ask an address, with a cache of its own and no token."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(reach, "_asked", {})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that is there."""
    with serving() as found:
        point_to(monkeypatch, found.url, tmp_path / "cache")
        yield found


@pytest.fixture
def gone(tmp_path, monkeypatch):
    """The address of a hub that refuses every connection."""
    with serving() as found:
        url = found.url
    point_to(monkeypatch, url, tmp_path / "cache")
    return url


@pytest.fixture
def cut(monkeypatch):
    """Call it, and the process is offline (HF_HUB_OFFLINE=1)."""

    def offline():
        import datasets.config
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    return offline


def finish(folder, kind, base, model):
    """Write a card and the manifest of a folder that holds the rest of an artefact."""
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return finish_artefact(folder, kind, model, base)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory):
    """Bases of the hub in folders, and a converted and a trimmed artefact that name them."""
    root = tmp_path_factory.mktemp("kinds")
    mixture, dense = tiny_model("mixtral", num_hidden_layers=3), tiny_model("llama")
    for name, model in (("mixture", mixture), ("dense", dense)):
        save_base(model, root / name)
    (root / "trimmed").mkdir()
    save_adapter(Trimmed(uniform_plan(plan_of(mixture), 1)), mixture, root / "trimmed")
    finish(root / "trimmed", TRIMMED, "maker/mixture", mixture)
    export_converted_model(
        dense, random_structure(dense), root / "converted", mode="shared", tokenizer=tiny_tokenizer()
    )
    finish(root / "converted", "converted", "maker/dense", dense)
    return SimpleNamespace(root=root, **{p.name: p for p in root.iterdir()})


@pytest.fixture(scope="session")
def experts(artefact, tmp_path_factory):  # noqa: F811
    """A build's artefact whose manifest names its base on the hub."""
    root = tmp_path_factory.mktemp("named")
    whole = copy_artefact(artefact, root / "whole")
    named = {"base_model_name_or_path": "maker/base"}
    return rewritten(whole, root / "experts", manifest=lambda said: said.update(named))


@pytest.fixture
def shelf(hub, experts, kinds, world):  # noqa: F811
    """A hub with two bases, and the experts and the trimmed mixture for them."""
    held = {"maker/base": world.base, "maker/mixture": kinds.mixture, "owner/experts": experts}
    for name, folder in {**held, "owner/trimmed": kinds.trimmed}.items():
        hub.add(name, folder)
    return hub
