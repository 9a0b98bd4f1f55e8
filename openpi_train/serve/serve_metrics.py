"""Metrics of the server, for Prometheus at `/metrics`. Read next: `server.py`."""

import collections
import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0, 600.0)
_RECENT = 1000


class Measures:
    """Counters and timings of one server; the quantiles are exact, over the last `_RECENT` answers.

    Args: `longest_s` is the largest bucket of the times of requests.
    """

    def __init__(self, num_waiting: Callable[[], int], num_clients: Callable[[], int], longest_s: float = 10.0):
        self.registry = CollectorRegistry()
        options = {"namespace": "openpi_train", "registry": self.registry}
        self.seconds = tuple(seconds for seconds in _SECONDS if seconds <= longest_s)
        self.requests = Counter("requests", "Requests by outcome.", ["outcome"], **options)
        self._latency = Histogram("request_seconds", "Time from request to answer.", buckets=self.seconds, **options)
        self._inference = Histogram(
            "inference_seconds",
            "Time of a batch on the device, until its results are on the host.",
            buckets=self.seconds,
            **options,
        )
        self._batch = Histogram("batch_rows", "Requests in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), **options)
        self._recent: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=_RECENT) for name in ("request", "inference")
        }
        quantiles = Gauge("recent_seconds", f"Quantiles of the last {_RECENT} answers.", ["of", "quantile"], **options)
        for name, times in self._recent.items():
            for quantile in (0.5, 0.95):
                quantiles.labels(name, str(quantile)).set_function(
                    lambda times=times, quantile=quantile: _quantile(times, quantile)
                )
        Gauge("queue_requests", "Requests waiting for the device.", **options).set_function(num_waiting)
        Gauge("clients", "Open connections.", **options).set_function(num_clients)

    def answered(self, latency_s: float) -> None:
        """Record an answer."""
        self.requests.labels("answered").inc()
        self._latency.observe(latency_s)
        self._recent["request"].append(latency_s)

    def ran(self, rows: int, seconds: float) -> None:
        """Record a batch."""
        self._batch.observe(rows)
        self._inference.observe(seconds)
        self._recent["inference"].append(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def summary(self) -> str:
        """The latency's quantiles, for the log."""
        times = self._recent["request"]
        if not times:
            return "no request was answered"
        p50, p95 = (1e3 * _quantile(times, quantile) for quantile in (0.5, 0.95))
        return f"of the last {len(times)} answers half took at most {p50:.1f} ms, 95 % at most {p95:.1f} ms"


def _quantile(times: collections.deque[float], quantile: float) -> float:
    """The smallest time that at least this fraction of the times does not exceed; NaN if there are none."""
    ordered = sorted(times)
    return ordered[math.ceil(quantile * len(ordered)) - 1] if ordered else math.nan
