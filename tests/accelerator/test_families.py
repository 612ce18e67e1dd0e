"""Every family of the table on an accelerator: experts that answer, and the whole of a conversion or a trim, as on the CPU."""

import torch

from freemoe import artefacts
from freemoe.domain_experts.hosting.several import STRATEGIES
from freemoe.hookmoe.pipeline import trim
from freemoe.models.sublayers import CONVERTIBLE
from freemoe.tomoe.pipeline import convert
from tests.accelerator.test_pipelines import convert_recipe, trim_recipe
from tests.accelerator.worlds import each_family, mixture
from tests.serve.conftest import alone, ask, engine_on, read
from tests.tiny import MIXTURES, save_base, save_base_and_text, tiny_model, tiny_tokenizer

NAMES = ["few", "low", "base", "low+few"]
PROMPTS = ["one two", "a longer prompt than that", "x", "the last of them"]


@each_family("llama", "qwen3_moe")
def test_experts_answer_there_as_here_in_any_batch(case, accelerator):
    def answers(device):
        moe = mixture(case, device)
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = "left"
        batch = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
        found = {way: moe(**batch, expert=NAMES, strategy=way).logits[:, -1].cpu() for way in STRATEGIES}
        found["texts"] = moe.generate(**batch, expert=NAMES, max_new_tokens=4, do_sample=False).cpu()
        return found

    here, there = answers("cpu"), answers(accelerator)
    for way, expected in here.items():
        torch.testing.assert_close(there[way], expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(here["swap"][0], here["swap"][1])


@each_family("llama")
def test_the_server_answers_there_as_each_prompt_alone_here(case, accelerator):
    here, there = mixture(case, "cpu"), mixture(case, accelerator)
    with engine_on(there, batch=4, prefill=7) as engine:
        boxes = engine.submit([ask(there, p, n, 6) for p, n in zip(PROMPTS, NAMES, strict=True)])
        for box, prompt, name in zip(boxes, PROMPTS, NAMES, strict=True):
            found = read(box)
            assert found.error is None
            assert alone(here, prompt, name, 6).startswith(found.text.rstrip("�"))


@each_family(of=[*CONVERTIBLE, *MIXTURES])
def test_from_a_recipe_to_answers(case, tmp_path, accelerator):
    save_base_and_text(tmp_path)
    (tmp_path / "model").rename(tmp_path / "llama")
    folder = "mixture" if case in MIXTURES else "model"
    save_base(tiny_model(case), tmp_path / folder)
    if case in MIXTURES:
        artefact = trim(trim_recipe(tmp_path, tmp_path / "out", device=accelerator))
    else:
        artefact = convert(convert_recipe(tmp_path, tmp_path / "out", rivals=False, device=accelerator))
    texts = [
        artefacts.load(artefact, device=device).generate_text("one two", max_new_tokens=6, do_sample=False)
        for device in (accelerator, "cpu")
    ]
    assert texts[0] == texts[1]
