"""A profile holds the steps that were asked for, and nothing that goes wrong with it costs the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings

import jax
import pytest
from run_helpers import (
    QuicklyCompiled,
    assert_same_metrics,
    assert_same_state,
    change,
    leaves,
    lines,
    programs_from,
    stop_after,
)

from jaxpar.errors import ConfigError
from jaxpar.experiment import TrainConfig
from jaxpar.runtime import loop, profile
from jaxpar.runtime.loop import train


@pytest.fixture(scope="module", autouse=True)
def shared_program():
    """All runs here differ only in what the loop does between the steps of one Program."""
    made = {}

    def program(experiment, devices):
        if not made:
            made["program"] = QuicklyCompiled(experiment, devices)
        return made["program"]

    with programs_from(program):
        yield


@pytest.fixture(scope="module")
def straight(tiny, one_device, tmp_path_factory):
    """Ten steps with no profile."""
    run = tmp_path_factory.mktemp("straight") / "run"
    train(tiny(), run, one_device, quiet=True)
    return run


def traces(run):
    return sorted(run.glob("profile/plugins/profile/*/*.xplane.pb"))


def events(run):
    """Name -> the steps it was marked with (None: none), in order of time, of the only trace."""
    (file,) = traces(run)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    found.append((event.start_ns, event.name, dict(event.stats).get("step_num")))
    names = {}
    for _, name, step in sorted(found, key=lambda event: event[0]):
        names.setdefault(name, []).append(step)
    return names


def test_the_trace_holds_the_steps_and_their_phases(tiny, straight, one_device, tmp_path, capfd):
    """*wrong*: 5 to 7 (steps counted from 0) or 4 to 7 (the last one included)."""
    experiment = tiny(profile="4:7", checkpoint_every=5)
    train(experiment, tmp_path, one_device)
    found = events(tmp_path)
    assert found["step"] == [4, 5, 6]
    assert len(found["data"]) == 3
    assert len(found["evaluate"]) == len(found["checkpoint"]) == 1  # after steps 6 and 5
    assert "start" not in found  # the profiler itself
    out = capfd.readouterr().out
    assert out.count("\nprofile  ") == 1
    assert f"profile  in {tmp_path}/profile: xprof --logdir {tmp_path}/profile" in out
    assert_same_metrics(tmp_path, straight)  # bit for bit


@pytest.mark.skipif(importlib.util.find_spec("xprof") is None, reason="pip install xprof")
def test_xprof_reads_it(tiny, one_device, tmp_path):
    from xprof.convert import raw_to_tool_data

    train(tiny(profile="4:7"), tmp_path, one_device, quiet=True)
    files = [str(file) for file in traces(tmp_path)]
    assert "overview_page" in raw_to_tool_data.xspace_to_tool_names(files)
    data, kind = raw_to_tool_data.xspace_to_tool_data(files, "trace_viewer", {})
    assert kind == "application/json"
    shown = [event["name"] for event in json.loads(data)["traceEvents"] if "name" in event]
    assert {"data", "evaluate"} <= set(shown) and sum(name.startswith("step") for name in shown) >= 3


def test_a_trace_of_the_whole_run(tiny, one_device, tmp_path):
    """From the first step to the last: nothing was read before it, nothing comes after it."""
    train(tiny(profile="1:3", steps=2), tmp_path, one_device, quiet=True)
    found = events(tmp_path)
    assert found["step"] == [1, 2]
    assert len(found["evaluate"]) == 1


def test_a_signal_ends_the_trace_and_a_resumed_run_goes_on_with_it(tiny, one_device, tmp_path, monkeypatch, capfd):
    experiment, run = tiny(profile="3:8"), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert train(experiment, run, one_device, quiet=True).step == 5
    assert events(run)["step"] == [3, 4, 5]
    (first,) = traces(run)
    first.unlink()
    train(change(experiment, "train", steps=9), run, one_device, resume=True, quiet=True)
    assert events(run)["step"] == [6, 7]
    (second,) = traces(run)
    second.unlink()
    capfd.readouterr()
    train(experiment, run, one_device, resume=True)
    assert traces(run) == []
    out = capfd.readouterr().out
    assert "profile  none: steps 3 to 7 are done already\n" in out and "xprof" not in out


@pytest.mark.parametrize("call", ["start_trace", "stop_trace"])
def test_a_profiler_that_fails_is_one_line(tiny, straight, one_device, tmp_path, monkeypatch, capfd, call):
    real = getattr(jax.profiler, call)

    def fail(*arguments, **options):
        if call == "stop_trace":
            real()
        raise RuntimeError("no space\nleft")

    monkeypatch.setattr(profile.jax.profiler, call, fail)
    assert train(tiny(profile="4:7"), tmp_path, one_device).step == 10
    out = capfd.readouterr().out
    assert out.count("profile ") == 1
    assert "profile  failed, the run goes on without: no space left\n" in out
    assert_same_metrics(tmp_path, straight)
    assert_same_state(leaves(tmp_path), leaves(straight))


def test_the_callers_own_trace_is_left_alone(tiny, one_device, tmp_path, capfd):
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace of every call takes seconds to write
    with jax.profiler.trace(tmp_path / "own", profiler_options=options):
        train(tiny(profile="2:4", steps=4), tmp_path / "run", one_device)
    assert "profile  failed, the run goes on without: Profile has already been started" in capfd.readouterr().out
    assert len(list((tmp_path / "own").rglob("*.xplane.pb"))) == 1 and traces(tmp_path / "run") == []


def test_an_exception_ends_the_trace(tiny, one_device, tmp_path, monkeypatch):
    """*wrong*: the next trace of the process fails."""
    monkeypatch.setattr(loop._Training, "_evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(profile="2:9"), tmp_path / "run", one_device, quiet=True)
    with jax.profiler.trace(tmp_path / "own"):
        pass
    assert len(traces(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "text", ["10", "13:10", "10:10", "0:3", "-1:3", "8:12", "11:12", "3:", ":3", "a:b", "1:2:3", "1.5:3", ""]
)
def test_a_range_that_cannot_be(text):
    with pytest.raises(ConfigError) as error:
        TrainConfig(steps=10, profile=text).validate()
    shown = " ".join(text.split())
    assert str(error.value) == (
        f"train.profile: {shown} is no range FIRST:STOP of this run's steps 1 to 10 "
        "(legal: such as 10:13 for steps 10, 11 and 12)"
    )


def test_ranges_that_can_be():
    for text, steps in ((None, []), ("1:2", [1]), ("9:11", [9, 10]), ("1:11", list(range(1, 11)))):
        config = dataclasses.replace(TrainConfig(steps=10), profile=text)
        config.validate()
        assert list(config.profiled_steps()) == steps


def test_lines_are_those_of_a_run_without(tiny, straight, one_device, tmp_path):
    """Reading the metrics before and after the trace writes no record twice and loses none."""
    train(tiny(profile="3:4", log_every=2), tmp_path, one_device, quiet=True)
    assert [r["step"] for r in lines(tmp_path)] == [2, 3, 4, 6, 6, 8, 9, 10, 10]
