"""Metrics: what `/metrics` tells Prometheus of requests, of the worker and of the memories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gistkit_serve.server.repository import MemoryRepository

if TYPE_CHECKING:
    from gistkit_serve.server.worker import Worker

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """The numbers of one application, with a registry; `seconds` are of requests by method, route and status."""

    def __init__(self, repository: MemoryRepository) -> None:
        self._repository = repository
        self.worker: Worker | None = None
        self.registry = CollectorRegistry()
        self.seconds = Histogram(
            "gistkit_request_seconds", "From a request to the end of its answer.", ["method", "route", "status"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What is so now."""
        repository, worker = self._repository, self.worker
        yield GaugeMetricFamily("gistkit_memories", "Memories that can be asked about.", len(repository))
        yield GaugeMetricFamily("gistkit_ram_bytes", "Of memories in RAM.", repository.ram_bytes)
        yield GaugeMetricFamily("gistkit_disk_bytes", "Of files of memories.", repository.disk_bytes)
        yield CounterMetricFamily("gistkit_evicted", "Memories removed for the limits' sake.", repository.evicted)
        if worker is not None:
            yield GaugeMetricFamily("gistkit_waiting", "Requests that wait for their turn.", worker.waiting)
            yield GaugeMetricFamily("gistkit_running", "Requests that are worked on.", len(worker.running))
            yield CounterMetricFamily("gistkit_tokens", "Tokens written in answers.", worker.tokens)
