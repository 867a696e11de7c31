"""Causal attention in XLA operations, for any platform, without an S x S array at training lengths.

Up to ``CHUNK`` positions it is one dense block. Beyond that the mask is cut into CHUNK x CHUNK blocks, and one scan
runs over the list of blocks that the mask leaves (the causal half, or the band of a sliding window), with an online
softmax going forward and recomputed probabilities going back (Dao et al., arXiv:2205.14135). ``attend_cached`` is the
attention of one new position to a cache of keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpar.compat import as_varying, varying_axes

CHUNK = 512
NEVER = -1e30  # a masked logit: finite, so that a row with no key stays finite


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees, besides its own segment: none later, none ``window`` or more positions back."""

    window: int | None = None
    softcap: float | None = None  # of the logits, see ``softcapped``
    scale: float | None = None  # factor on the logits; none: head_dim ** -0.5

    def scaled(self, q_BSHK: jax.Array) -> jax.Array:
        """The queries times ``scale``."""
        scale = q_BSHK.shape[-1] ** -0.5 if self.scale is None else self.scale
        return q_BSHK * jnp.asarray(scale, q_BSHK.dtype)


def softcapped(logits: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(logits / cap)`` (Gemma 2, arXiv:2408.00118); no ``cap``: the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    q_segments_BS: jax.Array | None,
    k_segments_BT: jax.Array | None,
    mask: Mask = Mask(),
    q_offset: jax.Array | int = 0,
    chunk: int = CHUNK,
) -> jax.Array:
    """Causal grouped-query attention, [B, S, H, K].

    Segments are document numbers: a query sees the keys of its own document only (``None``: one document). Query ``s``
    stands at position ``q_offset + s`` of the keys. Softmax in fp32; no collectives.
    """
    B, S, H, K = q_BSHK.shape
    G = k_BTGK.shape[2]
    if H % G:
        raise ValueError(f"{H} query heads are not a multiple of {G} key/value heads")
    R = H // G
    q = mask.scaled(q_BSHK).reshape(B, S, G, R, K).swapaxes(2, 3).reshape(B, S * R, G, K)
    if q_segments_BS is not None:
        q_segments_BS = jnp.repeat(q_segments_BS, R, axis=1)
    aligned = isinstance(q_offset, int) and q_offset == 0
    if max(S, k_BTGK.shape[1]) <= chunk:
        o = checkpoint_name(_dense(q, k_BTGK, v_BTGK, q_segments_BS, k_segments_BT, q_offset, mask, R), "attended")
    else:
        o = _in_blocks(q, k_BTGK, v_BTGK, q_segments_BS, k_segments_BT, q_offset, mask, R, chunk, aligned)
    return o.reshape(B, S, R, G, K).swapaxes(2, 3).reshape(B, S, H, K)


def attend_cached(
    q_BHK: jax.Array,
    k_BGK: jax.Array,
    v_BGK: jax.Array,
    cached_k_BTGK: jax.Array,
    cached_v_BTGK: jax.Array,
    at_B: jax.Array,
    mask: Mask = Mask(),
) -> jax.Array:
    """What the query at position ``at_B`` of each row reads, [B, H, K]: its own key, and those cached before it.

    Slot ``t`` of the cache holds position ``t``; slots from ``at_B`` on are not looked at, whatever they hold. Softmax
    in fp32; no collectives.
    """
    B, H, K = q_BHK.shape
    T, G = cached_k_BTGK.shape[1:3]
    q = mask.scaled(q_BHK).reshape(B, G, H // G, K)
    ago_BT = at_B[:, None] - jnp.arange(T)
    seen_BT = (ago_BT > 0) & (ago_BT < (mask.window or T + 1))
    cached = jnp.einsum("bgrk,btgk->bgrt", q, cached_k_BTGK, preferred_element_type=jnp.float32)
    own = jnp.einsum("bgrk,bgk->bgr", q, k_BGK, preferred_element_type=jnp.float32)
    s = softcapped(jnp.concatenate([cached, own[..., None]], axis=-1), mask.softcap)
    seen = jnp.pad(seen_BT, ((0, 0), (0, 1)), constant_values=True)[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, s, NEVER), axis=-1).astype(v_BGK.dtype)
    values = jnp.where(seen_BT[..., None, None], cached_v_BTGK, 0)  # what an unused slot holds may be anything
    o = jnp.einsum("bgrt,btgk->bgrk", p[..., :-1], values, preferred_element_type=jnp.float32)
    o += p[..., -1:] * v_BGK[:, :, None]
    return o.astype(q_BHK.dtype).reshape(B, H, K)


def _visible(q_at: jax.Array, k_at: jax.Array, q_seg: Any, k_seg: Any, window: int | None) -> jax.Array:
    """[B or 1, 1, S, T]: whether the query at position ``q_at`` sees the key at ``k_at``."""
    seen = q_at[:, None] >= k_at[None, :]
    if window is not None:
        seen &= q_at[:, None] - k_at[None, :] < window
    seen = seen[None]
    if q_seg is not None:
        seen = seen & (q_seg[:, :, None] == k_seg[:, None, :])
    return seen[:, None]


def _logits(q: jax.Array, k: jax.Array, softcap: float | None) -> jax.Array:
    return softcapped(jnp.einsum("bsgk,btgk->bgst", q, k, preferred_element_type=jnp.float32), softcap)


# From here on the R query heads that share a key head are R rows of one position: q is [B, S * R, G, K], row r of it
# stands at position r // R, and plain multi-head attention is R = 1.


def _dense(
    q: jax.Array, k: jax.Array, v: jax.Array, q_seg: Any, k_seg: Any, q_offset: Any, mask: Mask, R: int
) -> jax.Array:
    seen = _visible(q_offset + jnp.arange(q.shape[1]) // R, jnp.arange(k.shape[1]), q_seg, k_seg, mask.window)
    p = jax.nn.softmax(jnp.where(seen, _logits(q, k, mask.softcap), NEVER), axis=-1)
    return jnp.einsum("bgst,btgk->bsgk", p.astype(v.dtype), v)


def block_pairs(queries: int, keys: int, chunk: int, window: int | None, aligned: bool) -> np.ndarray:
    """The (query block, key block) pairs that the mask leaves, [pairs, 2]; all of them unless ``aligned``."""
    return np.array(
        [
            (i, j)
            for i in range(queries)
            for j in range(keys)
            if not aligned or (j <= i and (window is None or (i - j - 1) * chunk + 1 < window))
        ],
        np.int32,
    )


def _in_blocks(q, k, v, q_seg, k_seg, q_offset, mask, R, chunk, aligned):
    """Pad to whole blocks with positions that see only each other, run the blocks, cut the padding off."""
    S, T = q.shape[1], k.shape[1]  # S: rows
    if q_seg is None:
        q_seg, k_seg = jnp.ones((1, S), jnp.int32), jnp.ones((1, T), jnp.int32)
    pad_q, pad_k = -S % (chunk * R), -T % chunk

    def pad(x: jax.Array, n: int, fill: int = 0) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, n)
        return jnp.pad(x, widths, constant_values=fill) if n else x

    args = (pad(q, pad_q), pad(k, pad_k), pad(v, pad_k), pad(q_seg, pad_q, -1), pad(k_seg, pad_k, -1))
    return _blocks(*args, jnp.asarray(q_offset, jnp.int32), mask, R, chunk, aligned)[:, :S]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _blocks(q, k, v, q_seg, k_seg, q_offset, mask, R, chunk, aligned):
    return _blocks_forward(q, k, v, q_seg, k_seg, q_offset, mask, R, chunk, aligned)[0]


def _cut(x: jax.Array, chunk: int) -> jax.Array:
    """[B, S, ...] -> [S / chunk, B, chunk, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
    """The inverse of ``_cut``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _block(i, j, qs, ks, q_segs, k_segs, q_offset, mask, R):
    """Masked logits [B, G, C * R, C] of one pair of blocks, and which of them are seen."""
    rows, C = qs.shape[2], ks.shape[2]
    q_at, k_at = q_offset + i * C + jnp.arange(rows) // R, j * C + jnp.arange(C)
    seen = _visible(q_at, k_at, q_segs[i], k_segs[j], mask.window)
    return jnp.where(seen, _logits(qs[i], ks[j], mask.softcap), NEVER), seen


def _zeros_varying_like(q: jax.Array, k: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """fp32 zeros that may differ between devices wherever q or k do."""
    return as_varying(jnp.zeros(shape, jnp.float32), varying_axes(q) | varying_axes(k))


def _blocks_forward(q, k, v, q_seg, k_seg, q_offset, mask, R, chunk, aligned):
    # Without this a rematerialised layer would know the masks of all blocks beforehand, and keep them.
    q, q_seg, k_seg, q_offset = jax.lax.optimization_barrier((q, q_seg, k_seg, q_offset))
    qs, q_segs = (_cut(x, chunk * R) for x in (q, q_seg))
    ks, vs, k_segs = (_cut(x, chunk) for x in (k, v, k_seg))
    n, B, rows, G, K = qs.shape
    zero = _zeros_varying_like(q, k, (n, B, G, rows))
    acc = _zeros_varying_like(q, k, (n, B, G, rows, K))

    def step(carry, pair):
        top, total, acc = carry
        i, j = pair
        s, seen = _block(i, j, qs, ks, q_segs, k_segs, q_offset, mask, R)
        new_top = jnp.maximum(top[i], s.max(-1))
        p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0.0)
        keep = jnp.exp(top[i] - new_top)
        pv = jnp.einsum("bgst,btgk->bgsk", p.astype(v.dtype), vs[j], preferred_element_type=jnp.float32)
        carry = (
            top.at[i].set(new_top),
            total.at[i].set(total[i] * keep + p.sum(-1)),
            acc.at[i].set(acc[i] * keep[..., None] + pv),
        )
        return carry, None

    pairs = block_pairs(n, ks.shape[0], chunk, mask.window, aligned)
    (top, total, acc), _ = jax.lax.scan(step, (zero + NEVER, zero, acc), jnp.asarray(pairs))
    total = jnp.maximum(total, 1e-30)
    o_cut = (acc / total[..., None]).swapaxes(2, 3).astype(q.dtype)
    lse = top + jnp.log(total)
    o, lse = checkpoint_name(_join(o_cut), "attended"), checkpoint_name(lse, "attended")
    return o, (q, k, v, q_seg, k_seg, q_offset, o, lse)


def _blocks_backward(mask, R, chunk, aligned, saved, do):
    q, k, v, q_seg, k_seg, q_offset, o, lse = saved
    qs, q_segs, dos = (_cut(x, chunk * R) for x in (q, q_seg, do))
    ks, vs, k_segs = (_cut(x, chunk) for x in (k, v, k_seg))
    delta = jnp.sum(_cut(o, chunk * R).astype(jnp.float32) * dos.astype(jnp.float32), -1).swapaxes(2, 3)
    n = qs.shape[0]

    def step(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        s, seen = _block(i, j, qs, ks, q_segs, k_segs, q_offset, mask, R)
        p = jnp.where(seen, jnp.exp(s - lse[i][..., None]), 0.0)
        do_i = dos[i]
        dv_j = jnp.einsum("bgst,bsgk->btgk", p.astype(do_i.dtype), do_i, preferred_element_type=jnp.float32)
        dp = jnp.einsum("bsgk,btgk->bgst", do_i, vs[j], preferred_element_type=jnp.float32)
        ds = p * (dp - delta[i][..., None])
        if mask.softcap is not None:
            ds *= 1 - jnp.square(jnp.where(seen, s, 0.0) / mask.softcap)
        ds = ds.astype(q.dtype)
        dq_i = jnp.einsum("bgst,btgk->bsgk", ds, ks[j], preferred_element_type=jnp.float32)
        dk_j = jnp.einsum("bgst,bsgk->btgk", ds, qs[i], preferred_element_type=jnp.float32)
        return (dq.at[i].add(dq_i), dk.at[j].add(dk_j), dv.at[j].add(dv_j)), None

    pairs = block_pairs(n, ks.shape[0], chunk, mask.window, aligned)
    zeros = tuple(_zeros_varying_like(q, k, x.shape) for x in (qs, ks, vs))
    grads, _ = jax.lax.scan(step, zeros, jnp.asarray(pairs))
    dq, dk, dv = (_join(g).astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None, None, None


_blocks.defvjp(_blocks_forward, _blocks_backward)
