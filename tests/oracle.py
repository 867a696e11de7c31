"""A decoder written from its equations for one device, and what it takes to compare a Program with it.

Nothing here is shared with ``jaxpar.models``: attention is a dense S x S softmax under one explicit mask, rotary
positions multiply complex numbers, logits are whole, and everything is float64. Weights come in a Program's dictionary.
"""

import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.experiment import AdamWConfig, DecoderConfig, Experiment, MeshConfig, ShardingRules, TrainConfig
from jaxpar.models.rope import RopeConfig
from jaxpar.program import Program

# LLVM's optimizer is most of what a small program costs on a CPU; XLA's own passes are not touched by this.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
Z_LOSS = 1e-2

LLAMA = DecoderConfig(vocab_size=48, num_layers=2, embed=32, num_heads=8, num_kv_heads=4, mlp_width=64)
GEMMA = DecoderConfig(
    vocab_size=48, num_layers=2, embed=32, num_heads=4, num_kv_heads=2, mlp_width=64, mlp="geglu", qk_norm=True,
    tie_embeddings=True, embed_scale=True, sliding_window=5, attention_softcap=2.0, logit_softcap=3.0,
)  # fmt: skip
GPT = DecoderConfig(
    vocab_size=48, num_layers=2, embed=32, num_heads=4, num_kv_heads=4, mlp_width=64, mlp="gelu", qkv_bias=True,
    out_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
RELU2 = DecoderConfig(
    vocab_size=48, num_layers=2, embed=32, num_heads=8, num_kv_heads=4, head_dim=8, mlp_width=64, mlp="relu2",
    qkv_bias=True, qk_norm=True, logit_softcap=4.0, scan_unroll=2,
)  # fmt: skip
GEMMA3 = DecoderConfig(  # two local layers, a global one, two local ones past the last whole group
    vocab_size=48, num_layers=5, embed=32, num_heads=4, num_kv_heads=2, mlp_width=64, mlp="geglu", qk_norm=True,
    tie_embeddings=True, embed_scale=True, sliding_window=5, global_every=3, attention_scale=0.1, norm_offset=True,
    post_norms=True, rope=RopeConfig(theta=1e6, scaling="linear", factor=8.0), local_rope=RopeConfig(theta=1e4),
)  # fmt: skip
MODELS = {"llama": LLAMA, "gemma": GEMMA, "gpt": GPT, "relu2": RELU2, "gemma3": GEMMA3}


# -- the equations ---------------------------------------------------------------------------------------------------


def rms_norm(x, p, config):
    """x / sqrt(mean(x^2) + eps) * scale, or 1 + scale."""
    scale = p["scale"] + 1 if config.norm_offset else p["scale"]
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale


def turn(x_BSHK, positions_BS, rope):
    """The pairs (x_i, x_{i + K/2}) as complex numbers, times exp(i position theta^(-2i/K) / factor)."""
    assert rope.scaling in ("none", "linear")
    half = x_BSHK.shape[-1] // 2
    z = x_BSHK[..., :half] + 1j * x_BSHK[..., half:]
    z = z * jnp.exp(1j * positions_BS[:, :, None, None] * rope.theta ** (-jnp.arange(half) / half) / rope.factor)
    return jnp.concatenate([z.real, z.imag], -1)


def sees(segments_BS, window):
    """[B, S, T]: the key is in the query's document, not later, and fewer than ``window`` positions back."""
    s = np.arange(segments_BS.shape[1])
    ago = s[:, None] - s[None, :]
    seen = (ago >= 0) & (ago < (window or len(s)))
    return seen & (segments_BS[:, :, None] == segments_BS[:, None, :])


def softmax_attention(q_BSHK, k_BTGK, v_BTGK, seen_BST, softcap, scale=None):
    """softmax(q k^T scale) v, by default over sqrt(K), with every key/value head repeated for its queries."""
    repeats = q_BSHK.shape[2] // k_BTGK.shape[2]
    k, v = jnp.repeat(k_BTGK, repeats, 2), jnp.repeat(v_BTGK, repeats, 2)
    logits = jnp.einsum("bshk,bthk->bhst", q_BSHK, k) * (scale or q_BSHK.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    weights = jnp.where(seen_BST[:, None], jnp.exp(logits - logits.max(-1, keepdims=True)), 0)
    return jnp.einsum("bhst,bthk->bshk", weights / weights.sum(-1, keepdims=True), v)


def mlp(p, x, kind):
    """Two or three matrices."""
    up = x @ p["up"] + p.get("up_bias", 0)
    if kind == "swiglu":
        gate = x @ p["gate"]
        h = gate / (1 + jnp.exp(-gate)) * up
    elif kind == "relu2":
        h = jnp.maximum(up, 0) ** 2
    else:  # gelu by tanh
        y = x @ p["gate"] if kind == "geglu" else up
        h = 0.5 * y * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (y + 0.044715 * y**3)))
        h = h * up if kind == "geglu" else h
    return h @ p["down"] + p.get("down_bias", 0)


def logits(params, config, batch):
    """[B, S, V] of a decoder, layer after layer."""
    positions = batch["positions"]
    x = params["embedding"]["table"][batch["tokens"]]
    if config.embed_scale:
        x = x * config.embed**0.5
    for i in range(config.num_layers):
        p = jax.tree.map(lambda w: w[i], params["layers"])  # noqa: B023
        is_global = config.sliding_window is None or (config.global_every and (i + 1) % config.global_every == 0)
        seen = sees(batch["segments"], None if is_global else config.sliding_window)
        rope = config.rope if is_global else config.local_rope or config.rope
        a, y = p["attention"], rms_norm(x, p["attention_norm"], config)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, a[n]) + a.get(f"{n}_bias", 0) for n in "qkv")
        if config.qk_norm:
            q, k = rms_norm(q, a["q_norm"], config), rms_norm(k, a["k_norm"], config)
        q, k = turn(q, positions, rope), turn(k, positions, rope)
        o = softmax_attention(q, k, v, seen, config.attention_softcap, config.attention_scale)
        y = jnp.einsum("bshk,hkd->bsd", o, a["o"]) + a.get("o_bias", 0)
        x = x + (rms_norm(y, p["attention_post_norm"], config) if config.post_norms else y)
        y = mlp(p["mlp"], rms_norm(x, p["mlp_norm"], config), config.mlp)
        x = x + (rms_norm(y, p["mlp_post_norm"], config) if config.post_norms else y)
    x = rms_norm(x, params["final_norm"], config)
    out = x @ (params["embedding"]["table"].T if config.tie_embeddings else params["head"]["kernel"])
    return config.logit_softcap * jnp.tanh(out / config.logit_softcap) if config.logit_softcap else out


def token_losses(out_BSV, targets_BS):
    """-log p(target) and log(sum(exp(logits))) of every token."""
    top = out_BSV.max(-1)
    lse = top + jnp.log(jnp.exp(out_BSV - top[..., None]).sum(-1))
    return lse - jnp.take_along_axis(out_BSV, targets_BS[..., None], -1)[..., 0], lse


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_COMPILE)
def compiled_logits(params, config, batch):
    """``logits`` in the dtype of the parameters."""
    return logits(params, config, batch)


def losses(params, config, batch, z_loss=Z_LOSS):
    """(objective, loss): sums over valid tokens divided by the number of valid tokens of the whole batch."""
    nll, lse = token_losses(logits(params, config, batch), batch["targets"])
    mask = batch["mask"]
    return (mask * (nll + z_loss * lse**2)).sum() / mask.sum(), (mask * nll).sum() / mask.sum()


def gradients(params, config, batch, z_loss=Z_LOSS):
    """Gradients of the objective, and the loss, by jax.grad in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), params)
        grad = jax.jit(jax.grad(losses, has_aux=True), static_argnums=1, compiler_options=FAST_COMPILE)
        return jax.tree.map(np.asarray, grad(params, config, batch, z_loss))


# -- weights and batches ---------------------------------------------------------------------------------------------


def random_params(program):
    """Weights in which nothing is 0, 1 or small: a leaf's values follow from its name and shape alone."""

    def fill(name, shape):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("scale"):
            return (1 + 0.4 * rng.normal(size=shape)).astype(np.float32)
        if name.endswith("bias"):
            return (0.3 * rng.normal(size=shape)).astype(np.float32)
        std = 0.5 if name == "embedding.table" else 1.5 * shape[1 if name.startswith("layers") else 0] ** -0.5
        return (std * rng.normal(size=shape)).astype(np.float32)

    structure = jax.tree.structure(program.abstract_params)
    return jax.tree.unflatten(structure, [fill(p.name, p.shape) for p in program.parameters])


def put_params(program, params):
    """``params`` as the Program stores them."""
    return jax.tree.map(lambda w, s: jax.device_put(w, s.sharding), params, program.abstract_params)


def put_state(program, params):
    """The state of step 0 with these parameters, without compiling the Program's own initialisation."""
    state = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding),
        {k: v for k, v in program.abstract_state.items() if k != "params"},
    )
    return {**state, "params": put_params(program, params)}


def ragged_batch(rows=16, length=16, vocab=48, seed=0, empty_rows=()):
    """Packed documents of random lengths, padding at the ends, holes in the mask; nothing valid in ``empty_rows``."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    batch = {"tokens": rng.integers(0, vocab, shape), "targets": rng.integers(0, vocab, shape)}
    batch |= {"positions": np.zeros(shape, int), "segments": np.zeros(shape, int), "mask": np.zeros(shape, bool)}
    for row in range(rows):
        start, segment, end = 0, 1, length - rng.integers(0, 4)
        while start < end:
            stop = min(start + rng.integers(1, length), end)
            batch["positions"][row, start:stop] = np.arange(stop - start)
            batch["segments"][row, start:stop] = segment
            batch["mask"][row, start : stop - 1] = rng.random(stop - start - 1) < rng.random()
            start, segment = stop, segment + 1
    batch["mask"][list(empty_rows)] = False
    return {k: v if k == "mask" else v.astype(np.int32) for k, v in batch.items()}


# -- Programs --------------------------------------------------------------------------------------------------------


@functools.cache
def program(model="llama", microbatches=1, rules=ShardingRules(), optim=None, rows=16, length=16, **mesh):  # noqa: B008
    """A Program of MODELS[model] (or a config) on the first devices, as many as the ``mesh`` sizes say."""
    from jaxpar.tasks.language_model import LanguageModelConfig

    sizes = {"fsdp": 1, **mesh}
    experiment = Experiment(
        model=MODELS.get(model, model) if isinstance(model, str) else model,
        task=LanguageModelConfig(z_loss=Z_LOSS),
        optim=optim or AdamWConfig(),
        train=TrainConfig(steps=10, global_batch=rows, microbatches=microbatches, seq_len=length),
        mesh=MeshConfig(**sizes),
        rules=rules,
    )
    return Program(experiment, jax.devices()[: int(np.prod(list(sizes.values())))])


@functools.cache
def compiled_gradients(program):
    """``Program.gradients``, compiled."""
    state, batch = program.abstract_state, program.abstract_batch
    with jax.set_mesh(program.mesh):
        return jax.jit(program.gradients).lower(state["params"], batch, program.scalars()).compile(FAST_COMPILE)


@functools.cache
def compiled_step(program):
    """``Program.step``, compiled quickly."""
    return program.lower_step().compile(FAST_COMPILE)


def program_gradients(program, batch, params=None):
    """Gradients and metrics of a batch [B, S], as numpy arrays."""
    params = put_params(program, random_params(program) if params is None else params)
    return jax.tree.map(np.asarray, compiled_gradients(program)(params, program.put(batch), program.scalars()))


@functools.cache
def expected_gradients(program, **batch):
    """The oracle's gradients and loss for this Program's model and ``ragged_batch(**batch)``."""
    return gradients(random_params(program), program.experiment.model, ragged_batch(**batch))


def shapes(text):
    """Every array shape in compiled HLO."""
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[(\d+(?:,\d+)*)\]\{", text)}


def assert_leaves_close(got, want, tolerance=1e-5):
    """Every leaf of ``got`` within ``tolerance`` of the largest number of the same leaf of ``want``."""
    wrong = {}
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        assert g.shape == w.shape, f"{jax.tree_util.keystr(path)}: {g.shape} is not {w.shape}"
        error = np.abs(g - w).max() / np.abs(w).max()
        if not error <= tolerance:
            ratio = np.vdot(g, w) / np.vdot(w, w)
            wrong[jax.tree_util.keystr(path)] = f"error {error:.1e} of the largest, projection {ratio:.4f}"
    assert not wrong, f"leaves that differ: {wrong}"
