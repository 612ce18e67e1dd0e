"""Any artefact is opened by one function."""

import pytest
import torch

import freemoe
from freemoe.core.errors import ArtifactError, DataError, UnknownNameError
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from tests.hub.conftest import kinds  # noqa: F401  a fixture
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = "seven stones"


def continued(model, **options):
    ids = tiny_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **options)
    return tiny_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_plain_model_answers_as_itself(kinds):  # noqa: F811
    opened = freemoe.load(kinds.dense, device="cpu")
    wanted = continued(tiny_model("llama")), "base"
    assert opened.generate_text(PROMPT, max_new_tokens=6, do_sample=False) == wanted
    with pytest.raises(UnknownNameError, match="Known: auto, base"):
        opened.generate_text(PROMPT, expert="law/0")
    with pytest.raises(DataError, match="to fit the context of 256"):
        opened.generate_text(PROMPT, max_new_tokens=256)
    with pytest.raises(ArtifactError, match="no artefact that could be put on a base"):
        freemoe.load(kinds.dense, str(kinds.dense))


def test_a_trimmed_mixture_answers_trimmed_or_whole(kinds, tmp_path):  # noqa: F811
    base = tiny_model("mixtral", num_hidden_layers=3)
    opened = freemoe.load(kinds.trimmed, str(kinds.mixture), device="cpu")
    whole = continued(base)
    with Trimmed(uniform_plan(plan_of(base), 1)).attached(base):
        leaner = continued(base)
    assert leaner != whole
    for expert, wanted in (("auto", (leaner, "trimmed")), ("base", (whole, "base")), ("trimmed", (leaner, "trimmed"))):
        assert opened.generate_text(PROMPT, expert=expert, max_new_tokens=6, do_sample=False) == wanted
    tiny_model("mixtral", num_hidden_layers=3, seed=1).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="was made for the base"):
        freemoe.load(kinds.trimmed, str(tmp_path), device="cpu")


def test_a_converted_model_needs_no_base(kinds):  # noqa: F811
    opened = freemoe.load(kinds.converted, device="cpu")
    assert opened.model.config.model_type.startswith("tomoe_")
    assert opened.generate_text(PROMPT, max_new_tokens=6, do_sample=False) == (continued(opened.model), "converted")
    with pytest.raises(ArtifactError, match="needs no base"):
        freemoe.load(kinds.converted, "somewhere")
