"""Runs that are asked for by keywords: data in memory becomes files beside the run, and a loaded model is lent to it.

The recipe names the files, so that the run can be repeated from its recipe alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.files import write_atomic
from freemoe.core.run.places import executor_spec_of
from freemoe.evals.tasks.domains import PAIR
from freemoe.models.checkpoints.lending import provide_model
from freemoe.models.checkpoints.loading import dtype_name, load_tokenizer
from freemoe.recipes import Recipe
from freemoe.recipes.keywords import recipe_of

R = TypeVar("R", bound=Recipe)

SPLITS = (("reference", "test"), ("train", "test"), ("train", "validation"))
"""Names of two splits in a mapping (a ``DatasetDict``): what may be searched on, and what is only reported."""

TEXT = "text:"

# What begins with the kind of its source is no text, though it may hold blanks.
_SOURCE = re.compile(r"[a-z_]+:\S")


@contextlib.contextmanager
def resolve_recipe(
    kind: type[R], recipe: R | None, fields: Mapping[str, Any], tokenizer: Any, overwrite: bool
) -> Iterator[R]:
    """The recipe of a run, given as such or by keywords; inside, a loaded model is lent under the recipe's name for it.

    ``fields``: keywords; ``model`` may be a transformers model, and data may be in memory. ``tokenizer``: of a loaded
    model; the one beside its files if absent. ``overwrite``: replace files of data that were written with other rows.

    Raises:
        RecipeError: Both or neither are given, or something in the keywords cannot be used.
        DataError: Rows that cannot be written as JSON.
        ArtifactError: A file of data stands there with other rows.
    """
    command = kind.model_fields["command"].default
    if recipe is not None:
        if fields or tokenizer is not None:
            raise RecipeError(
                f"{command} takes a recipe or keywords, not both; got a recipe and {', '.join([*fields] or ['tokenizer'])}. "
                "Change a recipe by recipe.model_copy(update={...})."
            )
        if not isinstance(recipe, kind):
            raise RecipeError(
                f"{command} takes a {kind.__name__} or keywords, got {type(recipe).__name__}: {recipe!r:.60}."
            )
        yield recipe
        return
    if not fields:
        raise RecipeError(f"{command} needs a {kind.__name__} or keywords: {command}(model=..., ...).")
    values = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    model = values.get("model")
    loaded = None if model is None or isinstance(model, str) else model
    if loaded is not None:
        values["model"] = name_of(loaded)
    if "dtype" in values:
        values["dtype"] = dtype_name(values["dtype"])
    folder = Path(f"{values.get('output', kind.model_fields['output'].default)}.data")
    files = _data_in_files(values, folder, "text" in kind.model_fields and kind.model_fields["text"].annotation is str)
    made = recipe_of(kind, values)
    if loaded is None and tokenizer is not None:
        raise RecipeError("tokenizer goes with a loaded model; beside the name of one, its own is read. Leave it out.")
    if loaded is not None:
        _check_loaded(made, loaded)
    for path, content in files.items():
        _write_rows(path, content, overwrite)
    if loaded is None:
        yield made
        return
    with provide_model(made.model, loaded, tokenizer if tokenizer is not None else load_tokenizer(made.model)):  # type: ignore[union-attr]
        yield made


def name_of(model: Any) -> str:
    """What a recipe calls a loaded model: where it was loaded from, or its class where it came from nowhere.

    Raises:
        RecipeError: It is no transformers model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise RecipeError(
            f"model is of type {type(model).__name__}; a folder, a GGUF file, a hub id or a loaded transformers model is needed."
        )
    return str(getattr(model, "name_or_path", "") or f"{type(model).__name__} in memory")


def _check_loaded(recipe: Any, model: Any) -> None:
    """Raise where a recipe asks for what cannot be done with a model of this process."""
    if executor_spec_of(recipe).is_parallel:
        raise RecipeError(
            f"place is {recipe.place!r} and workers is {recipe.workers}, and other processes cannot share a loaded model. Give its "
            "folder, or place='local' and workers=1."
        )
    for name, own in (
        ("dtype", [str(model.dtype).removeprefix("torch.")]),
        ("device", [model.device.type, str(model.device)]),
    ):
        said = getattr(recipe, name)
        if said not in ("auto", *own):
            raise RecipeError(
                f"{name} is {said!r}, and the loaded model is {own[-1]}. Leave {name} out, or convert the model."
            )
    if recipe.revision is not None:
        raise RecipeError("revision is of a model that is loaded by its name; leave it out beside a loaded one.")


def _data_in_files(values: dict[str, Any], folder: Path, one_text: bool) -> dict[Path, str]:
    """Replace data in memory by the specs of files, and return what these files shall hold."""
    files: dict[Path, str] = {}
    domains = values.get("domains")
    if isinstance(domains, Mapping):
        values["domains"] = {str(n): _data_specs(str(n), data, folder, files) for n, data in domains.items()}
    if "text" in values:
        specs = [s.removeprefix(TEXT) for s in _data_specs("text", values["text"], folder, files)]
        values["text"] = specs[0] if one_text and len(specs) == 1 else specs
    return files


def _data_specs(name: str, data: Any, folder: Path, files: dict[Path, str]) -> list[str]:
    """The specs of one domain: as they were given, or of the files that its data are written to."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, Mapping):
        pair = next((pair for pair in SPLITS if set(pair) == set(data)), None)
        if pair is None:
            allowed = " or ".join("{" + ", ".join(map(repr, p)) + "}" for p in SPLITS)
            raise RecipeError(f"{name}: splits are called {', '.join(map(repr, data))}; allowed: {allowed}.")
        both = [_data_specs(f"{name}.{side}", data[side], folder, files) for side in pair]
        if any(len(specs) != 1 for specs in both):
            raise RecipeError(f"{name}: each split is one file or one set of rows.")
        (first,), (second,) = both
        return [f"{first}{PAIR}{second.removeprefix(TEXT)}"]
    if not isinstance(data, Iterable):
        raise RecipeError(
            f"{name} is of type {type(data).__name__}; a file's path, the name of a task, a list of these, or rows: a list of "
            "mappings or of texts, a datasets.Dataset, a pandas DataFrame."
        )
    rows = data.to_dict("records") if hasattr(data, "to_dict") and hasattr(data, "iloc") else list(data)  # type: ignore[attr-defined]
    if rows and all(isinstance(row, str | Path) for row in rows):
        # A text holds blanks, and no file or task is called so.
        texts = [
            row
            for row in rows
            if isinstance(row, str)
            and re.search(r"\s", row.strip())
            and not (_SOURCE.match(row) or os.path.exists(row))  # noqa: PTH110
        ]
        if not texts:
            return [str(row) for row in rows]
        if len(texts) < len(rows):
            other = next(str(row) for row in rows if row not in texts)
            raise RecipeError(
                f"{name}: {texts[0]!r:.60} is a text, and {other!r:.60} names a file or a task. Give one kind."
            )
        rows = [{"text": row} for row in rows]
        spec = TEXT
    else:
        spec = ""
    file = folder / f"{name}.jsonl"
    files[file] = _as_lines(name, rows)
    return [f"{spec}{file}"]


def _as_lines(name: str, rows: Iterable[Any]) -> str:
    """Rows as JSONL, the same for the same rows."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name}: row {number} is of type {type(row).__name__}; rows are mappings, or all of them texts."
            )
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name}: row {number} cannot be written as JSON ({error}). Keep text, whole numbers and lists of these: "
                f"{dict(row)!r:.120}"
            ) from None
    if not lines:
        raise DataError(f"{name}: there are no rows.")
    return "".join(lines)


def _write_rows(path: Path, content: str, overwrite: bool) -> None:
    """Write a file of rows, unless it stands there already."""
    data = content.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    if path.exists() and not overwrite:
        raise ArtifactError(
            f"{str(path)!r} holds other rows than those given, from an earlier run. Choose another output, or overwrite=True."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
