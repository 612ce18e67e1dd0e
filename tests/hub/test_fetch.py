"""Artefacts and their bases from a hub: each file is asked for at most twice, and then never again."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import freemoe
from freemoe.core.artifacts import MANIFEST
from freemoe.core.errors import ArtifactError, HubError, RecipeError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.hub.fetch import HubAccess, fetch_artefact, fetch_model, is_repository
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from tests.fake_hub import READER
from tests.tiny import logits

PROMPT = "seven stones"


def most_asked(hub):
    """Requests for the file that was asked for most often."""
    files = [path for _, path in hub.asked if "/resolve/" in path]
    return max(map(files.count, files))


# ----------------------------------------------------------------- what is a name of the hub


NO_NAMES = ("./owner/name", "/owner/name", "owner", "a/b/c", "a b/c", Path("owner/name"), "tests/hub", None)


@pytest.mark.parametrize("source", ["owner/name", "owner/name@v1", "owner/na.me-x", *NO_NAMES])
def test_a_folder_is_no_name_of_a_repository(source, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert is_repository(source) is (source not in NO_NAMES)


# ------------------------------------------------------------------------------ experts


def test_experts_find_their_base_on_the_hub(shelf, experts, world, tmp_path):
    moe = FreeMoE.from_pretrained("owner/experts", device="cpu")
    assert most_asked(shelf) == 2
    here = FreeMoE.from_pretrained(world.base, experts, device="cpu")
    assert moe.experts == here.experts
    for name in ("base", *moe.experts):
        with moe.expert(name), here.expert(name):
            torch.testing.assert_close(logits(moe.model), logits(here.model), rtol=0, atol=0)
    # What is saved of the base names where it came from, and no folder of the cache.
    assert moe.model.config._name_or_path == "maker/base"
    moe.save_pretrained(tmp_path / "copy")
    assert {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()} == {
        p.name: p.read_bytes() for p in experts.iterdir()
    }


def test_a_hub_that_went_away_is_asked_once_and_the_cache_serves(shelf, monkeypatch):
    from freemoe.hub import reach

    FreeMoE.from_pretrained("owner/experts", device="cpu")
    knocks = []
    monkeypatch.setattr(reach, "_asked", {})
    monkeypatch.setattr(reach, "_probe_endpoint", lambda where: knocks.append(where) or "nobody there")
    asked = len(shelf.asked)
    assert FreeMoE.from_pretrained("owner/experts", device="cpu").experts
    assert len(shelf.asked) == asked
    assert len(knocks) == 1


def test_a_base_is_shared(shelf, world):
    moe = FreeMoE.from_pretrained("owner/experts", base=world.model, tokenizer=world.tokenizer)
    assert moe.model is world.model
    assert not shelf.count("maker/base")
    assert FreeMoE.from_pretrained(world.model, "owner/experts").model is world.model


def test_revisions(shelf, experts, world):
    first = shelf.repositories["owner/experts"].branches["main"]
    shelf.add("owner/experts", {"README.md": b"empty"})
    with pytest.raises(ArtifactError, match=r"has no freemoe_config\.json"):
        FreeMoE.from_pretrained("owner/experts", base=world.model)
    for named in ({"revision": first}, {}):
        source = "owner/experts" if named else f"owner/experts@{first}"
        assert FreeMoE.from_pretrained(source, base=world.model, **named).experts
    with pytest.raises(HubError, match=r"has no such revision .*HTTP 404"):
        FreeMoE.from_pretrained("owner/experts", base=world.model, revision="later")


def test_cache_dir_and_local_files_only(shelf, world, tmp_path):
    how = {"base": world.model, "cache_dir": tmp_path / "mine"}
    with pytest.raises(HubError, match="not in the cache, and local_files_only is set"):
        FreeMoE.from_pretrained("owner/experts", local_files_only=True, **how)
    assert not shelf.asked
    FreeMoE.from_pretrained("owner/experts", **how)
    assert (tmp_path / "mine" / "models--owner--experts").is_dir()
    asked = len(shelf.asked)
    FreeMoE.from_pretrained("owner/experts", local_files_only=True, **how)
    assert len(shelf.asked) == asked


def test_places_named_twice_or_not_at_all(world, experts):
    for wrong in ((), (None,), (world.model,), (1, 2, 3)):
        with pytest.raises(RecipeError, match="from_pretrained"):
            FreeMoE.from_pretrained(*wrong)
    with pytest.raises(RecipeError, match="base again by name"):
        FreeMoE.from_pretrained(world.model, experts, base=world.model)
    with pytest.raises(RecipeError, match="artefact again by name"):
        FreeMoE.from_pretrained(world.model, experts, artefact=experts)
    assert FreeMoE.from_pretrained(world.model, artefact=experts).experts
    assert FreeMoE.from_pretrained(base=world.model, artefact=experts).experts


# ------------------------------------------------------------------------- the other kinds


def test_converted_and_trimmed_models_are_loaded_from_the_hub(shelf, kinds, cut, tmp_path):
    shelf.add("owner/half", kinds.converted)

    def said(name):
        opened = freemoe.load(name, device="cpu")
        return opened, opened.generate_text(PROMPT, max_new_tokens=4, do_sample=False)

    wanted = {}
    for name, folder in (("owner/trimmed", kinds.trimmed), ("owner/half", kinds.converted)):
        opened, wanted[name] = said(name)
        opened.save_pretrained(tmp_path / name)
        assert (tmp_path / name / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    assert wanted["owner/half"][1] == "converted"
    assert most_asked(shelf) == 2
    assert freemoe.load("owner/experts", device="cpu").experts
    # From here on all of it is in the cache.
    asked = len(shelf.asked)
    cut()
    assert all(said(name)[1] == text for name, text in wanted.items())
    assert freemoe.load("owner/experts", device="cpu").experts
    assert load_tokenizer("maker/base") is not None
    assert len(shelf.asked) == asked
    # A plain model beside its artefact is not one; and whatever is no artefact is not copied.
    plain = freemoe.load("maker/mixture", device="cpu")
    with pytest.raises(ArtifactError, match="not opened from an artefact"):
        plain.save_pretrained(tmp_path / "plain")


def test_a_model_is_not_fetched_twice_over(hub, kinds):
    files = {p.name: p.read_bytes() for p in kinds.dense.iterdir()}
    hub.add("maker/dense", {**files, "consolidated.safetensors": b"again", "onnx/model.onnx": b"again", "a.bin": b"x"})
    model, tokenizer = load_base("maker/dense", device="cpu")
    assert tokenizer is not None
    assert logits(model).shape[-1] == model.config.vocab_size
    assert not hub.count("consolidated") + hub.count("onnx") + hub.count("a.bin")


# ------------------------------------------------------------------------------- failures


def test_a_missing_or_private_model_is_one_message(hub, kinds):
    hub.add("owner/secret", kinds.trimmed, private=True)
    hub.add("maker/mixture", kinds.mixture, private=True)
    for name in ("owner/secret", "owner/none"):
        hub.asked.clear()
        with pytest.raises(HubError, match=rf"'{name}' cannot be read .*401.*private.*HF_TOKEN.*hf auth login"):
            freemoe.load(name)
        assert len(hub.asked) <= 4
    with pytest.raises(HubError, match=r"^The base model 'owner/none' could not be loaded"):
        load_base("owner/none")
    with pytest.raises(
        HubError, match=r"^There is no folder './none' here\. The base model 'none' could not be loaded"
    ):
        load_base("none")
    with pytest.raises(HubError, match="the token that was sent may not see it"):
        freemoe.load("owner/secret", token="hf_wrong")
    # The token opens the artefact and its base.
    assert freemoe.load("owner/secret", token=READER, device="cpu").experts == ["trimmed", "base"]


@pytest.mark.parametrize("part", ["tree", "resolve", "revision"])
def test_a_hub_that_fails_is_asked_twice_at_most(part, hub, kinds):
    hub.add("owner/plain", kinds.dense)
    hub.failing = {part: 503}
    with pytest.raises(HubError, match=r"the hub at .* failed \(HTTP 503\)"):
        load_base("owner/plain")
    for path in {path for _, path in hub.asked}:
        assert sum(path == other for _, other in hub.asked) <= 2


def test_out_of_reach_is_said_at_once(gone):
    for work in (
        lambda: load_base("owner/none"),
        lambda: load_tokenizer("owner/none"),
        lambda: freemoe.load("owner/none"),
        lambda: FreeMoE.from_pretrained("owner/none"),
        lambda: load_base("nothing-here"),
    ):
        with pytest.raises(HubError, match=rf"not in the cache, and the hub at {gone} cannot be reached"):
            work()


def test_a_download_that_was_edited_is_refused(hub, kinds):
    files = {p.name: p.read_bytes() for p in kinds.trimmed.iterdir()}
    hub.add("owner/edited", {**files, "hookmoe_config.json": b"{}"})
    with pytest.raises(ArtifactError, match="its checksum is not the manifest's"):
        freemoe.load("owner/edited")
    # A card may be edited, as the hub's page lets its owner do.
    hub.add("maker/mixture", kinds.mixture)
    hub.add("owner/better", {**files, "README.md": b"# Better words"})
    assert freemoe.load("owner/better", device="cpu").experts
    hub.add("owner/cut", {name: data for name, data in files.items() if not name.endswith(".safetensors")})
    with pytest.raises(ArtifactError, match=r"lacks 'hookmoe\.safetensors'"):
        freemoe.load("owner/cut")
    hub.add("owner/odd", {**files, MANIFEST: b"[]"})
    with pytest.raises(ArtifactError, match=r"is not whole: Input should be an object \(seen: \[\]\)"):
        freemoe.load("owner/odd")


def test_a_base_of_another_machine_is_asked_for(hub, kinds):
    assert json.loads((kinds.trimmed / MANIFEST).read_text())["base_model_name_or_path"] == "maker/mixture"
    with pytest.raises(HubError, match="what the artefact names as its base: name another place"):
        freemoe.load(kinds.trimmed)


def test_what_an_older_client_left_in_the_cache_is_enough(hub, kinds):
    from huggingface_hub import hf_hub_download

    hub.add("maker/dense", kinds.dense)
    access = HubAccess(local_files_only=True)
    for name in ("config.json", "model.safetensors"):
        hf_hub_download("maker/dense", name)
    assert fetch_model("maker/dense", access).joinpath("config.json").is_file()
    assert fetch_artefact("maker/dense", access) == Path("maker/dense")


def test_an_address_that_is_no_hub(hub):
    hub.failing = {"owner": 404}
    with pytest.raises(HubError, match=r"does not answer as a hub does \(HTTP 404\).*Check HF_ENDPOINT"):
        freemoe.load("owner/none")


def test_that_weights_are_fetched_is_said_once(hub, kinds, caplog):
    hub.add("maker/dense", kinds.dense)
    with caplog.at_level("INFO", logger="freemoe.hub"):
        load_tokenizer("maker/dense")
        assert not caplog.messages
        for _ in range(2):
            load_base("maker/dense", device="cpu")
    assert caplog.messages == [f"maker/dense: its weights are not in the cache and come from {hub.url}"]


def test_the_client_is_as_it_was(hub):
    import logging

    from huggingface_hub import constants
    from huggingface_hub.utils import http_backoff

    from freemoe.hub.reach import hub_session

    def state():
        return constants.HF_HUB_OFFLINE, dict(http_backoff.__kwdefaults__), logging.getLogger("huggingface_hub").level

    before = state()
    with hub_session(local=True) as closed, hub_session(again=1):
        assert closed
        assert constants.HF_HUB_OFFLINE
        assert http_backoff.__kwdefaults__["max_retries"] == 1
    assert state() == before
    with suppress(KeyError), hub_session(local=True):
        raise KeyError
    assert state() == before
