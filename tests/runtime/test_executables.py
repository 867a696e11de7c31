"""A step compiled by another process and loaded by a run: bit-equal, and refused where it is another step."""

import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from run_helpers import assert_same_metrics, assert_same_state, change, leaves, lines, stop_after

from jaxpar.cli import main
from jaxpar.errors import ConfigError, RunError
from jaxpar.experiment import MeshConfig, SGDConfig
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.program import Program
from jaxpar.runtime import executables, loop
from jaxpar.runtime.executables import compiled_from, load_step
from jaxpar.runtime.loop import train

FAST = "xla_backend_optimization_level=0"
MESH = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def experiment(tiny):
    return tiny(MESH, compiler_options=(FAST, "xla_tpu_enable_latency_hiding_scheduler=true"))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(
        '"""Tiny."""\nfrom run_helpers import tiny_experiment\nfrom jaxpar.experiment import MeshConfig\n\n\n'
        "def config():\n    mesh = MeshConfig(data=2, fsdp=-1, tensor=2)\n"
        f"    return tiny_experiment({str(text)!r}, mesh, compiler_options=({FAST!r},))\n"
    )
    return path


@pytest.fixture(scope="module")
def step_file(config_file, tmp_path_factory):
    """Saved by the command, in a process of its own; the mesh is written another way there."""
    path = tmp_path_factory.mktemp("step") / "tiny.step"
    command = [sys.executable, "-m", "jaxpar.cli", "compile", config_file, "--target", "cpu:8", "--save", path]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(f"jaxpar train ... --compiled {path}")
    return path


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    monkeypatch.setattr(loop, "peak_flops", lambda devices: (1e12, "a test"))


@pytest.fixture(scope="module")
def straight(experiment, tmp_path_factory):
    """The run that compiles its step."""
    run = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "peak_flops", lambda devices: (1e12, "a test"))
        train(experiment, run, quiet=True)
    return run


def test_a_loaded_step_trains_bit_for_bit(experiment, step_file, straight, tmp_path, compiled, capsys):
    """The same metrics and checkpoint, and no step is compiled. *Wrong*: one whose functions were left out hangs."""
    train(experiment, tmp_path / "run", compiled=step_file)
    assert "_step" not in " ".join(compiled)
    assert_same_metrics(tmp_path / "run", straight)
    assert_same_state(leaves(tmp_path / "run"), leaves(straight))
    said = capsys.readouterr().out
    assert f"loaded the step from {step_file} in " in said and "compiled in" not in said
    assert next(line for line in said.splitlines() if line.startswith("memory ")).endswith("on each device: fits")


def test_the_audit_of_both_is_the_same(experiment, step_file, straight, tmp_path):
    """compile.json holds the whole audit; a loaded step has text too."""
    program = Program(experiment, jax.devices())
    loaded = load_step(step_file, program)
    here = json.loads((straight / "compile.json").read_text())
    assert set(here["seconds"]) == {"compile", "roofline"}
    program.step = loaded
    from jaxpar.audit.audit import audit

    found = json.loads(json.dumps(audit(program, loaded)))
    assert found == {**here, "seconds": {"roofline": None}}
    assert found["wire_bytes"]["total"] > 0 and found["flops"]["hlo"] > 0


def test_it_goes_on_with_a_loaded_step(experiment, step_file, straight, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        train(experiment, run, quiet=True, compiled=step_file)
    assert lines(run)[-1]["step"] < 10
    train(experiment, run, resume=True, quiet=True, compiled=step_file)
    assert_same_metrics(run, straight)


OF_NO_MATTER = (
    ("optim", {"learning_rate": 0.5, "weight_decay": 0.3, "max_grad_norm": None, "b1": 0.5}),
    ("optim", {"schedule": ScheduleConfig(warmup_steps=3, final_ratio=0.5)}),
    ("train", {"steps": 77, "seed": 5, "profile": "2:3", "max_skipped": 0, "log_every": 3, "eval_every": 7}),
    ("train", {"eval_batches": 1, "checkpoint_every": 2, "keep_checkpoints": 1, "keep_every": 4, "init_from": "x"}),
    ("data", {"eval_fraction": 0.5, "tokenizer": "other"}),
    ("samples", {"every": 3}),
    ("track", {"to": ("tensorboard",)}),
    ("mesh", {"fsdp": -1}),  # the same mesh
    ("train", {"compute": "float32"}),  # which auto is on a CPU
    ("train", {"compiler_options": (FAST,)}),  # those of a TPU mean nothing here
)


def test_what_may_differ(experiment, step_file):
    """Fields that are left out of the comparison are in no line of the program either."""
    program = Program(experiment, jax.devices())
    header, _ = executables._parse(step_file, step_file.read_bytes().partition(b"\n")[0])
    assert compiled_from(program) == header
    other = experiment
    for part, fields in OF_NO_MATTER:
        other = change(other, part, **fields)
    changed = Program(other, jax.devices())
    assert compiled_from(changed) == header
    assert changed.lower_step().as_text() == program.lower_step().as_text()


REFUSED = {
    "mesh": ("mesh", {"data": 1, "fsdp": 4}, "mesh data 2 x fsdp 2 x tensor 2, here: fsdp 4 x tensor 2"),
    "model": ("model", {"mlp_width": 64}, "model.mlp_width 32, here: 64"),
    "cut": ("train", {"microbatches": 2}, "train.microbatches 1, here: 2"),
    "remat": ("train", {"remat": "full"}, "train.remat none, here: full"),
    "compute": ("train", {"compute": "bfloat16"}, "train.compute float32, here: bfloat16"),
    "options": ("train", {"compiler_options": ()}, f"train.compiler_options {FAST}, here: none"),
    "schedule": ("optim", {"schedule": ScheduleConfig("linear")}, "optim.schedule.kind cosine, here: linear"),
    "documents": ("data", {"mask_documents": False}, "data.mask_documents true, here: false"),
}


@pytest.mark.parametrize(("part", "fields", "said"), REFUSED.values(), ids=REFUSED)
def test_another_step_is_refused(experiment, step_file, part, fields, said):
    program = Program(change(experiment, part, **fields), jax.devices())
    with pytest.raises(ConfigError) as error:
        load_step(step_file, program)
    assert str(error.value).startswith(f"--compiled: {step_file} was compiled with {said} (legal: a step compiled from")


def test_momentum_that_is_there_or_not(experiment):
    """A traced number that is zero or not decides what the state holds."""
    still = dataclasses.replace(experiment, optim=SGDConfig(momentum=0.0))
    moving, faster = (dataclasses.replace(experiment, optim=SGDConfig(momentum=m)) for m in (0.5, 0.9))
    states = [compiled_from(Program(e, jax.devices())) for e in (still, moving, faster)]
    assert states[0] != states[1] == states[2]


def test_other_devices_versions_and_source(experiment, step_file, monkeypatch):
    def refused(experiment, devices):
        with pytest.raises(ConfigError) as error:
            load_step(step_file, Program(experiment, devices))
        return str(error.value).partition("was compiled with ")[2].partition(" (legal")[0]

    four = change(experiment, "mesh", data=1)
    assert refused(four, jax.devices()[:4]) == "devices 8 x cpu, here: 4 x cpu"
    assert refused(experiment, jax.devices()[::-1]) == "device ids 0-7, here: 7, 6, 5, 4, 3, 2, 1, 0"
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_source", lambda: "changed")
        assert refused(experiment, jax.devices()).endswith(", here: changed")
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_processor", lambda: "another")
        assert refused(experiment, jax.devices()).startswith("processor ")
    now = executables.versions("cpu")
    monkeypatch.setattr(executables, "versions", lambda platform: {**now, "jax": "9.9"})
    assert refused(experiment, jax.devices()) == f"jax {jax.__version__}, here: 9.9"


def test_nothing_is_begun_with_a_step_that_is_refused(experiment, step_file, tmp_path):
    with pytest.raises(ConfigError, match=r"was compiled with model\.mlp_width 32, here: 64"):
        train(change(experiment, "model", mlp_width=64), tmp_path / "run", compiled=step_file)
    assert not (tmp_path / "run").exists()


def with_content(step_file, content):
    """The file with another content, whose checksum is right."""
    header = json.loads(step_file.read_bytes().partition(b"\n")[0])
    header["sha256"] = hashlib.sha256(content).hexdigest()
    return json.dumps(header).encode() + b"\n" + content


DAMAGED = {
    "truncated": (lambda f: f.read_bytes()[:-100], RunError, "is damaged: its checksum is another"),
    "a bit": (lambda f: f.read_bytes()[:-1] + b"x", RunError, "is damaged: its checksum is another"),
    "no pickle": (lambda f: with_content(f, b"garbage"), RunError, "cannot be loaded: "),
    "another pickle": (lambda f: with_content(f, pickle.dumps([1, 2])), RunError, "cannot be loaded: "),
    "header cut": (lambda f: f.read_bytes()[:50], ConfigError, "is not a compiled step (legal: a file of jaxpar comp"),
    "empty": (lambda f: b"", ConfigError, "is not a compiled step"),
    "other kind": (lambda f: b'{"kind": "model"}\n', ConfigError, "is not a compiled step"),
    "a list": (lambda f: b"[1]\n", ConfigError, "is not a compiled step"),
    "binary": (lambda f: bytes(range(256)), ConfigError, "is not a compiled step"),
}


@pytest.mark.parametrize(("make", "kind", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_line(experiment, step_file, tmp_path, make, kind, said):
    path = tmp_path / "step"
    path.write_bytes(make(step_file))
    with pytest.raises(kind) as error:
        load_step(path, Program(experiment, jax.devices()))
    assert str(error.value).startswith(f"--compiled: {path} {said}") and "\n" not in str(error.value)


def test_the_command_ends_with_one_line(config_file, step_file, tmp_path, capfd):
    damaged = tmp_path / "damaged"
    damaged.write_bytes(step_file.read_bytes()[:-1])
    for path, code, said in (
        (tmp_path / "nowhere", 2, "cannot be read: No such file or directory"),
        (tmp_path, 2, "cannot be read: Is a directory"),
        (config_file, 2, "is not a compiled step"),
        (damaged, 1, "is damaged"),
    ):
        command = ["train", str(config_file), "--devices", "8", "--run", str(tmp_path / "run")]
        assert main([*command, "--compiled", str(path)]) == code
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"jaxpar: --compiled: {path} {said}")
    assert not (tmp_path / "run").exists()
