"""What a request may say: OpenAI's fields, with what is not served refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SEED = 2**63 - 1

Stop = str | list[str] | None


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


def _refuse(said: Any, idle: dict[str, tuple[Any, ...]], why: dict[str, str]) -> Any:
    """Raise for a field that would change the answer and is not served; where it asks for nothing it is left out."""
    if not isinstance(said, dict):
        return said
    for name, values in idle.items():
        if name in said and said[name] not in values:
            raise ValueError(f"{name} is not served here{why.get(name, '')}. Leave it out")
    return {name: value for name, value in said.items() if name not in idle}


_WHY = {
    "logit_bias": " (experts change the model, not single tokens; use stop or temperature)",
    "best_of": " (only as many as n)",
    "tools": " (the models answer in text alone)",
    "response_format": " (only text)",
}
_NOTHING = (None, [], {}, "")
_IDLE: dict[str, tuple[Any, ...]] = {"logit_bias": _NOTHING}
_IDLE_TEXT = {**_IDLE, "suffix": _NOTHING}
_IDLE_CHAT = {
    **_IDLE,
    "tools": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
}


class Common(BaseModel):
    """What both endpoints take."""

    # Strict: "12" is no number. A float that is a whole number is no integer either.
    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, le=_SEED)] | None = None
    stop: Stop = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Taken and without effect on an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        """Stop texts; empty ones say nothing."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in dict.fromkeys(found) if text]


class CompletionBody(Common):
    """Of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, said: Any) -> Any:
        return _refuse(said, _IDLE_TEXT, _WHY)

    @model_validator(mode="after")
    def _no_best_of(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not served here (only as many as n). Leave it out")
        return self


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Common):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=500)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, said: Any) -> Any:
        return _refuse(said, _IDLE_CHAT, _WHY)

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class LoadBody(BaseModel):
    """Of ``POST /v1/freemoe/experts``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    artefact: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    prefix: Annotated[str, Field(max_length=100)] = ""

    @property
    def place(self) -> str | None:
        """The folder, by either name."""
        return self.path or self.artefact


class RouteBody(BaseModel):
    """Of ``POST /v1/freemoe/route``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=500)] | None = None
