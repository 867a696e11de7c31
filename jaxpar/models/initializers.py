"""Random weights that are bit for bit the same on every mesh, and cheap to compile.

XLA's inverse error function rounds differently with the shape a device holds, and each Threefry call costs half a
second of compile time. So a weight is looked up in a table of normal quantiles by a hash of (key, position): integers
only, the same wherever they are computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@functools.cache
def _quantiles() -> np.ndarray:
    """65,536 equally likely values of a unit normal cut at two standard deviations, rescaled to unit variance."""
    from scipy.special import ndtr, ndtri

    share = (np.arange(1 << 16) + 0.5) / (1 << 16)
    values = ndtri(ndtr(-2.0) + share * (ndtr(2.0) - ndtr(-2.0)))
    return (values / values.std()).astype(np.float32)


def hashed_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each position of ``shape`` (at most 2**32 positions), a function of key and position.

    Two rounds of Wellons' ``lowbias32`` integer hash, one for each word of the key.
    """
    if np.prod(shape, dtype=np.float64) > 2**32:
        raise ValueError(f"{shape} has more than 2**32 positions")
    position = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride % 2**32)
        stride *= shape[dim]
    x = position
    for word in jax.random.key_data(key):
        x ^= word
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        x ^= x >> 16
    return x


def truncated_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """fp32 weights of standard deviation ``std`` from a normal cut at two of its standard deviations."""
    return jnp.asarray(_quantiles())[(hashed_bits(key, shape) >> 16).astype(jnp.int32)] * np.float32(std)


def weight(rngs: nnx.Rngs, std: float, **axes: int) -> nnx.Param:
    """A random weight whose logical axes and sizes are ``axes``, in order."""
    return nnx.Param(truncated_normal(rngs.params(), tuple(axes.values()), std), logical_axes=tuple(axes))


def constant(value: float, **axes: int) -> nnx.Param:
    """A constant vector (norm scale or bias) with its logical axes."""
    return nnx.Param(jnp.full(tuple(axes.values()), value, jnp.float32), logical_axes=tuple(axes))
