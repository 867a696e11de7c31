"""What ``jaxpar show`` says of every shipped config."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar.cli import main
from jaxpar.experiment import Experiment
from jaxpar.overrides import load_config
from jaxpar.serialize import from_json

CONFIGS = {
    "quickstart": 320 * 128 * 2 + 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128,
    "gpt_124m": 50304 * 768 + 12 * (4 * 768 * 768 + 2 * 768 * 3072 + 2 * 768) + 768,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "qwen3_0p6b": 596_049_920,
}


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    compiled = []

    def listen(event, duration, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def show(capsys, *arguments):
    assert main(["show", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_on_eight_devices(capsys, name):
    text = show(capsys, name, "--devices", "8", "--mesh.tensor", "2")
    shown = json.loads(show(capsys, name, "--devices", "8", "--mesh.tensor", "2", "--json"))
    assert shown["num_parameters"] == CONFIGS[name] == sum(math.prod(p["shape"]) for p in shown["parameters"])
    assert shown["num_parameters"] == sum(group["weights"] for group in shown["optimizer"]["groups"].values())
    assert f"parameters  {CONFIGS[name]:,};" in text
    assert "mesh        data 1 x fsdp 4 x pipe 1 x expert 1 x context 1 x tensor 2  (8 cpu devices)" in text

    config = load_config(name)
    assert isinstance(config, Experiment)
    read = from_json(Experiment, shown["config"])
    assert (read.model, read.optim, read.train) == (config.model, config.optim, config.train)
    assert read.mesh.tensor == 2
    train = config.train
    assert shown["batch"]["tokens_per_step"] == train.global_batch * train.seq_len
    assert shown["batch"]["tokens"] == train.global_batch * train.seq_len * train.steps
    assert shown["batch"]["sequences_per_device"] == train.global_batch / train.microbatches / 4
    for parameter in shown["parameters"]:
        assert parameter["name"] in text
        matrix = len([axis for axis in parameter["axes"] if axis != "layers"]) > 1
        assert parameter["group"] == "vector" if not matrix else parameter["zero_sharded"]


def layouts(capsys, *flags):
    out = show(capsys, "quickstart", "--devices", "8", "--mesh.tensor", "2", "--json", *flags)
    return {p["name"]: (p["stored"], p["used"], p["optimizer"]) for p in json.loads(out)["parameters"]}


def test_where_each_zero_stage_keeps_a_matrix(capsys):
    used, sharded = [None, None, "tensor"], [None, "fsdp", "tensor"]
    for zero, want in [
        (0, (used, used, used)),
        (1, (used, used, sharded)),
        (2, (used, used, sharded)),
        (3, (sharded, used, sharded)),
    ]:
        assert layouts(capsys, "--rules.zero", str(zero))["layers.mlp.up"] == want
    row = next(
        line
        for line in show(capsys, "quickstart", "--devices", "8", "--mesh.tensor", "2").splitlines()
        if "mlp.up" in line
    )
    assert row.split("  ")[-1].strip() == "embed/fsdp mlp/tensor" and "  mlp/tensor  " in row


def test_the_groups_are_the_same_on_every_mesh(capsys):
    def groups(*flags):
        return json.loads(show(capsys, "qwen3_0p6b", "--smoke", "--json", *flags))["optimizer"]["groups"]

    alone = groups("--devices", "1")
    assert set(alone) == {"matrix", "embedding", "vector"}  # the head is the embedding
    for flags in ("--mesh.tensor 4", "--mesh.fsdp 8", "--rules.zero 0", "--model.scan_unroll 2"):
        assert groups("--devices", "8", *flags.split()) == alone


def test_the_llama_of_the_docstring_on_256_devices():
    """4 GB machines show it too: nothing of it is made."""
    command = [sys.executable, "-m", "jaxpar.cli", "show", "configs/llama2_7b.py", "--devices", "256", "--json"]
    root = Path(jaxpar.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert shown["num_parameters"] == 6_738_415_616
    assert shown["mesh"]["fsdp"] == 256
    assert shown["batch"]["sequences_per_device"] == 4
    assert all(p["zero_sharded"] for p in shown["parameters"])
