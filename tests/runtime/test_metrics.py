"""Throughput, by a clock that the test turns."""

from __future__ import annotations

import pytest

from jaxpar.runtime import metrics
from jaxpar.runtime.metrics import Meter


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)`` lets time pass."""
    now = [100.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return wait


def test_rate_and_utilisation(clock):
    meter = Meter(tokens_per_step=1000, flops_per_token=6e6, peak_flops=1e11)
    clock(0.5)
    reading = meter.step()
    assert (reading.seconds, reading.tokens_per_second) == (0.5, pytest.approx(2000))
    assert reading.mfu == pytest.approx(2000 * 6e6 / 1e11)  # 0.12


def test_no_peak_no_utilisation(clock):
    meter = Meter(1000, 6e6, peak_flops=0.0)
    clock(1)
    assert meter.step().mfu is None


def test_only_the_last_steps_count(clock):
    meter = Meter(100, 1.0, 1.0, window=4)
    for _ in range(10):
        clock(10)  # ten slow steps
        meter.step()
    rates = []
    for _ in range(4):
        clock(1)
        rates.append(meter.step().tokens_per_second)
    assert rates == pytest.approx([400 / 31, 400 / 22, 400 / 13, 100])
    assert meter.step().seconds == 104


def test_evaluations_and_checkpoints_are_left_out_of_the_rate_but_not_of_the_clock(clock):
    meter = Meter(100, 1.0, 1.0)
    for _ in range(3):
        clock(1)
        reading = meter.step()
        clock(50)
        meter.pause(50)
    assert reading.tokens_per_second == pytest.approx(100)
    clock(1)
    reading = meter.step()
    assert reading.tokens_per_second == pytest.approx(100) and reading.seconds == 154


def test_a_clock_that_stands_still(clock):
    assert Meter(100, 1.0, 1.0).step().tokens_per_second > 0  # not a division by zero
