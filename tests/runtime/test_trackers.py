"""Trackers: what they hold against metrics.jsonl, over stops, crashes and failures of their own."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import types

import pytest
from run_helpers import (
    QuicklyCompiled,
    at_step,
    change,
    crash_after,
    lines,
    poison,
    programs_from,
    stop_after,
    tiny_experiment,
)

from jaxpar.errors import ConfigError
from jaxpar.experiment import TrackConfig
from jaxpar.runtime import loop, trackers
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.loop import TrainingStopped, train
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.runtime.trackers import Trackers, check_trackers, tags
from jaxpar.serialize import flatten


def needs(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """No tracker leaves this machine or the tests' folders; trackio reads its variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        assert "trackio" not in sys.modules
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_program():
    """All runs here differ only in what the loop does between the steps of one Program."""
    one = functools.cache(lambda model, devices: {})

    def program(experiment, devices):
        made = one(experiment.model, tuple(devices))
        if "program" not in made:
            made["program"] = QuicklyCompiled(experiment, devices)
        return made["program"]

    with programs_from(program):
        yield


def tracked(experiment, *names, **fields):
    return change(experiment, "track", to=names, **fields)


# What the trackers hold, read by their own readers


def tensorboard_points(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_hyperparameters(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data as parse

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    start = events.summary_metadata["_hparams_/session_start_info"]
    return {name: getattr(v, v.WhichOneof("kind")) for name, v in parse(start.plugin_data.content).hparams.items()}


def wandb_file(file):
    """The records of an offline file: a log of LevelDB's format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_records(run):
    """Of all sessions in order; W&B's own process may still be writing the last one."""
    deadline = time.monotonic() + 60
    for session in sorted(run.glob("wandb/offline-run-*")):
        ended = False
        while not ended:
            assert time.monotonic() < deadline
            records = [record for file in session.glob("*.wandb") for record in wandb_file(file)]
            ended = bool(records) and records[-1].WhichOneof("record_type") == "exit"
        yield from records


def wandb_points(run):
    points = {}
    for record in wandb_records(run):
        row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
        for tag, value in row.items():
            if "/" in tag:
                points.setdefault(tag, []).append((row["step"], value))
    return points


def trackio_points(run):
    from trackio.sqlite_storage import SQLiteStorage

    points = {}
    key = json.loads((run / "track.json").read_text())["trackio"]
    for row in SQLiteStorage.get_logs(key["project"], key["name"]):
        for tag, value in row.items():
            if "/" in tag:
                points.setdefault(tag, []).append((row["step"], value))
    return points


READ = {"tensorboard": tensorboard_points, "wandb": wandb_points, "trackio": trackio_points}
EACH = [
    pytest.param("tensorboard", marks=needs("tensorboardX", "tensorboard")),
    pytest.param("wandb", marks=needs("wandb")),
    pytest.param("trackio", marks=needs("trackio")),
]


def points_of(run):
    """What every tracker should hold."""
    points = {}
    for record in RunFolder(run).read_metrics():
        for tag, value in tags(record).items():
            points.setdefault(tag, []).append((record["step"], value))
    return points


def assert_mirrored(name, run, only=None):
    got, want = READ[name](run), points_of(run)
    assert set(got) == set(want)
    for tag in only or want:
        assert [step for step, _ in got[tag]] == [step for step, _ in want[tag]], tag
        assert [value for _, value in got[tag]] == pytest.approx([value for _, value in want[tag]], rel=1e-6), tag


DETERMINED = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "eval/loss", "eval/tokens")


# The names


def test_tags_are_grouped_and_finite():
    record = {"step": 3, "tokens": 9, "loss": None, "seconds": 1.0, "seconds_data": 0.5, "goodput": 0.5}
    assert tags({**record, "host_bytes": 7, "note": "text", "flag": True, "grad_norm": float("nan")}) == {
        "train/tokens": 9, "time/seconds": 1.0, "time/seconds_data": 0.5, "time/goodput": 0.5, "memory/host_bytes": 7,
    }  # fmt: skip
    # *wrong*: "tokens" beside "eval_tokens" would give two points of one tag at one step
    assert tags({"step": 3, "tokens": 9, "eval_loss": 2.0, "eval_tokens": 4}) == {"eval/loss": 2.0, "eval/tokens": 4}


# Whole runs


@pytest.mark.parametrize("name", EACH)
def test_a_tracker_holds_every_record_at_its_step(tiny, one_device, tmp_path, name, capfd):
    experiment, run = tracked(tiny(), name, project="numbers"), tmp_path / "first run"
    train(experiment, run, one_device)
    assert_mirrored(name, run)
    out, err = capfd.readouterr()
    shown = [line for line in out.splitlines() if line.startswith("track ")]
    assert len(shown) == 1 and shown[0].startswith(f"track    {name}: ")
    assert name == "tensorboard" or name in shown[0].split(": ", 1)[1]  # a command that can be run
    assert "wandb:" not in err and "rackio" not in out.replace(shown[0], "")  # no chatter of theirs


@needs("tensorboardX", "tensorboard")
def test_tensorboard_has_the_config(tiny, one_device, tmp_path):
    experiment = tracked(tiny(steps=2), "tensorboard")
    train(experiment, tmp_path, one_device, quiet=True)
    got = tensorboard_hyperparameters(tmp_path)
    assert set(got) == set(flatten(experiment))
    assert (got["optim.learning_rate"], got["optim"], got["train.profile"]) == (0.01, "AdamW", "none")


@needs("wandb")
def test_wandb_has_the_config_the_names_and_how_it_ended(tiny, one_device, tmp_path, monkeypatch):
    experiment = change(
        tracked(tiny(steps=3, max_skipped=1), "wandb", project="numbers", name="a name"), "optim", eps=1e-7
    )
    poison(monkeypatch, range(1, 100))
    with pytest.raises(TrainingStopped):
        train(experiment, tmp_path, one_device, quiet=True)
    records = list(wandb_records(tmp_path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("numbers", "a name")
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert {k: v for k, v in config.items() if k != "_wandb"}.keys() == flatten(experiment).keys()
    assert config["optim.eps"] == 1e-7
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [1]


@needs("trackio")
def test_trackio_has_the_config_and_two_folders_of_one_name_are_two_runs(tiny, one_device, tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    names = []
    for place, steps in (("a", 2), ("b", 3)):
        experiment, run = tracked(tiny(steps=steps), "trackio", project="twins"), tmp_path / place / "run"
        train(experiment, run, one_device, quiet=True)
        assert_mirrored("trackio", run)
        names.append(json.loads((run / "track.json").read_text())["trackio"]["name"])
        config = SQLiteStorage.get_run_config("twins", names[-1])
        assert config["train.steps"] == steps and flatten(experiment).keys() <= config.keys()
    assert names[0] != names[1] and all(name.startswith("run-") for name in names)


# Going on


def resume(experiment, run, devices):
    """Not within the same second: W&B names the folder of a session by it."""
    time.sleep(1.0 if "wandb" in experiment.track.to else 0.0)
    return train(experiment, run, devices, resume=True, quiet=True)


@pytest.mark.parametrize("name", EACH)
def test_a_stopped_run_goes_on_in_the_same_place(tiny, one_device, tmp_path, monkeypatch, name):
    experiment, run = tracked(tiny(), name, project="stopped"), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(experiment, run, one_device, quiet=True).stopped_by == "SIGTERM"
    key = json.loads((run / "track.json").read_text())[name]
    assert resume(change(experiment, "optim", learning_rate=0.02), run, one_device).step == 10
    again = json.loads((run / "track.json").read_text())[name]
    assert [again.get(part) for part in ("project", "id", "name")] == [key.get(p) for p in ("project", "id", "name")]
    assert_mirrored(name, run)


@pytest.mark.parametrize("name", EACH)
def test_steps_that_are_taken_again_appear_once(tiny, one_device, tmp_path, name):
    """Killed after step 8 with a checkpoint of step 5, resumed and killed at step 6, resumed with more evaluations."""
    experiment, run = tracked(tiny(steps=8, checkpoint_every=5), name, project="killed"), tmp_path / "run"
    train(experiment, run, one_device, quiet=True)
    shutil.rmtree(run / "checkpoints" / "step_8")
    stopped = change(experiment, "train", steps=6)
    resume(stopped, run, one_device)
    shutil.rmtree(run / "checkpoints" / "step_6")
    longer = change(experiment, "train", steps=10, eval_every=1)
    resume(longer, run, one_device)
    assert Checkpoints(run / "checkpoints").latest() == 10
    got = READ[name](run)
    assert [step for step, _ in got["train/loss"]] == list(range(1, 11))  # *wrong*: 6, 7 and 8 twice
    for points in got.values():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps))
    if name == "tensorboard":
        assert_mirrored(name, run)
    # what cannot be taken back has no evaluation at 7, which came after it had seen step 8
    want = [3, 6, 7, 8, 9, 10] if name == "tensorboard" else [3, 6, 8, 9, 10]
    assert [step for step, _ in got["eval/loss"]] == want


@pytest.mark.parametrize("name", EACH)
def test_an_evaluation_that_a_crash_cut_off_is_not_missing(tiny, one_device, tmp_path, monkeypatch, name):
    """Killed between the training record of step 6 and its evaluation."""
    experiment, run = tracked(tiny(checkpoint_every=5), name, project="cut"), tmp_path / "run"
    evaluate = loop._Training._evaluate

    def dies(self, step, state):
        if step == 6:
            raise MemoryError
        evaluate(self, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Training, "_evaluate", dies)
        with pytest.raises(MemoryError):
            train(experiment, run, one_device, quiet=True)
    resume(experiment, run, one_device)
    assert_mirrored(name, run, DETERMINED)


@pytest.mark.parametrize("name", EACH)
def test_a_tracker_that_joins_later_gets_the_whole_run(tiny, one_device, tmp_path, name):
    experiment, straight, run = tiny(checkpoint_every=5, steps=8), tmp_path / "straight", tmp_path / "run"
    train(experiment, straight, one_device, quiet=True)
    crash_after((None, straight, None), 5, run)
    resume(tracked(experiment, name, project="joins"), run, one_device)
    assert_mirrored(name, run)


@pytest.mark.parametrize("name", [EACH[0], EACH[2]])
def test_another_project_is_another_run(tiny, one_device, tmp_path, name):
    run = tmp_path / "run"
    train(tracked(tiny(steps=2), name, project="one"), run, one_device, quiet=True)
    resume(tracked(tiny(steps=3), name, project="other"), run, one_device)
    assert_mirrored(name, run)


@needs("trackio")
def test_trackio_gets_what_a_killed_session_had_not_written(tiny, one_device, tmp_path, monkeypatch):
    """It keeps records for half a second. *wrong*: they are missing for ever."""
    import trackio

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        log = trackio.run.Run.log
        patch.setattr(trackio.run.Run, "log", lambda self, values, step: log(self, values, step) if step < 4 else None)
        train(tracked(tiny(), "trackio", project="lagging"), run, one_device, quiet=True)
    resume(tracked(tiny(), "trackio", project="lagging"), run, one_device)
    assert_mirrored("trackio", run)


def test_wandb_gets_what_its_server_lacks(tmp_path, monkeypatch):
    """A server that has steps up to 7 of a run that goes on from 8, by what a resumed run's summary says."""
    rows, asked = [], {}

    class Run:
        offline, id, dir, url, summary = False, "abc", "there/files", "https://where", {"step": 7}

        def define_metric(self, *_, **__):
            pass

        def log(self, row):
            rows.append(row)

        def finish(self, exit_code):
            pass

    def init(**options):
        asked.update(options)
        return Run()

    wandb = types.SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = RunFolder(tmp_path)
    (tmp_path / "track.json").write_text('{"wandb": {"project": "jaxpar", "id": "abc", "reached": 0}}')
    said = []
    with Trackers(said.append) as mirror:
        earlier = [{"step": step, "loss": float(step)} for step in range(1, 11)]
        mirror.start(tracked(tiny_experiment(tmp_path), "wandb"), folder, 8, earlier)
        mirror.log({"step": 9, "loss": 9.0})
    assert (asked["id"], asked["resume"], asked["project"]) == ("abc", "allow", "jaxpar")
    assert said == ["track    wandb: https://where"]
    assert [row["step"] for row in rows] == [8, 9]


# Failures


class Broken:
    """A tracker that fails at one of its calls."""

    where, has = "nowhere", 0

    def __init__(self, call):
        self.call, self.calls = call, []
        self.key = {"project": "jaxpar"}

    def __call__(self, *_):
        self._do("start")
        return self

    def _do(self, call):
        self.calls.append(call)
        if call == self.call:
            raise OSError(28, "No space left on device\n(and more)")

    def log(self, step, values):
        self._do(f"log {step}")

    def finish(self, failed):
        self._do(f"finish {failed}")


@pytest.mark.parametrize("call", ["start", "log 4", "finish False"])
def test_a_tracker_that_fails_is_off_in_one_line(tiny, one_device, tmp_path, monkeypatch, capfd, call):
    broken, sound = Broken(call), Broken(None)
    monkeypatch.setattr(trackers, "_START", {"wandb": broken, "trackio": sound})
    monkeypatch.setattr(loop, "check_trackers", lambda config: None)
    summary = train(tracked(tiny(eval_every=100), "wandb", "trackio"), tmp_path, one_device)
    assert summary.step == 10
    out, _ = capfd.readouterr()
    line = "track    wandb is off, the run goes on without: [Errno 28] No space left on device (and more)\n"
    assert out.count(" is off") == 1 and line in out
    assert broken.calls[-1] == call  # and nothing after it
    steps = [f"log {step}" for step in range(1, 11)]
    assert sound.calls == ["start", *steps, "log 10", "finish False"]


@needs("tensorboardX", "tensorboard")
def test_tensorboard_on_a_full_disk(tiny, one_device, tmp_path, monkeypatch, capfd):
    """Its event file cannot grow. *wrong*: tensorboardX's SummaryWriter hangs here for ever."""
    run = tmp_path / "run"

    def fill():
        (file,) = (run / "tensorboard").iterdir()
        descriptors = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        (held,) = [int(path.rpartition("/")[2]) for path in descriptors if os.path.realpath(path) == str(file)]
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, held)
        os.close(full)

    at_step(monkeypatch, 3, fill)
    assert train(tracked(tiny(), "tensorboard"), run, one_device).step == 10
    out, _ = capfd.readouterr()
    assert out.count("tensorboard is off, the run goes on without: [Errno 28] No space left on device\n") == 1
    assert len(lines(run)) == 14


@needs("trackio")
def test_a_warning_of_trackio_is_a_failure(tmp_path):
    """It never raises: it warns that it dropped something and goes on."""
    said = []
    mirror = Trackers(said.append)
    experiment = tracked(tiny_experiment(tmp_path), "trackio", project="registry-x")  # reserved by trackio
    with mirror:
        mirror.start(experiment, RunFolder(tmp_path), 0, [])
        mirror.log({"step": 1, "loss": 1.0})
    assert len(said) == 1 and "trackio is off" in said[0] and "registry" in said[0]


def test_only_process_0_tracks(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_START", {"wandb": lambda *_: pytest.fail("started")})
    monkeypatch.setattr(trackers.jax, "process_index", lambda: 1)
    with Trackers(pytest.fail) as mirror:
        mirror.start(tracked(tiny_experiment(tmp_path), "wandb"), RunFolder(tmp_path), 0, [])
        mirror.log({"step": 1, "loss": 1.0})


# What is refused before anything is read or compiled


@pytest.mark.parametrize("spec", [None, types.SimpleNamespace(origin=None)], ids=["nothing", "a folder of that name"])
@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_a_package_that_is_not_there(tiny, one_device, tmp_path, monkeypatch, name, spec):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: spec)
    monkeypatch.setattr(loop, "load_data", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError) as error:
        train(tracked(tiny(), name), tmp_path / "run", one_device)
    assert (
        str(error.value) == f"track.to: {name} needs a package that is not there: pip install {trackers.PACKAGES[name]}"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mode", "key", "refused"), [("online", False, True), ("online", True, False), ("offline", False, False)]
)
def test_wandb_without_a_login(monkeypatch, mode, key, refused):
    settings = types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
    wandb = types.SimpleNamespace(setup=lambda: settings, login=lambda prompt, verify: key)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: types.SimpleNamespace(origin="here"))
    if refused:
        with pytest.raises(
            ConfigError, match=r"^track\.to: wandb needs a login \(legal: `wandb login`, or WANDB_MODE=of"
        ):
            check_trackers(TrackConfig(to=("wandb",)))
    else:
        check_trackers(TrackConfig(to=("wandb",)))


@pytest.mark.slow
@needs("wandb")
def test_the_login_check_of_the_real_wandb(tmp_path):
    """Its answer without a key, in a process of its own with a home of its own; it asks nobody."""
    code = """if True:
        from jaxpar.experiment import TrackConfig
        from jaxpar.runtime.trackers import check_trackers
        check_trackers(TrackConfig(to=("wandb",)))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert "ConfigError: track.to: wandb needs a login" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"to": ("wandb", "wandb")}, "track.to: wandb,wandb names a tracker twice"),
        ({"project": ""}, "track.project: '' is no name"),
        ({"project": "a/b"}, "track.project: 'a/b' is no name"),
        ({"name": " "}, "track.name: ' ' is no name"),
        ({"name": "x" * 101}, "track.name: "),
    ],
)
def test_wrong_fields(tmp_path, fields, message):
    experiment = dataclasses.replace(tiny_experiment(tmp_path), track=TrackConfig(**fields))
    with pytest.raises(ConfigError) as error:
        experiment.validate()
    assert str(error.value).startswith(message)
