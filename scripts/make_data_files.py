"""Writes tests/data: the same small questions of the bundled benchmark as ten files of ten shapes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from freemoe.assets import benchmark_path

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data"
ROWS = 60


def questions(domain: str, count: int = ROWS) -> list[dict[str, Any]]:
    """The first rows of a domain's reference documents."""
    lines = benchmark_path(domain, "reference").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def main() -> None:
    import pyarrow
    import pyarrow.parquet

    FOLDER.mkdir(exist_ok=True)
    code, general = questions("code"), questions("general")
    asked = [(row["prompt"], row["target"].strip()) for row in code]

    def lines(name: str, rows: list[Any]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / name).write_text(text, encoding="utf-8")

    def table(name: str, delimiter: str, rows: list[dict[str, Any]]) -> None:
        with (FOLDER / name).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    system = said("system", "Write the function.")
    lines("messages.jsonl", [{"messages": [system, said("user", p), said("assistant", t)]} for p, t in asked])
    talks = [
        {"conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": t}] * 2, "id": f"talk-{n // 2}"}
        for n, (p, t) in enumerate(asked)
    ]
    (FOLDER / "conversations.json").write_text(json.dumps({"version": 1, "data": talks}) + "\n", encoding="utf-8")
    lines("instructions.jsonl", [{"instruction": "Write f.", "input": p, "output": t} for p, t in asked])
    lines("completions.jsonl", [{"prompt": p, "completion": t} for p, t in asked])
    lines("targets.jsonl", [{"prompt": row["prompt"], "target": row["target"]} for row in code])
    choices = [{k: row[k] for k in ("question", "choices", "answer")} for row in general]
    table("choices.csv", ",", [{**row, "choices": json.dumps(row["choices"])} for row in choices])
    lettered = [
        {"question": r["question"], **dict(zip("ABCD", r["choices"], strict=True)), "answer": "ABCD"[r["answer"]]}
        for r in choices
    ]
    table("lettered.tsv", "\t", lettered)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(choices), FOLDER / "choices.parquet")
    texts = [row["prompt"] + row["target"] for row in questions("code", 4 * ROWS)]
    (FOLDER / "notes.txt").write_text("\n".join(texts), encoding="utf-8")
    lines("texts.jsonl", [{"text": text} for text in texts])


if __name__ == "__main__":
    main()
