"""A further system is a folder with the same five files and one row: every command knows its artefacts then."""

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny import save_base, tiny_model

RUN = """
import contextlib, io, json, sys
from freemoe.systems import SYSTEMS, ArtefactSystem
SYSTEMS.add("damped", ArtefactSystem("tests.fourth_system", "damp", "DampRecipe", "DampResult", no_merge="there is none."), "a toy")
from freemoe.cli import _run_arguments
told = []
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = _run_arguments(arguments)
    told.append([code, out.getvalue(), errors.getvalue()])
print(json.dumps(told))
"""


def run_commands(*commands):
    """What each prints, one after another in a process that knows the toy; the last one is refused."""
    asked = json.dumps([[str(a) for a in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", RUN], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *answers, refused = json.loads(done.stdout)
    assert [code for code, *_ in answers] == [0] * len(answers), answers
    assert refused[0] == 2
    return [out for _, out, _ in answers] + [refused[2]]


def test_one_folder_and_one_row_are_a_system(tmp_path):
    files = {p.stem for p in (Path(__file__).parent / "fourth_system").glob("*.py")}
    assert files == {"__init__", "recipe", "pipeline", "result", "artefact", "report"}
    base, out, text = tmp_path / "base", tmp_path / "out", tmp_path / "text.txt"
    save_base(tiny_model("llama"), base)
    text.write_text("\n\n".join(f"seven stones lie in river {n}, and the boats come home late" for n in range(40)))
    damp = ("damp", base, "--factor", "0", "-o", out)
    usage, plan, _, made, inspected, schema, listed, whole, answer, scored, refused = run_commands(
        ("damp", "--help"),
        (*damp, "--dry-run", "--json"),
        (*damp, "--print-recipe"),
        (*damp, "--json"),
        ("inspect", out, "--json"),
        ("schema", "damped"),
        ("ls", "systems"),
        ("generate", out, "seven stones", "--expert", "base", "--json"),
        ("generate", out, "seven stones", "--json"),
        ("eval", out, "--domain", f"text=text:{text}", "-e", "base", "-e", "damped", "--json"),
        ("merge", out, "damped", "-o", tmp_path / "merged"),
    )
    assert "--factor" in usage
    assert json.loads(plan)["output"] == str(out)
    document = json.loads(made)
    assert document["schema"] == "freemoe.damp/1"
    assert document["result"]["factor"] == 0.0
    assert "Nothing was measured" in (out / "report.html").read_text()
    assert json.loads(inspected)["factor"] == 0.0
    assert "damped" in schema
    assert "damped" in listed
    assert json.loads(whole)["text"] != json.loads(answer)["text"]
    rows = json.loads(scored)["domains"][0]["rows"]
    assert rows["damped"]["score"] != rows["base"]["score"]
    assert "cannot be merged: there is none." in refused
