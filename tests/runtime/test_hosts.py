"""Several hosts as real processes over gloo: the same numbers as one process, agreed stops, and no end that hangs.

Every process is given a time after which it is killed and the test fails: a hang is a failure.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from run_helpers import QuicklyCompiled, change, lines, programs_from, steps_of, stop_after, tiny_experiment, write_text

from jaxpar.experiment import MeshConfig, SamplesConfig
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.loop import train

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HANGS = 240  # seconds, on a busy machine
NAME = socket.gethostname().split(".")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text, the config file of the command, and the compile cache of all processes."""
    folder = tmp_path_factory.mktemp("hosts")
    write_text(folder / "numbers.txt")
    (folder / "tiny.py").write_text(
        '"""Tiny."""\nfrom run_helpers import tiny_experiment\n\n\n'
        f"TEXT = {str(folder / 'numbers.txt')!r}\n\n\n"
        "def config():\n    return tiny_experiment(TEXT, checkpoint_every=2, eval_every=99, steps=12)\n"
    )
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    return functools.partial(tiny_experiment, folder / "numbers.txt")


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(folder, script, *arguments):
    cache = jax.config.jax_compilation_cache_dir or folder / "cache"
    own = {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if not k.startswith(("JAX", "SLURM"))} | own,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    """(exit code, stdout, stderr) of each."""
    try:
        outputs = [process.communicate(timeout=HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def series(folder, *runs):
    """Two hosts of two devices do ``runs`` (see ``host_series.py``) one after the other."""
    file = folder / "series"
    file.write_bytes(pickle.dumps(runs))
    port = free_port()
    hosts = [start(folder, "host_series.py", f"127.0.0.1:{port},2,{i}", file) for i in range(2)]
    ended = finish(hosts)
    assert [code for code, *_ in ended] == [0, 0], ended
    assert [error for *_, error in ended] == ["", ""]
    assert ended[0][1] == ended[1][1]
    return [line.split(" ", 1) for line in ended[0][1].splitlines()]


def command(folder, run, faults, *flags, index_flags=((), ())):
    """``jaxpar train`` on two hosts of one device."""
    port = free_port()
    arguments = ["train", folder / "tiny.py", "--run", run, "--devices", 1, "--host-timeout", 5, "--quiet", *flags]
    return [
        start(folder, "host_process.py", fault, *arguments, "--hosts", f"127.0.0.1:{port},2,{i}", *own)
        for i, (fault, own) in enumerate(zip(faults, index_flags, strict=True))
    ]


def assert_close(run, other):
    """The same records; floats to 1e-6, since gloo may add up in another order than one process does."""
    assert len(lines(run)) == len(lines(other))
    for got, want in zip(lines(run), lines(other), strict=True):
        assert got == pytest.approx(want, rel=1e-6)


LAYOUTS = {
    "data across hosts": (MeshConfig(data=2, fsdp=2), {"microbatches": 2}),
    "tensor across hosts": (MeshConfig(fsdp=1, tensor=4), {}),
    "context across hosts": (MeshConfig(fsdp=1, context=2, tensor=2), {}),
}


def layout(tiny, name):
    """An experiment of four steps; the sequence that is cut across hosts is evaluated too, as ``moving`` below is."""
    mesh, more = LAYOUTS[name]
    experiment = tiny(mesh, steps=4, **more)
    if name.startswith("tensor"):
        samples = SamplesConfig(every=4, prompts=("one", ""), tokens=8)
        experiment = dataclasses.replace(experiment, samples=samples)
    return experiment if name.startswith("context") else change(experiment, "data", eval_fraction=0.0)


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """``alone(experiment)``: the run of one process on four devices."""

    def run(experiment):
        folder = tmp_path_factory.mktemp("alone") / "run"
        train(experiment, folder, jax.devices()[:4], quiet=True)
        return folder

    with programs_from(QuicklyCompiled):
        yield run


@pytest.fixture(scope="module")
def first_series(folder, tiny):
    """The layouts on two hosts; then fsdp across hosts, of which host 1 is told to stop in the middle."""
    runs = [(layout(tiny, name), folder / name.replace(" ", "_"), False, None) for name in LAYOUTS]
    moving = (tiny(MeshConfig(fsdp=4), steps=10), folder / "moving", False, 2)
    return series(folder, *runs, moving)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_hosts_train_as_one(first_series, folder, tiny, alone, name):
    """Wrong rows on a host, or rows cut wrongly along the sequence, change every loss; and they write as one."""
    assert first_series[list(LAYOUTS).index(name)] == ["4", "None"]
    run, other = folder / name.replace(" ", "_"), alone(layout(tiny, name))
    assert_close(run, other)
    if name.startswith("tensor"):
        assert (run / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()


def test_a_signal_to_one_host_and_then_other_numbers_of_hosts(first_series, folder, tiny, alone, monkeypatch):
    """SIGTERM to host 1 stops both after one step with one checkpoint; the run goes on on one host, then on two."""
    run, experiment = folder / "moving", tiny(MeshConfig(fsdp=4), steps=10)
    step, why = first_series[-1]
    assert why == f"SIGTERM to host 1 ({NAME})"
    assert 3 <= int(step) <= 6
    assert Checkpoints(run / "checkpoints").steps() == [int(step)] == [steps_of(run)[-1]]

    with monkeypatch.context() as patch:
        stop_after(patch, int(step) + 2)
        summary = train(experiment, run, jax.devices()[:4], resume=True, quiet=True)
    assert summary.stopped_by == "SIGTERM"
    assert summary.step == int(step) + 2

    assert series(folder, (experiment, run, True, None)) == [["10", "None"]]
    assert_close(run, alone(experiment))
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


ONE = rf"host 1 \({NAME}\)"
ZERO = rf"host 0 \({NAME}\)"
TAIL = r"--resume goes on from step \d+\n"


@pytest.mark.parametrize(
    ("faults", "codes", "said"),
    [
        (("none", "kill:9"), (1, -9), (f"jaxpar: {ONE} ended without a word: .*; {TAIL}", "")),
        (("kill:9", "none"), (-9, 1), ("", f"jaxpar: {ONE}: {ZERO} ended without a word: .*; {TAIL}")),
        (
            ("none", "error:9"),
            (1, 1),
            (f"jaxpar: {ONE} failed: OSError: the disk is gone; {TAIL}", f"jaxpar: {ONE}: OSError: the disk is .*\n"),
        ),
        (("none", "stall:9"), (1, 1), (f"jaxpar: {ONE} has waited 5 s for its data; {TAIL}",) * 2),
        (("none", "full:2"), (1, 1), (f"jaxpar: {ONE} failed: checkpoint at .*\n", f"jaxpar: {ONE}: checkpoint .*\n")),
    ],
    ids=["killed 1", "killed 0", "error", "stalled", "disk full"],
)
def test_one_host_fails_and_all_end(folder, tmp_path, faults, codes, said):
    """Each that is left says in one line who failed and where to go on, and nothing else."""
    ended = finish(command(folder, tmp_path / "run", faults))
    assert tuple(code for code, *_ in ended) == codes, ended
    for (_, out, error), pattern in zip(ended, said, strict=True):
        assert out == ""
        assert re.fullmatch(pattern, error), error
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.latest() is None or saved.structure(saved.latest())


def test_a_single_host_with_a_stalled_source(folder, tmp_path):
    arguments = ["train", folder / "tiny.py", "--run", tmp_path / "run", "--devices", 1, "--host-timeout", 5]
    [(code, _, error)] = finish([start(folder, "host_process.py", "stall:9", *arguments, "--quiet")])
    assert code == 1
    assert re.fullmatch(f"jaxpar: the run has waited 5 s for its data; {TAIL}", error)


def test_hosts_that_were_started_differently(folder, tmp_path):
    """Found before JAX starts, by field; no run folder is made."""
    hosts = command(folder, tmp_path / "run", ("none", "none"), index_flags=((), ("--optim.learning_rate", "0.5")))
    (code, _, error), (other_code, _, other_error) = finish(hosts)
    line = rf"optim.learning_rate: 0.5 on {ONE} is not 0.01, as on {ZERO} \(legal: the same command on all hosts\)\n"
    assert (code, other_code) == (2, 2)
    assert re.fullmatch(f"jaxpar: {ZERO}: {line}", error)
    assert re.fullmatch(f"jaxpar: {ONE}: {ZERO} failed: {line}", other_error)
    assert not (tmp_path / "run").exists()


def test_hosts_with_different_steps(folder, tmp_path):
    """Two executables that meet in a collective wait for ever: found before JAX starts."""
    files = [folder / "a.step", folder / "b.step"]
    files[0].write_bytes(b"a")
    flags = [("--compiled", file) for file in files]
    (code, _, error), (other, *_) = finish(command(folder, tmp_path / "run", ("none", "none"), index_flags=flags))
    assert (code, other) == (2, 2)
    line = (
        r"--compiled: '.*b\.step, which cannot be read: No such file.*' on host 1 .* is not '.*a\.step with SHA-256 .*'"
    )
    assert re.match(f"jaxpar: {ZERO}: {line}", error), error


def test_a_run_folder_that_not_all_share(folder, tmp_path):
    ended = finish(command(folder, tmp_path / "run", ("none", "blind")))
    assert [code for code, *_ in ended] == [2, 2]
    assert f"host 1 ({NAME}) do not see what host 0 wrote" in ended[0][2]
    assert len(ended[0][2].splitlines()) == len(ended[1][2].splitlines()) == 1
