"""Which Hugging Face tensor is which parameter of ours, as data.

A row has our dotted leaf, their name (``{}``: the number of the layer) and the dimensions of their tensor in our
logical axes: ``"(heads head_dim) embed"`` is a matrix [heads * head_dim, embed], the heads one after the other.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxpar.logical import LogicalAxes, of_one_layer

_ROWS = (
    ("embedding.table", "model.embed_tokens.weight", "vocab embed"),
    ("layers.attention_norm.scale", "model.layers.{}.input_layernorm.weight", "embed"),
    ("layers.attention.q", "model.layers.{}.self_attn.q_proj.weight", "(heads head_dim) embed"),
    ("layers.attention.k", "model.layers.{}.self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    ("layers.attention.v", "model.layers.{}.self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    ("layers.attention.o", "model.layers.{}.self_attn.o_proj.weight", "embed (heads head_dim)"),
    ("layers.attention.q_bias", "model.layers.{}.self_attn.q_proj.bias", "(heads head_dim)"),
    ("layers.attention.k_bias", "model.layers.{}.self_attn.k_proj.bias", "(kv_heads head_dim)"),
    ("layers.attention.v_bias", "model.layers.{}.self_attn.v_proj.bias", "(kv_heads head_dim)"),
    ("layers.attention.o_bias", "model.layers.{}.self_attn.o_proj.bias", "embed"),
    ("layers.attention.q_norm.scale", "model.layers.{}.self_attn.q_norm.weight", "head_dim"),
    ("layers.attention.k_norm.scale", "model.layers.{}.self_attn.k_norm.weight", "head_dim"),
    ("layers.mlp_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "embed"),
    ("layers.mlp.gate", "model.layers.{}.mlp.gate_proj.weight", "mlp embed"),
    ("layers.mlp.up", "model.layers.{}.mlp.up_proj.weight", "mlp embed"),
    ("layers.mlp.down", "model.layers.{}.mlp.down_proj.weight", "embed mlp"),
    ("final_norm.scale", "model.norm.weight", "embed"),
    ("head.kernel", "lm_head.weight", "vocab embed"),
)
_ROWS_OF_POST_NORMS = (  # Gemma 2 and 3 have four norms in a layer, and give one name of the others another meaning
    ("layers.attention_post_norm.scale", "model.layers.{}.post_attention_layernorm.weight", "embed"),
    ("layers.mlp_norm.scale", "model.layers.{}.pre_feedforward_layernorm.weight", "embed"),
    ("layers.mlp_post_norm.scale", "model.layers.{}.post_feedforward_layernorm.weight", "embed"),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # one matrix where embeddings are tied
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of ours and the tensors that it is made of."""

    name: str  # dotted path
    axes: LogicalAxes
    shape: tuple[int, ...]
    theirs: str
    dims: tuple[LogicalAxes, ...]  # of their tensor

    @property
    def layers(self) -> int | None:
        """Tensors it is stacked from; None: it is one tensor."""
        return self.shape[0] if self.axes[0] == "layers" else None

    @property
    def sizes(self) -> dict[str, int]:
        """Logical axis -> size."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each of the tensors."""
        return tuple(math.prod(self.sizes[a] for a in dim) for dim in self.dims)

    def tensor(self, layer: int) -> str:
        """The name of a layer's tensor (of any layer, where there is one tensor)."""
        return self.theirs.format(layer)

    def tensors(self) -> list[str]:
        """The names of all of them."""
        return [self.tensor(i) for i in range(self.layers or 1)]

    def read(self, index: Index, read: Callable[[str, Index], np.ndarray]) -> np.ndarray:
        """``leaf[index]`` in fp32 from ``read(tensor, index)``, which is asked for the fewest contiguous rows."""
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
        if self.layers is None:
            return self._from_tensor(ranges, lambda at: read(self.theirs, at)).astype(np.float32)
        stacked = np.empty([len(r) for r in ranges], np.float32)
        for row, layer in enumerate(ranges[0]):
            stacked[row] = self._from_tensor(ranges[1:], lambda at, i=layer: read(self.tensor(i), at))  # type: ignore[misc]
        return stacked

    def _from_tensor(self, ranges: list[range], read: Callable[[Index], np.ndarray]) -> np.ndarray:
        """Of a tensor's dimension, rows are read in units of its first axis; inner axes are cut afterwards."""
        ours = of_one_layer(self.axes)
        wanted = dict(zip(ours, ranges, strict=True))
        at, shape = [], []
        for first, *inner in self.dims:
            unit, rows = math.prod(self.sizes[a] for a in inner), wanted[first]
            at.append(slice(rows.start * unit, rows.stop * unit))
            shape += [len(rows), *(self.sizes[a] for a in inner)]
        axes = [a for dim in self.dims for a in dim]
        outer = {dim[0] for dim in self.dims}
        piece = read(tuple(at)).reshape(shape).transpose([axes.index(a) for a in ours])
        return piece[tuple(slice(None) if a in outer else slice(wanted[a].start, wanted[a].stop) for a in ours)]

    def of_layer(self, value: np.ndarray, layer: int) -> np.ndarray:
        """A layer's part of the leaf's ``value`` (all of it, where there is one tensor)."""
        return value if self.layers is None else value[layer]

    def to_tensor(self, value: np.ndarray) -> np.ndarray:
        """The tensor whose values are ``value``, one layer of this leaf."""
        ours = of_one_layer(self.axes)
        return value.transpose([ours.index(a) for dim in self.dims for a in dim]).reshape(self.tensor_shape)


def leaves(parameters: Iterable[Any], post_norms: bool) -> list[Leaf]:
    """A ``Leaf`` for each of a Program's ``parameters``, all of which have a row."""
    rows = {ours: (theirs, dims) for ours, theirs, dims in (*_ROWS, *(_ROWS_OF_POST_NORMS if post_norms else ()))}
    return [Leaf(p.name, p.axes, p.shape, rows[p.name][0], _dims(rows[p.name][1])) for p in parameters]


def _dims(text: str) -> tuple[LogicalAxes, ...]:
    return tuple(tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\S+", text))
