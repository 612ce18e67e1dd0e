"""What the comparison of two commits sees, and what it leaves out."""

import json
import runpy
from pathlib import Path

COMPARE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "same_results.py"))["compare"]


def written(folder, **entries):
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "result.json").write_text(json.dumps(entries))
    (folder / "demo" / "experts.safetensors").write_bytes(b"12")
    return folder


def test_times_are_left_out_and_results_are_not(tmp_path):
    one = written(tmp_path / "one", score=[1.0, {"gain": 2}], seconds=3, router={"p50_ms": 1}, cost={"a": 1})
    two = written(tmp_path / "two", score=[1.0, {"gain": 2}], seconds=4, router={"p50_ms": 2}, cost={"a": 2})
    assert COMPARE(one, two) == []
    three = written(tmp_path / "three", score=[1.0, {"gain": 3}], seconds=3, router={}, added=1)
    (three / "demo" / "experts.safetensors").write_bytes(b"13")
    (three / "demo" / "more.json").write_text("{}")
    assert COMPARE(one, three) == [
        "demo/more.json is only after",
        "demo/experts.safetensors: other bytes",
        "demo/result.json/added is only after",
        "demo/result.json/score/1/gain: 2 -> 3",
    ]
