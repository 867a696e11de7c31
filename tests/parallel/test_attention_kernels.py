"""Which kernel runs where, and TPU's splash kernel, interpreted, against the chunked path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.attention import Mask, attention
from jaxpar.parallel.attention import _splash, choose_kernel

PLAIN = dict(seq_len=1024, head_dim=128, dtype=jnp.bfloat16, documents_masked=True, softcap=None)


@pytest.mark.parametrize(
    "platform, changes, kernel, reason",
    [
        ("cpu", {}, "chunked", "the platform is cpu"),
        ("tpu", {}, "splash", "the platform is tpu"),
        ("tpu", dict(seq_len=1000), "chunked", "seq_len % 128"),
        ("tpu", dict(head_dim=80), "chunked", "head_dim % 64"),
        ("tpu", dict(context=2), "chunked", "context"),
        ("gpu", dict(cudnn=True, documents_masked=False), "cudnn", "the platform is gpu"),
        ("gpu", dict(cudnn=True), "chunked", "mask_documents"),
        ("gpu", dict(cudnn=False, documents_masked=False), "chunked", "not installed"),
        ("gpu", dict(cudnn=True, documents_masked=False, dtype=jnp.float32), "chunked", "16-bit"),
        ("gpu", dict(cudnn=True, documents_masked=False, head_dim=320), "chunked", "head_dim"),
    ],
)
def test_the_kernel_follows_the_platform_of_the_mesh(platform, changes, kernel, reason):
    found, why = choose_kernel(platform, **{**PLAIN, **changes})
    assert found == kernel and reason in why


@pytest.mark.parametrize("heads, kv_heads, mask", [(2, 2, Mask()), (4, 2, Mask(window=100)), (2, 1, Mask(softcap=5.0))])
def test_splash_is_the_same_attention(heads, kv_heads, mask):
    """Value and gradients, two documents, with a cotangent that is not constant; heads share keys in the same order."""
    random = np.random.default_rng(0)
    B, S, K = 1, 256, 64
    q, k, v, weight = (
        jnp.asarray(random.normal(size=(B, S, n, K)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    segments = jnp.asarray(np.arange(S)[None] >= 150, jnp.int32)

    def loss(run, *qkv):
        return jnp.sum(run(*qkv) * weight)

    def splash(q, k, v):
        return _splash(q, k, v, segments, mask, interpret=True)

    def chunked(q, k, v):
        return attention(q, k, v, segments, segments, mask)

    got, want = (jax.value_and_grad(loss, (1, 2, 3))(run, q, k, v) for run in (splash, chunked))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(b).max()))
