"""A run small enough to be trained again and again, the ways to disturb it, and how two runs compare."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.data import DataConfig, TextFiles
from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, MeshConfig, TrainConfig
from jaxpar.program import Program
from jaxpar.runtime import loop
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.metrics import PHASES
from jaxpar.runtime.parity import FAST_COMPILE
from jaxpar.runtime.run_folder import RunFolder

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MEASURED = {"tokens_per_second", "mfu", "goodput", "memory_bytes", "host_bytes"}
MEASURED |= {"seconds", *(f"seconds_{phase}" for phase in PHASES)}


def write_text(path: Path) -> None:
    """Eighty short documents of unequal lengths."""
    documents = [" ".join(f"{word} is {i}" for word in NUMBERS[: 2 + i % 5]) for i in range(80)]
    path.write_text("\n\n".join(documents))


def tiny_experiment(text: Path, mesh: MeshConfig = MeshConfig(), zero: int = 3, **train: Any) -> Experiment:  # noqa: B008
    """An experiment of 13,000 weights and ten steps on the documents of ``text``."""
    steps = {"steps": 10, "global_batch": 8, "seq_len": 16, "eval_every": 3, "eval_batches": 3}
    experiment = Experiment(
        model=DecoderConfig(vocab_size=264, num_layers=2, embed=16, num_heads=4, num_kv_heads=4, mlp_width=32),
        data=DataConfig(sources=(TextFiles(str(text), separator="\n\n"),), eval_fraction=0.2),
        optim=AdamWConfig(learning_rate=1e-2),
        train=TrainConfig(**{**steps, "checkpoint_every": 100, "keep_checkpoints": 100, **train}),
        mesh=mesh,
    )
    return change(experiment, "rules", zero=zero)


def change(experiment: Experiment, part: str, **fields: Any) -> Experiment:
    """The experiment with some fields of one part replaced."""
    return dataclasses.replace(experiment, **{part: dataclasses.replace(getattr(experiment, part), **fields)})


class QuicklyCompiled(Program):
    @functools.cached_property
    def step(self) -> Any:
        return self.lower_step().compile(FAST_COMPILE)


@contextlib.contextmanager
def programs_from(make: Callable[[Experiment, list[Any]], Program]) -> Iterator[None]:
    """In the block the loop gets its Programs from ``make``, and takes no time to measure the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", make)
        patch.setattr(loop, "peak_flops", lambda devices: (1e12, "a test"))
        yield


def lines(run: Path) -> list[dict[str, Any]]:
    """The records of a run, without what the clock decides."""
    records = RunFolder(run).read_metrics()
    return [{name: value for name, value in record.items() if name not in MEASURED} for record in records]


def steps_of(run: Path, field: str = "loss") -> list[int]:
    return [record["step"] for record in lines(run) if field in record]


def assert_same_metrics(run: Path, straight: Path, start: int = 0) -> None:
    """Bit for bit: JSON writes floats exactly."""
    want = [json.dumps(record) for record in lines(straight) if record["step"] > start]
    assert [json.dumps(record) for record in lines(run) if record["step"] > start] == want


def leaves(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The state in a checkpoint of a run (the newest), by name, read onto one device."""
    saved = Checkpoints(run / "checkpoints")
    step = saved.latest() if step is None else step
    assert step is not None
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for n, x in saved.structure(step).items()}
    return {name: np.asarray(leaf) for name, leaf in saved.restore(step, wanted).items()}


def assert_same_state(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(got) == list(want)
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name


def contents(run: Path) -> dict[Path, bytes]:
    """Every file of a run but what its last session measured of itself."""
    measured = ("compile.json", "time.json")
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in measured}


def at_step(monkeypatch, step, action):
    """Call ``action()`` each time that the metrics of ``step`` have been written."""
    record = loop._Training._record

    def and_act(self, number, metrics):
        record(self, number, metrics)
        if number == step:
            action()

    monkeypatch.setattr(loop._Training, "_record", and_act)


def around_steps(monkeypatch, change):
    """Call the compiled step with what ``change(number of the step, scalars)`` returns as its scalars."""
    run_loop = loop._Training._loop

    def changed(self, step, state, first):
        def run_step(state, batch, scalars):
            return step(state, batch, change(int(state["step"]) + 1, scalars))

        return run_loop(self, run_step, state, first)

    monkeypatch.setattr(loop._Training, "_loop", changed)


def stop_after(monkeypatch, step, number=signal.SIGTERM):
    """A signal while ``step`` is under way."""

    def change(at, scalars):
        if at == step:
            os.kill(os.getpid(), number)
        return scalars

    around_steps(monkeypatch, change)


def poison(monkeypatch, steps):
    """Give the objective of these steps a NaN weight, so that every gradient is NaN."""
    around_steps(monkeypatch, lambda at, scalars: {**scalars, "z_loss": np.float32("nan")} if at in steps else scalars)


def crash_after(straight, k, run):
    """What is left of the straight run if it is killed somewhere after its checkpoint of step ``k``."""
    _, folder, _ = straight
    shutil.copytree(folder, run)
    for step in Checkpoints(run / "checkpoints").steps():
        if step > k:
            shutil.rmtree(run / "checkpoints" / f"step_{step}")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "tok')
