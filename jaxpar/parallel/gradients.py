"""Gradients of a step: the scan over microbatches, and what each ZeRO stage reduces when.

====  =====================================  ==========================================================
ZeRO  gradients of a microbatch              after the last microbatch
====  =====================================  ==========================================================
0     whole, per device                      all-reduce over fsdp and the other axes
1     whole, per device                      reduce-scatter over fsdp, all-reduce of the shards elsewhere
2, 3  reduce-scattered over fsdp, by layer,  all-reduce of the shards over the other axes
      as the backward pass makes them
====  =====================================  ==========================================================

Stages are per leaf: vectors stop at 1. Reductions over fsdp go along one torus dimension after the other
(``collectives.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.compat import as_varying
from jaxpar.mesh.axes import MESH_AXES
from jaxpar.mesh.rules import BATCH_AXES, SEQ_AXES, ZERO_AXIS, LeafLayout, live, unsplit_axes
from jaxpar.parallel.collectives import Lent, ZeroCollectives, local_shard

Batch = dict[str, jax.Array]
Objective = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]  # (parameters, batch) -> shares of (objective, loss)


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Loss and gradients inside ``shard_map``; ``layouts`` is a tree like the parameters."""

    layouts: Any
    sizes: dict[str, int]
    zero: ZeroCollectives

    def valid_tokens(self, mask: jax.Array) -> jax.Array:
        """Number of valid tokens of the whole global batch, in fp32; a psum over the batch and sequence axes."""
        axes = live((*BATCH_AXES, *SEQ_AXES), self.sizes)
        count = jnp.sum(mask, dtype=jnp.int32)
        return (jax.lax.psum(count, axes) if axes else count).astype(jnp.float32)

    def total(self, share: jax.Array) -> jax.Array:
        """The sum of every device's share, on every device."""
        axes = live(MESH_AXES, self.sizes)
        return jax.lax.psum(share, axes) if axes else share

    def evaluate(self, objective: Objective, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """(sum of the loss over valid tokens, number of valid tokens) of a batch [B, S]."""
        axes = live(MESH_AXES, self.sizes)
        _, loss = objective(as_varying(params, axes), as_varying(batch, axes))
        return self.total(loss), self.valid_tokens(batch["mask"])

    def gradients(self, objective: Objective, params: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """Gradients of (objective summed over valid tokens) / (valid tokens of the global batch), in fp32.

        ``batch``: arrays [A, B / A, S], this device's part. The gradients come in the *sharded* layout for stages 1
        to 3, in the *used* one for stage 0. Metrics: ``loss`` and ``tokens``.
        """
        axes = live(MESH_AXES, self.sizes)
        tokens = self.valid_tokens(batch["mask"])
        scale = 1.0 / jnp.maximum(tokens, 1.0)
        params, batch, scale = as_varying((params, batch, scale), axes)
        by, rebuild = self._differentiated(params)

        def micro(by: Any, piece: Batch) -> tuple[jax.Array, jax.Array]:
            objective_share, loss_share = objective(rebuild(by), piece)
            return objective_share * scale, loss_share * scale

        value_and_grad = jax.value_and_grad(micro, has_aux=True)
        if batch["tokens"].shape[0] == 1:
            (_, loss), grads = value_and_grad(by, jax.tree.map(lambda x: x[0], batch))
        else:

            def step(carry: Any, piece: Batch) -> Any:
                (_, loss), grads = value_and_grad(by, piece)
                return jax.tree.map(jnp.add, carry, (loss, grads)), None

            zeros = as_varying((jnp.float32(0), jax.tree.map(jnp.zeros_like, by)), axes)
            (loss, grads), _ = jax.lax.scan(step, zeros, batch)
        grads = jax.tree.map(self._reduce, grads, self.layouts)
        return grads, {"loss": self.total(loss), "tokens": tokens}

    def _differentiated(self, params: Any) -> tuple[Any, Callable[[Any], Any]]:
        """What to differentiate by, and how the parameters follow from it: at ZeRO-2, shards of lent parameters."""

        def shard(whole: jax.Array, layout: LeafLayout) -> jax.Array:
            if layout.stage == 2 and layout.zero_dim is not None:
                return local_shard(whole, ZERO_AXIS, layout.zero_dim)
            return whole

        def lend(shard: jax.Array, whole: jax.Array, layout: LeafLayout) -> Any:
            return Lent(whole, shard) if layout.stage == 2 and layout.zero_dim is not None else shard

        return jax.tree.map(shard, params, self.layouts), lambda by: jax.tree.map(lend, by, params, self.layouts)

    def _reduce(self, grad: jax.Array, layout: LeafLayout) -> jax.Array:
        """The sum over devices. Vectors weigh nothing on the wire: theirs are added in fp32 whatever is asked for."""
        grad = grad.astype(self.zero.reduce_dtype if layout.matrix else jnp.float32)
        if layout.stage == 1 and layout.zero_dim is not None:
            grad = self.zero.reduce_scatter(grad, layout.zero_dim)
        axes = unsplit_axes(layout.updated, self.sizes)
        return (jax.lax.psum(grad, axes) if axes else grad).astype(jnp.float32)
