"""The parts of a decoder layer. Weights are (in, out); shapes in the code are this device's part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.models import rope
from jaxpar.models.initializers import constant, weight

if TYPE_CHECKING:
    from jaxpar.models.decoder import DecoderConfig
    from jaxpar.models.layout import Layout

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = ("swiglu", "geglu")

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""q [B, S, H, K], k and v [B, S, G, K] of one layer -> what the heads read [B, S, H, K], and what is kept (a cache)."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
    """activation(gate) * up.

    The gradients of both are made in one pass and written down. Left to itself XLA:TPU makes each of them twice, inside
    both products that read it.
    """
    return ACTIVATIONS[kind](gate) * up


def _gated_backward(kind: str, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, backward = jax.vjp(lambda gate, up: ACTIVATIONS[kind](gate) * up, *saved)
    return jax.lax.optimization_barrier(backward(g))


gated.defvjp(lambda gate, up, kind: (gated(gate, up, kind), (gate, up)), _gated_backward)


def _add(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """In fp32, so that the bias's gradient is summed over tokens in fp32."""
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, statistics in fp32 (Zhang & Sennrich, arXiv:1910.07467).

    With ``norm_offset`` the factor is 1 + scale.
    """

    def __init__(self, config: DecoderConfig, **axis: int):
        self.eps = config.norm_eps
        self.offset = 1.0 if config.norm_offset else 0.0
        self.scale = constant(1.0 - self.offset, **axis)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * (self.offset + self.scale[...] if self.offset else self.scale[...])).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, optional biases and QK-norm."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, K, H, G = config.embed, config.width_of_head, config.num_heads, config.num_kv_heads
        self.q = weight(rngs, D**-0.5, embed=D, heads=H, head_dim=K)
        self.k = weight(rngs, D**-0.5, embed=D, kv_heads=G, head_dim=K)
        self.v = weight(rngs, D**-0.5, embed=D, kv_heads=G, head_dim=K)
        self.o = weight(rngs, config.residual_std(H * K), heads=H, head_dim=K, embed=D)
        self.q_bias = constant(0.0, heads=H, head_dim=K) if config.qkv_bias else None
        self.k_bias = constant(0.0, kv_heads=G, head_dim=K) if config.qkv_bias else None
        self.v_bias = constant(0.0, kv_heads=G, head_dim=K) if config.qkv_bias else None
        self.o_bias = constant(0.0, embed=D) if config.out_bias else None
        self.q_norm = RMSNorm(config, head_dim=K) if config.qk_norm else None
        self.k_norm = RMSNorm(config, head_dim=K) if config.qk_norm else None

    def __call__(
        self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, layout: Layout
    ) -> tuple[jax.Array, Any]:
        x_BSD = layout.enter(x_BSD, "heads")
        with jax.named_scope("q"):
            q_BSHK = jnp.einsum("bsd,dhk->bshk", x_BSD, self.q[...])
        with jax.named_scope("k"):
            k_BSGK = jnp.einsum("bsd,dgk->bsgk", x_BSD, self.k[...])
        with jax.named_scope("v"):
            v_BSGK = jnp.einsum("bsd,dgk->bsgk", x_BSD, self.v[...])
        q_BSHK, k_BSGK, v_BSGK = _add(q_BSHK, self.q_bias), _add(k_BSGK, self.k_bias), _add(v_BSGK, self.v_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        q_BSHK, k_BSGK = (rope.rotate(x, cos, sin, layout.swap_halves) for x in (q_BSHK, k_BSGK))
        q_BSHK, k_BSGK, v_BSGK = (checkpoint_name(x, "qkv") for x in (q_BSHK, k_BSGK, v_BSGK))
        with jax.named_scope("attend"):
            o_BSHK, kept = attend(q_BSHK, k_BSGK, v_BSGK)
        with jax.named_scope("o"):
            y_BSD = layout.leave(jnp.einsum("bshk,hkd->bsd", o_BSHK, self.o[...]), "heads")
        return _add(y_BSD, self.o_bias), kept


class MLP(nnx.Module):
    """Two matrices around an activation, or three with a gate (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, F = config.embed, config.mlp_width
        self.kind = config.mlp
        self.gate = weight(rngs, D**-0.5, embed=D, mlp=F) if config.mlp in GATED else None
        self.up = weight(rngs, D**-0.5, embed=D, mlp=F)
        self.down = weight(rngs, config.residual_std(F), mlp=F, embed=D)
        self.up_bias = constant(0.0, mlp=F) if config.mlp_bias else None
        self.down_bias = constant(0.0, embed=D) if config.mlp_bias else None

    def __call__(self, x_BSD: jax.Array, layout: Layout) -> jax.Array:
        x_BSD = layout.enter(x_BSD, "mlp")
        with jax.named_scope("up"):
            h_BSF = _add(x_BSD @ self.up[...], self.up_bias)
        with jax.named_scope("gate"):
            if self.gate is None:
                h_BSF = ACTIVATIONS[self.kind](h_BSF)
            else:
                h_BSF = gated(x_BSD @ self.gate[...], h_BSF, self.kind)
        with jax.named_scope("down"):
            return _add(layout.leave(h_BSF @ self.down[...], "mlp"), self.down_bias)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with ``post_norms`` what is added is normed too."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        def post_norm() -> RMSNorm | None:
            return RMSNorm(config, embed=config.embed) if config.post_norms else None

        self.attention_norm = RMSNorm(config, embed=config.embed)
        self.attention = Attention(config, rngs=rngs)
        self.attention_post_norm = post_norm()
        self.mlp_norm = RMSNorm(config, embed=config.embed)
        self.mlp = MLP(config, rngs=rngs)
        self.mlp_post_norm = post_norm()

    def __call__(
        self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, layout: Layout
    ) -> tuple[jax.Array, Any]:
        """The residual after this layer, and what ``attend`` keeps of it."""
        x_BSD = checkpoint_name(x_BSD, "residual")
        with jax.named_scope("attention"):
            y_BSD, kept = self.attention(self.attention_norm(x_BSD), cos, sin, attend, layout)
            y_BSD = y_BSD if self.attention_post_norm is None else self.attention_post_norm(y_BSD)
        x_BSD = checkpoint_name(x_BSD + y_BSD, "attended")
        with jax.named_scope("mlp"):
            y_BSD = self.mlp(self.mlp_norm(x_BSD), layout)
            y_BSD = y_BSD if self.mlp_post_norm is None else self.mlp_post_norm(y_BSD)
        return x_BSD + y_BSD, kept
