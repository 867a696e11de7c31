"""config.json in and out: what each key means, in the layouts of transformers 4 and 5, and which values are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxpar.errors import ConfigError
from jaxpar.experiment import DecoderConfig
from jaxpar.models.rope import RopeConfig
from jaxpar.weights.architectures import ARCHITECTURES, REFUSED
from jaxpar.weights.translate import canonical, from_huggingface, to_huggingface

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
TYPES = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2


def decoder(**raw):
    return from_huggingface({**SIZES, **raw})[0]


def test_what_absent_keys_mean():
    """The defaults of each architecture's configuration class; Mistral has 8 key heads, Gemma ties."""
    sizes = {"vocab_size": 128, "num_layers": 8, "embed": 64, "num_heads": 4, "num_kv_heads": 4, "mlp_width": 96}
    assert decoder(model_type="llama") == DecoderConfig(**sizes, norm_eps=1e-6)
    assert decoder(model_type="mistral", num_key_value_heads=4).sliding_window == 4096
    qwen2 = decoder(model_type="qwen2", num_key_value_heads=4)
    assert qwen2.qkv_bias and not qwen2.out_bias and qwen2.sliding_window is None
    qwen3 = decoder(model_type="qwen3", num_key_value_heads=4)
    assert qwen3.qk_norm and qwen3.head_dim == 128
    gemma = decoder(model_type="gemma", num_key_value_heads=4)
    assert gemma.tie_embeddings and gemma.norm_offset and gemma.embed_scale and gemma.mlp == "geglu"
    assert gemma.head_dim == 256 and not gemma.post_norms
    gemma2 = decoder(model_type="gemma2")
    assert (gemma2.sliding_window, gemma2.global_every, gemma2.attention_scale) == (4096, 2, None)  # 256 wide heads
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.post_norms) == (50.0, 30.0, True)
    gemma3 = decoder(model_type="gemma3_text")
    assert (gemma3.sliding_window, gemma3.global_every, gemma3.qk_norm) == (4096, 6, True)
    assert (gemma3.rope.theta, gemma3.local_rope.theta) == (1e6, 1e4)


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"model_type": "llama", "rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {**LINEAR, "rope_theta": 5e5}},
        ),
        (
            {"model_type": "gemma3_text", "rope_theta": 3e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}
            | {"sliding_window_pattern": 6},
            {
                "rope_parameters": {
                    "full_attention": {**LINEAR, "rope_theta": 3e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
                "layer_types": TYPES,
            },
        ),
        ({"model_type": "gemma2"}, {"layer_types": ["sliding_attention", "full_attention"] * 4}),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 8},
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 8},
            {"layer_types": ["full_attention"] * 8},
        ),
    ],
)
def test_the_old_layout_is_the_new(old, new):
    both = {"num_key_value_heads": 4}
    assert decoder(**both, **old) == decoder(**both, model_type=old["model_type"], **new)


def test_scalings_by_their_names():
    given = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert decoder(**LLAMA, rope_scaling=given | {"original_max_position_embeddings": 512}).rope == RopeConfig(
        scaling="llama3", factor=8.0, original_length=512, low_frequency_factor=1.0, high_frequency_factor=4.0
    )
    assert decoder(**LLAMA, rope_scaling=given, max_position_embeddings=99).rope.original_length == 99
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": None, "original_max_position_embeddings": 512}
    assert decoder(**LLAMA, rope_parameters=yarn | {"rope_theta": 7.0}).rope == RopeConfig(
        theta=7.0, scaling="yarn", factor=4.0, original_length=512
    )
    assert decoder(**LLAMA, rope_scaling=yarn | {"attention_factor": 1.1386294}).rope.scaling == "yarn"


GEMMA3 = {"model_type": "gemma3_text"}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model_type": "mixtral"},
            "model_type: mixtral is not supported (legal: llama, mistral, qwen2, qwen3, gemma,",
        ),
        ({"model_type": "gemma3"}, "model_type: gemma3 is not supported (legal: llama,"),
        ({"model_type": None}, "model_type: None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: ['LlamaForSequenceClassification'] of"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu is not supported (legal: silu, gelu_pytorch_tanh)"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported (legal: False)"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: {'bits': 4} is not supported (legal: weights that",
        ),
        ({"num_local_experts": 8}, "num_local_experts: 8 is not supported (legal: models without experts)"),
        ({"vision_config": {"a": 1}}, "vision_config: {'a': 1} is not supported (legal: models of text alone)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported (legal: 1)"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 64"),
        ({"hidden_size": None}, "hidden_size: missing and there is no default (legal: a positive whole number)"),
        ({"hidden_size": "64"}, "hidden_size: 64 is not a size (legal: a positive whole number)"),
        ({"vocab_size": 0}, "vocab_size: 0 is not a size"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True is not a size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: 1e-5 is not supported (legal: a positive number)"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: no is not supported (legal: true, false)"),
        ({"rope_theta": -1.0}, "rope_theta: -1.0 is not supported (legal: a positive number)"),
        ({"rope_scaling": "linear"}, "rope_scaling: linear is not supported (legal: an object or null)"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling rope_type: longrope is not supported (legal: default, linear, llama3, yarn)",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling rope_type: dynamic is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling factor: None is not supported (legal: a positive number)"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "rope_parameters partial_rotary_factor: 0.25 is not supported (legal: 1)",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
            "rope_scaling attention_factor: 1.0 is not supported (legal: null, or 0.1 ln(factor) + 1 = 1.13863)",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "rope_scaling mscale: 1.0 with mscale_all_dim is not supported (legal: null)",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
            "rope_scaling truncate: False is not supported (legal: true)",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mrope_section": [1]}},
            "rope_scaling mrope_section: [1] is not supported with rope_type linear",
        ),
        (
            {**QWEN3, "layer_types": TYPES},
            f"layer_types: {str(TYPES)[:117]}... has sliding_attention, but there is no sliding_window",
        ),
        (
            {**QWEN3, "use_sliding_window": True, "max_window_layers": 3},
            "max_window_layers: 3 is not supported (legal: 0, or 8 layers and more)",
        ),
        ({**GEMMA3, "layer_types": TYPES[2:]}, "layer_types: ["),
        ({**GEMMA3, "layer_types": [*TYPES[:7], "full_attention"]}, "layer_types: ["),
        ({**GEMMA3, "layer_types": ["linear_attention"] * 8}, "layer_types: ["),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ({**GEMMA3, "attn_logit_softcapping": 9.0}, "attn_logit_softcapping: 9.0 is not supported (legal: null;"),
        (
            {"model_type": "gemma", "hidden_activation": "gelu"},
            "hidden_activation: gelu is not supported (legal: null,",
        ),
    ],
)
def test_values_without_a_counterpart_are_refused_by_name(raw, message):
    with pytest.raises(ConfigError) as error:
        from_huggingface({**LLAMA, **raw})
    assert str(error.value).startswith(f"config.json {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma", "gemma3_text"])
def test_values_of_any_type_are_translated_or_refused_in_one_line(model_type):
    """A file that is damaged or of another kind must not end in a traceback."""
    architecture = next(a for a in ARCHITECTURES if a.model_type == model_type)
    base = {"architectures": [architecture.name], **LLAMA, "model_type": model_type, "sliding_window": 8}
    wrong = (None, "text", True, -1, 0, 1.5, math.inf, [], [[1]], [[1]] * 8, {}, {"a": 1})
    ropes = [
        {key: {"rope_type": kind, part: value}}
        for key in ("rope_parameters", "rope_scaling")
        for kind in ("default", "linear", "llama3", "yarn")
        for part in ("rope_type", "factor", "rope_theta", "attention_factor", "full_attention", "sliding_attention")
        for value in wrong
    ]
    keys = {*base, *architecture.keys, *REFUSED, "layer_types"}
    for raw in ({key: value} for key in keys for value in wrong):
        without_type = {key: value for key, value in base.items() if key != "model_type"}
        ropes += [raw] if "architectures" not in raw else [raw, {**without_type, **raw, "model_type": ...}]
    for change in ropes:
        raw = {key: value for key, value in {**base, **change}.items() if value is not ...}
        try:
            from_huggingface(raw)
        except ConfigError as error:
            assert str(error).startswith("config.json ") and "\n" not in str(error), change


def test_keys_that_are_not_known_are_named():
    """And those that are known not to matter are not."""
    raw = {**LLAMA, "torch_dtype": "bfloat16", "use_cache": True, "eos_token_id": [1, 2], "residual_multiplier": 0.2}
    _, notes = from_huggingface({**raw, "attention_dropout": 0.1})
    assert notes == [
        "config.json residual_multiplier: not known here, not read",
        "config.json attention_dropout: 0.1: there is no dropout here",
    ]


BASE = DecoderConfig(vocab_size=99, num_layers=4, embed=64, num_heads=4, num_kv_heads=2, mlp_width=96)
GEMMA = dataclasses.replace(BASE, mlp="geglu", norm_offset=True, embed_scale=True)
GEMMA_2 = dataclasses.replace(
    GEMMA, post_norms=True, sliding_window=9, global_every=2, attention_softcap=50.0, attention_scale=144**-0.5
)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (BASE, "Llama"),
        (dataclasses.replace(BASE, qkv_bias=True, out_bias=True, mlp="geglu"), "Llama"),
        (dataclasses.replace(BASE, sliding_window=9), "Mistral"),
        (dataclasses.replace(BASE, embed=66, head_dim=16), "Mistral"),  # transformers wants heads to divide a Llama's
        (dataclasses.replace(BASE, qkv_bias=True), "Qwen2"),
        (dataclasses.replace(BASE, sliding_window=9, global_every=2), None),  # of no bias and no norm, none alternates
        (dataclasses.replace(BASE, qk_norm=True, sliding_window=9, global_every=4), "Qwen3"),
        (GEMMA, "Gemma"),
        (GEMMA_2, "Gemma2"),
        (dataclasses.replace(GEMMA_2, attention_softcap=None, qk_norm=True, local_rope=RopeConfig(99.0)), "Gemma3"),
        (dataclasses.replace(BASE, mlp="gelu", mlp_bias=True), None),
        (dataclasses.replace(BASE, out_bias=True), None),
        (dataclasses.replace(BASE, embed_scale=True), None),
        (dataclasses.replace(GEMMA_2, attention_scale=0.123), None),
    ],
)
def test_which_architecture_a_config_is(config, name):
    """It says the same when it is read back; or a field is named that no architecture has."""
    if name is None:
        with pytest.raises(ConfigError, match=r"^model\.\w+: .* is not what \w+ has, the closest of .*\(legal: .*\)$"):
            to_huggingface(config, 4096)
        return
    raw = to_huggingface(config, 4096)
    assert raw["architectures"] == [f"{name}ForCausalLM"]
    assert from_huggingface(raw) == (canonical(config), [])


def test_one_function_is_written_one_way():
    """Two configs of the same logits are one config, so that an import that nobody changed is known as such."""
    wide = dataclasses.replace(GEMMA_2, head_dim=16, attention_scale=0.25, global_every=9, scan_unroll=2)
    local = dataclasses.replace(wide, local_rope=RopeConfig(7.0, factor=3.0), rope=RopeConfig(8.0))
    want = dataclasses.replace(GEMMA_2, attention_scale=None, global_every=None, rope=RopeConfig(7.0))
    assert canonical(local) == want
    assert canonical(want) == want
    ntk = RopeConfig(100.0, scaling="ntk", factor=2.0)
    assert canonical(dataclasses.replace(BASE, rope=ntk)).rope == RopeConfig(100.0 * 2 ** (16 / 14))


def test_all_seven_are_there():
    assert [a.model_type for a in ARCHITECTURES] == [
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
    ]  # fmt: skip
