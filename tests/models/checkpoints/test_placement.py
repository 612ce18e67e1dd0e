"""Where a base's weights lie: what is understood, what is refused, and before anything is loaded."""

import gc

import pytest

from freemoe.core.errors import DataError, RecipeError
from freemoe.models.checkpoints import placement
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.checkpoints.placement import device_map, is_one_device
from tests.tiny import save_base, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_base(tiny_model("llama"), tmp_path_factory.mktemp("base"))


def sizes(model):
    embeddings = model.get_input_embeddings().weight
    return embeddings.nbytes, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("place", "one"),
    [("auto", True), ("cuda:3", True), ("split", False), ("disk", False), ("cpu=1GiB", False), ({"": "cpu"}, False)],
)
def test_one_device_or_several(place, one):
    assert is_one_device(place) is one


def test_layers_stay_on_disk_and_all_else_does_not():
    found = device_map("disk", tiny_model("llama"))
    assert [name for name, place in found.items() if place == "disk"] == ["model.layers.0", "model.layers.1"]
    assert set(found) - {"model.layers.0", "model.layers.1"} >= {"model.embed_tokens", "model.norm", "lm_head"}


def test_limits_fill_memory_first(folder):
    embeddings, whole = sizes(tiny_model("llama"))
    # Everything fits into this machine's memory.
    for limit, expected in ((None, {"cpu"}), (2 * whole, {"cpu"}), ((embeddings + whole) // 2, {"cpu", "meta"})):
        model, _ = load_base(folder, device=f"cpu={limit / 1024:.0f}KiB" if limit else "split")
        assert {p.device.type for p in model.parameters()} == expected
        assert model.get_input_embeddings().weight.device.type == "cpu"


def test_temporary_files_go_with_the_model(tmp_path, monkeypatch):
    # Experts are put together at loading, so that they are written anew.
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    model, _ = load_base(tmp_path / "base", device="disk")
    assert list((tmp_path / "temporary").rglob("*.safetensors"))
    del model
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())
    (tmp_path / "base" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError):
        load_base(tmp_path / "base", device="disk")
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("cpu=10", "limit 'cpu=10'"),
        ("cuda=10GiB", "limit 'cuda=10GiB'"),
        ("disk=10GiB", "use auto, cpu, cuda, cuda:N, split, disk"),
        ("cpu=1KiB", "must be in memory"),
        ({"model.embed_tokens": "cpu"}, "leaves out 'model.layers.0.self_attn.q_proj.weight'"),
        ({"": "cpu", "model.embed_tokens": "disk"}, "must be in memory"),
        ("disc", "Device 'disc' is unknown"),
    ],
    ids=str,
)
def test_a_bad_place_is_refused_before_anything_is_loaded(place, message, folder):
    with pytest.raises(RecipeError, match=message):
        load_base(folder, device=place)


def test_accelerate_is_asked_for_where_it_is_needed(folder, monkeypatch):
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"--device disk needs accelerate.*freemoe\[devices\]"):
        load_base(folder, device="disk")
    assert load_base(folder, device="cpu")[0].device.type == "cpu"


def test_too_little_memory_is_said_before_loading(folder, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    _, whole = sizes(tiny_model("llama"))
    for free, device, said in (
        (whole // 2, "cpu", r"takes .* and .* are free.*--device disk"),
        (1000, "disk", r"smallest pass needs .* are free.*--dtype bfloat16"),
    ):
        monkeypatch.setattr(placement, "available_memory_bytes", lambda free=free: free)
        with pytest.raises(DataError, match=said):
            load_base(folder, device=device)
