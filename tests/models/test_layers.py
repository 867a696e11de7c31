"""The parts of a layer that carry their own gradients, against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import rope
from jaxpar.models.layers import ACTIVATIONS, GATED, gated

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("kind", GATED)
def test_a_gate_is_a_product(kind):
    """Value and both gradients, with a cotangent that is not constant; *wrong*: the two gradients exchanged."""
    gate, up, weight = (jnp.asarray(RANDOM.normal(size=(3, 5, 7)), jnp.float32) for _ in range(3))

    def loss(multiply, gate, up):
        return jnp.sum(multiply(gate, up) * weight)

    got = jax.jit(jax.value_and_grad(lambda *x: loss(lambda g, u: gated(g, u, kind), *x), (0, 1)))(gate, up)
    want = jax.value_and_grad(lambda *x: loss(lambda g, u: ACTIVATIONS[kind](g) * u, *x), (0, 1))(gate, up)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6)


def test_a_gate_under_recomputation_and_batching():
    """The custom gradient goes through ``checkpoint``, ``scan`` and ``vmap`` alike."""
    gate, up = (jnp.asarray(RANDOM.normal(size=(4, 6)), jnp.float32) for _ in range(2))

    def scanned(gate, up):
        def body(total, row):
            return total + jax.checkpoint(lambda g, u: jnp.sum(gated(g, u, "swiglu") ** 2))(*row), None

        return jax.lax.scan(body, 0.0, (gate, up))[0]

    def plain(gate, up):
        return jnp.sum((jax.nn.silu(gate) * up) ** 2)

    def batched(gate, up):
        return jnp.sum(jax.vmap(lambda g, u: gated(g, u, "swiglu"))(gate, up) ** 2)

    want = jax.grad(plain, (0, 1))(gate, up)
    for function in (scanned, batched):
        for g, w in zip(jax.grad(function, (0, 1))(gate, up), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("K", [2, 6, 128])
def test_halves_exchanged_by_a_product(K, dtype):
    """The very numbers that moving gives, in either dtype; *wrong*: rolled by half in the other direction of an odd
    half, or summed with a rounding."""
    x = jnp.asarray(RANDOM.normal(size=(2, 3, 4, K)), dtype)
    with jax.default_matmul_precision("highest"):
        moved, multiplied = rope.roll(x), rope.multiply(x)
    assert multiplied.dtype == x.dtype
    np.testing.assert_array_equal(multiplied, moved)
    np.testing.assert_array_equal(moved, np.concatenate([x[..., K // 2 :], x[..., : K // 2]], -1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_rotation_and_its_gradient_by_either_way(dtype):
    """Exchanging is its own transpose."""
    x, weight = (jnp.asarray(RANDOM.normal(size=(1, 5, 2, 16)), dtype) for _ in range(2))
    cos, sin = rope.tables(rope.RopeConfig(), 16, jnp.arange(5)[None])

    def loss(x, swap):
        return jnp.sum(rope.rotate(x, cos, sin, swap).astype(jnp.float32) * weight.astype(jnp.float32))

    with jax.default_matmul_precision("highest"):
        for function in (lambda x, s: rope.rotate(x, cos, sin, s), jax.grad(loss)):
            np.testing.assert_array_equal(function(x, rope.multiply), function(x, rope.roll))
