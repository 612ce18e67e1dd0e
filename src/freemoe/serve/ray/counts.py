"""What replicas count, on one page for Prometheus: every number as it is, with the replica that counted it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import Metric


def render_replica_metrics(counted: Mapping[str, Sequence[Metric]]) -> bytes:
    """Metrics by who counted them, as Prometheus reads them; each sample has the label ``replica``."""
    merged: dict[str, Metric] = {}
    for replica, metrics in counted.items():
        for metric in metrics:
            one = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                one.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    # All that is asked of a registry.
    return generate_latest(SimpleNamespace(collect=merged.values))  # type: ignore[arg-type]
