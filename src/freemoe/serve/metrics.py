"""What engine and server count, for Prometheus; in a registry of its own, so that two servers in a process do not mix."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TENTHS = [i / 10 for i in range(1, 11)]
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Counts what the engine does, by `SequenceRequest.metrics_label`, and what the server answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        seconds, between = (
            partial(Histogram, labelnames=["expert"], buckets=buckets, registry=self.registry)
            for buckets in (_SECONDS, _BETWEEN)
        )
        self._requests = counter("freemoe_requests", "Sequences that ended, by expert and how.", ["expert", "how"])
        self._read = counter("freemoe_prompt_tokens", "Tokens of prompts that were read.", ["expert"])
        self._written = counter("freemoe_generated_tokens", "New tokens.", ["expert"])
        self.running = gauge("freemoe_running_sequences", "Sequences that have a slot.")
        self.waiting = gauge("freemoe_waiting_sequences", "Sequences that wait for a slot.")
        self.first_token = seconds("freemoe_time_to_first_token_seconds", "From the request to its first token.")
        self.next_token = between("freemoe_time_between_tokens_seconds", "From a token to the next.")
        self.routed = counter("freemoe_routed", "Prompts that the router gave to an expert.", ["expert"])
        self.confidence = Histogram(
            "freemoe_router_confidence", "How sure the router was.", buckets=_TENTHS, registry=self.registry
        )
        self.responses = counter("freemoe_http_responses", "Responses by path and status.", ["path", "status"])

    def record_sequence_end(self, expert: str, how: str, read: int, written: int) -> None:
        """A sequence's end: ``stop``, ``length``, ``gone`` or ``error``; tokens of its prompt that were read, and new ones."""
        self._requests.labels(expert, how).inc()
        self._read.labels(expert).inc(read)
        self._written.labels(expert).inc(written)
