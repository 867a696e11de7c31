"""Import, train, export, with the command: what a user does."""

from __future__ import annotations

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import llama_files, parameters

from jaxpar.cli import main
from jaxpar.experiment import Experiment
from jaxpar.program import Program
from jaxpar.runtime.opening import load_data
from jaxpar.runtime.pretrained import Pretrained
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json

SMALL = [
    "--data.sources.0", "TextFiles", "--data.sources.0.path", "numbers.txt", "--data.sources.0.separator", "\n",
    "--data.eval_fraction", "0.2", "--train.steps", "2", "--train.global_batch", "8", "--train.seq_len", "16",
    "--optim.schedule.warmup_steps", "0", "--optim.learning_rate", "1e-2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A bf16 Llama with a vocabulary for bytes, in ``hf``; texts; the compile cache left as the tests have it."""
    assert len(jax.devices()) == 8  # they are started before the command could start fewer
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    llama_files(tmp_path / "hf", ml_dtypes.bfloat16, vocab_size=260)
    (tmp_path / "hf" / "generation_config.json").write_text("{}")
    for i in range(20):
        (tmp_path / "numbers.txt").open("a").write(" ".join(str(i * n) for n in range(30)) + "\n")


def test_import_train_export(capsys, tmp_path):
    """The first loss is that of the imported weights; the tuned run remembers what it came from, without the origin."""
    assert main(["import", "hf", "--run", "runs/llama", "--devices", "1", *SMALL]) == 0
    assert "LlamaForCausalLM, 24,120 parameters, bfloat16" in capsys.readouterr().out
    assert main(["train", "runs/llama", "--run", "runs/tuned", "--devices", "1"]) == 0
    assert "the parameters of" in capsys.readouterr().out

    tuned = RunFolder("runs/tuned")
    experiment = from_json(Experiment, tuned.read_config())
    program = Program(experiment, jax.devices()[:1])
    params = Pretrained("runs/llama", program.abstract_params).load()
    with load_data(experiment).loader(8) as loader:
        total, count = program.evaluate(params, program.put(next(loader), 0), program.scalars())
    assert tuned.read_metrics()[0]["loss"] == pytest.approx(float(total) / float(count), rel=1e-5)

    shutil.rmtree("runs/llama")
    assert main(["export", "runs/tuned", "out"]) == 0
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw == json.loads((tmp_path / "hf" / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{}"
    written, trained = load_file("out/model.safetensors"), parameters(tmp_path / "runs" / "tuned")
    before = load_file("hf/model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    assert written[up].dtype == ml_dtypes.bfloat16 and not (written[up] == before[up]).all()
    assert (written[up] == trained["layers.mlp.up"][1].T.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train runs/llama --resume",
            "run: TMP/runs/llama holds imported weights, not a run that can go on (legal: another folder, with "
            "--train.init_from TMP/runs/llama)",
        ),
        ("train runs/llama --run runs/llama", "run: TMP/runs/llama already holds a run"),
        ("import hf --run runs/llama", "run: TMP/runs/llama already holds a run"),
        ("import hf", "--run:  does not say which folder to make (legal: a new folder)"),
        ("import", "import: HF_FOLDER must come first: a folder with config.json"),
        ("import none --run x", "HF_FOLDER: none/config.json cannot be read: No such file or directory"),
        (
            "import hf --run x --train.stesp 3",
            "train.stesp: 3 sets an unknown field of Train. Did you mean train.steps?",
        ),
        ("import hf --run x --devices 8 --mesh.tensor 8", "model.num_heads: 4 is not divisible by mesh.tensor 8"),
        (
            "import hf --run x --model.mlp_width 56",
            "model.layers.0.mlp.down_proj.weight: [24, 40] in model.safetensors",
        ),
        ("export runs/llama", "export: RUN and HF_FOLDER must come first: a run folder, and a new folder to write"),
        ("export runs/llama hf", "HF_FOLDER: hf is not an empty folder (legal: a new one)"),
        ("export runs/llama hf://x", "HF_FOLDER: hf://x is not the name of a folder (legal: a path on this machine)"),
        ("import hf://x --run x", "HF_FOLDER: hf://x is not the name of a folder (legal: a path on this machine)"),
        ("import hf --run numbers.txt/x", "run: TMP/numbers.txt/x cannot be written: Not a directory"),
        ("import hf --run x --data.tokenizer nope.json", "data.tokenizer: nope.json cannot be read: No such file or"),
        ("export runs/llama out --step 5", "--step: 5 is not a complete checkpoint of the run (legal: 0)"),
        ("export runs/llama out --dtype int8", "export RUN HF_FOLDER: argument --dtype: invalid choice: 'int8'"),
        ("export runs/llama out --max-shard-size big", "--max-shard-size: big is not a size (legal: such as 5GB,"),
        ("export runs/llama out --mesh.tensor 2", "export: --mesh.tensor 2 takes no overrides"),
    ],
)
def test_what_the_commands_refuse(capsys, tmp_path, here, arguments, message):
    """Exit code 2, one line, nothing written."""
    assert main(["import", "hf", "--run", "runs/llama", *SMALL]) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"}
    capsys.readouterr()
    assert main(arguments.split()) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert error.replace(str(tmp_path), "TMP").startswith(f"jaxpar: {message}")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"} == before


def test_run_folders_can_be_moved_and_their_origin_removed(capsys, here, tmp_path):
    """The config names the import's tokenizer where that was; the run folder has a copy, which another would not be."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, [])).save(str(tmp_path / "hf" / "tokenizer.json"))
    assert main(["import", "hf", "--run", "runs/llama", *SMALL]) == 0
    shutil.move("runs/llama", "moved")
    capsys.readouterr()
    assert main(["generate", "moved", "--tokens", "2", "--prompt", "ab", "--devices", "1"]) == 0
    note = capsys.readouterr().err.splitlines()[0].replace(str(tmp_path), "TMP")
    there = "huggingface/tokenizer.json"
    assert note == f"note     data.tokenizer TMP/runs/llama/{there} is not there: TMP/moved/{there} is used"
    assert main(["generate", "moved", "--data.tokenizer", "other.json"]) == 2
    assert "data.tokenizer: other.json cannot be read" in capsys.readouterr().err


def test_verify_says_what_it_needs(capsys, monkeypatch, tmp_path):
    """Before anything is read or written."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["import", "hf", "--run", "x", "--verify"]) == 2
    line = "jaxpar: --verify needs torch and transformers: pip install torch==2.13.0 transformers\n"
    assert capsys.readouterr().err == line
    assert not (tmp_path / "x").exists()


def test_training_needs_a_vocabulary_that_fits(capsys, here, tmp_path):
    """A model whose tokenizer is not there must not be trained on bytes that it has no rows for."""
    llama_files(tmp_path / "small")
    assert main(["import", "small", "--run", "small-run", *SMALL]) == 0
    assert "no tokenizer.json is there" in capsys.readouterr().out
    assert main(["train", "small-run", "--run", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxpar: model.vocab_size: 152 is smaller than the 257 tokens")
    assert np.isfinite(parameters(tmp_path / "small-run")["head.kernel"]).all()
