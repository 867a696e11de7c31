"""In, on any mesh, and out again, without PyTorch: the bytes, the files beside them, and what is remembered."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import llama_files, parameters
from tokenizers import Tokenizer, models

from jaxpar.errors import ConfigError, JaxparError
from jaxpar.experiment import Experiment, TrainConfig
from jaxpar.program import Program
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder
from jaxpar.serialize import from_json, to_json
from jaxpar.weights import names
from jaxpar.weights.files import Folder
from jaxpar.weights.translate import from_huggingface

MESHES = {
    "one device": (1, ()),
    "tensor 2 x fsdp 4": (8, ("--mesh.tensor", "2", "--mesh.fsdp", "4")),
    "fsdp 8, cut along heads": (8, ("--rules.zero_order", "head_dim,heads,mlp,vocab,embed")),
}
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: (t.dtype, t.shape, t.tobytes()) for name, t in load_file(file).items()}
    return found


def test_each_leaf_is_the_tensor_it_should_be(tmp_path, imported):
    """Element by element: heads one after the other in their rows, (out, in) there and (in, out) here."""
    theirs = llama_files(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "run")
    ours = parameters(tmp_path / "run")
    K = 10
    for layer in (0, 1):
        q = theirs[f"model.layers.{layer}.self_attn.q_proj.weight"]
        o = theirs[f"model.layers.{layer}.self_attn.o_proj.weight"]
        gate = theirs[f"model.layers.{layer}.mlp.gate_proj.weight"]
        for d, h, k in ((0, 0, 0), (5, 3, 7), (23, 1, 9)):
            assert ours["layers.attention.q"][layer, d, h, k] == q[h * K + k, d]
            assert ours["layers.attention.o"][layer, h, k, d] == o[d, h * K + k]
        assert (ours["layers.mlp.gate"][layer] == gate.T).all()
        norm = theirs[f"model.layers.{layer}.post_attention_layernorm.weight"]
        assert (ours["layers.mlp_norm.scale"][layer] == norm).all()
    assert (ours["head.kernel"] == theirs["lm_head.weight"].T).all()
    assert (ours["embedding.table"] == theirs["model.embed_tokens.weight"]).all()
    assert all(leaf.dtype == np.float32 for leaf in ours.values())


@pytest.mark.parametrize("mesh, dtype", list(zip(MESHES, DTYPES, strict=True)))
def test_the_bytes_come_back(tmp_path, imported, exported, mesh, dtype):
    """Whatever the dtype, the mesh, and the files that tensors lie in; the config too."""
    devices, flags = MESHES[mesh]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 4}
    llama_files(tmp_path / "hf", dtype, shards=3, **sizes)
    imported(tmp_path / "hf", tmp_path / "run", *flags, devices=jax.devices()[:devices])
    _, lines = exported(tmp_path / "run", tmp_path / "back", most=20_000)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "hf")
    assert max(f.stat().st_size for f in (tmp_path / "back").glob("*.safetensors")) < 22_000
    assert any(np.dtype(dtype).name in line for line in lines)
    name = np.dtype(dtype).name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == name


def test_dtypes_may_be_mixed_and_a_tied_head_written_out(tmp_path, imported, exported):
    """What a file was is remembered tensor by tensor, also that the one matrix is there twice."""

    def change(t):
        t["model.norm.weight"] = t["model.norm.weight"].astype(np.float32)
        t["lm_head.weight"] = t["model.embed_tokens.weight"]
        t["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(5, np.float32)  # computed, in old files

    llama_files(tmp_path / "hf", ml_dtypes.bfloat16, change=change, tie_word_embeddings=True)
    imported(tmp_path / "hf", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "back")
    want = tensors(tmp_path / "hf")
    del want["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert tensors(tmp_path / "back") == want
    exported(tmp_path / "run", tmp_path / "wide", "float32")
    assert {t[0] for t in tensors(tmp_path / "wide").values()} == {np.dtype(np.float32)}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"


def test_only_the_slices_that_are_needed_are_read(tmp_path, monkeypatch):
    """Each element once over all shards, and never more at a time than a shard of a layer's tensor."""
    llama_files(tmp_path / "hf", shards=2)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    model = from_huggingface(raw)[0]
    from jaxpar.mesh.axes import MeshConfig
    from jaxpar.weights.convert import _read

    program = Program(Experiment(model=model, mesh=MeshConfig(fsdp=4, tensor=2)), jax.devices())
    parts = names.leaves(program.parameters, False)
    pieces = []
    with Folder(tmp_path / "hf") as files:
        read = files.read
        monkeypatch.setattr(files, "read", lambda name, at: pieces.append((name, read(name, at))) or pieces[-1][1])
        _read(files, parts, program)
        counts = {name: sum(p.size for n, p in pieces if n == name) for name, _ in pieces}
        for leaf in parts:
            if len(leaf.tensor_shape) > 1:  # vectors are whole on every device
                for name in leaf.tensors():
                    assert counts[name] == np.prod(leaf.tensor_shape), name
                    assert max(p.size for n, p in pieces if n == name) == np.prod(leaf.tensor_shape) / 8


def test_a_run_folder_that_stands_alone(tmp_path, imported, exported):
    """Its tokenizer is its own, it begins training with its own weights, and the files come back."""
    source = tmp_path / "hf"
    llama_files(source)
    vocabulary = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2, "[UNK]": 3}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "padding_side": "left"}')
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    imported(source, tmp_path / "run", "--data.eval_fraction", "0.3", "--train.steps", "7")
    experiment = from_json(Experiment, RunFolder(tmp_path / "run").read_config())
    assert experiment.data.tokenizer == str(tmp_path / "run" / "huggingface" / "tokenizer.json")
    assert experiment.data.eos_token == "<|im_end|>"
    assert experiment.data.eval_fraction == 0.3 and experiment.train.steps == 7
    assert experiment.train.init_from == str(tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert after == before


def test_another_tokenizer_than_the_imported_one(tmp_path, imported, exported):
    """What the run was trained with is written, without the old one's settings; and one that has gone is said."""
    llama_files(tmp_path / "hf")
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "padding_side": "left"}')
    other = tmp_path / "other.json"
    Tokenizer(models.WordLevel({"b": 0, "<eos>": 1}, unk_token="b")).save(str(other))
    flags = ("--data.tokenizer", str(other), "--data.eos_token", "none")
    imported(tmp_path / "hf", tmp_path / "run", *flags)
    exported(tmp_path / "run", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == other.read_bytes()
    config = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["bos_token_id"]) == (1, None)  # *wrong* 2 and 1, of the old one
    other.unlink()
    _, lines = exported(tmp_path / "run", tmp_path / "again")
    assert f"note     data.tokenizer {other} is not there: that of the import is written" in lines


@pytest.fixture
def run(tmp_path, one_device):
    """A run of ours, checkpoints of two steps, all leaves of each its step."""
    from jaxpar.experiment import DecoderConfig

    model = DecoderConfig(vocab_size=264, num_layers=2, embed=16, num_heads=4, num_kv_heads=2, mlp_width=24)
    experiment = Experiment(model=model, train=TrainConfig(seq_len=32))
    folder = RunFolder(tmp_path / "run")
    saved = Checkpoints(folder.checkpoints, asynchronous=False)
    for step in (3, 12):
        shapes = Program(experiment, one_device).abstract_params
        params = jax.tree.map(lambda x, step=step: jax.numpy.full(x.shape, step, x.dtype), shapes)
        saved.save(step, {"params": params, "opt": {"mu": params}, "step": jax.numpy.int32(step)}, {"data": "x"})
    with folder:
        folder.start(to_json(experiment))
    return tmp_path / "run"


def test_the_newest_checkpoint_or_the_one_named(tmp_path, run, exported):
    exported(run, tmp_path / "newest")
    exported(run, tmp_path / "third", step=3)
    for folder, value in (("newest", 12), ("third", 3)):
        assert all((t == value).all() for t in load_file(tmp_path / folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, r"--step: 4 is not a complete checkpoint of .*run \(legal: 3, 12\)"),
        ({"target": "run"}, r"HF_FOLDER: .*run is not an empty folder \(legal: a new one\)"),
        ({"folder": "none"}, r".*none/config.json could not be read: No such file or directory"),
        ({"model": {"mlp": "relu2"}}, r"model.mlp: relu2 is not what LlamaForCausalLM has.*\(legal: swiglu\)"),
        ({"model": {"attention_softcap": 9.0}}, r"model.attention_softcap: 9.0 is not what .*\(legal: null\)"),
    ],
)
def test_exports_that_cannot_be(tmp_path, run, exported, change, message):
    """One line, and nothing is written."""
    if "model" in change:
        folder = RunFolder(run)
        experiment = from_json(Experiment, folder.read_config())
        model = dataclasses.replace(experiment.model, **change["model"])
        folder.config_file.write_text(json.dumps(to_json(dataclasses.replace(experiment, model=model))))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(JaxparError, match=f"^{message}$") as error:
        exported(
            tmp_path / change.get("folder", "run"), tmp_path / change.get("target", "out"), step=change.get("step")
        )
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_numbers_that_float16_does_not_have(tmp_path, imported, exported, monkeypatch):
    """70000 would become infinity in silence."""
    llama_files(tmp_path / "hf", np.float16)
    imported(tmp_path / "hf", tmp_path / "run")
    from jaxpar.weights import convert

    original = Checkpoints.restore

    def trained(self, *args, **kwargs):
        params = original(self, *args, **kwargs)
        params["layers"]["mlp"]["up"] = params["layers"]["mlp"]["up"].at[1, 0, 0].set(70_000.0)
        return params

    monkeypatch.setattr(convert.Checkpoints, "restore", trained)
    with pytest.raises(JaxparError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight has values too large for float16"):
        exported(tmp_path / "run", tmp_path / "out")
    exported(tmp_path / "run", tmp_path / "out", "bfloat16")


def test_not_a_number_is_said(tmp_path, imported):
    def change(t):
        t["model.layers.1.mlp.up_proj.weight"][3, 2] = np.nan

    llama_files(tmp_path / "hf", change=change)
    _, lines = imported(tmp_path / "hf", tmp_path / "run")
    assert "note     layers.mlp.up holds NaN or infinity" in lines


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path, imported):
    llama_files(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"^run: .* already holds a run"):
        imported(tmp_path / "hf", tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
