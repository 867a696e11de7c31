"""Attention in blocks against a dense softmax: values, dq, dk and dv under a cotangent that is not constant (E4)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxpar.models.attention import Mask, attention, block_pairs


def inputs(queries, keys, heads=4, kv_heads=2, dtype=np.float32):
    rng = np.random.default_rng(queries * 100 + keys)
    q, do = (rng.normal(size=(2, queries, heads, 6)).astype(dtype) for _ in range(2))
    k, v = (rng.normal(size=(2, keys, kv_heads, 6)).astype(dtype) for _ in range(2))
    return (2 * q, 2 * k, v), do


def dense(qkv, do, segments, offset, mask):
    """The oracle's values and gradients in float64; the queries are those from ``offset`` on."""
    q, _, _ = qkv
    seen = oracle.sees(segments, mask.window)[:, offset : offset + q.shape[1]]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*qkv, do)]

        def run(q, k, v, do):
            o, back = jax.vjp(
                lambda q, k, v: oracle.softmax_attention(q, k, v, seen, mask.softcap, mask.scale), q, k, v
            )
            return o, *back(do)

        return jax.tree.map(np.asarray, jax.jit(run, compiler_options=oracle.FAST_COMPILE)(*wide))


def ours(qkv, do, segments, offset, mask, chunk, traced=False):
    """The same of ``attention``."""
    q_segments = None if segments is None else segments[:, offset : offset + qkv[0].shape[1]]

    def run(qkv, do, at):
        o, back = jax.vjp(lambda q, k, v: attention(q, k, v, q_segments, segments, mask, at, chunk), *qkv)
        return o, *back(do)

    run = jax.jit(run, static_argnums=() if traced else 2, compiler_options=oracle.FAST_COMPILE)
    return run(qkv, do, jnp.int32(offset) if traced else offset)


CASES = {
    "dense": dict(chunk=64),
    "dense window softcap": dict(chunk=64, mask=Mask(4, 1.5)),
    "blocks": dict(chunk=8),
    "blocks of a length that does not divide": dict(chunk=5),
    "one key/value head": dict(chunk=5, kv_heads=1),
    "window of blocks": dict(chunk=8, mask=Mask(16)),
    "window inside a block": dict(chunk=8, mask=Mask(3)),
    "window of two": dict(chunk=4, mask=Mask(2)),
    "softcap": dict(chunk=5, mask=Mask(softcap=1.5)),
    "scale": dict(chunk=5, mask=Mask(softcap=1.5, scale=0.3)),
    "documents": dict(chunk=8, documents=True),
    "everything": dict(chunk=5, mask=Mask(7, 1.5), documents=True),
    "offset": dict(chunk=5, queries=9, offset=11, mask=Mask(8), documents=True),
    "traced offset": dict(chunk=4, queries=8, offset=10, documents=True, traced=True),
    "traced offset of zero": dict(chunk=4, queries=8, offset=0, traced=True, mask=Mask(softcap=2.0)),
    "dense offset": dict(chunk=64, queries=9, offset=11, mask=Mask(8), documents=True, traced=True),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_dense_attention(case):
    """Keys at half their gradient, or a band one key too wide or too narrow, are far outside."""
    keys, options = 24 if case == "blocks" else 22, dict(CASES[case])
    mask, documents = options.pop("mask", Mask()), options.pop("documents", False)
    offset, queries = options.pop("offset", 0), options.pop("queries", keys)
    qkv, do = inputs(queries, keys, kv_heads=options.pop("kv_heads", 2))
    segments = np.sort(np.random.default_rng(3).integers(1, 4, (2, keys)), -1) if documents else None
    whole = np.ones((2, keys), int) if segments is None else segments
    want = dense(qkv, do, whole, offset, mask)
    got = ours(qkv, do, segments, offset, mask, **options)
    got, want = (dict(zip(("o", "dq", "dk", "dv"), x, strict=True)) for x in (got, want))
    oracle.assert_leaves_close(got, want, 3e-6)


def test_sixteen_bits():
    """bfloat16 inputs give bfloat16 outputs near the exact ones of the same inputs."""
    qkv, do = inputs(22, 22)
    qkv, do = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (qkv, do))
    want = dense(qkv, do, np.ones((2, 22), int), 0, Mask())
    for chunk in (5, 64):
        got = ours(qkv, do, None, 0, Mask(), chunk)
        assert all(x.dtype == jnp.bfloat16 for x in got)
        oracle.assert_leaves_close(got, want, 3e-2)


@pytest.mark.parametrize("chunk, window", list(itertools.product([1, 4, 5], [None, 1, 2, 4, 5, 6, 9, 100])))
def test_pairs_are_those_with_something_to_see(chunk, window):
    """Exactly the causal half or the window's band, no block more."""
    n = 5
    at = np.arange(n * chunk)
    ago = at[:, None] - at[None, :]
    seen = (ago >= 0) & (ago < (window or n * chunk))
    want = [(i, j) for i in range(n) for j in range(n) if seen.reshape(n, chunk, n, chunk)[i, :, j].any()]
    assert block_pairs(n, n, chunk, window, aligned=True).tolist() == [list(pair) for pair in want]
    if window is None:
        assert len(want) == n * (n + 1) // 2


def test_unaligned_queries_keep_every_pair():
    """Where the offset is not known before the run, no block can be left out."""
    assert len(block_pairs(2, 5, 4, 3, aligned=False)) == 10


def test_heads_that_do_not_divide():
    """Grouped queries need whole groups."""
    (q, k, v), _ = inputs(4, 4, heads=3)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        attention(q, k, v, None, None)


def test_no_square_of_the_length_at_training_lengths():
    """Forward and backward of 2048 positions hold no buffer of 2048 x 2048."""
    x = jax.ShapeDtypeStruct((1, 2048, 2, 8), jnp.float32)

    def loss(q, k, v):
        return attention(q, k, v, None, None, Mask()).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile(oracle.FAST_COMPILE)
    shapes = oracle.shapes(compiled.as_text())
    assert any(shape.count(512) == 2 for shape in shapes)
    assert not any(shape.count(2048) > 1 for shape in shapes)
