"""Metrics of the text server, for Prometheus at `/metrics`. Read next: `text_server.py`."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from openpi_train.serve.serve_metrics import Measures


class TextMeasures(Measures):
    """`Measures` of requests and of steps of the generator, with the time to the first text and counts of tokens."""

    def __init__(self, num_waiting: Callable[[], int], num_running: Callable[[], int], num_clients: Callable[[], int]):
        super().__init__(num_waiting, num_clients, longest_s=600.0)
        options = {"namespace": "openpi_train", "registry": self.registry}
        self._first = Histogram(
            "first_text_seconds", "Time from request to its first text.", buckets=self.seconds, **options
        )
        self._tokens = Counter("tokens", "Tokens of answered requests.", ["of"], **options)
        Gauge("running_completions", "Completions that have a row.", **options).set_function(num_running)

    def first_text(self, latency_s: float) -> None:
        """Record the first text of a request."""
        self._first.observe(latency_s)

    def counted(self, num_prompt: int, num_completion: int) -> None:
        """Record the tokens of a request."""
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("completion").inc(num_completion)
