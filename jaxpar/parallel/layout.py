"""The mesh form of ``models.Layout``: every collective of a decoder's forward pass, in one file.

Runs inside ``shard_map`` over all six axes. Residuals are [B / batch axes, S / (context, tensor), D]: tensor
parallelism shards norms and residuals over the sequence (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.logical import LogicalAxes
from jaxpar.mesh.rules import ZERO_AXIS, ShardingRules, live
from jaxpar.models.attention import Mask, attention
from jaxpar.models.layout import lookup, map_parameters, parameter_dtype
from jaxpar.models.rope import multiply, roll
from jaxpar.parallel.attention import Kernel, run_kernel
from jaxpar.parallel.collectives import Lent, ZeroCollectives, gather_weight, read_lent
from jaxpar.parallel.cross_entropy import cross_entropy, default_chunk

M = TypeVar("M", bound=nnx.Module)
Remat = Literal["none", "dots", "qkv", "attention", "full", "offload"]
WEIGHT = "weight"  # gathered or cast: cheaper to make again than to keep for every layer


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """One device's view of a decoder on a mesh."""

    sizes: dict[str, int]  # of the mesh axes
    rules: ShardingRules
    zero_dims: dict[LogicalAxes, int | None]  # of one layer's leaf: the dimension cut at ZeRO 2 or 3, none: never
    zero: ZeroCollectives
    dtype: Any  # compute dtype
    platform: str  # "tpu", "gpu" or "cpu"
    kernel: Kernel
    remat_policy: Remat

    def split(self, logical: str) -> str | None:
        """The live mesh axis that splits ``logical``, if any."""
        axes = live(self.rules.mesh_axes(logical), self.sizes)
        return axes[0] if axes else None

    def gather(self, module: M) -> M:
        """Whole weights. ZeRO-3: an all-gather over fsdp per leaf (backward: reduce-scatter); else no collective."""

        def whole(axes: tuple[str, ...], value: Any) -> jax.Array:
            dtype, dim = parameter_dtype(axes, self.dtype), self.zero_dims[axes]
            if isinstance(value, Lent):
                assert dim is not None
                return read_lent(value.whole, value.shard, self.zero, dim, dtype)
            gathering = self.rules.zero == 3 and dim is not None
            weight = gather_weight(value, self.zero, dim, dtype) if gathering else value.astype(dtype)
            return jax.ad_checkpoint.checkpoint_name(weight, WEIGHT) if weight is not value else value

        return map_parameters(module, whole)

    def reduce_first(self, module: M, x_BSD: jax.Array) -> tuple[M, jax.Array]:
        """Without it XLA:TPU puts the reduce-scatter off and keeps the whole gradient through all layers."""
        graph, params = nnx.split(module)
        leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Lent))
        if any(isinstance(leaf, Lent) for leaf in leaves):
            return module, x_BSD
        leaves, x_BSD = _in_turn(leaves, x_BSD)
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves)), x_BSD

    def swap_halves(self, x: jax.Array) -> jax.Array:
        """On a TPU a product: moving data between lanes costs it more than the matrix unit needs."""
        return (multiply if self.platform == "tpu" else roll)(x)

    def embed(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Look up this device's rows, then a reduce-scatter over tensor from the vocabulary to the sequence."""
        axis = self.split("vocab")
        if axis is None:
            return lookup(table_VD, self._own_sequence(tokens_BS))
        return jax.lax.psum_scatter(own_rows(table_VD, tokens_BS, axis), axis, scatter_dimension=1, tiled=True)

    def enter(self, x_BSD: jax.Array, split: str) -> jax.Array:
        """All-gather the sequence over tensor; an MLP whose width is whole stays on its part of the sequence."""
        if self.sizes["tensor"] == 1 or (split != "heads" and self.split(split) is None):
            return x_BSD
        return jax.lax.all_gather(x_BSD, "tensor", axis=1, tiled=True)

    def leave(self, y_BSD: jax.Array, split: str) -> jax.Array:
        """Reduce-scatter over tensor back to the sequence; the inverse of ``enter`` where nothing was split."""
        if (axis := self.split(split)) is not None:
            return jax.lax.psum_scatter(y_BSD, axis, scatter_dimension=1, tiled=True)
        return self._own_sequence(y_BSD) if split == "heads" else y_BSD

    def _own_sequence(self, x: jax.Array) -> jax.Array:
        """This device's part of dimension 1 over tensor."""
        if self.sizes["tensor"] == 1:
            return x
        size = x.shape[1] // self.sizes["tensor"]
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * size, size, 1)

    def attention(
        self, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BS: jax.Array | None, mask: Mask
    ) -> jax.Array:
        """Heads are local. Over context, queries stay and keys and values are all-gathered."""
        if self.sizes["context"] == 1:
            return run_kernel(self.kernel, q_BSHK, k_BSGK, v_BSGK, segments_BS, mask)
        k_BTGK, v_BTGK = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k_BSGK, v_BSGK))
        segments_BT = None if segments_BS is None else jax.lax.all_gather(segments_BS, "context", axis=1, tiled=True)
        offset = jax.lax.axis_index("context") * q_BSHK.shape[1]
        return attention(q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BT, mask, offset)

    def cross_entropy(
        self,
        x_BSD: jax.Array,
        head_DV: jax.Array,
        targets_BS: jax.Array,
        mask_BS: jax.Array,
        z_loss: jax.Array,
        softcap: float | None,
    ) -> tuple[jax.Array, jax.Array]:
        """This device's share of (loss + z-loss, loss), summed over its valid tokens.

        With a split vocabulary the sequence is all-gathered over tensor first.
        """
        axis = self.split("vocab")
        if axis is None:
            targets_BS, mask_BS = self._own_sequence(targets_BS), self._own_sequence(mask_BS)
        else:
            x_BSD = self.enter(x_BSD, "vocab")
        h_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        chunk = default_chunk(h_ND.shape[0], head_DV.shape[1])
        return cross_entropy(h_ND, head_DV, targets_BS.reshape(-1), mask_BS.reshape(-1), z_loss, softcap, axis, chunk)

    def remat(self, layer: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """What the backward pass recomputes.

        ``none``: nothing but gathers and casts of weights; ``dots``: all but products with weights; ``qkv``: all but
        the inputs of attention; ``attention``: all but its output and what the MLP begins with; ``full``: everything
        from the layer's input; ``offload``: the same, with that input in the host's memory meanwhile. Outside a loop
        the compiler would find the values again in the forward pass and keep them, so there a barrier stands between
        the two.
        """
        policies = jax.checkpoint_policies
        if self.remat_policy == "full":
            policy = policies.nothing_saveable
        elif self.remat_policy == "offload":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["residual"],
                offload_src="device",
                offload_dst="pinned_host",
            )
        elif self.remat_policy == "dots":
            policy = policies.dots_with_no_batch_dims_saveable
        elif self.remat_policy == "qkv":
            policy = policies.save_only_these_names("qkv")
        elif self.remat_policy == "attention":
            policy = policies.save_only_these_names("attended")
        elif self.dtype != jnp.float32 or (self.rules.zero == 3 and self.sizes[ZERO_AXIS] > 1):
            policy = _all_but_weights
        else:
            return layer
        return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


@jax.custom_vjp
def _in_turn(leaves: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return leaves, x


_in_turn.defvjp(lambda leaves, x: (_in_turn(leaves, x), None), lambda _, g: jax.lax.optimization_barrier(g))


def own_rows(table_VD: jax.Array, tokens_BS: jax.Array, axis: str) -> jax.Array:
    """Rows of a table split over ``axis``; zeros for tokens whose row another device has. No collective."""
    row_BS = tokens_BS - jax.lax.axis_index(axis) * table_VD.shape[0]
    return lookup(table_VD, jnp.where(row_BS < 0, table_VD.shape[0], row_BS))  # of another device: past the end


def _all_but_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep every intermediate except weights as they are read, which are gathered and cast again going back."""
    return params.get("name") != WEIGHT and not _gathers_weights(primitive, params)


def _gathers_weights(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether this is an all-gather over the ZeRO axis, or ``gather_weight``, which the policy sees whole."""
    if primitive.name.startswith("all_gather"):
        return ZERO_AXIS in params["axis_name"]
    inner = params.get("call_jaxpr")
    return inner is not None and any(_gathers_weights(eqn.primitive, eqn.params) for eqn in inner.eqns)
