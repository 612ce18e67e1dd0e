"""The page on serving: its curl examples work as they stand, and its table of limits is the code's."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from freemoe import FreeMoE
from freemoe.recipes.expert_names import MAX_EXPERTS
from freemoe.serve.http.bodies import ChatBody, CompletionBody
from freemoe.serve.settings import EngineLimits, RequestLimits
from tests.serve.conftest import served, write_artefact
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
NAMES = ["law/all", "notes/all"]


def commands():
    """Every command of curl, continued lines joined."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")
    return [line for line in blocks.splitlines() if line.startswith("curl")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_example_with_curl(folders, tmp_path):
    assert len(commands()) == 9
    model = tiny_model("llama", num_hidden_layers=1)
    own = write_artefact(tmp_path / "experts", folders.base, model, NAMES)
    write_artefact(tmp_path / "more-experts", folders.base, model, NAMES)
    host = FreeMoE.from_pretrained(str(folders.base), own, device="cpu")
    with served(host, roots=[tmp_path]) as there:
        for command in commands():
            line = command.replace("http://127.0.0.1:8000", there.url)
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (command, done.stderr)
            if " -N " in line:
                assert done.stdout.rstrip().endswith("data: [DONE]")
                continue
            head, _, body = done.stdout.rpartition("\n\n")
            assert "error" not in json.loads(body), (command, body)
            if " -i " in line:
                assert "x-freemoe-expert" in head
                assert "x-freemoe-confidence" in head


def test_the_table_of_limits_is_the_code_s():
    limits, bounds = EngineLimits(4096), RequestLimits()
    for told in (
        f"`--max-batch`, {limits.batch} ",
        f"`--queue`, {limits.queue} ",
        f"`--prefill-tokens`, {limits.prefill} ",
        f"{bounds.bytes >> 20} MiB",
        f"`--patience-seconds`, {bounds.seconds:g} ",
        f"{limits.pieces:,} events",
        f"| {bounds.choices}, prompts",
        f"| {bounds.stops} of 1,000",
        f"| {bounds.at_once} ",
        f"| {MAX_EXPERTS:,} |",
    ):
        assert told in PAGE, told


def test_fields_that_are_served_are_named():
    named = set(re.findall(r"`([a-z_.]+)`", PAGE))
    quiet = {"service_tier", "safety_identifier", "prompt_cache_key", "model", "prompt", "messages", "stream_options"}
    for body in (CompletionBody, ChatBody):
        assert {*body.model_fields} - named - quiet <= {"max_completion_tokens"}
