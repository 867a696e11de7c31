"""Against PyTorch: the same logits, both ways, and the same bytes back."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import oracle
import pytest
from safetensors.numpy import load_file
from tiny_models import MODELS, torch_model

from jaxpar.cli import main
from jaxpar.experiment import DecoderConfig, Experiment, TrainConfig
from jaxpar.models.rope import RopeConfig
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import to_json
from jaxpar.weights import verify

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="pip install torch==2.13.0 transformers",
)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """Ten times what the command asks for; the largest seen is 8e-6."""
    monkeypatch.setattr(verify, "TOLERANCE", 1e-5)


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: (t.dtype, t.shape, t.tobytes()) for name, t in load_file(file).items()}
    return found


@pytest.mark.parametrize("number, name", list(enumerate(MODELS)))
def test_logits_and_bytes_come_back(tmp_path, imported, exported, number, name):
    """Every second model is sharded and lies on eight devices. Every key is one that moves logits: each has been
    changed by a tenth (a window by one) and moved them by 1e-4 or more, nearly all by 1e-2."""
    sharded = number % 2 == 1
    torch_model(name).save_pretrained(tmp_path / "hf", max_shard_size="30KB" if sharded else "5GB")
    assert sharded == (tmp_path / "hf" / "model.safetensors.index.json").exists()
    flags, devices = (("--mesh.tensor", "2", "--mesh.fsdp", "4"), jax.devices()) if sharded else ((), None)
    same, lines = imported(tmp_path / "hf", tmp_path / "run", *flags, devices=devices, check=True)
    assert same, lines
    assert not [line for line in lines if "not known" in line]

    exported(tmp_path / "run", tmp_path / "back", most=10**9 if sharded else 30_000)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "hf")
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "back"))
    assert after == before


LLAMA = DecoderConfig(
    vocab_size=264, num_layers=3, embed=24, num_heads=4, num_kv_heads=2, head_dim=10, mlp_width=40, norm_eps=3e-4
)
WINDOWED = dataclasses.replace(LLAMA, sliding_window=9)
GEMMA = dataclasses.replace(LLAMA, mlp="geglu", norm_offset=True, embed_scale=True, tie_embeddings=True)
GEMMA_2 = dataclasses.replace(
    GEMMA, post_norms=True, sliding_window=9, global_every=2, attention_scale=17**-0.5, attention_softcap=5.0
)
OURS = {
    "LlamaForCausalLM": dataclasses.replace(LLAMA, rope=RopeConfig(scaling="llama3", factor=4.0, original_length=90)),
    "MistralForCausalLM": dataclasses.replace(
        WINDOWED, rope=RopeConfig(scaling="yarn", factor=2.0, original_length=90)
    ),
    "Qwen2ForCausalLM": dataclasses.replace(LLAMA, qkv_bias=True, rope=RopeConfig(scaling="ntk", factor=2.0)),
    "Qwen3ForCausalLM": dataclasses.replace(WINDOWED, qk_norm=True, global_every=2, tie_embeddings=True),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": dataclasses.replace(GEMMA_2, logit_softcap=15.0),
    "Gemma3ForCausalLM": dataclasses.replace(
        GEMMA_2, qk_norm=True, attention_softcap=None, local_rope=RopeConfig(theta=700.0)
    ),
}


@pytest.mark.parametrize("name, model", OURS.items())
def test_a_run_of_ours_is_one_of_theirs(tmp_path, one_device, exported, name, model):
    """Random weights -> export -> AutoModelForCausalLM: the same logits, in the run's own precision and in bf16."""
    experiment = Experiment(model=model, train=TrainConfig(seq_len=96))
    offset = 1.0 if model.norm_offset else 0.0  # norms around 1: fp32 keeps five digits through three layers
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: jnp.asarray(w - offset if "scale" in str(path[-1]) else w),
        oracle.random_params(Program(experiment, one_device)),
    )
    run = RunFolder(tmp_path / "run")
    Checkpoints(run.checkpoints, asynchronous=False).save(5, {"params": params}, {})
    with run:
        run.start(to_json(experiment))
    dtype = "bfloat16" if name == "Gemma2ForCausalLM" else None
    same, lines = exported(tmp_path / "run", tmp_path / "hf", dtype, check=True)
    assert same, lines
    assert any(name in line and (dtype or "float32") in line for line in lines)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["eos_token_id"] == 256 and raw["bos_token_id"] is None  # of the byte tokenizer


def test_the_command_fails_where_logits_differ(tmp_path, capsys, monkeypatch):
    """Exit code 1, and the run folder is there to be looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    torch_model("qwen3").save_pretrained("hf")
    assert main(["import", "hf", "--run", "good", "--verify"]) == 0
    assert "pass" in capsys.readouterr().out
    assert main(["import", "hf", "--run", "bad", "--verify", "--model.norm_eps", "1e-2"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["export", "good", "back", "--verify", "--max-shard-size", "20KB"]) == 0
    assert "pass" in capsys.readouterr().out
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
