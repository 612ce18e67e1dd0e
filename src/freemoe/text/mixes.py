"""Mixes of public data sets for training, from local files or from the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.registry import Registry
from freemoe.core.untrusted import read_json
from freemoe.text.blocks import cut_passages
from freemoe.text.documents import read_documents
from freemoe.text.hub_data import load_hub_data

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MixSource:
    """One data set of a mix."""

    name: str  # What it is called
    # Where its files may lie below the data folder, the whole set before parts of it; the first that is there is read
    files: tuple[str, ...]
    hub: tuple[str, str | None, str]  # Repository, configuration and split on the hub
    text: Callable[[dict[str, Any]], str]  # A record's text
    is_running_text: bool = False  # Its records are lines of one text rather than documents


def instruction_text(record: dict[str, Any]) -> str:
    """The set's own column ``text`` where it has one (Alpaca's on the hub), else instruction, input and answer as one text."""
    if "text" in record:
        return record["text"]
    asked = record["instruction"].strip()
    given = (record.get("input") or "").strip()
    return "\n\n".join(part for part in (f"Task: {asked}", given, f"Answer: {record['output'].strip()}") if part)


ALPACA = MixSource(
    "alpaca",
    ("alpaca/alpaca_data.json", "alpaca/alpaca_2k_gumbelsoft.json"),
    ("tatsu-lab/alpaca", None, "train"),
    instruction_text,
)
CODE_ALPACA = MixSource(
    "code_alpaca",
    ("code_alpaca/code_alpaca_20k.json", "code_alpaca/code_alpaca_2k.json"),
    ("sahil2801/CodeAlpaca-20k", None, "train"),
    instruction_text,
)


WIZARD_LM = MixSource(
    "wizard_lm",
    ("wizard_lm/WizardLM_evol_instruct_V2_143k.json",),
    ("WizardLMTeam/WizardLM_evol_instruct_V2_196k", None, "train"),
    lambda record: "\n\n".join(turn["value"].strip() for turn in record["conversations"]),
)
WIKITEXT = MixSource(
    "wikitext",
    ("wikitext-2-raw/wiki.train.raw", "wikitext-2-raw/wikitext2_train_5k.txt"),
    ("Salesforce/wikitext", "wikitext-103-raw-v1", "train"),
    lambda record: record["text"],
    is_running_text=True,
)

MIXES: Registry[tuple[MixSource, ...]] = Registry("mix")
MIXES.add("paper", (ALPACA, CODE_ALPACA, WIKITEXT), "Alpaca, CodeAlpaca and WikiText in equal parts (ToMoE Sec. 4.1)")
MIXES.add("wikitext", (WIKITEXT,), "WikiText alone (the other setting of ToMoE Sec. 4.1)")
MIXES.add(
    "authors",
    (ALPACA, WIKITEXT, CODE_ALPACA, WIZARD_LM),
    "the paper's three and WizardLM's conversations, in equal parts (ToMoE's code)",
)


def read_mix(name: str, root: str | Path | None) -> list[str]:
    """The passages of a mix, every source with about as many characters as the shortest one, taken in turns.

    ``root``: data folder; the hub if None.

    Raises:
        DataError: A source is not there.
    """
    sources = [_read_mix_source(source, root) for source in MIXES.get(name)]
    shortest = min(sum(map(len, texts)) for texts in sources)
    cut = [_take_characters(texts, shortest) for texts in sources]
    longest = max(map(len, cut))
    # Each source spread evenly over the whole, whatever the lengths of its passages.
    keyed = [(i * longest / len(texts), n, text) for n, texts in enumerate(cut) for i, text in enumerate(texts)]
    return [text for _, _, text in sorted(keyed, key=lambda entry: entry[:2])]


def _take_characters(texts: Iterable[str], characters: int) -> list[str]:
    found: list[str] = []
    total = 0
    for text in texts:
        if found and total + len(text) > characters:
            break
        found.append(text)
        total += len(text)
    return found


def _read_mix_source(source: MixSource, root: str | Path | None) -> list[str]:
    if root is None:
        try:
            records: Any = load_hub_data(*source.hub)
        except DataError as error:
            raise type(error)(f"{error} Or give a folder with its files: --data-root FOLDER.") from error
        texts = map(source.text, records)
        return cut_passages(["".join(texts)] if source.is_running_text else [text for text in texts if text.strip()])
    path = next((path for name in source.files if (path := Path(root).expanduser() / name).is_file()), None)
    if path is None:
        raise DataError(
            f"Data set {source.name!r} is not under {Path(root).absolute()} (--data-root): looked for {', '.join(source.files)}."
        )
    if not path.match(source.files[0]):
        log.warning("%s is a part of the data set %r; the whole would be %s.", path, source.name, source.files[0])
    if path.suffix != ".json":
        return cut_passages(read_documents(path))
    records = read_json(path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path} is not the data set's original file: a list of objects is needed. Fetch it again.")
    return list(map(source.text, records))
