"""The loop: a run that stops, dies, moves to another mesh or goes wrong, against one that does none of this."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from run_helpers import (
    QuicklyCompiled,
    assert_same_metrics,
    assert_same_state,
    at_step,
    change,
    contents,
    crash_after,
    leaves,
    lines,
    poison,
    programs_from,
    steps_of,
    stop_after,
)

from jaxpar.data import TextFiles
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.experiment import MeshConfig
from jaxpar.program import Program
from jaxpar.runtime import loop
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.hosts import one_host
from jaxpar.runtime.loop import TrainingStopped, train
from jaxpar.runtime.run_folder import RunFolder


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs that differ only in what the loop does between steps share a Program: traced and compiled once."""
    between = {"eval_every": 1, "eval_batches": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "log_every": 1}

    @functools.cache
    def shared(experiment, devices):
        return (Program if len(devices) == 1 else QuicklyCompiled)(experiment, list(devices))

    def program(experiment, devices):
        return shared(change(experiment, "train", **between, max_skipped=1), tuple(devices))

    with programs_from(program):
        yield


@pytest.fixture(scope="module")
def straight(tiny, one_device, tmp_path_factory):
    """Ten steps without an interruption, a checkpoint of each: (experiment, run folder, summary)."""
    run = tmp_path_factory.mktemp("straight") / "run"
    experiment = tiny(checkpoint_every=1)
    summary = train(experiment, run, one_device, quiet=True)
    return experiment, run, summary


# What a run writes


def test_metrics_are_complete(straight):
    experiment, run, summary = straight
    assert steps_of(run) == list(range(1, 11))
    assert steps_of(run, "eval_loss") == [3, 6, 9, 10]
    records = lines(run)
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    assert all(a["tokens"] <= b["tokens"] for a, b in itertools.pairwise(records))
    for record in RunFolder(run).read_metrics():
        assert all(value is not None and math.isfinite(value) for value in record.values())
    assert Checkpoints(run / "checkpoints").steps() == list(range(1, 11))
    assert summary.tokens == records[-1]["tokens"] < 10 * experiment.tokens_per_step  # padding is not counted
    assert (summary.step, summary.stopped_by) == (10, None)
    assert (summary.train_loss, summary.eval_loss) == (records[-2]["loss"], records[-1]["eval_loss"])


def test_the_loss_falls(straight):
    losses = [record["loss"] for record in lines(straight[1]) if "loss" in record]
    assert abs(losses[0] - math.log(264)) < 0.6
    assert losses[-1] < losses[0] - 1
    assert straight[2].eval_loss < losses[0] - 1


def test_log_every_thins_the_metrics_and_changes_no_number(straight, tiny, one_device, tmp_path):
    train(tiny(log_every=4), tmp_path / "run", one_device, quiet=True)
    assert steps_of(tmp_path / "run") == [4, 8, 10]  # the last one always
    want = {record["step"]: record for record in lines(straight[1]) if "loss" in record}
    assert [r for r in lines(tmp_path / "run") if "loss" in r] == [want[4], want[8], want[10]]


def test_quiet_prints_nothing_and_loud_says_what_matters(straight, one_device, tmp_path, capfd):
    experiment, _, _ = straight
    train(dataclasses.replace(experiment), tmp_path / "quiet", one_device, quiet=True)
    assert capfd.readouterr() == ("", "")
    train(experiment, tmp_path / "loud", one_device)
    out, err = capfd.readouterr()
    for word in ("parameters", "unigram entropy", "8 sequences x 16 tokens = 128 tokens a step; 10 steps", "finished"):
        assert word in out
    assert "10/10" in err and "tokens/s" in err and "MFU" in err
    assert "reading data" not in err  # it took no second


# Evaluation


def test_evaluation_weighs_every_token_once_however_it_is_cut(tiny, one_device, tmp_path):
    """Against logits of the plain model. The mean of the batches' means would be another number."""
    found = {}
    state = loop.Program(tiny(), one_device).init()
    for microbatches in (1, 4):
        with RunFolder(tmp_path / str(microbatches)) as folder:
            folder.start({})
            for eval_batches in (1000, 2):
                experiment = tiny(microbatches=microbatches, eval_batches=eval_batches)
                run = loop._Training(experiment, folder.path, one_device, False, True, one_host())
                run.folder, run.data = folder, loop.load_data(experiment)
                run._evaluate(0, state)
        found[microbatches] = folder.read_metrics()

    model = experiment.task.init(experiment.model, jax.random.key(experiment.train.seed))
    graph, weights = nnx.split(model)

    @jax.jit
    def nll_of(weights, batch):
        logits_BSV = nnx.merge(graph, weights)(batch["tokens"], batch["positions"], batch["segments"])
        targets_BS1 = batch["targets"][..., None].astype(int)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits_BSV), targets_BS1, axis=-1)[..., 0]

    sums, counts = [], []
    for batch in run.data.evaluation.batches(8):
        mask_BS = batch["mask"].astype(bool)
        sums.append(float(np.sum(np.asarray(nll_of(weights, batch)), where=mask_BS, dtype=np.float64)))
        counts.append(int(mask_BS.sum()))
    right, wrong = sum(sums) / sum(counts), np.mean(np.array(sums) / counts)
    assert min(counts) < max(counts) and abs(right - wrong) > 1e-4
    for everything, two_batches in found.values():
        assert everything["eval_loss"] == pytest.approx(right, abs=2e-6)
        assert everything["eval_tokens"] == sum(counts)
        assert two_batches["eval_loss"] == pytest.approx(sum(sums[:2]) / sum(counts[:2]), abs=2e-6)
        assert two_batches["eval_tokens"] == sum(counts[:2])  # not of two batches of two sequences


# Resume


@pytest.mark.parametrize("k", range(1, 10))
def test_resume_at_every_step_is_bitwise(straight, one_device, tmp_path, k):
    experiment, folder, summary = straight
    run = tmp_path / "run"
    crash_after(straight, k, run)
    assert train(experiment, run, one_device, resume=True, quiet=True) == summary
    assert_same_metrics(run, folder)
    assert_same_state(leaves(run), leaves(folder))


@pytest.mark.parametrize("step", [5, 6, 10])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_and_a_resume_equal_ten_steps(straight, tiny, one_device, tmp_path, monkeypatch, step, number):
    """Also where the stop falls on an evaluation (6) or on the last step (10)."""
    experiment, run = tiny(), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, step, number)
        before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
        summary = train(experiment, run, one_device, quiet=True)
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert (summary.step, summary.stopped_by) == (step, None if step == 10 else number.name)
    assert Checkpoints(run / "checkpoints").steps() == [step]
    assert steps_of(run) == list(range(1, step + 1))
    assert train(experiment, run, one_device, resume=True, quiet=True) == straight[2]
    assert_same_metrics(run, straight[1])
    assert_same_state(leaves(run), leaves(straight[1]))


def test_a_second_interrupt_is_obeyed_at_once(tiny, one_device, tmp_path, monkeypatch):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run", one_device, quiet=True)


def test_the_checkpoint_lists_the_whole_state(straight):
    run = straight[1]
    saved = Checkpoints(run / "checkpoints")
    state = saved.structure(10)
    assert {name.split(".")[0] for name in state} == {"params", "opt", "step", "skipped"}
    weights = [name.removeprefix("params.") for name in state if name.startswith("params.")]
    for name in weights:
        assert f"opt.0.mu.{name}" in state and f"opt.0.nu.{name}" in state
    assert set(saved.metadata(10)) >= {"tokens", "data"}
    got = leaves(run, 7)
    assert (got["step"], got["opt.0.count"], got["skipped"]) == (7, 7, 0)


def test_resuming_a_finished_run_changes_nothing(straight, one_device, tmp_path):
    experiment, folder, summary = straight
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    before = contents(run)
    assert train(experiment, run, one_device, resume=True, quiet=True) == summary
    assert contents(run) == before


def test_fewer_steps_than_were_taken_are_refused(straight, one_device, tmp_path):
    experiment, folder, _ = straight
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shorter = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=4))
    before = contents(run)
    with pytest.raises(ConfigError, match=r"^train\.steps: 4 is before the checkpoint at step 10 \(legal: 10"):
        train(shorter, run, one_device, resume=True, quiet=True)
    assert contents(run) == before  # *wrong*: config.json says 4 steps, and the next resume stops there


def test_resume_without_a_run_starts_one(straight, one_device, tmp_path):
    experiment, folder, summary = straight
    assert train(experiment, tmp_path / "run", one_device, resume=True, quiet=True) == summary
    assert_same_metrics(tmp_path / "run", folder)


def test_resume_goes_back_past_a_damaged_checkpoint(straight, one_device, tmp_path):
    experiment, folder, _ = straight
    run = tmp_path / "run"
    crash_after(straight, 6, run)
    (run / "checkpoints" / "step_6" / "checkpoint.json").write_text("{")
    train(experiment, run, one_device, resume=True, quiet=True)
    assert_same_metrics(run, folder)


# What a resume refuses, and what it says


def refused(experiment, run, devices, compiled, match):
    """A resume must say no in a line that matches, compile nothing and leave the folder as it was."""
    before = contents(run)
    compiled.clear()
    with pytest.raises(JaxparError, match=match) as error:
        train(experiment, run, devices, resume=True, quiet=True)
    assert "\n" not in str(error.value) and not isinstance(error.value, TrainingStopped)
    assert compiled == []
    assert contents(run) == before


def test_other_data_is_refused(straight, one_device, tmp_path, text, compiled):
    experiment, _, _ = straight
    run = tmp_path / "run"
    crash_after(straight, 5, run)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("three", "drei"))
    source = TextFiles(str(other), separator="\n\n")
    match = "^data: .* changed since the checkpoint at step 5"
    refused(change(experiment, "data", sources=(source,)), run, one_device, compiled, match)
    refused(change(experiment, "data", eval_fraction=0.3), run, one_device, compiled, match)
    refused(change(experiment, "train", seed=1), run, one_device, compiled, match)
    same = tmp_path / "copy.txt"
    same.write_text(text.read_text())
    moved = change(experiment, "data", sources=(TextFiles(str(same), separator="\n\n"),))
    train(moved, run, one_device, resume=True, quiet=True)  # the same text elsewhere is the same data
    assert_same_metrics(run, straight[1])


@pytest.mark.parametrize(
    ("part", "fields", "leaf"),
    [
        ("model", {"mlp_width": 64}, r"layers\.mlp\.down: saved float32\[2,32,16\], the config wants float32\[2,64,16"),
        ("model", {"num_layers": 3}, r"layers\.\S+: saved float32\[2,\S+, the config wants float32\[3,"),
        ("model", {"qk_norm": True}, r"\.layers\.attention\.\S+: not saved, the config wants float32\[2,4\]"),
        ("model", {"tie_embeddings": True}, r"head\.kernel: saved float32\[16,264\], the config has no such leaf"),
    ],
)
def test_another_model_is_refused_by_the_name_of_a_leaf(straight, one_device, tmp_path, compiled, part, fields, leaf):
    run = tmp_path / "run"
    crash_after(straight, 5, run)
    refused(change(straight[0], part, **fields), run, one_device, compiled, leaf)
    assert train(straight[0], run, one_device, resume=True, quiet=True) == straight[2]


def test_a_folder_of_another_kind_is_refused(straight, one_device, tmp_path, compiled):
    experiment, folder, _ = straight
    with pytest.raises(ConfigError, match=r"^run: .* already holds a run \(legal: another folder, or resume\)"):
        train(experiment, folder, one_device, quiet=True)
    (tmp_path / "config.json").write_text('{"model": 3}')
    refused(experiment, tmp_path, one_device, compiled, "model")
    (tmp_path / "config.json").write_text("{")
    refused(experiment, tmp_path, one_device, compiled, "damaged")


def test_changes_are_printed_on_resume_and_kept_in_the_config(straight, one_device, tmp_path, capsys):
    run = tmp_path / "run"
    crash_after(straight, 5, run)
    changed = change(straight[0], "optim", learning_rate=0.02)
    train(changed, run, one_device, resume=True)
    out = capsys.readouterr().out
    assert "resuming from step 5\nchanged  optim.learning_rate: 0.01 -> 0.02\n" in out
    rates = [record["learning_rate"] for record in lines(run) if "loss" in record]
    before = [record["learning_rate"] for record in lines(straight[1]) if "loss" in record]
    assert rates[:5] == before[:5]
    assert rates[5:] == pytest.approx([2 * rate for rate in before[5:]], rel=1e-6)
    assert json.loads((run / "config.json").read_text())["optim"]["learning_rate"] == 0.02


def test_a_tokenizer_that_is_bigger_than_the_model(tiny, one_device, tmp_path, compiled):
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: 256 is smaller than the 257 tokens of data\.tokenizer"):
        train(change(tiny(), "model", vocab_size=256), tmp_path / "run", one_device, quiet=True)
    assert compiled == [] and not (tmp_path / "run").exists()


# Other meshes


@pytest.mark.slow
def test_a_run_that_moves_from_mesh_to_mesh(straight, tiny, one_device, tmp_path, monkeypatch):
    """One run over four meshes and two ZeRO stages logs what one device does (B2: sums over wrong axes differ)."""
    run, devices = tmp_path / "run", jax.devices()

    def smooth(*where, **train_config):  # Adam's usual epsilon makes large updates of gradients that are only noise
        return change(tiny(*where, **train_config), "optim", eps=1e-2)

    train(smooth(eval_every=100), tmp_path / "straight", one_device, quiet=True)
    stages = [
        (3, smooth(MeshConfig(data=2, tensor=4, fsdp=1)), devices),
        (5, smooth(MeshConfig(fsdp=8)), devices),
        (8, smooth(MeshConfig(fsdp=2, context=2, tensor=2), 1, microbatches=2), devices),
        (10, smooth(), one_device),
    ]
    for stop, experiment, mesh_devices in stages:
        with monkeypatch.context() as patch:
            patch.setattr(loop._Training, "_evaluate", lambda *_: None)  # one program less to compile on each mesh
            stop_after(patch, stop)
            assert train(experiment, run, mesh_devices, resume=True, quiet=True).step == stop
    want = [record for record in lines(tmp_path / "straight") if "loss" in record]
    for got, record in zip(lines(run), want, strict=True):
        for exact in ("step", "tokens", "skipped"):
            assert got[exact] == record[exact]
        for name in ("loss", "grad_norm", "learning_rate"):
            assert got[name] == pytest.approx(record[name], rel=1e-5)
    got, want = leaves(run), leaves(tmp_path / "straight")
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-5 * np.abs(want[name]).max(), err_msg=name)


# Non-finite


def test_a_non_finite_step_is_skipped_whole_and_counted(straight, one_device, tmp_path, monkeypatch, capsys):
    experiment, run = straight[0], tmp_path / "run"
    poison(monkeypatch, {3, 6, 7})
    train(experiment, run, one_device)
    records = [record for record in lines(run) if "loss" in record]
    assert [record["skipped"] for record in records] == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert [record["step"] for record in records if record["grad_norm"] is None] == [3, 6, 7]
    assert capsys.readouterr().out.count("skipped whole") == 3
    for skipped in (3, 6, 7):
        before, after = leaves(run, skipped - 1), leaves(run, skipped)
        assert (after.pop("step"), after.pop("skipped")) == (before.pop("step") + 1, before.pop("skipped") + 1)
        assert_same_state(after, before)  # parameters, moments and their count
    assert all(np.isfinite(leaf).all() for leaf in leaves(run).values())
    assert records[-1]["loss"] < records[0]["loss"] - 1
    rates = [record["learning_rate"] for record in lines(straight[1]) if "loss" in record]
    assert [record["learning_rate"] for record in records] == rates  # the schedule goes on


def test_a_run_that_stays_non_finite_stops_with_the_last_good_checkpoint(straight, one_device, tmp_path, monkeypatch):
    experiment, run = change(straight[0], "train", checkpoint_every=100, max_skipped=2), tmp_path / "run"
    with monkeypatch.context() as patch:
        poison(patch, range(6, 100))
        with pytest.raises(TrainingStopped) as error:
            train(experiment, run, one_device, quiet=True)
    message = str(error.value)
    assert error.value.exit_code == 1 and "\n" not in message
    assert "not finite in the last 3 steps up to step 8" in message and f"{run}/checkpoints/step_8" in message
    good = leaves(straight[1], 5)
    last = leaves(run, 8)
    for name in good:
        if name not in ("step", "skipped"):
            assert last[name].tobytes() == good[name].tobytes(), name
    assert train(experiment, run, one_device, resume=True, quiet=True).step == 10  # the cause is gone


# A full disk


@contextlib.contextmanager
def no_file_longer_than(size):
    """The operating system refuses to let any file of this process grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's, of a failed write
@pytest.mark.parametrize("what", ["a checkpoint", "the metrics"])
def test_a_full_disk(straight, one_device, tmp_path, monkeypatch, what):
    """Files may still grow enough for the metrics but not for a checkpoint; or not for the next line of metrics."""
    experiment, run = change(straight[0], "train", checkpoint_every=4), tmp_path / "run"
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:

        def fill():
            while Checkpoints(run / "checkpoints").steps() != [4]:
                time.sleep(0.01)
            room = 50 if what == "the metrics" else 2_000
            stack.enter_context(no_file_longer_than((run / "metrics.jsonl").stat().st_size + room))

        at_step(patch, 6, fill)
        with pytest.raises(TrainingStopped) as error:
            train(experiment, run, one_device, quiet=True)
    message = str(error.value)
    assert "\n" not in message and error.value.exit_code == 1
    start = "checkpoint at step 8 could not be written" if what == "a checkpoint" else f"{run}/metrics.jsonl could not"
    assert message.startswith(start) and message.endswith(": File too large; --resume goes on from step 4")
    assert Checkpoints(run / "checkpoints").steps() == [4]
    assert (what == "the metrics") == (not (run / "metrics.jsonl").read_text().endswith("\n"))  # a torn line
    train(experiment, run, one_device, resume=True, quiet=True)
    assert_same_metrics(run, straight[1])
    assert_same_state(leaves(run), leaves(straight[1]))


# Compilation


def test_a_run_compiles_one_step_and_one_evaluation(tiny, one_device, tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(loop, "Program", Program)  # a new one, which has compiled nothing yet
    train(tiny(eval_every=2), tmp_path / "run", one_device, quiet=True)
    count = Counter(compiled)
    assert (count["jit(_step)"], count["jit(_evaluate)"]) == (1, 1)


def test_a_sweep_compiles_once(straight, one_device):
    """F11: rates, decays, lengths and clipping are arguments of the step, so its program is the same text."""

    def lowered(experiment):
        return Program(experiment, one_device).lower_step().as_text()

    base = straight[0]
    text = lowered(base)
    schedule = dataclasses.replace(base.optim.schedule, warmup_steps=7, final_ratio=0.3)
    swept = change(base, "optim", learning_rate=3e-4, weight_decay=0.0, b1=0.8, b2=0.99, eps=1e-6, max_grad_norm=None)
    swept = change(change(swept, "optim", schedule=schedule), "train", steps=123, eval_every=7)
    assert lowered(change(swept, "task", z_loss=1e-3)) == text
    assert lowered(change(base, "optim", schedule=dataclasses.replace(schedule, kind="linear"))) != text


# Death

DRIVER = """
    import sys, jax
    from jaxpar.cli import main
    from jaxpar.runtime import loop
    loop.peak_flops = lambda devices: (1e12, "a test")
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_that_is_stopped_and_killed_again_and_again(tiny, one_device, tmp_path, text):
    """A signal of each kind at a random moment, mostly within a save; each time ``--resume``."""
    experiment = tiny(steps=40, checkpoint_every=1, keep_checkpoints=2, eval_every=7)
    train(experiment, tmp_path / "straight", one_device, quiet=True)
    config = tmp_path / "numbers.py"
    config.write_text(
        textwrap.dedent(f"""
        from jaxpar.experiment import Experiment
        from jaxpar.serialize import from_json

        def config():
            return from_json(Experiment, {RunFolder(tmp_path / "straight").read_config()!r})
        """)
    )
    run = tmp_path / "run"
    cache = jax.config.jax_compilation_cache_dir
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_COMPILATION_CACHE_DIR": cache or ""}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), "train", str(config), "--run", str(run), "--resume"]
    chance = random.Random(1)
    done = 0
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            [*command, "--devices", "1"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            target = done + chance.randint(4, 9)
            deadline = time.monotonic() + 120
            while process.poll() is None and max([0, *steps_of(run)]) < target:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.05))
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        latest = Checkpoints(run / "checkpoints").latest()
        assert latest is not None
        if number == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
            assert latest >= target - 2
        else:
            assert process.returncode == 128 + number, err
            assert "Traceback" not in err
            assert f"stopped by {number.name} after step {latest}" in out
            assert latest == steps_of(run)[-1]
        done = latest
    assert done < 40
    train(experiment, run, one_device, resume=True, quiet=True)
    assert_same_metrics(run, tmp_path / "straight")
    assert_same_state(leaves(run), leaves(tmp_path / "straight"))
