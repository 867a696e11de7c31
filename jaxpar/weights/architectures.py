"""Which architectures of ``transformers`` a ``DecoderConfig`` can be, and the keys of their config.json, as data.

Defaults are those of the configuration classes of transformers 5.24: what a file means that does not name the key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One of them."""

    name: str  # its class
    model_type: str
    always: Mapping[str, bool]  # fields of DecoderConfig that are so in all its models
    keys: Mapping[str, Any]  # what its result depends on, beside REQUIRED, and the default
    activation: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    biases: Literal["none", "qkv", "attention_bias"] = "attention_bias"  # of attention; the last: a key says
    heads_divide: bool = False  # transformers refuses a hidden_size that num_attention_heads does not divide
    period: int | None = None  # where neither layer_types nor a key says it: every so many-th layer has no window


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,  # it matters where a rope scaling names no original length
    "rope_theta": 10_000.0,
    "rope_scaling": None,  # before transformers 5
    "rope_parameters": None,  # since
    "partial_rotary_factor": None,
}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    **_COMMON,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
_GEMMA_2 = {
    **{key: value for key, value in _GEMMA.items() if key != "hidden_act"},  # which these do not read
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}

ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        {},
        {**_COMMON, "num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False},
        heads_divide=True,
    ),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        {},
        {
            **_COMMON,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        biases="none",
    ),
    Architecture("Qwen2ForCausalLM", "qwen2", {}, {**_QWEN, "head_dim": None}, biases="qkv"),
    Architecture("Qwen3ForCausalLM", "qwen3", {"qk_norm": True}, {**_QWEN, "head_dim": 128, "attention_bias": False}),
    Architecture(
        "GemmaForCausalLM",
        "gemma",
        {"norm_offset": True, "embed_scale": True},
        {**_GEMMA, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        {"norm_offset": True, "embed_scale": True, "post_norms": True},
        {
            **_GEMMA_2,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        activation="hidden_activation",
        heads_divide=True,
        period=2,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {"norm_offset": True, "embed_scale": True, "post_norms": True, "qk_norm": True},
        {
            **_GEMMA_2,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        activation="hidden_activation",
        heads_divide=True,
    ),
)

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}  # of the gate; in a Gemma file "gelu" means the second

# Keys that change nothing here: dtypes, special tokens, what training or generation would do, bookkeeping.
_UNREAD = """
architectures model_type transformers_version dtype torch_dtype use_cache cache_implementation _name_or_path
name_or_path bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
initializer_range pretraining_tp attention_dropout hidden_act hidden_activation return_dict output_hidden_states
output_attentions is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size
chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task task_specific_params
tie_encoder_decoder tie_last_hidden_states torchscript use_bfloat16 pruned_heads return_dict_in_generate do_sample
early_stopping max_length max_new_tokens min_length temperature top_k top_p typical_p num_beams num_beam_groups
num_return_sequences repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids forced_bos_token_id
forced_eos_token_id begin_suppress_tokens suppress_tokens remove_invalid_values exponential_decay_length_penalty
diversity_penalty encoder_no_repeat_ngram_size output_scores prefix tokenizer_class _attn_implementation_autoset
_sliding_window_pattern unsloth_fixed unsloth_version
"""
UNREAD = frozenset(_UNREAD.split())

# Keys whose presence (with a value that is not false, null, 0 or empty) means another kind of model.
REFUSED = {
    **dict.fromkeys(("quantization_config", "compression_config"), "weights that are not quantized"),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "models without experts",
    ),
    **dict.fromkeys(("vision_config", "text_config", "audio_config", "use_mrope"), "models of text alone"),
    **dict.fromkeys(("attn_logit_softcapping",), "null; transformers does not apply it either"),  # of Gemma 3
}
