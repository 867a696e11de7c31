"""Throughput and where the time went, by a clock that the test turns."""

from __future__ import annotations

import os
import types

import numpy as np
import pytest

from jaxpar.runtime import metrics
from jaxpar.runtime.metrics import PHASES, Meter, memory


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)`` lets time pass."""
    now = [100.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return wait


def meter_at_the_loop(tokens=1000, flops=6e6, peak=1e11, **window):
    meter = Meter(tokens, flops, started=100.0, **window)
    meter.peak_flops = peak
    return meter


def step(meter, clock, seconds, data=0.0):
    """A step of the loop: what the loader makes it wait for, then the device."""
    with meter.phase("step", 1):
        with meter.phase("data"):
            clock(data)
        clock(seconds - data)
        return meter.step()


# Throughput


def test_rate_and_utilisation(clock):
    reading = step(meter_at_the_loop(), clock, 0.5)
    assert reading.tokens_per_second == pytest.approx(2000)
    assert reading.mfu == pytest.approx(2000 * 6e6 / 1e11)  # 0.12


def test_no_peak_no_utilisation(clock):
    assert step(meter_at_the_loop(peak=0.0), clock, 1).mfu is None


def test_only_the_last_steps_count(clock):
    meter = meter_at_the_loop(100, window=4)
    for _ in range(10):
        step(meter, clock, 10)  # slow ones
    rates = [step(meter, clock, 1, data=0.4).tokens_per_second for _ in range(4)]
    assert rates == pytest.approx([400 / 31, 400 / 22, 400 / 13, 100])


def test_the_rate_leaves_out_all_but_steps_and_their_data(clock):
    meter = meter_at_the_loop(100)
    clock(30)  # *wrong*: a first step of 31 seconds
    for _ in range(3):
        reading = step(meter, clock, 1)
        with meter.phase("evaluate"):
            clock(50)
        with meter.phase("checkpoint"):
            clock(7)
        assert reading.tokens_per_second == pytest.approx(100)
    assert meter.seconds()["seconds"] == 30 + 3 * 58


def test_a_clock_that_stands_still(clock):
    meter = meter_at_the_loop()
    assert meter.seconds()["goodput"] == 0  # not a division by zero
    assert meter.shares().startswith("0.0 s")
    assert step(meter, clock, 0).tokens_per_second > 0


# Where the time went


def test_every_second_belongs_to_the_innermost_phase(clock):
    meter = meter_at_the_loop()
    clock(3)
    with meter.phase("compile"):
        clock(10)
    with meter.phase("step"):
        step(meter, clock, 5, data=2)
        with meter.phase("evaluate"):
            with meter.phase("compile"):
                clock(4)
            clock(6)
        clock(1)  # between the steps
        with pytest.raises(KeyError), meter.phase("checkpoint"):
            clock(8)
            raise KeyError  # what fails took its time all the same
    got = meter.seconds()
    parts = {"start": 3, "compile": 14, "data": 2, "step": 4, "evaluate": 6, "checkpoint": 8, "lost": 0}
    assert got == {"seconds": 37, **{f"seconds_{k}": v for k, v in parts.items()}, "goodput": round(4 / 37, 4)}
    assert parts.keys() == PHASES.keys()
    shares = "38 % compiling, 22 % checkpoints, 16 % evaluation, 11 % steps, 8 % start, 5 % waiting for data"
    assert meter.shares() == f"37.0 s: {shares}"


def test_long_runs_are_told_in_hours(clock):
    meter = meter_at_the_loop()
    with meter.phase("step"):
        clock(59.96)
        assert meter.shares() == "1 min 00 s: 100 % steps"
        clock(2 * 3600)
        assert meter.shares() == "2 h 01 min: 100 % steps"


def session(clock, first, until, earlier):
    """Records of steps of 10 s after 5 s of start, and what time.json says after a checkpoint of 2 s at the end."""
    meter = meter_at_the_loop()
    meter._since = metrics.time.perf_counter()
    clock(5)
    meter.carry_over(first, earlier)
    records = []
    for number in range(first + 1, until + 1):
        step(meter, clock, 10)
        records.append({"step": number, **meter.seconds()})
    with meter.phase("checkpoint"):
        clock(2)
    return records, {"step": until, **meter.seconds()}


def test_a_run_that_was_stopped_goes_on_counting(clock):
    records, ended = session(clock, 0, 3, [])
    assert records[-1]["seconds"] == 35
    more, _ = session(clock, 3, 4, [*records, ended])
    assert more[0]["seconds"] == 52  # *wrong*: 50, without the checkpoint that no record saw
    assert (more[0]["seconds_start"], more[0]["seconds_checkpoint"], more[0]["seconds_lost"]) == (10, 2, 0)
    assert more[0]["goodput"] == round(40 / 52, 4)


def test_work_after_the_checkpoint_is_lost_once(clock):
    """Killed after step 5 with a checkpoint of step 3, then killed again before any new record, then resumed."""
    records, _ = session(clock, 0, 5, [])
    meter = meter_at_the_loop()
    meter._since = metrics.time.perf_counter()
    meter.carry_over(3, records)
    at_start = {"step": 3, **meter.seconds()}
    assert at_start["seconds_lost"] == 20 and at_start["seconds"] == 55
    clock(1000)  # the machine is down
    more, _ = session(clock, 3, 5, [*records[:3], at_start])
    assert [r["seconds_lost"] for r in more] == [20, 20]  # *wrong*: 0, the truncated records are gone
    assert [r["seconds_step"] for r in more] == [40, 50]
    assert [r["seconds"] for r in more] == [70, 80]
    seconds = [r["seconds"] for r in records + more]
    assert seconds == sorted(seconds)  # one time that never goes back


def test_a_run_without_a_checkpoint_lost_everything(clock):
    records, _ = session(clock, 0, 2, [])
    more, _ = session(clock, 0, 1, records)
    assert more[0]["seconds_lost"] == 25 and more[0]["seconds_step"] == 10


def test_an_older_clean_end_is_not_taken_for_the_last(clock):
    """time.json of a session that stopped at step 3; the next one was killed after step 6, its checkpoint is of 5."""
    records, ended = session(clock, 0, 3, [])
    more, _ = session(clock, 3, 6, [*records, ended])
    last, _ = session(clock, 5, 6, [*records, *more, ended])
    assert last[0]["seconds_lost"] == 10 and last[0]["seconds_checkpoint"] == 2


def test_records_without_these_fields_count_nothing(clock):
    old = [{"step": 1, "loss": 2.0, "seconds": 50.0}, {"step": 1, "eval_loss": 2.0}, {}]
    more, _ = session(clock, 1, 2, old)
    assert more[0]["seconds"] == 15


def test_the_rate_of_a_resumed_run_forgets_the_session_before(clock):
    meter = meter_at_the_loop(100)
    meter.carry_over(1, [{"step": 1, "seconds": 500.0, "seconds_step": 400.0, "seconds_data": 100.0}])
    assert step(meter, clock, 1).tokens_per_second == pytest.approx(100)


# Memory


def device(process, statistics):
    return types.SimpleNamespace(process_index=process, memory_stats=lambda: statistics)


def test_device_memory_is_the_peak_of_the_fullest_device_here():
    def fail():
        raise RuntimeError("not addressable")

    devices = [device(0, {"peak_bytes_in_use": 5, "bytes_in_use": 9}), device(0, {"peak_bytes_in_use": 7})]
    elsewhere = types.SimpleNamespace(process_index=1, memory_stats=fail)
    assert memory([*devices, elsewhere])["memory_bytes"] == 7
    assert "memory_bytes" not in memory([device(0, None)])  # a CPU
    assert "memory_bytes" not in memory([device(0, {})])


@pytest.mark.parametrize("proc", [True, False])
def test_host_memory_is_that_of_this_process(monkeypatch, proc):
    if not proc:  # as on macOS
        monkeypatch.setattr(metrics.Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError(str(self))))
    elif not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    before = memory([])["host_bytes"]
    held = np.ones(200 << 20, np.uint8)
    after = memory([])["host_bytes"]
    if proc:
        assert 190 << 20 < after - before < 260 << 20  # *wrong* by 4096: pages for bytes
    assert 10 << 20 < before <= after < 1 << 40  # *wrong* by 1024: kilobytes for bytes
    assert held[0] == 1
