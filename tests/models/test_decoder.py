"""The decoder on one device: logits, documents, initial weights, counts, and what its config refuses."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from jaxpar.errors import ConfigError
from jaxpar.models.decoder import Decoder, DecoderConfig
from jaxpar.models.initializers import truncated_normal
from jaxpar.models.layout import SingleDevice, lookup, parameter_dtype
from jaxpar.models.rope import RopeConfig


def decoder(config):
    """The model with the oracle's random weights, and these."""
    params = oracle.random_params(oracle.program(config))
    graph, template = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))
    nnx.replace_by_pure_dict(template, jax.tree.map(jnp.asarray, params))
    return nnx.merge(graph, template), params


def run(model, *batch):
    """Logits, compiled."""
    graph, params = nnx.split(model)
    compiled = jax.jit(lambda p, b: nnx.merge(graph, p)(*b), compiler_options=oracle.FAST_COMPILE)
    return compiled(params, batch)


def initial(config):
    """Fresh weights as a dictionary."""
    make = jax.jit(
        lambda: nnx.to_pure_dict(nnx.split(Decoder(config, rngs=nnx.Rngs(params=0)))[1]),
        compiler_options=oracle.FAST_COMPILE,
    )
    return jax.tree.map(np.asarray, make())


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt", "relu2", "gemma3"])
def test_logits_are_the_oracles(name):
    """On one device, whole, in fp32."""
    model, params = decoder(oracle.MODELS[name])
    batch = oracle.ragged_batch(rows=2)
    got = run(model, batch["tokens"], batch["positions"], batch["segments"])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), params)
        want = np.asarray(oracle.compiled_logits(wide, oracle.MODELS[name], batch))
    assert got.dtype == jnp.float32
    real = batch["segments"] > 0
    oracle.assert_leaves_close(got[real], want[real])


def test_another_document_moves_no_logit():
    """Exactly 0 (E7); with one segment for both documents it is not, restarted positions or not."""
    model, _ = decoder(oracle.LLAMA)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 48, (2, 16))
    tokens[1, 7:] = tokens[0, 7:]  # document 1 is the same, document 0 another
    positions = np.tile(np.r_[np.arange(7), np.arange(9)], (2, 1))
    segments = np.tile(np.repeat([1, 2], [7, 9]), (2, 1))
    one, other = np.asarray(run(model, tokens, positions, segments))[:, 7:]
    assert np.abs(one - other).max() == 0
    one, other = np.asarray(run(model, tokens, positions, np.ones_like(segments)))[:, 7:]
    assert np.abs(one - other).max() > 1e-3


def test_later_tokens_move_no_logit():
    """Causality, exactly."""
    model, _ = decoder(oracle.GEMMA)
    tokens = np.random.default_rng(0).integers(0, 48, (2, 16))
    tokens[1, :9] = tokens[0, :9]
    one, other = np.asarray(run(model, tokens))
    assert np.abs(one - other)[:9].max() == 0
    assert np.abs(one - other)[9].max() > 0


def test_initial_weights_are_independent():
    """No two leaves and no two layers share a value pattern, as they would with one random key for both."""
    config = dataclasses.replace(oracle.GPT, vocab_size=64, tie_embeddings=False, mlp="geglu")
    params = initial(config)
    seen = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        for i, w in enumerate(leaf if "layers" in name else [leaf]):
            w = np.asarray(w).ravel()
            if "scale" in name or "bias" in name:
                assert (w == ("scale" in name)).all()
                continue
            for other, v in seen.items():
                n = min(len(w), len(v))
                assert abs(np.corrcoef(w[:n], v[:n])[0, 1]) < 0.2, (name, i, other)
            seen[name, i] = w


def test_initial_deviations():
    """D^-1/2 into a layer; out of it (fan in x 2 layers)^-1/2 (GPT-2); 1 for an embedding that is not the head."""
    config = DecoderConfig(vocab_size=2048, num_layers=3, embed=64, num_heads=4, num_kv_heads=4, mlp_width=256)
    params = initial(config)
    layers = params["layers"]
    for got, want in [
        (params["embedding"]["table"], 1.0),
        (params["head"]["kernel"], 64**-0.5),
        (layers["attention"]["q"], 64**-0.5),
        (layers["attention"]["o"], (64 * 6) ** -0.5),
        (layers["mlp"]["up"], 64**-0.5),
        (layers["mlp"]["down"], (256 * 6) ** -0.5),
    ]:
        np.testing.assert_allclose(np.std(got), want, rtol=0.02)


def test_truncated_normal():
    """Nothing beyond two deviations of the uncut normal; mean 0 and deviation as asked."""
    x = np.asarray(truncated_normal(jax.random.key(1), (1 << 18,), 0.5))
    assert abs(x.mean()) < 3e-3
    np.testing.assert_allclose(x.std(), 0.5, rtol=5e-3)
    assert 1.1 < np.abs(x).max() < 0.5 * 2 / 0.8796 + 1e-6


def test_flops_by_hand():
    """Two layers, grouped queries, gated MLP: matrices 6 x weights; attention over (S + 1) / 2 keys."""
    config = DecoderConfig(vocab_size=100, num_layers=2, embed=8, num_heads=4, num_kv_heads=2, head_dim=3, mlp_width=20)
    layer = 8 * 12 + 8 * 6 + 8 * 6 + 12 * 8 + 3 * 8 * 20  # q, k, v, o, gate-up-down
    assert config.matmul_parameters() == 2 * layer + 800
    keys_of_ten = sum(range(1, 11)) / 10
    scores_and_values = 2 * 2 * 4 * 3 * keys_of_ten  # multiply-adds of 4 heads of 3, twice
    assert config.flops_per_token(10) == 6 * (2 * layer + 800) + 3 * 2 * scores_and_values

    narrow = dataclasses.replace(config, sliding_window=4)
    keys_of_ten = (1 + 2 + 3 + 4 * 7) / 10
    assert narrow.flops_per_token(10) == pytest.approx(6 * (2 * layer + 800) + 3 * 2 * 2 * 2 * 4 * 3 * keys_of_ten)
    mixed = dataclasses.replace(narrow, num_layers=3, global_every=3).flops_per_token(10)
    one_layer = [dataclasses.replace(c, num_layers=1).flops_per_token(10) - 4800 for c in (narrow, config)]
    assert mixed == pytest.approx(2 * one_layer[0] + one_layer[1] + 4800)
    assert dataclasses.replace(config, sliding_window=99).flops_per_token(10) == config.flops_per_token(10)
    assert dataclasses.replace(config, mlp="gelu").matmul_parameters() == 2 * (layer - 160) + 800


def test_weights_that_compute_in_sixteen_bits():
    """Matrices do; norm scales and biases stay fp32, a bias per head too."""
    model, _ = decoder(oracle.GPT)
    layers = SingleDevice(jnp.bfloat16).gather(model).layers
    assert layers.attention.q[...].dtype == layers.mlp.up[...].dtype == jnp.bfloat16
    assert model.embedding.table[...].dtype == jnp.float32
    for bias in (layers.attention.q_bias, layers.attention.o_bias, layers.mlp.up_bias, layers.mlp_norm.scale):
        assert bias[...].dtype == jnp.float32
    assert parameter_dtype(("layers", "head_dim"), jnp.bfloat16) == jnp.float32


def test_a_frequent_tokens_gradient_is_summed_in_fp32():
    """1000 tokens of gradient 1 give 1000; *wrong* 256, where bfloat16 + 1 stops growing."""
    table, rows = jnp.ones((4, 2), jnp.bfloat16), np.full((10, 100), 3)
    grad = jax.grad(lambda t: lookup(t, rows).astype(jnp.float32).sum())(table)
    assert grad.dtype == jnp.bfloat16
    assert grad.tolist() == [[0, 0]] * 3 + [[1000, 1000]]


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0), ("num_layers", 0), ("embed", -8), ("num_heads", 3), ("num_kv_heads", 3), ("head_dim", 5),
        ("mlp_width", 0), ("sliding_window", 0), ("attention_softcap", 0.0), ("logit_softcap", -1.0),
        ("scan_unroll", 3), ("norm_eps", 0.0), ("attention_scale", 0.0), ("global_every", 2),
    ],
)  # fmt: skip
def test_shapes_no_decoder_has(field, value):
    """One line: the field, its value, the rule, the legal values; each legal number listed is legal."""
    config = DecoderConfig(embed=256, num_layers=4)
    with pytest.raises(ConfigError, match=rf"^model\.{field}: {re.escape(str(value))} .*\(legal: .*\)$") as error:
        dataclasses.replace(config, **{field: value}).validate()
    assert "\n" not in str(error.value)
    for legal in re.findall(r"\b\d+\b", str(error.value.legal)):
        dataclasses.replace(config, **{field: int(legal), "num_kv_heads": 1}).validate()


def test_layers_of_two_kinds_need_a_window():
    """What would mean nothing is refused."""
    for fields in (dict(global_every=1, sliding_window=4), dict(local_rope=RopeConfig())):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            DecoderConfig(**fields).validate()
