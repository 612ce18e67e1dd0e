"""What is asked of the engine, and what it answers: frozen values that pass between threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from freemoe.core.errors import BusyError, DataError, WorkerError
from freemoe.evals.engine.sampling import GREEDY, SamplingConfig
from freemoe.recipes.expert_names import ExpertRef


class ContextError(DataError):
    """A sequence that does not fit the context."""


class QueueFullError(BusyError):
    """More sequences wait than the queue holds."""


class SlowReaderError(BusyError):
    """A stream that is read more slowly than it is written, beyond what is kept for it."""


class StoppingError(BusyError):
    """The engine takes no more requests: it is about to end."""


class EngineError(WorkerError):
    """The engine itself has failed: nothing is answered until it is started anew."""


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to write, and how its tokens are chosen."""

    prompt: tuple[int, ...]  # Token ids, at least one
    expert: str  # Whose weights write it; never ``auto``
    max_tokens: int
    sampling: SamplingConfig = GREEDY
    top_k: int = 0  # Only so many likeliest tokens are drawn from; 0 for all
    # Only tokens are drawn from that have this share of the likeliest one's probability (Nguyen et al. 2024).
    min_p: float = 0.0
    presence: float = 0.0  # Taken from the logits of tokens that were written already
    frequency: float = 0.0  # The same, times how often they were written
    # Divides positive logits of tokens of the prompt and the answer, and multiplies negative ones (Keskar et al. 2019); 1
    # leaves them.
    repetition: float = 1.0
    choice: int = 0  # Number among the answers to one prompt; each draws other numbers
    stop: tuple[str, ...] = ()  # Texts that end the answer and are not part of it
    # How many likeliest tokens to name beside each token; None for no log-probabilities at all
    logprobs: int | None = None
    echo: bool = False  # Log-probabilities of the prompt's tokens are wanted too

    def uses_expert(self, name: str) -> bool:
        """Whether an expert is, or is part of, the one that was asked for."""
        return name in self._expert_ref.names

    @property
    def metrics_label(self) -> str:
        """What its expert is counted as; combinations as one, as every series is kept for ever and they are without number."""
        return "combination" if self._expert_ref.operation else self.expert

    @cached_property
    def _expert_ref(self) -> ExpertRef:
        return ExpertRef.parse(self.expert)


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely it was."""

    id: int
    offset: int  # Characters of the answer (or, of a prompt's tokens, of the prompt) before it
    # Natural logarithm of its probability at temperature 1; None at the beginning of a prompt, or if not asked for
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # The likeliest tokens with theirs, the likeliest first


@dataclass(frozen=True)
class TextChunk:
    """Text that will not change any more, and the tokens that ended in it; the tokens may be of text that is still held back."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """The prompt's tokens with their log-probabilities, where they were asked for."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class SequenceEnd:
    """The end of an answer."""

    # ``stop`` at a stop string or the token that ends a text, ``length`` at the most tokens, ``error``
    reason: str
    tokens: int  # New tokens, the one that ends a text not counted
    error: Exception | None = None  # Why there is no more of it


Event = PromptRead | TextChunk | SequenceEnd
