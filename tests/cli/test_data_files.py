"""Data of ten shapes: each is recognised, and a build says as what; conversations keep their template to the answer."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from freemoe.assets import demo_model_path
from freemoe.core.artifacts import read_manifest
from freemoe.evals.tasks.domains import load_domain
from tests.tiny import CHAT_TEMPLATE

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = {
    "messages.jsonl": "chat",
    "conversations.json": "chat",
    "instructions.jsonl": "instruction {instruction, input, output}",
    "completions.jsonl": "completion",
    "targets.jsonl": "target",
    "choices.csv": "choice",
    "choices.parquet": "choice",
    "lettered.tsv": "lettered {question, A, B, C, D, answer}",
    "notes.txt": "",
    "texts.jsonl": "",
}
SMALL = ["--metric", "wanda", "--ratio", "0.5", "--theta", "0:1:0.5", "--by", "none", "--controls", "0", "--no-oracle"]


def test_every_file_has_a_shape_here():
    assert {path.name for path in DATA.iterdir() if path.is_file()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_each_is_recognised_and_said(name):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    data = load_domain("d", [str(DATA / name)], tokenizer=tokenizer)
    assert len(data.reference) >= 5
    assert len(data.reported) >= 5
    said = f"read as {FILES[name]}" if FILES[name] else "reported its tail"
    assert said in data.notes[0]


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory):
    """The bundled base with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(demo_model_path(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_conversations_are_built_on_and_answered_by_the_template(freemoe, chat_base, tmp_path):
    out = str(tmp_path / "out")
    data = f"help={DATA / 'messages.jsonl'}"
    built = freemoe("build", str(chat_base), "-d", data, *SMALL, "-o", out).ok()
    assert "read as chat {messages}, by the model's chat template" in built.err
    assert read_manifest(out)["chat"] is True
    result = json.loads((Path(out) / "result.json").read_text())
    assert result["recipe"]["data"]["chat"] == "auto"
    said = {}
    for mode in ("auto", "on", "off"):
        line = ["generate", out, "divide by 5: f(x)=", "--chat", mode, "--json", "--max-new-tokens", "8"]
        said[mode] = freemoe(*line).json["text"]
    assert said["auto"] == said["on"] != said["off"]
    off = freemoe("build", str(chat_base), "-d", data, *SMALL, "--chat", "off", "-o", out + "-off")
    assert "as plain text, without a chat template" in off.err
    assert read_manifest(out + "-off")["chat"] is False


def test_chat_that_cannot_be(freemoe, tmp_path):
    line = ["build", "freemoe-demo", "-d", f"a={DATA / 'messages.jsonl'}", "--chat", "on", "-o", str(tmp_path / "o")]
    freemoe(*line).refused("has no chat template")
    freemoe("generate", "freemoe-demo", "x", "--chat", "maybe").refused("Unknown --chat 'maybe'")
