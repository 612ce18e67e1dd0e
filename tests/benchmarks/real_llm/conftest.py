"""The first part of the real files: enough for quick cells, which read them anew for every cell."""

import pytest

from benchmarks.harness import Settings
from benchmarks.real_llm import running


@pytest.fixture(scope="session")
def small_root(data_root, tmp_path_factory):
    """A data folder with the real model, ARC, some of WikiText-2 and some of GSM8K."""
    root = tmp_path_factory.mktemp("data")
    for name in ("models", "arc"):
        (root / name).symlink_to(data_root / name)
    for name in ("wikitext-2-raw/wikitext2_train_5k.txt", "wikitext-2-raw/wiki.test.raw"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text((data_root / name).read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    (root / "gsm8k").mkdir()
    for name in ("gsm8k/train.jsonl", "gsm8k/test.jsonl"):
        lines = (data_root / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (root / name).write_text("".join(lines[:300]), encoding="utf-8")
    return root


@pytest.fixture
def real(stories, small_root, tmp_path, monkeypatch):
    """Settings for cells of the real small model, each measured in this process."""
    monkeypatch.setattr(running, "in_own_process", lambda job, work: work(job))
    model = str(small_root / "models" / "stories260k")
    return Settings(True, data_root=small_root, model=model, cells=tmp_path / "cells")
