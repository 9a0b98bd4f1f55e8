"""What servers measure: quantiles against numpy's of the same definition, sums and counts."""

import numpy as np
import pytest

from openpi_train.serve.openai.text_measures import TextMeasures
from openpi_train.serve.serve_metrics import Measures


def made():
    return Measures(num_waiting=lambda: 3, num_clients=lambda: 2)


def value(measures, name):
    """The value of a line of /metrics."""
    (line,) = [line for line in measures.text().decode().splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


# numpy's `inverted_cdf` is the smallest time that at least this fraction does not exceed.
@pytest.mark.parametrize("number", [1, 2, 3, 19, 20, 21, 100, 999])
def test_quantiles_are_the_smallest_times_that_so_many_do_not_exceed(number):
    times, measures = np.random.default_rng(number).permutation(np.arange(1.0, number + 1)), made()
    for time in times:
        measures.answered(time)
        measures.ran(1, 2 * time)
    for quantile in (0.5, 0.95):
        expected = np.quantile(times, quantile, method="inverted_cdf")
        assert value(measures, f'openpi_train_recent_seconds{{of="request",quantile="{quantile}"}}') == expected
        assert value(measures, f'openpi_train_recent_seconds{{of="inference",quantile="{quantile}"}}') == 2 * expected
    p50, p95 = (1e3 * np.quantile(times, quantile, method="inverted_cdf") for quantile in (0.5, 0.95))
    assert measures.summary() == (
        f"of the last {number} answers half took at most {p50:.1f} ms, 95 % at most {p95:.1f} ms"
    )


def test_quantiles_are_those_of_the_last_thousand_answers():
    measures = made()
    for time in [*[100.0] * 1000, *range(1, 1001)]:
        measures.answered(time)
    assert value(measures, 'openpi_train_recent_seconds{of="request",quantile="0.5"}') == 500
    assert value(measures, 'openpi_train_recent_seconds{of="request",quantile="0.95"}') == 950
    assert value(measures, 'openpi_train_requests_total{outcome="answered"}') == 2000


def test_without_answers_there_is_no_quantile():
    measures = made()
    assert measures.summary() == "no request was answered"
    assert np.isnan(value(measures, 'openpi_train_recent_seconds{of="request",quantile="0.5"}'))
    assert (value(measures, "openpi_train_queue_requests"), value(measures, "openpi_train_clients")) == (3, 2)


def test_batches_are_counted_by_their_rows_and_seconds():
    measures = made()
    for rows, seconds in [(1, 0.25), (4, 0.5), (3, 2.0)]:
        measures.ran(rows, seconds)
    assert value(measures, "openpi_train_batch_rows_sum") == 8 and value(measures, "openpi_train_batch_rows_count") == 3
    assert value(measures, "openpi_train_inference_seconds_sum") == 2.75
    assert value(measures, 'openpi_train_inference_seconds_bucket{le="0.5"}') == 2


def test_texts_are_measured_by_their_tokens_and_the_time_to_the_first():
    measures = TextMeasures(num_waiting=lambda: 0, num_running=lambda: 0, num_clients=lambda: 0)
    for prompt, completion in [(5, 7), (1, 2)]:
        measures.counted(prompt, completion)
    measures.first_text(0.5)
    assert value(measures, 'openpi_train_tokens_total{of="prompt"}') == 6
    assert value(measures, 'openpi_train_tokens_total{of="completion"}') == 9
