"""Cross-entropy over a sharded vocabulary, in chunks of tokens: the whole fp32 logits never exist.

The gradient is made together with the value, chunk by chunk (as Liger-Kernel's fused linear cross-entropy does), so
the logits are computed once. Vocabulary parallelism as in Megatron-LM (arXiv:1909.08053): a maximum and two sums of one
number per token cross the axis.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.compat import as_varying, varying_axes
from jaxpar.models.attention import softcapped

LOGITS = 1 << 25  # logits of a chunk: 128 MiB in fp32


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def cross_entropy(
    h_ND: jax.Array,
    head_DV: jax.Array,
    targets_N: jax.Array,
    mask_N: jax.Array,
    z_loss: jax.Array,
    softcap: float | None,
    axis: str | None,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the unmasked tokens of -log p(target) + z_loss * logsumexp^2, and of -log p(target) alone.

    ``head_DV``: this device's columns when the vocabulary is split over mesh ``axis``, whose devices hold the same
    tokens: each returns its equal share of the sums. The gradient returned by each is that of all shares together with
    respect to its own columns, or through its own columns: what the sum over devices of the shares asks for, provided
    that the cotangent is the same on all of them.  Differentiable in ``h_ND`` and ``head_DV``, by the first sum only.
    Collectives: per chunk a pmax and two psums of [C] over ``axis``. z-loss: PaLM, section 5.
    """
    return _run(h_ND, head_DV, targets_N, mask_N, z_loss, softcap, axis, chunk, False)[0]


def default_chunk(tokens: int, vocab: int) -> int:
    """Tokens per chunk: a chunk of logits stays near 128 MiB, but has rows enough to pay for reading the head."""
    return max(1, min(tokens, max(LOGITS // vocab // 256 * 256, 1024)))


def _run(h, w, targets, mask, z_loss, softcap, axis, chunk, with_grad):
    N, D = h.shape
    V = w.shape[1]
    axes = frozenset().union(*(varying_axes(x) for x in (h, w, targets, mask)))
    first = jax.lax.axis_index(axis) * V if axis else 0
    ways = jax.lax.axis_size(axis) if axis else 1
    columns = first + jnp.arange(V)

    def across(x: jax.Array, reduce: Any) -> jax.Array:
        return as_varying(reduce(x, axis), axes) if axis else x

    def part(dw: jax.Array, h: jax.Array, targets: jax.Array, mask: jax.Array) -> Any:
        logits = softcapped(jnp.einsum("nd,dv->nv", h, w, preferred_element_type=jnp.float32), softcap)
        top = across(logits.max(-1), jax.lax.pmax)
        lse = top + jnp.log(across(jnp.exp(logits - top[:, None]).sum(-1), jax.lax.psum))
        hit = columns == targets[:, None]
        nll = lse - across(jnp.where(hit, logits, 0.0).sum(-1), jax.lax.psum)
        sums = jnp.stack([jnp.sum(mask * (nll + z_loss * lse**2)), jnp.sum(mask * nll)]) / ways
        if not with_grad:
            return sums, dw, None
        p = jnp.exp(logits - lse[:, None])
        d = mask[:, None] * (p * (1 + 2 * z_loss * lse)[:, None] - hit)
        if softcap is not None:
            d *= 1 - jnp.square(logits / softcap)
        d = d.astype(h.dtype)
        dw += jnp.einsum("nd,nv->dv", h, d, preferred_element_type=jnp.float32)
        return sums, dw, jnp.einsum("nv,dv->nd", d, w)

    mask = mask.astype(jnp.float32)
    dw = as_varying(jnp.zeros((D, V) if with_grad else (), jnp.float32), axes)
    if chunk >= N:
        sums, dw, dh = part(dw, h, targets, mask)
        return (sums[0], sums[1]), (dh, dw)

    pad = -N % chunk
    cut = lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])  # noqa: E731

    def step(carry: Any, xs: Any) -> Any:
        sums, dw = carry
        more, dw, dh = part(dw, *xs)
        return (sums + more, dw), dh

    zero = as_varying(jnp.zeros(2, jnp.float32), axes)
    (sums, dw), dh = jax.lax.scan(step, (zero, dw), (cut(h), cut(targets), cut(mask)))
    return (sums[0], sums[1]), (None if dh is None else dh.reshape(-1, D)[:N], dw)


def _forward(h, w, targets, mask, z_loss, softcap, axis, chunk):
    out, (dh, dw) = _run(h, w, targets, mask, z_loss, softcap, axis, chunk, True)
    return out, (dh, dw, jnp.zeros((), w.dtype))


def _backward(softcap, axis, chunk, saved, g):  # g[1]: the plain loss is a metric, nothing is differentiated by it
    dh, dw, like = saved
    return ((dh * g[0]).astype(dh.dtype), (dw * g[0]).astype(like.dtype), None, None, None)


cross_entropy.defvjp(_forward, _backward)
