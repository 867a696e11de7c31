"""Collectives over the ZeRO axis, staged along the torus; weight gathers whose backward pass is a reduce-scatter."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.mesh.rules import ZERO_AXIS


@dataclasses.dataclass(frozen=True)
class ZeroCollectives:
    """All-gather and reduce-scatter over the ZeRO axis, in one or more stages.

    ``stages``: the axis as a product of torus dimensions, outermost first. Over one flat axis that spans several of
    them XLA:TPU turns a large reduce-scatter into an all-reduce and a slice, twice the bytes; dimension by dimension it
    stays what it is. A single stage is the plain collective. Bytes on the wire are the same in any number of stages.
    """

    stages: tuple[int, ...]
    reduce_dtype: Any = jnp.dtype(jnp.float32)  # of matrices' gradients while devices add them; vectors': fp32

    def _groups(self) -> list[list[list[int]] | None]:
        """Of each stage, outermost first: the devices along the axis that differ in that dimension alone."""
        if len(self.stages) == 1:
            return [None]
        groups: list[list[list[int]] | None] = []
        size = math.prod(self.stages)
        for i, ways in enumerate(self.stages):
            stride = math.prod(self.stages[i + 1 :])
            first = [d for d in range(size) if d // stride % ways == 0]
            groups.append([[d + k * stride for k in range(ways)] for d in first])
        return groups

    def all_gather(self, shard: jax.Array, dim: int) -> jax.Array:
        """Concatenate the shards along ``dim``: the innermost torus dimension first."""
        for groups in reversed(self._groups()):
            shard = jax.lax.all_gather(shard, ZERO_AXIS, axis=dim, tiled=True, axis_index_groups=groups)
        return shard

    def reduce_scatter(self, whole: jax.Array, dim: int) -> jax.Array:
        """This device's shard of the sum, in the dtype of ``whole``; the outermost torus dimension first."""
        shape = list(whole.shape)
        shape[dim] //= math.prod(self.stages)
        # Without dimensions of 1: libtpu 0.0.50 refuses some (a key/value head for each device) in fp32.
        kept = [d for d, size in enumerate(whole.shape) if size > 1 or d == dim]
        whole = whole.reshape([whole.shape[d] for d in kept])
        for groups in self._groups():
            whole = jax.lax.psum_scatter(
                whole, ZERO_AXIS, scatter_dimension=kept.index(dim), tiled=True, axis_index_groups=groups
            )
        return whole.reshape(shape)

    def scatter_gradient(self, whole: jax.Array, dim: int) -> jax.Array:
        """This device's shard of a matrix's gradient, added up in ``reduce_dtype``, in fp32."""
        return self.reduce_scatter(whole.astype(self.reduce_dtype), dim).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(shard: jax.Array, zero: ZeroCollectives, dim: int, dtype: Any) -> jax.Array:
    """ZeRO-3: all-gather ``shard`` along ``dim`` over the ZeRO axis in ``dtype``.

    Backward: the gradient is reduce-scattered over the same axis, so each device gets its shard of the sum.
    """
    return zero.all_gather(shard.astype(dtype), dim)


def _gather_forward(shard: jax.Array, zero: ZeroCollectives, dim: int, dtype: Any) -> tuple[jax.Array, None]:
    return gather_weight(shard, zero, dim, dtype), None


gather_weight.defvjp(_gather_forward, lambda zero, dim, dtype, _, g: (zero.scatter_gradient(g, dim),))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lent:
    """ZeRO-2: a whole parameter to read, and this device's shard of it to differentiate by."""

    whole: jax.Array
    shard: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def read_lent(whole: jax.Array, shard: jax.Array, zero: ZeroCollectives, dim: int, dtype: Any) -> jax.Array:
    """The whole parameter in ``dtype``, no collective.

    Backward: its gradient leaves as a reduce-scatter over the ZeRO axis to ``shard``.
    """
    return whole.astype(dtype)


def _read_forward(
    whole: jax.Array, shard: jax.Array, zero: ZeroCollectives, dim: int, dtype: Any
) -> tuple[jax.Array, None]:
    return whole.astype(dtype), None


read_lent.defvjp(_read_forward, lambda zero, dim, dtype, _, g: (None, zero.scatter_gradient(g, dim)))


def local_shard(whole: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part of ``whole`` along ``dim``, no collective."""
    size = whole.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(axis) * size, size, dim)
