"""lm-eval's clients against the running server: the answers and scores of the model itself, document by document."""

import pytest

from tests.domain_experts.test_lm_eval_model import manager, task_config
from tests.tiny import CHAT_TEMPLATE

pytest.importorskip("tenacity", reason="lm-eval's clients need it (pip install 'freemoe[dev]')")
# lm-eval and its libraries warn of their own affairs, aiohttp of a session that lm-eval leaves open.
pytestmark = pytest.mark.filterwarnings("ignore")


def samples(model, kind, **options):
    """lm-eval's answers, and its figures."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(manager().load([task_config(kind)])["tasks"].values()),
        task_manager=manager(),
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
        **options,
    )
    assert found is not None
    [rows] = found["samples"].values()
    [figures] = found["results"].values()
    return [row["resps"] for row in rows], {k: v for k, v in figures.items() if isinstance(v, float)}


def local(moe):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=moe.model, tokenizer=moe.tokenizer, batch_size=4, max_length=128)


@pytest.mark.parametrize(("kind", "expert"), [("choice", "a"), ("generate", "base")])
def test_local_completions(there, moe, folders, kind, expert):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with moe.expert(expert):
        expected, figures = samples(local(moe), kind)
    client = LocalCompletionsAPI(
        base_url=f"{there.url}/v1/completions",
        model=f"base:{expert}" if expert != "base" else "base",
        tokenizer=str(folders.base),
        tokenizer_backend="huggingface",
        max_length=128,
        max_gen_toks=9,
        batch_size=4 if kind == "choice" else 1,
        max_retries=1,
    )
    found, same = samples(client, kind)
    if kind == "generate":
        assert found == expected
    else:
        for ours, theirs in zip(found, expected, strict=True):
            for [(score, greedy)], [(true, is_greedy)] in zip(ours, theirs, strict=True):
                assert float(score) == pytest.approx(float(true), abs=1e-3)
                assert greedy == is_greedy
    assert same == figures


def test_local_chat_completions(there, moe, monkeypatch):
    from lm_eval.models.openai_completions import LocalChatCompletion

    monkeypatch.setattr(moe.tokenizer, "chat_template", CHAT_TEMPLATE)
    expected, figures = samples(local(moe), "generate", apply_chat_template=True)
    client = LocalChatCompletion(
        base_url=f"{there.url}/v1/chat/completions", model="base", max_gen_toks=9, max_retries=1
    )
    assert samples(client, "generate", apply_chat_template=True) == (expected, figures)
