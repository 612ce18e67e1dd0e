"""Experts that are put onto the engine when they are asked for: the same answers, and nothing that nobody asked for."""

import asyncio
import shutil
from types import SimpleNamespace

import pytest

from freemoe import FreeMoE
from freemoe.core.errors import DataError, FreeMoEError, UnknownNameError
from freemoe.serve.catalogue import ExpertCatalogue, NotLoadedError, ServedExperts
from freemoe.serve.engine.routing import route_prompts
from tests.serve.conftest import alone, ask, engine_on, read, write_artefact
from tests.tiny import tiny_model


@pytest.fixture
def there(folders):
    """A base without experts, and a catalogue of a and b."""
    opened = FreeMoE.from_pretrained(str(folders.base), folders.own, device="cpu")
    bare = FreeMoE(opened.model, [], opened.router, opened.tokenizer)
    with engine_on(bare) as engine:
        experts = ServedExperts(engine, ExpertCatalogue().with_artefact(folders.own))
        yield SimpleNamespace(engine=engine, host=bare, experts=experts)


def load(there, name):
    asyncio.run(there.experts.ensure_loaded(name))


def said(there, name, tokens=12):
    return read(there.engine.submit([ask(there.host, "court?", name, tokens)])[0]).text


def test_an_expert_is_there_when_it_is_asked_for(there, whole):
    assert there.experts.catalogue.expert_names == ["a", "b"]
    with pytest.raises(UnknownNameError):
        said(there, "a")
    load(there, "base")
    assert there.engine.experts == []
    load(there, "a")
    assert there.engine.experts == ["a"]
    assert said(there, "a") == alone(whole, "court?", "a") != alone(whole, "court?", "b")
    load(there, "a+b")
    assert said(there, "a+b") == alone(whole, "court?", "a+b")
    assert there.engine.experts == ["a", "b"]


def test_many_ask_for_one_at_once_and_it_is_loaded_once(there, monkeypatch):
    loads = []
    load = there.host.load_expert
    monkeypatch.setattr(there.host, "load_expert", lambda *how, **more: loads.append(how) or load(*how, **more))

    async def ask_often():
        await asyncio.gather(*(there.experts.ensure_loaded(name) for name in ["a", "b", "a", "a+b"] * 8))

    asyncio.run(ask_often())
    assert len(loads) == 2


def test_the_router_picks_what_is_not_loaded_yet(there, whole):
    prompts = [tuple(whole.tokenizer(text)["input_ids"]) for text in ("court?", "x", "", "3 + 4")]
    true = route_prompts(whole, prompts)
    assert {one.expert for one in true} & {"a", "b"}
    assert route_prompts(there.host, prompts, there.experts.catalogue.expert_names) == true
    # Where they cannot be asked for either, the base answers.
    assert {one.expert for one in route_prompts(there.host, prompts)} == {"base"}


def test_a_newer_catalogue_is_taken_over_and_an_older_one_is_not(there, folders):
    first = there.experts.catalogue
    load(there, "a+b")
    second = first.without_expert("a").with_artefact(folders.more, "x-")
    assert second.version > first.version
    there.experts.update_catalogue(second)
    assert there.experts.catalogue.expert_names == ["b", "x-c", "x-d"]
    # Nobody can ask for it from now on, though it may not be gone yet.
    assert there.engine.experts == ["b"]
    there.experts.update_catalogue(first)
    assert there.experts.catalogue.expert_names == ["b", "x-c", "x-d"]
    asyncio.run(there.experts.wait_dropped())
    assert there.host.experts == ["b"]
    load(there, "x-c")
    assert there.engine.experts == ["b", "x-c"]


def test_a_name_that_means_another_expert_now_answers_as_that_one(there, folders, whole, tmp_path):
    """Those who asked for the old one get it, who asks afterwards gets the new one."""
    model = tiny_model("llama", num_hidden_layers=1)
    write_artefact(tmp_path / "swapped", folders.base, model, "ba")
    swapped = FreeMoE.from_pretrained(str(folders.base), tmp_path / "swapped", device="cpu")
    assert alone(swapped, "court?", "a") != alone(whole, "court?", "a")
    load(there, "a")
    old = there.engine.submit([ask(there.host, "court?", "a", 60)])[0]
    there.experts.update_catalogue(ExpertCatalogue().with_artefact(tmp_path / "swapped"))
    load(there, "a")
    assert said(there, "a") == alone(swapped, "court?", "a")
    assert read(old).text == alone(whole, "court?", "a", 60)


def test_files_that_are_gone_cost_that_expert_and_no_other(there, folders, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(folders.more, copied)
    there.experts.update_catalogue(there.experts.catalogue.with_artefact(copied))
    shutil.rmtree(copied)
    with pytest.raises(NotLoadedError, match="'c' could not be loaded") as caught:
        load(there, "c")
    assert str(tmp_path) not in str(caught.value)
    load(there, "a")
    assert said(there, "a")


def test_what_is_loaded_while_it_runs(there, folders, whole):
    before = there.experts.catalogue
    with pytest.raises(DataError, match="'a', 'b' already"):
        asyncio.run(there.experts.load_experts(folders.own, ""))
    with pytest.raises(FreeMoEError):
        asyncio.run(there.experts.load_experts(folders.other, ""))
    assert there.experts.catalogue == before
    assert asyncio.run(there.experts.load_experts(folders.more, "x-")) == ["x-c", "x-d"]
    assert there.experts.catalogue.version > before.version
    assert there.engine.experts == ["x-c", "x-d"]
    assert said(there, "x-c") == alone(whole, "court?", "c")
    asyncio.run(there.experts.drop_expert("x-c"))
    assert there.host.experts == ["x-d"]
    assert there.experts.catalogue.expert_names == ["a", "b", "x-d"]
    for name in ("x-c", "base"):
        with pytest.raises(UnknownNameError):
            asyncio.run(there.experts.drop_expert(name))
    # Its name is free again.
    there.experts.update_catalogue(there.experts.catalogue.without_expert("x-d"))
    assert asyncio.run(there.experts.load_experts(folders.more, "x-")) == ["x-c", "x-d"]
