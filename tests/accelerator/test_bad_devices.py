"""Devices that are not there, or full: what is told names what there is, and what would fit."""

import json

import pytest
import torch

from freemoe.cli import _run_arguments
from freemoe.core.errors import RecipeError
from freemoe.models.checkpoints.loading import load_base
from tests.tiny import save_base_and_text


@pytest.fixture
def files(tmp_path):
    save_base_and_text(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["{}:7", "xpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(name, files, accelerator):
    kind = torch.device(accelerator).type
    with pytest.raises(RecipeError, match=rf"not on this machine; torch finds .*\b{kind}\b"):
        load_base(files / "model", device=name.format(kind))


def test_a_base_on_the_second_device(files, pretend_accelerator):
    base, _ = load_base(files / "model", device="pretend:1")
    assert base(torch.arange(3, 9, device="pretend:1")[None]).logits.device == torch.device("pretend", 1)


def test_a_device_that_fills_up_on_the_way_ends_in_a_message(files, pretend_accelerator, capsys):
    command = ["convert", str(files / "model"), "--text", str(files / "text.jsonl"), "--block", "32", "--steps", "2"]
    command += ["-o", str(files / "out"), "--device", "pretend", "--json", "-q"]
    base, _ = load_base(files / "model", device="cpu")
    with pretend_accelerator.room_for(6 * sum(p.numel() * p.element_size() for p in base.parameters())):
        assert _run_arguments(command) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "DataError"
    assert all(word in said["error"] for word in ("not enough memory", "--dry-run", "--dtype", "--batch-tokens"))
