"""Any artefact is opened by one function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import freemoe
from freemoe.core.artifacts import write_manifest
from freemoe.core.errors import ArtifactError, DataError, UnknownNameError
from freemoe.hookmoe.adapter import Trimmed, save_adapter
from freemoe.hookmoe.artefact_files import KIND
from freemoe.hookmoe.plans.apply import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.tomoe.export import export_converted_model
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tomoe.random_structures import random_structure

PROMPT = "seven stones"


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def continued(model, **options) -> str:
    ids = tiny_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **options)
    return tiny_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def manifest(folder: Path, kind: str, base: Path, model) -> None:
    body = {"kind": kind, "base_model_name_or_path": str(base), "base_fingerprint": fingerprint_model(model)}
    write_manifest(folder, {**body, "freemoe_version": "0", "revision": None})


def test_a_plain_model_answers_as_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    opened = freemoe.load(saved(model, tmp_path / "model"), device="cpu")
    assert opened.generate_text(PROMPT, max_new_tokens=6, do_sample=False) == (continued(model), "base")
    with pytest.raises(UnknownNameError, match="Known: auto, base"):
        opened.generate_text(PROMPT, expert="law/0")
    with pytest.raises(DataError, match="to fit the context of 256"):
        opened.generate_text(PROMPT, max_new_tokens=256)
    with pytest.raises(ArtifactError, match="no artefact that could be put on a base"):
        freemoe.load(tmp_path / "model", str(tmp_path / "model"))


def test_a_trimmed_mixture_answers_trimmed_or_whole(tmp_path: Path) -> None:
    base = tiny_model("mixtral", num_hidden_layers=3)
    source, folder = saved(base, tmp_path / "base"), tmp_path / "trimmed"
    trimmed = Trimmed(uniform_plan(plan_of(base), 1))
    folder.mkdir()
    save_adapter(trimmed, base, folder)
    manifest(folder, KIND, source, base)
    opened = freemoe.load(folder, device="cpu")
    whole = continued(base)
    with trimmed.attached(base):
        leaner = continued(base)
    assert leaner != whole
    for expert, wanted in (("auto", (leaner, "trimmed")), ("base", (whole, "base")), ("trimmed", (leaner, "trimmed"))):
        assert opened.generate_text(PROMPT, expert=expert, max_new_tokens=6, do_sample=False) == wanted
    other = saved(tiny_model("mixtral", num_hidden_layers=3, seed=1), tmp_path / "other")
    with pytest.raises(ArtifactError, match="was made for the base"):
        freemoe.load(folder, str(other), device="cpu")


def test_a_converted_model_needs_no_base(tmp_path: Path) -> None:
    model, folder = tiny_model("llama"), tmp_path / "converted"
    export_converted_model(model, random_structure(model), folder, mode="shared", tokenizer=tiny_tokenizer())
    manifest(folder, "converted", tmp_path, model)
    opened = freemoe.load(folder, device="cpu")
    assert opened.model.config.model_type.startswith("tomoe_")
    assert opened.generate_text(PROMPT, max_new_tokens=6, do_sample=False) == (continued(opened.model), "converted")
    with pytest.raises(ArtifactError, match="needs no base"):
        freemoe.load(folder, "somewhere")
