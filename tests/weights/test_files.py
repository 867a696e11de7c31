"""Wrong or partial files: one line that names the file or the tensor, before a weight is read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import llama_files

from jaxpar.errors import ConfigError
from jaxpar.weights.files import Folder, parse_size

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def refused(tmp_path, imported, monkeypatch):
    """``refused()``: the line with which the import of the folder ``hf`` is refused; no run folder is made."""

    def run():
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as error:
            patch.setattr("jaxpar.weights.names.Leaf.read", lambda *_: pytest.fail("a weight was read"))
            imported(tmp_path / "hf", tmp_path / "run")
        assert not (tmp_path / "run").exists()
        text = str(error.value)
        assert "\n" not in text
        return text.replace(str(tmp_path), "TMP")

    return run


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (drop(UP), {}, f"{UP}: missing in TMP/hf, layers.mlp.up is made of it"),
        (drop("lm_head.weight"), {}, "lm_head.weight: missing in TMP/hf, head.kernel is made of it"),
        (
            put(UP, np.zeros((24, 40), np.float32)),
            {},
            f"{UP}: [24, 40] in model.safetensors is not the shape that config.json gives layers.mlp.up "
            "(legal: [40, 24])",
        ),
        (
            put(UP, np.zeros((40, 24), np.int8)),
            {},
            f"{UP}: I8 in model.safetensors is not supported (legal: F32, BF16, F16)",
        ),
        (
            put("model.layers.2.mlp.up_proj.weight", np.zeros((40, 24), np.float32)),
            {},
            "model.layers.2.mlp.up_proj.weight: [40, 24] in model.safetensors: config.json has no such weight",
        ),
        (
            put("model.layers.0.self_attn.q_proj.bias", np.zeros(40, np.float32)),
            {},
            "model.layers.0.self_attn.q_proj.bias: [40] in model.safetensors: config.json has no such weight",
        ),
        (
            lambda tensors: None,
            {"attention_bias": True},
            "model.layers.0.self_attn.k_proj.bias: missing in TMP/hf, layers.attention.k_bias is made of it",
        ),
        (
            put("lm_head.weight", np.zeros((152, 24), np.float32)),
            {"tie_word_embeddings": True},
            "lm_head.weight: [152, 24] differs from model.embed_tokens.weight, but config.json says "
            "tie_word_embeddings (legal: the same matrix, or tie_word_embeddings false)",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, refused, change, keys, message):
    llama_files(tmp_path / "hf", change=change, **keys)
    assert refused() == message


def test_a_file_cut_anywhere(tmp_path, refused):
    """In its header, in the middle of a tensor, one byte before its end; and one with a byte too many."""
    llama_files(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:5], whole[:200], whole[: len(whole) // 2], whole[:-1], whole + b"x"):
        file.write_bytes(content)
        assert refused().startswith("HF_FOLDER: TMP/hf/model.safetensors is cut short or damaged: ")
    file.write_bytes(b"<!DOCTYPE html>" * 20)  # what a download that failed leaves
    assert refused().startswith("HF_FOLDER: TMP/hf/model.safetensors is cut short or damaged: ")


SECOND = "model-00002-of-00003.safetensors"


def test_shards_and_their_index(tmp_path, refused):
    folder = tmp_path / "hf"
    llama_files(folder, shards=3)
    index = folder / "model.safetensors.index.json"
    content, where = index.read_text(), json.loads(index.read_text())["weight_map"]

    tensors = load_file(folder / SECOND)
    name = next(iter(tensors))
    save_file({n: t for n, t in tensors.items() if n != name}, folder / SECOND)
    assert refused() == f"{name}: {SECOND} does not hold the tensor that model.safetensors.index.json puts there"
    save_file({**tensors, UP: tensors.get(UP, np.zeros((40, 24), np.float32))}, folder / SECOND)
    if where[UP] != SECOND:
        assert refused().startswith(f"{UP}: ") and "holds too" in refused()

    (folder / SECOND).unlink()
    assert refused() == (
        f"model.safetensors.index.json: {SECOND} is not in TMP/hf (legal: all the files that it names)"
    )
    index.write_text(content.replace(SECOND, "../" + SECOND))
    assert refused().startswith(f"model.safetensors.index.json: ../{SECOND} is not in TMP/hf")
    for damaged in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(damaged)
        assert refused().startswith("HF_FOLDER: TMP/hf/model.safetensors.index.json has no")


def test_folders_that_are_no_model(tmp_path, refused):
    folder = tmp_path / "hf"
    assert refused() == "HF_FOLDER: TMP/hf/config.json cannot be read: No such file or directory"
    folder.mkdir()
    for content, message in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (folder / "config.json").write_text(content)
        assert refused().startswith(f"HF_FOLDER: TMP/hf/config.json {message}")
    (folder / "config.json").unlink()
    folder.rmdir()
    llama_files(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused() == (
        "HF_FOLDER: TMP/hf holds no model.safetensors and no model.safetensors.index.json, but pytorch_model.bin "
        "(legal: what save_pretrained writes)"
    )


def test_an_intact_folder(tmp_path):
    """The checks above refuse nothing that is right."""
    tensors = llama_files(tmp_path / "hf", shards=3)
    with Folder(tmp_path / "hf") as files:
        assert files.tensors.keys() == tensors.keys()
        assert (files.read(UP, (slice(3, 9), slice(0, 24))) == tensors[UP][3:9]).all()


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2GiB", 2**31), ("700", 700)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "5XB", "-1GB", "1e3"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"^--max-shard-size: .* is not a size \(legal: such as 5GB, 500MB, 2GiB\)$"):
        parse_size(text)
