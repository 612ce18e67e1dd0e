"""OpenAI's paths over real HTTP: what is answered is what the model says alone, in the shapes that clients expect."""

import json

import openai
import pytest
import torch

from tests.serve.conftest import alone, wait_until
from tests.tiny import CHAT_TEMPLATE

PROMPTS = ["court?", "12+7=", "a treaty of 1919", "x"]
MODELS = {"base": "base", "base:a": "a", "b": "b", "base:c+d": "c+d", "base:b&d": "b&d"}


def complete(there, **body):
    done = there.client.post("/v1/completions", json={"model": "base", "max_tokens": 12, "temperature": 0, **body})
    assert done.status_code == 200, done.text
    return done


def text_of(there, **body):
    return complete(there, **body).json()["choices"][0]["text"]


def lines_of(text):
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


@pytest.mark.parametrize(("model", "expert"), MODELS.items())
def test_a_completion_is_the_model_s_own(there, moe, model, expert):
    done = complete(there, model=model, prompt="court?")
    body = done.json()
    assert body["object"] == "text_completion"
    assert body["model"] == model
    text = alone(moe, "court?", expert)
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    counts = {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    assert body["usage"] == counts | {"freemoe": {"expert": expert, "confidence": None}}
    assert done.headers["x-freemoe-expert"] == expert
    assert "x-freemoe-confidence" not in done.headers


def test_models_are_listed(there):
    body = there.client.get("/v1/models").json()
    assert [row["id"] for row in body["data"]] == ["base", "auto", "base:a", "base:b", "base:c", "base:d"]
    assert {row["object"] for row in body["data"]} == {"model"}
    for name, row in [(row["id"], row) for row in body["data"]] + [("base:c+d", None), ("b", None)]:
        found = there.client.get(f"/v1/models/{name}")
        assert (found.status_code, found.json()) == (200, row or {**body["data"][0], "id": name})
    client = openai.OpenAI(base_url=f"{there.url}/v1", api_key="unused", max_retries=0)
    assert client.models.retrieve("base:c&d").id == "base:c&d"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("base:nobody")


@pytest.mark.parametrize(
    ("extras", "ignored"),
    [
        ({}, None),
        ({"user": "me", "parallel_tool_calls": False, "store": True}, "user,parallel_tool_calls,store"),
        ({"tempreature": 0.5, "a,b\r\nx: y": 1, "ä": None}, "tempreature,a%2Cb%0D%0Ax%3A%20y,%C3%A4"),
        ({"model_config": 1, "ignored": 2, "stops": 3, "__dict__": 4}, "model_config,ignored,stops,__dict__"),
        ({"typical_p": 1}, "typical_p"),
        ({"logit_bias": {}, "suffix": ""}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_are_unknown_do_nothing_and_are_named_in_a_header(there, moe, extras, ignored, stream):
    done = complete(there, prompt="court?", stream=stream, **extras)
    assert done.headers.get("x-freemoe-ignored") == ignored
    pieces = lines_of(done.text) if stream else [done.json()]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == alone(moe, "court?")


def test_an_answer_of_another_server_may_be_sent_on_as_it_came(there):
    """As openai's own classes dump a message, and as agents keep them."""
    answer = {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "reasoning_content": ""}
    answer |= dict.fromkeys(("audio", "function_call", "tool_calls"))
    messages = [{"role": "user", "name": "me", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]
    messages += [answer, {"role": "user", "content": "z"}]
    tools = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    body = {"model": "base", "messages": messages, "max_tokens": 1, **tools}
    done = there.client.post("/v1/chat/completions", json=body)
    assert done.status_code == 200, done.text
    assert done.headers["x-freemoe-ignored"] == "parallel_tool_calls"


def test_auto_is_what_the_router_says(there, moe):
    for prompt in PROMPTS:
        text, expert = moe.generate_text(prompt, expert="auto", max_new_tokens=12, do_sample=False)
        [(_, route)] = moe.route(prompt)
        done = complete(there, model="auto", prompt=prompt)
        assert done.json()["choices"][0]["text"] == text
        assert done.headers["x-freemoe-expert"] == expert
        assert float(done.headers["x-freemoe-confidence"]) == pytest.approx(route.confidence, abs=1e-5)
        assert done.json()["usage"]["freemoe"]["expert"] == expert
        said = there.client.post("/v1/freemoe/route", json={"prompt": prompt}).json()
        assert (said["expert"], said["subdomains"][0]["name"]) == (expert, route.subdomain)
        assert said["confidence"] == pytest.approx(route.confidence, abs=1e-5)
        assert sum(row["probability"] for row in said["subdomains"]) == pytest.approx(1, abs=1e-4)


def test_prompts_of_every_form_and_several_answers(there, moe):
    ids = [moe.tokenizer(p)["input_ids"] for p in PROMPTS]
    texts = [alone(moe, p) for p in PROMPTS]
    for prompt in (PROMPTS, ids):
        body = complete(there, prompt=prompt).json()
        assert [c["text"] for c in body["choices"]] == texts
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert body["usage"]["freemoe"]["expert"] == ["base"] * 4
    assert text_of(there, prompt=ids[0]) == texts[0]
    drawn = complete(there, prompt=PROMPTS[:2], n=3, temperature=1, seed=5).json()["choices"]
    assert len({c["text"] for c in drawn}) == 6
    # The same seed draws the same, alone too, and another seed draws others.
    again = complete(there, prompt=PROMPTS[1], n=3, temperature=1, seed=5).json()["choices"]
    assert again[2]["text"] == drawn[5]["text"]
    assert text_of(there, prompt=PROMPTS[1], temperature=1, seed=6) != drawn[3]["text"]


@pytest.mark.parametrize("expert", ["base", "a"])
def test_a_streamed_completion_is_the_whole_one(there, moe, expert):
    how = {"model": expert, "prompt": PROMPTS, "n": 2, "temperature": 1, "seed": 3}
    how |= {"logprobs": 2, "echo": True, "stop": ["M", "\x05"]}
    whole = complete(there, **how).json()
    streamed = complete(there, **how, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-freemoe-expert"] == expert
    chunks = lines_of(streamed.text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for key, value in choice["logprobs"].items():
            assert [v for c in mine if c["logprobs"] for v in c["logprobs"][key]] == value, key


def test_logprobs_of_completions(there, moe):
    body = complete(there, model="b", prompt="treaty", max_tokens=3, logprobs=2, echo=True).json()["choices"][0]
    told = body["logprobs"]
    assert body["text"].startswith("treaty")
    assert {len(row) for row in told.values()} == {9}
    ids = moe.tokenizer("treaty")["input_ids"]
    with torch.no_grad():
        scores = moe(torch.tensor([ids]), expert="b").logits[0].log_softmax(-1)
    true = [None, *(float(scores[i, t]) for i, t in enumerate(ids[1:]))]
    assert told["token_logprobs"][:6] == pytest.approx(true, abs=1e-4)
    assert told["tokens"][:6] == list("treaty")
    assert told["text_offset"][:7] == [0, 1, 2, 3, 4, 5, 6]
    assert told["top_logprobs"][0] is None
    assert max(told["top_logprobs"][8].values()) == told["token_logprobs"][8]
    scored = complete(there, model="b", prompt="treaty", max_tokens=0, logprobs=0, echo=True).json()["choices"][0]
    assert scored["text"] == "treaty"
    assert scored["logprobs"]["token_logprobs"] == told["token_logprobs"][:6]


def test_a_chat_without_a_template_and_with_one(there, moe, monkeypatch):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"model": "a", "messages": messages, "max_tokens": 5, "temperature": 0}
    plain = there.client.post("/v1/chat/completions", json=body).json()
    assert plain["object"] == "chat.completion"
    assert plain["choices"][0]["message"]["role"] == "assistant"
    assert plain["choices"][0]["message"]["content"] == alone(moe, "System: short\n\nUser: hi\n\nAssistant:", "a", 5)
    monkeypatch.setattr(moe.tokenizer, "chat_template", CHAT_TEMPLATE)
    templated = there.client.post("/v1/chat/completions", json=body).json()
    assert templated["choices"][0]["message"]["content"] == alone(moe, "[system]short[/][user]hi[/][assistant]", "a", 5)
    monkeypatch.setattr(moe.tokenizer, "chat_template", "{{ raise_exception('no system here') }}")
    refused = there.client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "no system here" in refused.json()["error"]["message"]


def test_the_openai_client(there, moe):
    client = openai.OpenAI(base_url=f"{there.url}/v1", api_key="any", max_retries=0)
    assert "base:a" in [model.id for model in client.models.list()]
    done = client.completions.create(model="base:a", prompt="court?", max_tokens=8, temperature=0)
    assert done.choices[0].text == alone(moe, "court?", "a", 8)
    messages = [{"role": "user", "content": "court?"}]
    chat = {"model": "base:b", "messages": messages, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == 8
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    assert whole.usage.completion_tokens == 8
    with client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content == alone(moe, "User: court?\n\nAssistant:", "b", 8)
    assert chunks[-1].usage.completion_tokens == 8
    raw = client.completions.with_raw_response.create(model="auto", prompt="court?", max_tokens=1)
    assert raw.headers["x-freemoe-expert"]
    with pytest.raises(openai.NotFoundError, match="base:d"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="base", prompt="x" * 500)
    assert refused.value.code == "context_length_exceeded"


def test_signs_and_metrics(there):
    assert there.client.get("/health").json() == {"status": "ok"}
    assert there.client.get("/ready").json() == {"status": "ready"}
    complete(there, model="d", prompt="x", max_tokens=3)
    wait_until(lambda: "running_sequences 0.0" in there.client.get("/metrics").text, 10)
    page = there.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    for line in (
        'freemoe_requests_total{expert="d",how="length"}',
        'freemoe_generated_tokens_total{expert="d"} 3.0',
        'freemoe_prompt_tokens_total{expert="d"} 1.0',
        'freemoe_time_to_first_token_seconds_count{expert="d"} 1.0',
        'freemoe_time_between_tokens_seconds_count{expert="d"} 2.0',
        'freemoe_http_responses_total{path="/v1/completions",status="200"}',
        "freemoe_running_sequences 0.0",
        "freemoe_router_confidence_count",
    ):
        assert line in page.text, line


def test_the_api_describes_itself(there):
    found = there.client.get("/openapi.json").json()
    fields = found["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"model", "prompt", "max_tokens", "stream"} <= set(fields)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/freemoe/route"} <= set(found["paths"])
    assert "/openapi.json" in there.client.get("/docs").text
