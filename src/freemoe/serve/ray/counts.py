"""What replicas count, on one page for Prometheus: every number as it is, with the replica that counted it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""A metric as plain data: name, what it is, type, and its samples: name, labels, value."""

_LABEL = "replica"


def families(registry: CollectorRegistry) -> list[Family]:
    """All metrics of a registry, as plain data."""
    return [
        (metric.name, metric.documentation, metric.type, [(s.name, dict(s.labels), s.value) for s in metric.samples])
        for metric in registry.collect()
    ]


def page(told: Mapping[str, Sequence[Family]]) -> bytes:
    """Metrics by who counted them, as Prometheus reads them; each sample has the label ``replica``."""
    registry = CollectorRegistry()
    registry.register(_Merged(told))
    return generate_latest(registry)


class _Merged:
    """Metrics of several registries as those of one."""

    def __init__(self, told: Mapping[str, Sequence[Family]]) -> None:
        self._told = told

    def collect(self) -> Iterable[Metric]:
        return list(self._by_name().values())

    def _by_name(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for replica, (name, documentation, kind, samples) in self._each():
            metric = found.setdefault(name, Metric(name, documentation, kind))
            for sample, labels, value in samples:
                metric.add_sample(sample, {_LABEL: replica, **labels}, value)
        return found

    def _each(self) -> Iterator[tuple[str, Any]]:
        for replica, several in self._told.items():
            for family in several:
                yield replica, family
