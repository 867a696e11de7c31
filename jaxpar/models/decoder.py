"""A decoder-only transformer: Llama-, GPT-, Qwen- and Gemma-class models by config."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import ConfigError, divisors
from jaxpar.models import rope
from jaxpar.models.attention import Mask, softcapped
from jaxpar.models.initializers import weight
from jaxpar.models.layers import GATED, DecoderLayer, RMSNorm
from jaxpar.models.layout import Layout, SingleDevice
from jaxpar.models.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder."""

    vocab_size: int = 320  # rows of the embedding; at least the tokenizer's
    num_layers: int = 4
    embed: int = 256  # width of the residual stream
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int | None = None  # width of a head; none: embed / num_heads
    mlp_width: int = 1024
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    qkv_bias: bool = False
    out_bias: bool = False  # bias of the attention output
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head (Qwen3)
    sliding_window: int | None = None  # positions a query sees, itself included; none: all earlier ones
    global_every: int | None = None  # every so many-th layer has no sliding window (Gemma 2: 2, Gemma 3: 6)
    attention_scale: float | None = None  # factor on attention logits; none: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)
    tie_embeddings: bool = False  # the head is the embedding transposed
    embed_scale: bool = False  # multiply embeddings by sqrt(embed) (Gemma)
    norm_eps: float = 1e-6
    norm_offset: bool = False  # norms multiply by 1 + scale (Gemma)
    post_norms: bool = False  # also norm what attention and MLP add to the residual (Gemma 2)
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # of the layers with a sliding window (Gemma 3); none: rope
    scan_unroll: int = 1  # layers per iteration of the layer scan: more is faster to run, slower to compile

    @property
    def width_of_head(self) -> int:
        """``head_dim``, given or derived."""
        return self.head_dim or self.embed // self.num_heads

    def kinds(self) -> tuple[tuple[Mask, RopeConfig], ...]:
        """Mask and rotary positions of the first layers; layer i is like layer i modulo how many these are."""

        def kind(window: int | None, rope: RopeConfig) -> tuple[Mask, RopeConfig]:
            return Mask(window, self.attention_softcap, self.attention_scale), rope

        everywhere = kind(None, self.rope)
        if self.sliding_window is None:
            return (everywhere,)
        local = kind(self.sliding_window, self.local_rope or self.rope)
        return (local,) if self.global_every is None else (*[local] * (self.global_every - 1), everywhere)

    def residual_std(self, fan_in: int) -> float:
        """Weights that write to the residual start smaller, by the square root of how many there are (GPT-2)."""
        return (fan_in * 2 * self.num_layers) ** -0.5

    def validate(self) -> None:
        """Raise ConfigError for a shape no decoder has."""
        for name in (
            "vocab_size", "num_layers", "embed", "num_heads", "num_kv_heads", "mlp_width", "scan_unroll",
            "head_dim", "sliding_window", "attention_softcap", "attention_scale", "logit_softcap", "norm_eps",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"model.{name}", value, "is not positive and finite", "a positive number")
        if self.head_dim is None and self.embed % self.num_heads:
            legal = "an even model.embed" if self.embed % 2 else divisors(self.embed // 2)  # heads of even width
            raise ConfigError("model.num_heads", self.num_heads, f"does not divide model.embed {self.embed}", legal)
        if self.width_of_head % 2:
            raise ConfigError("model.head_dim", self.width_of_head, "is odd, rotary positions need pairs", "even sizes")
        if self.rope.scaling == "ntk" and self.width_of_head < 4:
            raise ConfigError("model.head_dim", self.width_of_head, "is too narrow for rope.scaling ntk", "4 or more")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.num_kv_heads",
                self.num_kv_heads,
                f"does not divide model.num_heads {self.num_heads}",
                divisors(self.num_heads),
            )
        if self.num_layers % self.scan_unroll:
            raise ConfigError(
                "model.scan_unroll",
                self.scan_unroll,
                f"does not divide model.num_layers {self.num_layers}",
                divisors(self.num_layers),
            )
        if self.sliding_window is None:
            for name in ("global_every", "local_rope"):
                if getattr(self, name) is not None:
                    rule = "means nothing without model.sliding_window"
                    raise ConfigError(f"model.{name}", getattr(self, name), rule, "none, or set the window too")
        if self.global_every is not None and self.global_every < 2:
            raise ConfigError("model.global_every", self.global_every, "is too small", "2 or more, or none")
        self.rope.validate(self.width_of_head)
        if self.local_rope is not None:
            self.local_rope.validate(self.width_of_head, "model.local_rope")

    def matmul_parameters(self) -> int:
        """Weights that multiply activations: every matrix but the embedding lookup."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.width_of_head
        mlp = (3 if self.mlp in GATED else 2) * self.mlp_width
        return self.num_layers * self.embed * (heads + mlp) + self.embed * self.vocab_size

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward per token: 6 per matrix weight, and attention's two products.

        Causal attention counts as half (a window as its band), recomputation does not count (PaLM, appendix B).
        """
        kinds, keys = self.kinds(), 0.0
        for i in range(self.num_layers):
            window = min(kinds[i % len(kinds)][0].window or seq_len, seq_len)
            keys += window - window * (window - 1) / (2 * seq_len)  # keys per query, averaged over the sequence
        return 6 * self.matmul_parameters() + 12 * self.num_heads * self.width_of_head * keys


class Embedding(nnx.Module):
    """The table of token vectors."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        std = config.embed**-0.5 if config.tie_embeddings else 1.0
        self.table = weight(rngs, std, vocab=config.vocab_size, embed=config.embed)


class Head(nnx.Module):
    """The matrix from the residual to logits."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.kernel = weight(rngs, config.embed**-0.5, embed=config.embed, vocab=config.vocab_size)


class Decoder(nnx.Module):
    """Embedding, scanned layers, final norm, head."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs=rngs)
        self.layers = stack(lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key)), rngs, config.num_layers)
        self.final_norm = RMSNorm(config, embed=config.embed)
        self.head = None if config.tie_embeddings else Head(config, rngs=rngs)

    def hidden(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array | None, layout: Layout
    ) -> tuple[jax.Array, jax.Array]:
        """The final residual [B, S, D] (sequence-sharded as the layout has it) and the head matrix [D, V]."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, _: Any) -> tuple[jax.Array, None]:
            return layout.attention(q, k, v, segments_BS, mask), None

        return self.run(tokens_BS, positions_BS, attend, None, layout)[:2]

    def run(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, attend: Callable[..., Any], cache: Any, layout: Layout
    ) -> tuple[jax.Array, jax.Array, Any]:
        """As ``hidden``, with ``attend(q, k, v, mask, the layer's part of cache) -> (heads' output, what it keeps)``.

        ``cache``: arrays with a leading axis of layers, or None; the third result is what the layers keep, likewise.
        """
        table_VD = layout.gather(self.embedding).table[...]
        with jax.named_scope("embedding"):
            x_BSD = layout.embed(table_VD, tokens_BS)
        if self.config.embed_scale:
            x_BSD = x_BSD * jnp.asarray(self.config.embed**0.5, x_BSD.dtype)
        graph, params = nnx.split(self.layers)

        def layer(mask: Mask, cos: jax.Array, sin: jax.Array, x_BSD: jax.Array, of_layer: Any) -> tuple[jax.Array, Any]:
            params, cache = of_layer
            with jax.named_scope("layers"):
                own = layout.gather(nnx.merge(graph, params))
                return own(x_BSD, cos, sin, lambda q, k, v: attend(q, k, v, mask, cache), layout)

        kinds = [
            functools.partial(layer, mask, *rope.tables(config, self.config.width_of_head, positions_BS))
            for mask, config in self.config.kinds()
        ]
        x_BSD, kept = _run(kinds, x_BSD, (params, cache), self.config, layout)
        head, x_BSD = (None, x_BSD) if self.head is None else layout.reduce_first(self.head, x_BSD)
        x_BSD = layout.gather(self.final_norm)(x_BSD)
        head_DV = table_VD.T if head is None else layout.gather(head).kernel[...]
        return x_BSD, head_DV, kept

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        layout: Layout = SingleDevice(),  # noqa: B008 (frozen)
    ) -> jax.Array:
        """Logits [B, S, V] in fp32, for small batches on one device; training never makes them whole."""
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        x_BSD, head_DV = self.hidden(tokens_BS, positions_BS, segments_BS, layout)
        logits_BSV = jnp.einsum("bsd,dv->bsv", x_BSD, head_DV, preferred_element_type=jnp.float32)
        return softcapped(logits_BSV, self.config.logit_softcap)


def stack(make: Any, rngs: nnx.Rngs, count: int) -> Any:
    """``count`` modules as one whose weights have a leading ``layers`` axis; layer ``i`` has the i-th key."""
    keys = jax.random.split(rngs.params(), count)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(keys[0])))
    return nnx.merge(graph, jax.vmap(lambda key: nnx.split(make(key))[1])(keys))


def _run(kinds: Sequence[Callable[..., Any]], x: Any, stacked: Any, config: DecoderConfig, layout: Layout) -> Any:
    """Layer after layer, ``x, kept = kinds[i % len(kinds)](x, stacked[i])``: a scan over groups of one layer per kind.

    Layers beyond the last whole group follow the scan. Unrolled whole, there is none: it would stack what the backward
    pass needs.
    """
    unrolled, period = config.scan_unroll == config.num_layers, len(kinds)
    groups = 0 if unrolled else config.num_layers // period
    looped, rest = _cut(stacked, groups * period)

    def body(x: Any, group: Any) -> Any:
        return _each([layout.remat(kind, in_loop=True) for kind in kinds], x, group, period)

    kept = []
    if groups:
        looped = jax.tree.map(lambda w: w.reshape(groups, period, *w.shape[1:]), looped)
        x, of_groups = jax.lax.scan(body, x, looped, unroll=max(1, config.scan_unroll // period))
        kept.append(jax.tree.map(lambda w: w.reshape(groups * period, *w.shape[2:]), of_groups))
    if count := config.num_layers - groups * period:
        x, of_rest = _each([layout.remat(kind, in_loop=False) for kind in kinds], x, rest, count)
        kept.append(of_rest)
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept)


def _each(kinds: Sequence[Callable[..., Any]], x: Any, stacked: Any, count: int) -> Any:
    """``count`` layers in a plain loop."""
    kept = []
    for i, one in enumerate(_unstack(stacked, count)):
        x, of_layer = kinds[i % len(kinds)](x, one)
        kept.append(of_layer)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *kept)


def _cut(stacked: Any, count: int) -> tuple[Any, Any]:
    """The first ``count`` layers and the others (the transpose of the split is one concatenation)."""
    leaves, structure = jax.tree.flatten(stacked)
    parts = [jax.lax.split(w, (count, w.shape[0] - count)) for w in leaves]
    return jax.tree.unflatten(structure, [p[0] for p in parts]), jax.tree.unflatten(structure, [p[1] for p in parts])


def _unstack(params: Any, count: int) -> list[Any]:
    """The parameters of each of ``count`` layers (the transpose of the split is one concatenation)."""
    split = jax.tree.map(lambda w: [x[0] for x in jax.lax.split(w, (1,) * count)], params)
    return [jax.tree.map(lambda w, i=i: w[i], split, is_leaf=lambda x: isinstance(x, list)) for i in range(count)]
