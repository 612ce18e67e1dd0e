"""What judges the server's answers sees answers that are not what the body asks for."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from freemoe.serve.engine.scheduler import BatchScheduler
from tests.hardening.fuzz.case import Case, Refused, WrongError, judge
from tests.hardening.fuzz.kinds import requests
from tests.hardening.fuzz.material import PROBES

pytestmark = pytest.mark.filterwarnings("ignore")

GREEDY = {"model": "more/switch", "prompt": PROBES[0], "n": 2, "max_tokens": 5, "temperature": 0}
ANOTHER = {"model": "base:more/switch+more/unit"}


@pytest.fixture(scope="module", autouse=True)
def server(material):
    made = requests._server(material.folder / "experts")
    yield made
    made.engine.stop()
    requests._server.cache_clear()


@pytest.mark.parametrize(
    ("body", "asked", "spoil", "says"),
    [
        ({}, {}, lambda said: None, None),
        ({}, {}, lambda said: said["choices"].pop(), "choices for 1 prompts"),
        ({}, {}, lambda said: said["usage"].update(completion_tokens=99), "99 tokens"),
        ({}, {}, lambda said: said["choices"][0].update(text="something else"), "another text"),
        ({}, {}, lambda said: said["choices"][1].update(finish_reason="error"), "ended with 'error'"),
        ({"max_tokens": 12}, {"max_tokens": 12, **ANOTHER}, lambda said: None, "another text"),
    ],
)
def test_a_wrong_answer_is_seen_and_a_right_one_is_one(server, body, asked, spoil, says):
    status, content = asyncio.run(requests._asked(server, requests.TEXT, json.dumps({**GREEDY, **asked}).encode()))
    assert status == 200, content
    said = json.loads(content)
    spoil(said)
    with pytest.raises(WrongError, match=says) if says else nullcontext():
        requests._require_answer(server.moe, {**GREEDY, **body}, json.dumps(said).encode(), chat=False)


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
