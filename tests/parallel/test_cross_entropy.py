"""Cross-entropy in chunks, whole or split over the vocabulary, against full float64 logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxpar.compat import as_varying
from jaxpar.parallel.cross_entropy import cross_entropy, default_chunk

N, D, V = 11, 8, 12
RNG = np.random.default_rng(0)
H, W = RNG.normal(size=(N, D)).astype(np.float32), 2 * RNG.normal(size=(D, V)).astype(np.float32)
TARGETS, MASK = RNG.integers(0, V, N).astype(np.int32), RNG.random(N) < 0.7


@functools.cache
def expected(z_loss, softcap):
    """Objective, loss, dh, dw."""
    with jax.enable_x64(True):

        def objective(h, w):
            logits = h @ w
            if softcap:
                logits = softcap * jnp.tanh(logits / softcap)
            nll, lse = oracle.token_losses(logits[None], TARGETS[None])
            return (MASK * (nll + z_loss * lse**2)).sum(), (MASK * nll).sum()

        wide = (jnp.asarray(x.astype(np.float64)) for x in (H, W))
        grad = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), compiler_options=oracle.FAST_COMPILE)
        (total, loss), grads = grad(*wide)
        return jax.tree.map(np.asarray, (total, loss, *grads))


def close(got, want):
    oracle.assert_leaves_close(dict(zip("olhw", got, strict=True)), dict(zip("olhw", want, strict=True)), 2e-6)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("z_loss, softcap", [(0.0, None), (0.3, None), (0.0, 3.0), (0.3, 3.0)])
def test_whole_vocabulary(chunk, z_loss, softcap):
    """Also where the chunk (4) does not divide the tokens (11)."""

    def objective(h, w):
        return cross_entropy(h, w, TARGETS, MASK, jnp.float32(z_loss), softcap, None, chunk)

    grad = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), compiler_options=oracle.FAST_COMPILE)
    (total, loss), grads = grad(H, W)
    close((total, loss, *grads), expected(z_loss, softcap))
    value = jax.jit(objective, compiler_options=oracle.FAST_COMPILE)(H, W)  # without a gradient
    np.testing.assert_allclose(value, (total, loss), rtol=1e-6)


def test_the_cotangent_scales_the_gradient():
    """And only the objective's does: the reported loss is not differentiated."""

    def objective(h, w, first, second):
        total, loss = cross_entropy(h, w, TARGETS, MASK, jnp.float32(0.3), None, None, 4)
        return first * total + second * loss

    grads = jax.grad(objective, (0, 1))(jnp.asarray(H), jnp.asarray(W), 0.25, 7.0)
    _, _, dh, dw = expected(0.3, None)
    oracle.assert_leaves_close(grads, (dh / 4, dw / 4), 2e-6)


def test_the_cotangent_is_not_rounded_to_the_compute_dtype():
    """1/2024 in bfloat16 is 0.37 % too large: a gradient scaled by it would be 1.0037 times the right one."""
    h, w = jnp.asarray(H, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)

    def grad(scale):
        return jax.grad(lambda h: scale * cross_entropy(h, w, TARGETS, MASK, jnp.float32(0), None, None, 64)[0])(h)

    one, scaled = (np.asarray(grad(jnp.float32(s)), np.float64) for s in (1.0, 1 / 2024))
    np.testing.assert_allclose(np.vdot(scaled, one) / np.vdot(one, one) * 2024, 1, atol=1e-3)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("check_vma", [True, False])
def test_split_vocabulary(check_vma, ways, chunk):
    """Shares add up to the loss, not to ``ways`` times it; dh is the sum over devices, dw each device's own."""
    mesh = jax.make_mesh((ways,), ("tensor",), devices=jax.devices()[:ways])
    P = jax.sharding.PartitionSpec

    def local(h, w, targets, mask):
        h, targets, mask = as_varying((h, targets, mask), ("tensor",))

        def objective(h, w):
            return cross_entropy(h, w, targets, mask, jnp.float32(0.3), 3.0, "tensor", chunk)

        (total, loss), (dh, dw) = jax.value_and_grad(objective, (0, 1), has_aux=True)(h, w)
        alone = jax.lax.psum(jnp.stack(objective(h, w)), "tensor")
        return *jax.lax.psum((total, loss, dh), "tensor"), dw, alone

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            local,
            in_specs=(P(), P(None, "tensor"), P(), P()),
            out_specs=(P(), P(), P(), P(None, "tensor"), P()),
            check_vma=check_vma,
        )
        args = (H, jax.device_put(W, jax.NamedSharding(mesh, P(None, "tensor"))), TARGETS, MASK)
        *got, alone = jax.jit(run, compiler_options=oracle.FAST_COMPILE)(*args)
    close(got, expected(0.3, 3.0))
    np.testing.assert_allclose(alone, got[:2], rtol=1e-6)


@pytest.mark.parametrize("chunk", [4, 64])
def test_nothing_valid(chunk):
    """Zero, and zero gradients; not NaN."""

    def objective(h, w):
        return cross_entropy(h, w, TARGETS, np.zeros(N, bool), jnp.float32(0.3), None, None, chunk)

    out = jax.value_and_grad(objective, (0, 1), has_aux=True)(H, W)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(out))


def test_large_logits():
    """Logits of thousands: the maximum is taken out before the exponential."""
    total, loss = cross_entropy(1000 * H, W, TARGETS, MASK, jnp.float32(0), None, None, 4)
    logits = 1000.0 * H.astype(np.float64) @ W
    nll, _ = oracle.token_losses(jnp.asarray(logits, jnp.float32)[None], TARGETS[None])
    np.testing.assert_allclose(total, (MASK * nll).sum(), rtol=1e-5)
    assert np.isfinite(loss)


def test_chunks_stay_near_128_mebibytes():
    """As many tokens as fit 2^25 logits, in 256s; 1024 at least, never more than there are."""
    assert default_chunk(10_000, 1 << 13) == 4096
    assert default_chunk(10_000, 10_000) == 3328
    assert default_chunk(10_000, 1 << 20) == 1024
    assert default_chunk(100, 1 << 15) == 100


def test_no_buffer_of_all_logits():
    """At 4096 tokens and 32768 words, forward and backward hold 1024 x 32768 logits at most."""
    tokens, words = 4096, 1 << 15

    def loss(h, w, targets, mask):
        return cross_entropy(h, w, targets, mask, jnp.float32(0), None, None, default_chunk(tokens, words))[0]

    shapes = [((tokens, 4), jnp.float32), ((4, words), jnp.float32), ((tokens,), jnp.int32), ((tokens,), jnp.bool_)]
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes))
    shapes = oracle.shapes(lowered.compile(oracle.FAST_COMPILE).as_text())
    assert max(np.prod(shape) for shape in shapes if words in shape) == 1024 * words
