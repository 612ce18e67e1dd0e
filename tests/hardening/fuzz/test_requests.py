"""What judges the server's answers sees answers that are not what the body asks for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from freemoe.serve.engine.scheduler import BatchScheduler
from tests.hardening.fuzz.case import Case, Refused, WrongError, judge
from tests.hardening.fuzz.kinds import requests
from tests.hardening.fuzz.material import PROBES

pytestmark = pytest.mark.filterwarnings("ignore")

GREEDY: dict[str, Any] = {
    "model": "more/switch",
    "prompt": PROBES[0],
    "n": 2,
    "max_tokens": 5,
    "temperature": 0,
}


@pytest.fixture(scope="module", autouse=True)
def stopped(material):
    yield
    requests._server(material.folder / "experts").engine.stop()
    requests._server.cache_clear()


def answered(material, body, path=requests.TEXT):
    server = requests._server(material.folder / "experts")
    status, content = asyncio.run(requests._asked(server, path, json.dumps(body).encode()))
    assert status == 200, content
    return json.loads(content)


def judged(material, body, said):
    server = requests._server(material.folder / "experts")
    requests._require_answer(server.moe, body, json.dumps(said).encode(), chat=False)


def test_a_right_answer_is_one(material):
    one = dict(GREEDY)
    judged(material, one, answered(material, one))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda said: said["choices"].pop(), "choices for 1 prompts"),
        (lambda said: said["usage"].update(completion_tokens=99), "99 tokens"),
        (lambda said: said["choices"][0].update(text="something else"), "another text"),
        (lambda said: said["choices"][1].update(finish_reason="error"), "ended with 'error'"),
    ],
)
def test_a_wrong_answer_is_seen(material, spoil, says):
    body = dict(GREEDY)
    said = answered(material, body)
    spoil(said)
    with pytest.raises(WrongError, match=says):
        judged(material, body, said)


def test_another_experts_answer_is_wrong(material):
    body = {**GREEDY, "max_tokens": 12}
    with pytest.raises(WrongError, match="another text"):
        judged(material, body, answered(material, {**body, "model": "base:more/switch+more/unit"}))


@pytest.mark.parametrize("raw", [b'{"n": 1, "n": 2}', b'{"n": NaN}', b"[1]"])
def test_bodies_that_no_answer_is_right_for(raw):
    with pytest.raises(WrongError):
        requests._plain(raw)


def test_a_fault_of_the_server_is_seen(material, monkeypatch):
    case = Case("requests", {"path": requests.TEXT, "body": json.dumps({**GREEDY, "prompt": "a"})})
    assert judge(case, material).ending == "accepted"
    wrong = Case("requests", {"path": requests.TEXT, "body": json.dumps({**GREEDY, "model": "nobody"})})
    assert judge(wrong, material).ending == "refused"
    with pytest.raises(Refused, match="404"):
        requests.attempt(wrong.what, material, material.folder)

    def broken(*_):
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(BatchScheduler, "_process_logits", broken)
        assert judge(case, material).ending == "traceback"
    assert judge(case, material).ending == "accepted"
