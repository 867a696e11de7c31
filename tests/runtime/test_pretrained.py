"""Fine-tuning: the parameters are another run's, everything else is new; a resumed run needs the other one no more."""

from __future__ import annotations

import functools
import shutil

import jax
import numpy as np
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
    tiny_experiment,
    write_text,
)

from jaxpar.errors import JaxparError
from jaxpar.experiment import MeshConfig
from jaxpar.optim.schedules import ScheduleConfig
from jaxpar.runtime import loop
from jaxpar.runtime.loop import train
from jaxpar.runtime.opening import load_data
from jaxpar.runtime.pretrained import Pretrained

WARMUP = ScheduleConfig(warmup_steps=4)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs that differ in steps, checkpoints and origin only share what is compiled."""
    between = {"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "init_from": None}

    @functools.cache
    def shared(experiment, devices):
        return QuicklyCompiled(experiment, list(devices))

    with programs_from(lambda e, devices: shared(change(e, "train", **between), tuple(devices))):
        yield


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """(text, folder) of a run of ten steps on one device, checkpoints at 5 and 10."""
    folder = tmp_path_factory.mktemp("pretrained")
    write_text(folder / "numbers.txt")
    experiment = tiny_experiment(folder / "numbers.txt", checkpoint_every=5)
    train(experiment, folder / "run", jax.devices()[:1], quiet=True)
    return folder / "numbers.txt", folder / "run"


def tuned(text, origin, **train):
    experiment = tiny_experiment(
        text, MeshConfig(tensor=2, fsdp=4), checkpoint_every=1, init_from=str(origin), seed=3, **train
    )
    return change(experiment, "optim", schedule=WARMUP)


@pytest.fixture(scope="module")
def whole(pretrained, tmp_path_factory):
    """Six steps that begin with the newest parameters of it, on eight devices: (experiment, folder)."""
    experiment = tuned(*pretrained, steps=6)
    run = tmp_path_factory.mktemp("tuned") / "run"
    train(experiment, run, quiet=True)
    return experiment, run


def test_parameters_are_taken_and_nothing_else(pretrained, whole):
    """The learning rate of step 0 of a warmup is 0, so after the first step the parameters are still theirs, bit for
    bit; the optimizer has counted one step, not eleven, and has not kept their moments."""
    theirs, ours = leaves(pretrained[1]), leaves(whole[1], 1)
    params = [name for name in theirs if name.startswith("params.")]
    assert_same_state({n: ours[n] for n in params}, {n: theirs[n] for n in params})
    counts = [name for name in ours if name.endswith(".count")]
    assert counts and all(ours[name] == 1 and theirs[name] == 10 for name in counts)
    assert ours["step"] == 1
    moments = [name for name in ours if ".mu." in name]
    assert moments and not any(np.array_equal(ours[name], theirs[name]) for name in moments)


def test_the_first_loss_is_that_of_the_parameters(whole):
    """Not log(264) = 5.6, that of random ones."""
    experiment, run = whole
    program = loop.Program(experiment, jax.devices())
    params = Pretrained(experiment.train.init_from, program.abstract_params).load()
    with load_data(experiment).loader(experiment.train.global_batch) as loader:
        total, count = program.evaluate(params, program.put(next(loader), 0), program.scalars())
    first = lines(run)[0]["loss"]
    assert first == pytest.approx(float(total) / float(count), rel=1e-6)
    assert first < 4.5


def test_the_schedule_begins_at_its_beginning(whole):
    """F11: a warmup of four steps, then the cosine; *wrong* the rates of steps 10 to 15."""
    rates = [line["learning_rate"] for line in lines(whole[1]) if "learning_rate" in line]
    np.testing.assert_allclose(rates[:5], [0.0, 0.0025, 0.005, 0.0075, 0.01], rtol=1e-6)
    assert rates[5] < 0.01


def test_a_resumed_run_reads_its_own_checkpoint(pretrained, whole, tmp_path, monkeypatch):
    """Stopped at step 3, the origin deleted: the same metrics and state, bit for bit, as without a stop."""
    experiment, straight = whole
    origin = tmp_path / "origin"
    shutil.copytree(pretrained[1], origin)
    experiment = change(experiment, "train", init_from=str(origin))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(experiment, tmp_path / "run", quiet=True).step == 3
    shutil.rmtree(origin)
    train(experiment, tmp_path / "run", resume=True, quiet=True)
    assert_same_metrics(tmp_path / "run", straight)
    assert_same_state(leaves(tmp_path / "run"), leaves(straight))


def test_one_checkpoint_of_the_run(pretrained, tmp_path):
    """``.../checkpoints/step_5`` is not the newest one."""
    text, run = pretrained
    train(tuned(text, run / "checkpoints" / "step_5", steps=1), tmp_path / "run", quiet=True)
    ours, theirs = leaves(tmp_path / "run"), leaves(run, 5)
    assert_same_state(
        {n: x for n, x in ours.items() if n.startswith("params.")},
        {n: x for n, x in theirs.items() if n.startswith("params.")},
    )


@pytest.mark.parametrize(
    ("model", "origin", "message"),
    [
        (
            {"mlp_width": 48},
            "",
            "params.layers.mlp.down: saved float32[2,32,16], the config wants float32[2,48,16]; 2 more differ "
            "(checkpoint RUN/checkpoints/step_10)",
        ),
        ({"tie_embeddings": True}, "", "params.head.kernel: saved float32[16,264], the config has no such leaf"),
        ({"qk_norm": True}, "", "params.layers.attention.k_norm.scale: not saved, the config wants float32[2,4]"),
        (
            {},
            "none",
            "train.init_from: RUN/none holds no complete checkpoint (legal: a run folder, or its checkpoints/",
        ),
        (
            {},
            "checkpoints/step_7",
            "RUN/checkpoints/step_7 is not a complete checkpoint: checkpoint.json: No such file",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_data_is_read(pretrained, tmp_path, monkeypatch, model, origin, message):
    """One line with the leaf and both shapes; no run folder is made."""
    text, run = pretrained
    monkeypatch.setattr(loop, "load_data", lambda *_: pytest.fail("data was read"))
    experiment = change(tuned(text, run / origin, steps=1), "model", **model)
    with pytest.raises(JaxparError) as error:
        train(experiment, tmp_path / "run", quiet=True)
    assert str(error.value).replace(str(run), "RUN").startswith(message)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_saved_nothing_begins_again_with_the_origin(pretrained, whole, tmp_path):
    """``--resume`` before the first checkpoint: parameters as at the start, not random ones."""
    run = tmp_path / "run"
    train(change(whole[0], "train", steps=1), run, quiet=True)
    shutil.rmtree(run / "checkpoints" / "step_1")
    train(whole[0], run, resume=True, quiet=True)
    assert_same_metrics(run, whole[1])
