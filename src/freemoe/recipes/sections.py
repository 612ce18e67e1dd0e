"""What every recipe's sections share: they are frozen, and an unknown key is an error."""

from __future__ import annotations

import inspect
import types
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from freemoe.core.run.places import MOST_WORKERS, executor_spec_of, parse_executor_spec
from freemoe.core.untrusted import text_fault, walk_values
from freemoe.recipes import limits


def _one_device(value: str) -> str:
    if value in ("split", "disk") or "=" in value:
        raise ValueError(
            f"{value!r} spreads the base, and what is trained here needs all of it on one device: auto, cpu, cuda, cuda:N"
        )
    return value


def _known_place(value: str) -> str:
    parse_executor_spec(value)
    return value


LayerNumber = Annotated[int, Field(ge=0, le=limits.LAYERS)]

# numpy and scikit-learn take no seed outside this range.
Seed = Annotated[int, Field(ge=0, lt=2**32, description="Seed of everything random.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Field(description="Number format of the base.")]
Device = Annotated[str, AfterValidator(_one_device), Field(description="auto, cpu, cuda, cuda:N.")]
Chat = Annotated[
    Literal["auto", "on", "off"],
    Field(
        description="The model's chat template: auto (where it has one and the data is conversations), on (every prompt is a "
        "message of the user), off."
    ),
]
GroupBy = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=200,
        description="Column of the rows that names their source: rows of one never stand on two sides of a split. It is read "
        "instead of the column 'key'.",
    ),
]
Devices = Annotated[
    str | dict[str, str],
    Field(
        description="auto, cpu, cuda, cuda:N; split: over every accelerator, then memory, then disk; disk: layers are read from "
        "their files as they are needed; cuda:0=20GiB,cpu=8GiB: as much as that on each, the rest on disk."
    ),
]
Where = Annotated[
    str,
    AfterValidator(_known_place),
    Field(
        description="Where units of work are done: local, local:N (N processes), ray (on this machine alone), ray://HOST:PORT (a "
        "cluster)."
    ),
]
Workers = Annotated[
    int,
    Field(
        ge=1,
        le=MOST_WORKERS,
        description="Processes, or actors on Ray, that do units of work side by side, each with the base and --threads to itself; "
        "without --threads they share the cores. On Ray 1 is as many as there are machines, or accelerators.",
    ),
]
UnitSeconds = Annotated[
    float | None,
    Field(
        gt=0, le=1e7, description="A unit that takes a worker longer is begun again, once, by another one. [no limit]"
    ),
]
Threads = Annotated[int | None, Field(ge=1, le=4096, description="CPU threads.")]
Revision = Annotated[str | None, Field(description="Revision of the hub repository.")]
BatchTokens = Annotated[int, Field(ge=16, le=limits.TOKENS, description="Padded tokens per batch.")]
Output = Annotated[str, Field(description="Folder to write.")]
Preset = Annotated[
    Literal["quick", "standard", "thorough"],
    Field(
        description="Size of what is not given itself: quick (a first answer in minutes), standard (the defaults) or thorough."
    ),
]
Model = Annotated[str, Field(description="The base: a folder, a GGUF file, a hub id, or a bundled one (freemoe-demo).")]


_NEITHER = ("0", "1", "t", "f", "y", "n")  # Texts that pydantic would take for true or false


class RecipeSection(BaseModel):
    """A part of a recipe. Its docstring lists its fields: their types, defaults and descriptions, taken from the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Texts are short and hold no control characters, and yes is no number."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if is_section(kind):
            return value  # its own fields are checked, one by one
        for _, held in walk_values(value):
            if isinstance(held, str):
                _check_text(held)
        if isinstance(value, bool) and bool not in _union_types(kind):
            raise ValueError("yes and no are not allowed here")
        if bool in _union_types(kind) and isinstance(value, str) and value.lower() in _NEITHER:
            raise ValueError(f"{value!r} is neither true nor false")
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Describe the fields where ``help`` looks."""
        super().__pydantic_init_subclass__(**kwargs)
        about = inspect.cleandoc(cls.__doc__ or "")
        cls.__doc__ = "\n".join([about, "", "Attributes:", *_field_lines(cls)])


def is_section(annotation: Any) -> TypeGuard[type[RecipeSection]]:
    """Whether a field of this type is a section with fields of its own."""
    return isinstance(annotation, type) and issubclass(annotation, RecipeSection)


def _check_text(text: str) -> None:
    if len(text) > limits.CHARACTERS:
        raise ValueError(f"a text of {len(text):,} characters; at most {limits.CHARACTERS:,} are allowed")
    fault = text_fault(text) or ("a control character" if any(unicodedata.category(c) == "Cc" for c in text) else "")
    if fault:
        raise ValueError(f"the text holds {fault}")


def _union_types(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _field_lines(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """A line for every field of a section, and for those of the sections in it."""
    for name, field in section.model_fields.items():
        if name == "command":  # says which recipe a YAML file holds
            continue
        kind = field.annotation
        if is_section(kind):
            yield f"    {path}{name} ({kind.__name__}): {(kind.__doc__ or '').partition(chr(10))[0]}"
            yield from _field_lines(kind, f"{path}{name}.")
        else:
            default = "required" if field.is_required() else f"default {field.get_default()!r}"
            yield f"    {path}{name} ({_type_text(kind)}, {default}): {field.description or ''}"


def _type_text(annotation: Any) -> str:
    """A type as people write it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(_type_text(part) for part in parts)
    if origin is Literal:
        return " | ".join(repr(part) for part in parts)
    if origin is Annotated:
        return _type_text(parts[0])
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if part is Ellipsis else _type_text(part) for part in parts)}]"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


class Recipe(RecipeSection):
    """All that one command needs. Its units of work may be done elsewhere: it has ``place``, ``workers`` and ``unit_seconds``."""

    if TYPE_CHECKING:
        # Each recipe declares them itself, in the order in which a dumped recipe has them.
        command: str
        output: str | None
        seed: int | None
        dtype: str
        threads: int | None
        place: str
        workers: int
        unit_seconds: float | None

    SHORT: ClassVar[Mapping[str, str]] = {}
    """Names that the command line and keywords have for fields of sections, where they are no field's own or are one of several
    sections."""

    SETTINGS: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    """Field that names settings -> its values -> what each sets, by section; what an earlier field sets wins."""

    @model_validator(mode="before")
    @classmethod
    def _fill_settings(cls, data: Any) -> Any:
        """Set what is not given to what the named settings say, so that a dumped recipe holds it and means the same."""
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        for field, tables in cls.SETTINGS.items():
            for name, values in tables.get(str(data.get(field, cls.model_fields[field].default)), {}).items():
                given = filled.get(name, {} if isinstance(values, Mapping) else values)
                if isinstance(given, BaseModel):
                    given = given.model_dump(exclude_unset=True)
                filled[name] = {**values, **given} if isinstance(given, dict) else given
        return filled

    def notes(self) -> list[str]:
        """What a result must say of its preset: every field that it has otherwise than the defaults."""
        name = getattr(self, "preset", "standard")
        changed = []
        for section, values in self.SETTINGS.get("preset", {}).get(name, {}).items():
            for field in values if isinstance(values, Mapping) else (section,):
                holder = getattr(self, section) if isinstance(values, Mapping) else self
                value, default = getattr(holder, field), type(holder).model_fields[field].get_default()
                # How units are trained says nothing where none are switched off.
                if value != default and getattr(holder, "unit", section) is not None:
                    path = f"{section}.{field}" if holder is not self else field
                    changed.append(f"{path} {_value_text(value)} (standard: {_value_text(default)})")
        return [f"a {name} answer (--preset {name}): {', '.join(changed)}"] if changed else []

    @model_validator(mode="after")
    def _one_number_of_workers(self) -> Self:
        executor_spec_of(self)
        return self


def _value_text(value: Any) -> str:
    """A field's value in words."""
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value is None else str(value)


class TimingSection(RecipeSection):
    """What is timed at the end: greedy requests of the base and of what was made of it, in turns, batch 1."""

    prompts: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] = Field(
        default=(),
        max_length=100,
        description="Tokens of each prompt (paper: 1024,2048,4096); one block of the test part if absent.",
    )
    new_tokens: int = Field(default=17, ge=2, le=2**20, description="Tokens of the long request (paper: 256).")
    rounds: int = Field(
        default=5, ge=0, le=100_000, description="Rounds, after one that warms up (paper: 100); 0: nothing is timed."
    )
