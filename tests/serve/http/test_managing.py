"""Experts that come and go while the server runs: from the folders that were named alone, and never in use."""

import shutil
from urllib.parse import quote

import pytest

from freemoe import FreeMoE
from freemoe.serve.settings import EngineLimits
from tests.serve.conftest import alone, served
from tests.serve.http.test_hostile import GOOD, TEXT, error_of

EXPERTS = "/v1/freemoe/experts"


@pytest.fixture
def host(folders):
    return FreeMoE.from_pretrained(str(folders.base), folders.own, device="cpu")


@pytest.fixture
def there(host, folders):
    with served(host, EngineLimits(128, batch=4), roots=[folders.own, folders.root / "more"]) as found:
        yield found


def names(there):
    return [row["name"] for row in there.client.get(EXPERTS).json()["data"]]


def test_experts_are_listed_loaded_and_dropped(there, host, folders):
    rows = there.client.get(EXPERTS).json()["data"]
    assert [(row["name"], row["kind"]) for row in rows] == [("a", "switch"), ("b", "switch")]
    error_of(there.client.post(TEXT, json={**GOOD, "model": "c"}), 404)
    loaded = there.client.post(EXPERTS, json={"path": str(folders.more)})
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["loaded"] == ["c", "d"]
    assert names(there) == ["a", "b", "c", "d"]
    text = there.client.post(TEXT, json={**GOOD, "model": "base:c", "max_tokens": 8}).json()["choices"][0]["text"]
    assert text == alone(host, "x", "c", 8)
    error_of(there.client.post(EXPERTS, json={"artefact": str(folders.more)}), 400)
    assert there.client.post(EXPERTS, json={"artefact": ".", "prefix": "own-"}).json()["loaded"] == ["own-a", "own-b"]
    for name in ("c", "base:d", "own-a", "own-b"):
        assert there.client.delete(f"{EXPERTS}/{name}").json()["deleted"] is True
    error_of(there.client.post(TEXT, json={**GOOD, "model": "c"}), 404)
    for name in ("c", "base"):
        error_of(there.client.delete(f"{EXPERTS}/{name}"), 404)
    assert names(there) == ["a", "b"]


@pytest.mark.parametrize("before", ["x-", "x:", "Süd ost/", "100%2F", "C#?/", "数", "a|", "%0A"])
def test_what_can_be_loaded_can_be_asked_for_and_deleted_by_its_name(there, folders, before):
    loaded = there.client.post(EXPERTS, json={"path": str(folders.more), "prefix": before})
    assert loaded.json()["loaded"] == [f"{before}c", f"{before}d"]
    answer = there.client.post(TEXT, json={**GOOD, "model": f"base:{before}c", "max_tokens": 1})
    assert answer.json()["usage"]["freemoe"]["expert"] == f"{before}c"
    assert there.client.delete(f"{EXPERTS}/{quote(before + 'c', safe='')}").status_code == 200
    assert names(there) == ["a", "b", f"{before}d"]


@pytest.mark.parametrize("before", ["base:", "a+", "a&", "x\n", "\u202e", " ", "../", "/", "x\x00"])
def test_names_that_mean_something_else_are_refused(there, folders, before):
    for path in (folders.own, folders.more):
        error = error_of(there.client.post(EXPERTS, json={"path": str(path), "prefix": before}), 400)
        assert "The name " in error["message"] or "invalid_json" in error["code"]
    assert names(there) == ["a", "b"]


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "../other", "other", "../../..", "own/../../other", "base", "more/experts.safetensors", "\\..\\other", "x" * 4000, "https://x/y", "owner/name"],
)  # fmt: skip
def test_folders_that_were_not_named_cannot_be_read(there, folders, path):
    error = error_of(there.client.post(EXPERTS, json={"path": path}), 403)
    # Whether there is something is not said, nor where anything lies.
    assert str(folders.root) not in error["message"]
    error_of(there.client.post(EXPERTS, json={"path": str(folders.other)}), 403)


def test_a_link_leads_nowhere_else(there, folders):
    link = folders.more / "link"
    link.symlink_to(folders.other)
    try:
        for path in (str(link), "link"):
            error_of(there.client.post(EXPERTS, json={"path": path}), 403)
    finally:
        link.unlink()


def test_experts_of_another_base_and_damaged_ones_are_refused(host, folders, tmp_path):
    shutil.copytree(folders.other, tmp_path / "other")
    shutil.copytree(folders.more, tmp_path / "cut")
    (tmp_path / "cut" / "experts.safetensors").write_bytes(b"nothing")
    with served(host, roots=[tmp_path]) as there:
        for path, word in (("other", "base"), ("cut", "experts.safetensors")):
            error = error_of(there.client.post(EXPERTS, json={"path": path}), 400)
            assert word in error["message"]
            assert error["code"] == "bad_artefact"
            assert str(tmp_path) not in error["message"]
        assert names(there) == ["a", "b"]
        assert there.client.post(TEXT, json=GOOD).status_code == 200
