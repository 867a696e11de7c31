"""Small random Hugging Face models: what transformers writes, or the same files without it."""

from __future__ import annotations

import json

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxpar.runtime.checkpoints import Checkpoints

_SIZES = {
    "vocab_size": 152, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 3e-4, "max_position_embeddings": 96,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {  # a base so small that the ramps of the scalings fall among five frequencies
    "rope_type": "llama3", "rope_theta": 20.0, "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 9.0,
    "original_max_position_embeddings": 90,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 20.0, "factor": 3.0, "original_max_position_embeddings": 90,
    "beta_fast": 6.0, "beta_slow": 1.5,
}  # fmt: skip
_GEMMA_3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}
_GEMMA_3 = {"query_pre_attn_scalar": 21, "sliding_window": 9, "rope_parameters": _GEMMA_3_ROPES}

# name -> (architecture, keys): everything that changes a logit, away from its default.
MODELS = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-biased": ("Llama", {"attention_bias": True, "head_dim": 6, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 11, "rope_parameters": _YARN, "max_position_embeddings": 270}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "query_pre_attn_scalar": 17, "sliding_window": 7, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 15.0, "tie_word_embeddings": True,
        },
    ),
    "gemma3": ("Gemma3", {**_GEMMA_3, "num_hidden_layers": 7, "final_logit_softcapping": 15.0}),
    "gemma3-local": ("Gemma3", {**_GEMMA_3, "tie_word_embeddings": True}),  # too shallow for a global layer
}  # fmt: skip


def torch_model(name: str, **keys):
    """A transformers model whose every tensor is random, norms and biases too."""
    import torch
    import transformers

    architecture, changes = MODELS[name]
    suffix = "TextConfig" if architecture == "Gemma3" else "Config"
    config = getattr(transformers, architecture + suffix)(**{**_SIZES, **changes, **keys})
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.normal_(std=0.3 if "proj" in key else 0.7)
    return model


def llama_files(path, dtype=np.float32, shards=1, change=None, **keys):
    """The folder of a Llama of two layers, written by safetensors alone; ``change(tensors)`` may spoil it first."""
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", **_SIZES}
    raw |= {"num_hidden_layers": 2, "hidden_act": "silu", "attention_bias": False, **keys}
    D, F, V, K = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"], raw["head_dim"]
    H, G = raw["num_attention_heads"], raw["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(raw["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (D,), "self_attn.q_proj": (H * K, D), "self_attn.k_proj": (G * K, D),
            "self_attn.v_proj": (G * K, D), "self_attn.o_proj": (D, H * K), "post_attention_layernorm": (D,),
            "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }.items():  # fmt: skip
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (D,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    if change is not None:
        change(tensors)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return tensors
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tensors


def parameters(run):
    """The parameters in the newest checkpoint of a run, by name, on one device."""
    saved = Checkpoints(run / "checkpoints")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name.removeprefix("params."): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        for name, x in saved.structure(saved.latest()).items()
        if name.startswith("params.")
    }
    return {name: np.asarray(leaf) for name, leaf in saved.restore(saved.latest(), wanted, only="params").items()}
