"""A trimmed mixture's files that are not what they say are refused, with right checksums too."""

import json

import pytest
import torch

from freemoe.core.errors import ArtifactError, FreeMoEError
from freemoe.hookmoe.adapter import Trimmed, load_adapter, save_adapter
from freemoe.hookmoe.artefact import inspect_artefact
from freemoe.hookmoe.artefact_files import KIND
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.models.checkpoints.identity import IDENTITY, identify_base
from tests.artefacts import finish_artefact, rename, rewritten
from tests.tiny import save_base, tiny_model, tiny_tokenizer

NAN = float("nan")


@pytest.fixture(scope="module")
def base():
    return tiny_model("mixtral")


@pytest.fixture(scope="module")
def trimmed(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trimmed") / "out"
    folder.mkdir()
    plan = uniform_plan(plan_of(base), 1)
    save_adapter(Trimmed(plan, new_hooks(base, {0: 4, 1: 6}, "routed", "pre", bias=True)), base, folder)
    said = {"plan": list(plan.ks), IDENTITY: identify_base(base, tiny_tokenizer())}
    return finish_artefact(folder, KIND, base, **said)


def test_it_is_whole(trimmed, base, tmp_path):
    assert load_adapter(rewritten(trimmed, tmp_path / "copy"), base, tiny_tokenizer()).hooks is not None


SETTINGS = {
    "another rule": (lambda c: c.update(rescale="twice"), "rule 'twice' for router weights; known: none"),
    "a hook less": (lambda c: c["hook_layers"].pop("1"), "belongs to no hook"),
    "no hooks": (lambda c: c.update(hook_layers={}), "belongs to no hook"),
    "a hook more": (lambda c: c["hook_layers"].update({"2": 4}), "KeyError"),
    "a wider hook": (lambda c: c["hook_layers"].update({"1": 8}), "not what hookmoe_config.json says"),
    "a hook at a word": (lambda c: c["hook_layers"].update(x=4), "hook_layers.x"),
    "no bias": (lambda c: c.update(bias=False), "belongs to no hook"),
    "another scope": (lambda c: c.update(scope="all"), "not what hookmoe_config.json says"),
    "another position": (lambda c: c.update(position="beside"), "not what hookmoe_config.json says"),
    "another plan": (lambda c: c.update(top_k=[2, 2]), r"has the plan \[2, 2\], and the manifest has \[1, 1\]"),
    "a plan that is a word": (lambda c: c.update(top_k="1,1"), "top_k: .*seen: '1,1'"),
    "no plan": (lambda c: c.pop("top_k"), "top_k: Field required"),
    "another width": (lambda c: c.update(hidden_size=16), "not what hookmoe_config.json says"),
    "another family": (lambda c: c.update(family="olmoe"), "family 'olmoe', and the model has 'mixtral'"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_others(trimmed, base, tmp_path, case):
    edit, message = SETTINGS[case]
    with pytest.raises(ArtifactError, match=message):
        load_adapter(rewritten(trimmed, tmp_path / "copy", hookmoe_config=edit), base)


@pytest.mark.parametrize("ks", [[0, 1], [3, 9], [1], [1, None], [1, "1"], [1.5, 1]])
def test_plans_that_the_base_cannot_run(trimmed, base, tmp_path, ks):
    copy = rewritten(
        trimmed, tmp_path / "copy", manifest=lambda m: m.update(plan=ks), hookmoe_config=lambda c: c.update(top_k=ks)
    )
    with pytest.raises(FreeMoEError):
        load_adapter(copy, base)


TENSORS = {
    "NaN in a hook": (
        lambda t: t["layers.1.up.weight"].view(-1)[3:4].fill_(NAN),
        r"infinity in 'layers\.1\.up\.weight'",
    ),
    "NaN as its scale": (lambda t: t["layers.0.r"].fill_(NAN), r"infinity in 'layers\.0\.r'"),
    "infinity": (lambda t: t["layers.0.down.bias"].fill_(float("inf")), "NaN or infinity"),
    "integers": (lambda t: t.update({"layers.0.up.weight": t["layers.0.up.weight"].to(torch.int8)}), "integers where"),
    "another shape": (lambda t: t.update({"layers.0.r": torch.ones(2)}), "not what hookmoe_config.json says"),
    "a tensor less": (lambda t: t.pop("layers.0.r"), "KeyError"),
    "a tensor more": (lambda t: t.update({"layers.7.r": torch.ones(())}), "belongs to no hook"),
    "another name": (lambda t: rename(t, "layers.0.r", "layers.0.s"), "KeyError"),
    "none": (lambda t: t.clear(), "KeyError"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_others(trimmed, base, tmp_path, case):
    edit, message = TENSORS[case]
    with pytest.raises(ArtifactError, match=message):
        load_adapter(rewritten(trimmed, tmp_path / "copy", hookmoe=edit), base)
    with pytest.raises(ArtifactError, match=message):
        inspect_artefact(tmp_path / "copy")


def test_another_base_config_or_tokenizer(trimmed, base, tmp_path):
    with pytest.raises(ArtifactError, match="made for the base 'tiny'"):
        load_adapter(trimmed, tiny_model("mixtral", seed=1))
    save_base(base, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 4}))
    with pytest.raises(ArtifactError, match="sliding_window is 4 and was None"):
        inspect_artefact(trimmed, str(tmp_path))
    other = tiny_tokenizer()
    other.bos_token = "</s>"
    with pytest.raises(ArtifactError, match="another tokenizer"):
        load_adapter(trimmed, base, other)
