"""What a model asks of the place it runs in; the plain, single-device answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.compat import as_varying, varying_axes
from jaxpar.logical import is_matrix
from jaxpar.models.attention import Mask, attention
from jaxpar.models.rope import roll

M = TypeVar("M", bound=nnx.Module)


class Layout(Protocol):
    """The collectives of a decoder. Inside a mesh every array is this device's part."""

    def gather(self, module: M) -> M:
        """The same module with whole weights (ZeRO-3 all-gathers them here), matrices in the compute dtype."""
        ...

    def reduce_first(self, module: M, x_BSD: jax.Array) -> tuple[M, jax.Array]:
        """Both as they are. Going back, the weights' gradients are whole before the gradient of ``x`` goes on."""
        ...

    def swap_halves(self, x: jax.Array) -> jax.Array:
        """``x`` with the halves of its last dimension exchanged, for rotary positions."""
        ...

    def embed(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Rows of a vocabulary-sharded table, as a sequence-sharded residual [B, S, D]."""
        ...

    def enter(self, x_BSD: jax.Array, split: str) -> jax.Array:
        """From the sequence-sharded residual to the whole sequence, for a layer whose ``split`` axis is sharded."""
        ...

    def leave(self, y_BSD: jax.Array, split: str) -> jax.Array:
        """Sum the partial products over the shards of ``split``, back to the sequence-sharded residual."""
        ...

    def attention(
        self, q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BS: jax.Array | None, mask: Mask
    ) -> jax.Array:
        """Causal attention of the whole sequence, [B, S, H, K]."""
        ...

    def remat(self, layer: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """The layer function under the rematerialisation policy; ``in_loop``: its scan is not unrolled whole."""
        ...


def map_parameters(module: M, function: Callable[[tuple[str, ...], Any], Any]) -> M:
    """The module with every parameter's value replaced by ``function(logical_axes, value)``."""
    graph, params = nnx.split(module)
    values = []
    for path, variable in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        with jax.named_scope(".".join(str(key.key) for key in path)):
            values.append(variable.replace(function(variable.get_metadata("logical_axes"), variable.get_value())))
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_variable), values))


def parameter_dtype(axes: tuple[str, ...], dtype: Any) -> Any:
    """Matrices compute in ``dtype``; norm scales and biases stay fp32."""
    return dtype if is_matrix(axes) else jnp.float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: jax.Array, rows_BS: jax.Array, vocab: int, dtype: Any) -> jax.Array:
    return table_VD.at[rows_BS].get(mode="fill", fill_value=0)


def _lookup_forward(table_VD: jax.Array, rows_BS: jax.Array, vocab: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _lookup(table_VD, rows_BS, vocab, dtype), rows_BS


def _lookup_backward(vocab: int, dtype: Any, rows_BS: jax.Array, g_BSD: jax.Array) -> tuple[jax.Array, None]:
    zeros = as_varying(jnp.zeros((vocab, g_BSD.shape[-1]), jnp.float32), varying_axes(g_BSD))
    return zeros.at[rows_BS].add(g_BSD.astype(jnp.float32), mode="drop").astype(dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def lookup(table_VD: jax.Array, rows_BS: jax.Array) -> jax.Array:
    """Rows of the table, [B, S, D]; zeros, and no gradient, for a row past its end.

    The gradient of a row is summed over its tokens in fp32, whatever the dtype.
    """
    return _lookup(table_VD, rows_BS, table_VD.shape[0], table_VD.dtype)


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


@dataclasses.dataclass(frozen=True)
class SingleDevice:
    """Everything is here already."""

    dtype: Any = "float32"

    def gather(self, module: M) -> M:
        """Cast the matrices."""
        return map_parameters(module, lambda axes, w: w.astype(parameter_dtype(axes, self.dtype)))

    def reduce_first(self, module: M, x_BSD: jax.Array) -> tuple[M, jax.Array]:
        """The identity."""
        return module, x_BSD

    def swap_halves(self, x: jax.Array) -> jax.Array:
        """Move the data."""
        return roll(x)

    def embed(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Plain lookup."""
        return lookup(table_VD, tokens_BS)

    def enter(self, x_BSD: jax.Array, split: str) -> jax.Array:
        """The identity."""
        return x_BSD

    def leave(self, y_BSD: jax.Array, split: str) -> jax.Array:
        """The identity."""
        return y_BSD

    def attention(
        self, q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BS: jax.Array | None, mask: Mask
    ) -> jax.Array:
        """Chunked attention."""
        return attention(q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BS, mask)

    def remat(self, layer: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
        """Nothing is recomputed."""
        return layer
