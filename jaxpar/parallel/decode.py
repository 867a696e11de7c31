"""The layout of generation: rows over every axis but ``tensor``, and weights as they are used.

A new token is one position, so there is no sequence to split: ``context`` splits rows too, and ``tensor`` splits heads,
MLP width and vocabulary with an all-reduce after each (two a layer, and one for the embedding).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.mesh.rules import BATCH_AXES, SEQ_AXES
from jaxpar.models.attention import Mask, softcapped
from jaxpar.models.layout import lookup
from jaxpar.parallel.attention import run_kernel
from jaxpar.parallel.layout import MeshLayout, own_rows

ROW_AXES = (*BATCH_AXES, *SEQ_AXES)


class DecodeLayout(MeshLayout):
    """One device's view of a decoder that generates. Residuals are [rows / (all axes but tensor), S, D]."""

    def embed(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Look up this device's rows of the table; an all-reduce over tensor where the vocabulary is split."""
        axis = self.split("vocab")
        return lookup(table_VD, tokens_BS) if axis is None else jax.lax.psum(own_rows(table_VD, tokens_BS, axis), axis)

    def enter(self, x_BSD: jax.Array, split: str) -> jax.Array:
        """The identity: the sequence is whole."""
        return x_BSD

    def leave(self, y_BSD: jax.Array, split: str) -> jax.Array:
        """An all-reduce over the axis that ``split`` is split over."""
        axis = self.split(split)
        return y_BSD if axis is None else jax.lax.psum(y_BSD, axis)

    def attention(
        self, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array | None, mask: Mask
    ) -> jax.Array:
        """Rows and heads are local; no collective."""
        return run_kernel(self.kernel, q_BSHK, k_BSGK, v_BSGK, segments_BS, mask)

    def logits(self, x_BD: jax.Array, head_DV: jax.Array, softcap: float | None) -> jax.Array:
        """Of the whole vocabulary, [B, V] in fp32: all-gathered over tensor where it is split."""
        logits_BV = jnp.einsum("bd,dv->bv", x_BD, head_DV, preferred_element_type=jnp.float32)
        if (axis := self.split("vocab")) is not None:
            logits_BV = jax.lax.all_gather(logits_BV, axis, axis=1, tiled=True)
        return softcapped(logits_BV, softcap)
