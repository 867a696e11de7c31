"""A run small enough to be trained again and again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
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
from jaxpar.runtime.run_folder import RunFolder

NUMBERS = "zero one two three four five six seven eight nine".split()
MEASURED = ("tokens_per_second", "mfu", "seconds")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Eighty short documents of unequal lengths."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    lines = [" ".join(f"{word} is {i}" for word in NUMBERS[: 2 + i % 5]) for i in range(80)]
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture(scope="session")
def tiny(text) -> Any:
    """``tiny(**train)``: an experiment of 5,000 weights, ten steps."""

    def make(mesh: MeshConfig | None = None, zero: int = 3, **train: Any) -> Experiment:
        experiment = Experiment(
            model=DecoderConfig(vocab_size=264, num_layers=2, embed=16, num_heads=4, num_kv_heads=4, mlp_width=32),
            data=DataConfig(sources=(TextFiles(str(text), separator="\n\n"),), eval_fraction=0.2),
            optim=AdamWConfig(learning_rate=1e-2),
            train=TrainConfig(
                **{
                    **dict(steps=10, global_batch=8, seq_len=16, eval_every=3, eval_batches=3),
                    **dict(checkpoint_every=100, keep_checkpoints=100),
                    **train,
                }
            ),
            mesh=mesh or MeshConfig(),
        )
        return dataclasses.replace(experiment, rules=dataclasses.replace(experiment.rules, zero=zero))

    return make


@pytest.fixture(scope="module")
def one_device() -> list[Any]:
    return jax.devices()[:1]


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> Iterator[None]:
    """Two runs of one experiment in a module share its Program, so that its step is traced and compiled once."""

    @functools.cache
    def shared(experiment: Experiment, devices: tuple[Any, ...]) -> Program:
        return Program(experiment, list(devices))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", lambda experiment, devices: shared(experiment, tuple(devices)))
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


def leaves(run: Path, experiment: Experiment, step: int | None = None) -> dict[str, np.ndarray]:
    """The state in a checkpoint of a run, by name, read onto one device."""
    saved = Checkpoints(run / "checkpoints")
    step = saved.latest() if step is None else step
    assert step is not None
    one = dataclasses.replace(experiment, mesh=MeshConfig())
    state = saved.restore(step, Program(one, jax.devices()[:1]).abstract_state)
    return dict(zip(saved.structure(step), map(np.asarray, jax.tree.leaves(state)), strict=True))


def assert_same_state(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(got) == list(want)
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name
