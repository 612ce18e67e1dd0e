"""What engine and server count, for Prometheus; in a registry of its own, so that two servers in a process do not mix."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Counts what the engine does, by `SequenceRequest.metrics_label`, and what the server answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        more: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter(
            "freemoe_requests", "Sequences that ended, by expert and how.", ["expert", "how"], **more
        )
        self._read = Counter("freemoe_prompt_tokens", "Tokens of prompts that were read.", ["expert"], **more)
        self._written = Counter("freemoe_generated_tokens", "New tokens.", ["expert"], **more)
        self._running = Gauge("freemoe_running_sequences", "Sequences that have a slot.", **more)
        self._waiting = Gauge("freemoe_waiting_sequences", "Sequences that wait for a slot.", **more)
        self._first = Histogram(
            "freemoe_time_to_first_token_seconds",
            "From the request to its first token.",
            ["expert"],
            buckets=_SECONDS,
            **more,
        )
        self._between = Histogram(
            "freemoe_time_between_tokens_seconds", "From a token to the next.", ["expert"], buckets=_BETWEEN, **more
        )
        self._routed = Counter("freemoe_routed", "Prompts that the router gave to an expert.", ["expert"], **more)
        self._sure = Histogram(
            "freemoe_router_confidence", "How sure the router was.", buckets=[i / 10 for i in range(1, 11)], **more
        )
        self._answers = Counter("freemoe_http_responses", "Responses by path and status.", ["path", "status"], **more)

    def record_first_token(self, expert: str, seconds: float) -> None:
        """The first token of an answer, so long after it was asked for."""
        self._first.labels(expert).observe(seconds)

    def record_next_token(self, expert: str, seconds: float) -> None:
        """A further token, so long after the one before."""
        self._between.labels(expert).observe(seconds)

    def record_sequence_end(self, expert: str, how: str, read: int, written: int) -> None:
        """A sequence's end: ``stop``, ``length``, ``gone`` or ``error``; tokens of its prompt that were read, and new ones."""
        self._requests.labels(expert, how).inc()
        self._read.labels(expert).inc(read)
        self._written.labels(expert).inc(written)

    def record_queue_sizes(self, running: int, waiting: int) -> None:
        """Sequences that have a slot, and those that wait for one."""
        self._running.set(running)
        self._waiting.set(waiting)

    def record_routing(self, expert: str, confidence: float) -> None:
        """A prompt got an expert from the router."""
        self._routed.labels(expert).inc()
        self._sure.observe(confidence)

    def record_response(self, path: str, status: int) -> None:
        """A response was begun; ``path`` is one of the server's own."""
        self._answers.labels(path, str(status)).inc()

    def render_metrics(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
