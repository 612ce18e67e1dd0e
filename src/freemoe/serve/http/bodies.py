"""What a request may say: OpenAI's fields. One that would change the answer and is not served is refused; unknown ones do nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

_SEED = 2**63 - 1

_UNSUPPORTED = "unsupported_parameter"


def _unsupported_field(why: str = "", *idle: Any) -> AfterValidator:
    """Refuse every value but those that ask for nothing."""

    def require_unset(value: Any) -> Any:
        if value not in (None, [], {}, "", *idle):
            raise PydanticCustomError(_UNSUPPORTED, "{why}", {"why": why})
        return value

    return AfterValidator(require_unset)


_TEXT_ALONE = "the models answer in text alone"
_Tools = Annotated[Any, _unsupported_field(_TEXT_ALONE)]
_ToolChoice = Annotated[Any, _unsupported_field(_TEXT_ALONE, "none", "auto")]


class StreamOptions(BaseModel):
    """``stream_options`` of a request: whether a stream ends with its usage."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class CommonBody(BaseModel):
    """The fields that completions and chats share."""

    # Strict: "12" is no number. A float that is a whole number is no integer either.
    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-_SEED, le=_SEED)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not served: only values that ask for nothing are taken.
    logit_bias: Annotated[
        Any, _unsupported_field("experts change the model, not single tokens; use stop or temperature")
    ] = None
    suffix: Annotated[Any, _unsupported_field()] = None
    tools: _Tools = None
    tool_choice: _ToolChoice = None
    functions: _Tools = None
    function_call: _ToolChoice = None
    response_format: Annotated[Any, _unsupported_field("only text", {"type": "text"})] = None
    modalities: Annotated[Any, _unsupported_field("only text", ["text"])] = None
    audio: Annotated[Any, _unsupported_field("only text")] = None
    prediction: Annotated[Any, _unsupported_field()] = None
    web_search_options: Annotated[Any, _unsupported_field()] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stop_texts(self) -> list[str]:
        """Stop texts; empty ones say nothing."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in dict.fromkeys(texts) if text]


class CompletionBody(CommonBody):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, info.data.get("n") or 1):
            raise PydanticCustomError(_UNSUPPORTED, "only as many as n")
        return value

    @property
    def max_new_tokens(self) -> int | None:
        """New tokens at most; None where it is not said."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens beside each token; None for no log-probabilities."""
        return self.logprobs


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; what answers of other servers carry beside their text is left out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    tool_calls: _Tools = None
    function_call: _Tools = None

    @property
    def template_message(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(CommonBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=500)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _asks_for_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true")
        return value

    @property
    def max_new_tokens(self) -> int | None:
        """New tokens at most; None where it is not said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens beside each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class LoadBody(BaseModel):
    """The body of ``POST /v1/freemoe/experts``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    artefact: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    prefix: Annotated[str, Field(max_length=100)] = ""

    @property
    def artefact_path(self) -> str | None:
        """The folder, by either name."""
        return self.path or self.artefact


class RouteBody(BaseModel):
    """The body of ``POST /v1/freemoe/route``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=500)] | None = None
