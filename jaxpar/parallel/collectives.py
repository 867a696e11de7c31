"""Weight gathers whose backward pass is a reduce-scatter in fp32."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(shard: jax.Array, axis: str, dim: int, dtype: Any) -> jax.Array:
    """ZeRO-3: all-gather ``shard`` along ``dim`` over mesh ``axis`` in ``dtype``.

    Backward: the gradient is reduce-scattered over ``axis`` in fp32, so each device gets its shard of the sum.
    """
    return jax.lax.all_gather(shard.astype(dtype), axis, axis=dim, tiled=True)


def _gather_forward(shard: jax.Array, axis: str, dim: int, dtype: Any) -> tuple[jax.Array, None]:
    return gather_weight(shard, axis, dim, dtype), None


def _scatter(axis: str, dim: int, g: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(g.astype(jnp.float32), axis, scatter_dimension=dim, tiled=True)


gather_weight.defvjp(_gather_forward, lambda axis, dim, dtype, _, g: (_scatter(axis, dim, g),))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lent:
    """ZeRO-2: a whole parameter to read, and this device's shard of it to differentiate by."""

    whole: jax.Array
    shard: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def read_lent(whole: jax.Array, shard: jax.Array, axis: str, dim: int, dtype: Any) -> jax.Array:
    """The whole parameter in ``dtype``, no collective.

    Backward: its gradient leaves as a reduce-scatter over ``axis``, in fp32, to ``shard``.
    """
    return whole.astype(dtype)


def _read_forward(whole: jax.Array, shard: jax.Array, axis: str, dim: int, dtype: Any) -> tuple[jax.Array, None]:
    return whole.astype(dtype), None


read_lent.defvjp(_read_forward, lambda axis, dim, dtype, _, g: (None, _scatter(axis, dim, g)))


def local_shard(whole: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part of ``whole`` along ``dim``, no collective."""
    size = whole.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axis) * size, size, dim)
