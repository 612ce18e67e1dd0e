"""Bodies of HTTP requests to the server, on an artefact with experts of every kind.

Accepted is an answer to what a plain reader finds in the body: as many choices as are asked for, no more tokens than that, no stop
text in them, and, where nothing is drawn at random, the text that transformers' generate gives under that expert. Whatever comes,
an error has OpenAI's shape, nothing is a fault of the server's, and no slot stays taken.
"""

import asyncio
import copy
import json
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from hypothesis import strategies as st

from benchmarks.serve.material import Wish, generated
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.serve.catalogue import ServedExperts
from freemoe.serve.engine.engine import InferenceEngine
from freemoe.serve.http.app import make_app
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits, RequestLimits
from tests.hardening.fuzz.case import Refused, require
from tests.hardening.fuzz.drawing import TEXTS, hostile, near, rarely, spliced
from tests.hardening.fuzz.editing import holder_of, places
from tests.hardening.fuzz.material import PROBES
from tests.hardening.soak.soak import NEAR, gap

TEXT, CHAT, ROUTE, LOAD = "/v1/completions", "/v1/chat/completions", "/v1/freemoe/route", "/v1/freemoe/experts"

_SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBES[0]}]
_SOUND = (
    (TEXT, {"model": "base", "prompt": PROBES[0], "max_tokens": 6, "temperature": 0}),
    (TEXT, {"model": "base:more/switch", "prompt": [PROBES[0], PROBES[1]], "n": 2, "max_tokens": 4, "seed": 7, "top_p": 0.9}),
    (TEXT, {"model": "more/unit", "prompt": [5, 9, 30], "logprobs": 2, "echo": True, "max_tokens": 3, "temperature": 0.0}),
    (TEXT, {"model": "base:more/switch+more/unit", "prompt": [[4, 8], [15, 16, 23]], "stop": ["e", "."], "temperature": 0}),
    (TEXT, {"model": "auto", "prompt": PROBES[1], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}),
    (CHAT, {"model": "base", "messages": _SAID, "max_tokens": 5, "temperature": 0, "top_k": 3, "presence_penalty": 0.5}),
    (CHAT, {"model": "more/base", "messages": _SAID, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3, "n": 2}),
    (ROUTE, {"prompt": PROBES[0]}),
    (LOAD, {"path": "elsewhere", "prefix": "new-"}),
)  # fmt: skip
_ONE, _TWO = "more/unit", "more/switch"
_OTHERS = {
    "model": ("base", "auto", _TWO, f"base:{_ONE}", f"base:{_ONE}&{_TWO}", f"{_ONE}+{_TWO}", " base"),
    "temperature": (0, 0.0, 0.5, 1, 2, None),
    "n": (1, 2, 3, None),
    "max_tokens": (0, 1, 2, 9, None),
    "stop": ("e", [" "], ["x", ""], [], None, "the"),
    "stream": (True, False, None),
    "stream_options": ({"include_usage": True}, {"include_usage": False}, {}, None),
    "echo": (True, False),
    "logprobs": (0, 1, 5, None, True),
    "seed": (0, -3, 2**62),
    "top_p": (0.01, 0.5, 1, 1.0),
    "top_k": (-1, 0, 1, 40),
    "frequency_penalty": (-2, 0, 1.5),
    "repetition_penalty": (0.1, 1, 1.0, 2.5),
    "min_p": (0, 0.1, 1),
    "prompt": ("", "a", PROBES[1], ["x", "y"], [[3]], [7] * 90, "é" * 40, "0 " * 200),
    "user": ("me", 7, None),
    "best_of": (1, 2),
}
"""Fields -> what may well be accepted: only what is accepted can be wrong."""

_PIECES = (*b'\0 \xff \xc3 { ] " , NaN 1e999 -0 \\ud800'.split(b" "), b"[" * 70, b"9" * 400, b"\xef\xbb\xbf")


def strategy(material):
    """The path and the bytes of a body as Latin-1: fields of a sound one changed, then maybe some characters."""
    others = {"best_of", "user", "tools", "suffix", "logit_bias", "x"}
    fields = sorted({name for _, body in _SOUND for name in body} | others)
    texts = [text.encode("utf-8", "replace") for text in TEXTS]
    pieces = st.one_of(st.sampled_from(_PIECES), st.sampled_from(texts))

    @st.composite
    def bodies(draw):
        path, sound = draw(st.sampled_from(_SOUND))
        body = json.loads(json.dumps(sound))
        for _ in range(draw(st.sampled_from([0, 1, 2])) if path in (TEXT, CHAT) else 0):
            name = draw(st.sampled_from([name for name in sorted(_OTHERS) if path == TEXT or name != "prompt"]))
            body[name] = copy.deepcopy(draw(st.sampled_from(_OTHERS[name])))
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2]))):
            found = list(places(body))
            if not found:
                break
            where, held = draw(st.sampled_from(found))
            holder = holder_of(body, where)
            if draw(rarely(10)):
                del holder[where[-1]]
            elif draw(rarely(4)):
                body[draw(st.sampled_from(fields))] = draw(hostile())
            else:
                holder[where[-1]] = draw(near(held))
        raw = spliced(draw, json.dumps(body).encode(), pieces, 5, 3)
        return {"path": path, "body": raw.decode("latin-1")}

    return bodies()


_CONTEXT = 96


@dataclass(frozen=True)
class _Server:
    engine: InferenceEngine
    moe: FreeMoE
    app: Any


@cache
def _server(folder):
    """One for all cases of a process: what a case leaves behind is the next one's to stumble over."""
    moe = FreeMoE.from_pretrained(folder)
    metrics = ServerMetrics()
    engine = InferenceEngine(moe, EngineLimits(context=_CONTEXT, batch=16, queue=32), metrics).start()
    return _Server(engine, moe, make_app(ServedExperts(engine), metrics, bounds=RequestLimits(choices=32)))


def warm(material):
    path, body = _SOUND[0]
    asyncio.run(_asked(_server(material.folder / "experts"), path, json.dumps(body).encode()))


async def _asked(server, path, raw):
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, content=raw, headers={"content-type": "application/json"})
        return answer.status_code, answer.content


def attempt(what, material, folder):
    """Ask, and look at the answer."""
    server, raw = _server(material.folder / "experts"), what["body"].encode("latin-1")
    status, content = asyncio.run(_asked(server, what["path"], raw))
    if not server.engine.is_alive:
        raise RuntimeError("the engine has ended")
    _require_free(server)
    if status >= 500:
        raise RuntimeError(f"{status}: {content.decode(errors='replace')[:600]}")
    if status != 200:
        said = json.loads(content)["error"]
        require(set(said) == {"message", "type", "param", "code"}, f"an error of another shape: {said}")
        require(bool(said["message"]) and "\x1b" not in said["message"], "an error without words, or with escape codes")
        raise Refused(f"{status}: {said['message']}")
    body = _plain(raw)
    if what["path"] in (TEXT, CHAT):
        _require_answer(server.moe, body, content, chat=what["path"] == CHAT)


def _require_free(server):
    """An answer may be told a moment before its slot is free."""
    until = time.monotonic() + 5
    while server.engine.num_unfinished:
        require(time.monotonic() < until, "a sequence stays behind an answer")
        time.sleep(0.001)


def _plain(raw):
    """What a plain reader finds in a body; nothing that is said twice."""

    def once(pairs):
        require(len({name for name, _ in pairs}) == len(pairs), "a body that says a field twice")
        return dict(pairs)

    def refuse(number):
        require(False, f"a body with {number}")

    found = json.loads(raw.decode(), object_pairs_hook=once, parse_constant=refuse)
    require(isinstance(found, dict), "a body that is no mapping")
    return found


def _whole(body, name, least, most, other=None):
    value = body.get(name)
    if value is None:
        return other
    require(type(value) is int and least <= value <= most, f"{name} {value!r:.80}")
    return value


def _require_answer(moe, body, content, chat):
    temperature = body.get("temperature")
    require(temperature is None or (type(temperature) in (int, float) and 0 <= temperature <= 2), "a temperature")
    n = _whole(body, "n", 1, 128, 1) or 1
    most = _whole(body, "max_completion_tokens", 1, 10**7) if chat else None
    most = _whole(body, "max_tokens", int(chat), 10**7) if most is None else most
    prompts = 1 if chat else _count(body["prompt"])
    choices, used = _streamed(content) if body.get("stream") is True else _at_once(content)
    require(len(choices) == prompts * n, f"{len(choices)} choices for {prompts} prompts with n={n}")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    for text, reason in choices:
        require(reason in ("stop", "length"), f"an answer that ended with {reason!r}")
        if not body.get("echo"):
            require(not any(stop and stop in text for stop in stops), "a stop text")
    if used is not None and most is not None:
        require(used <= most * len(choices), f"{used} tokens for {len(choices)} answers of {most}")
    penalties = (body.get("presence_penalty"), body.get("frequency_penalty"), body.get("repetition_penalty", 1) != 1)
    drawn = temperature != 0 or any(penalties)
    if not (chat or drawn or stops or body.get("echo") or body["model"] == "auto"):
        _require_text(moe, body, [text for text, _ in choices], n, 16 if most is None else most)


def _count(prompt):
    require(isinstance(prompt, str | list) and prompt != [], "a prompt")
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def _at_once(content):
    said = json.loads(content)
    rows = sorted(said["choices"], key=lambda row: row["index"])
    texts = [row["text"] if "text" in row else row["message"]["content"] for row in rows]
    return list(zip(texts, [row["finish_reason"] for row in rows], strict=True)), said["usage"]["completion_tokens"]


def _streamed(content):
    lines = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: ")]
    require(bool(lines) and lines[-1] == "[DONE]", "a stream without an end")
    texts, reasons, used = {}, {}, None
    for said in map(json.loads, lines[:-1]):
        require("error" not in said, f"a stream that broke: {said}")
        used = (said.get("usage") or {}).get("completion_tokens", used)
        for row in said["choices"]:
            index, text = row["index"], row.get("text") or row.get("delta", {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            reasons[index] = row.get("finish_reason") or reasons.get(index, "")
    return [(texts[index], reasons[index]) for index in sorted(texts)], used


def _require_text(moe, body, texts, n, most):
    """Greedy answers are those of generate, but for two tokens that are equally likely."""
    prompt = body["prompt"]
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    expert = body["model"].removeprefix("base:").strip()
    for number, one in enumerate(several):
        ids = moe.tokenizer(one)["input_ids"] if isinstance(one, str) else one
        room = min(most, _CONTEXT - len(ids))
        if not room:
            continue
        wish = Wish(expert, tuple(ids), room)
        out = generated(moe, wish)
        true = moe.tokenizer.decode(out, skip_special_tokens=True)
        for text in texts[number * n : (number + 1) * n]:
            same = text == true or gap(moe, wish, out, text) <= NEAR
            require(same, f"another text than generate's: {text!r:.120} and {true!r:.120}")
