"""The shipped configs: what their docstrings promise, and that each smoke() trains."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar.data import TextFiles
from jaxpar.experiment import Experiment
from jaxpar.overrides import load_config
from jaxpar.program import Program
from jaxpar.runtime import loop
from jaxpar.runtime.parity import FAST_COMPILE
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json, to_json, type_check

FILES = sorted((Path(jaxpar.__file__).parents[1] / "configs").glob("[!_]*.py"))
NAMES = [path.stem for path in FILES]


class QuicklyCompiled(Program):
    """Its step is compiled quickly rather than well."""

    @functools.cached_property
    def step(self):
        return self.lower_step().compile(FAST_COMPILE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of unequal lengths, the longest beyond a sequence."""
    path = tmp_path_factory.mktemp("text") / "counting.txt"
    path.write_text("\n\n".join(" ".join(map(str, range(n * n % 97))) for n in range(1, 60)))
    return path


def test_the_list():
    assert {"quickstart", "gpt_124m", "llama2_7b", "llama3_8b", "qwen3_0p6b"} <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_docstring_gives_the_command(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None and f"configs/{path.name}" in text


@pytest.mark.parametrize("name", NAMES)
def test_both_variants_are_whole_and_come_back_from_json(name):
    for variant in ("config", "smoke"):
        experiment = load_config(name, variant)
        assert isinstance(experiment, Experiment)
        type_check(experiment)
        experiment.validate()
        assert from_json(Experiment, to_json(experiment)) == experiment
    Program(load_config(name, "smoke"), jax.devices())  # fits eight devices as it is


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_smoke_trains(name, text, tmp_path, monkeypatch):
    """Two steps from end to end; the quickstart on its own data, the others on little text and without evaluation."""
    monkeypatch.setattr(loop, "peak_flops", lambda devices: (1e12, "a test"))
    monkeypatch.setattr(loop, "Program", QuicklyCompiled)
    experiment = load_config(name, "smoke")
    assert isinstance(experiment, Experiment)
    train = dataclasses.replace(experiment.train, steps=2)
    data = experiment.data
    if name != "quickstart":
        data = dataclasses.replace(data, sources=(TextFiles(str(text), separator="\n\n"),), eval_fraction=0.0)
    experiment = dataclasses.replace(experiment, train=train, data=data)
    mesh = experiment.mesh
    devices = jax.devices()[: abs(mesh.data * mesh.fsdp * mesh.tensor)]  # the fewest that it runs on
    summary = loop.train(experiment, tmp_path / "run", devices, quiet=True)
    assert summary.step == 2
    losses = [record["loss"] for record in RunFolder(tmp_path / "run").read_metrics() if "loss" in record]
    assert abs(losses[0] - math.log(experiment.model.vocab_size)) < 1.0  # a model that knows nothing
    assert (summary.eval_loss is not None) == (name == "quickstart")
    if name == "quickstart":
        assert 2.5 < summary.unigram_entropy < 3.5  # Python source, in nats per byte
